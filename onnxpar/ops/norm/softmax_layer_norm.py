"""Softmax, LayerNormalization, RMSNormalization: a sharded axis communicates only statistics."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import aligned_operands, axis_names
from onnxpar.ops.local_helpers import axis_of, copy_or, reduced, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.old_versions import OF_ONE_AXIS
from onnxpar.ops.norm.softmax_layer_norm_gradient import (
    layer_norm_gradient,
    log_softmax_gradient,
    normalised_axes,
    rms_norm_gradient,
    softmax_gradient,
)
from onnxpar.ops.norm.split_statistics import normalised
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import NO_ROLES, Kernel, KernelCall, Roles


def softmax_rule(view: NodeView) -> OpRule:
    """Every dim may be sharded; along the normalised axis, devices communicate."""
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    return parse_rule(f"{text} -> {text}; special: {names[axis_of(view, -1)]}")


def _softmax(*, log: bool) -> Callable[[LocalNode], Sequence[ir.Value]]:
    def special(node: LocalNode) -> Sequence[ir.Value]:
        shape = node.in_shape(0)
        x = node.input(0)
        for factor in node.split_factors("special"):
            x = node.masked(x, 0, factor, "lowest")
        x = node.builder.cast(x, work_dtype(x.dtype))
        atoms = node.split_atoms("special")
        y = _softmax_of(node, x, axis_of(node.view, -1), atoms, shape, log=log)
        return (node.builder.cast(y, node.out_dtype()),)

    special.__doc__ = (
        "All-reduces the maximum, then the sum of exponentials: one number per row each."
    )
    return special


def _softmax_of(
    node: LocalNode, x: ir.Value, axis: int, atoms: Atoms, shape: Sequence[Dim], *, log: bool
) -> ir.Value:
    axes = [axis]
    kept = reduced(shape, axes)
    top = node.all_reduce(node.builder.reduce("ReduceMax", x, axes, keepdims=True), atoms, "max")
    low = node.op("Sub", x, top, shape=shape)
    powers = node.op("Exp", low, shape=shape)
    total = node.all_reduce(node.builder.reduce("ReduceSum", powers, axes, keepdims=True), atoms)
    if log:
        return node.op("Sub", low, node.op("Log", total, shape=kept), shape=shape)
    return node.op("Div", powers, total, shape=shape)


def log_softmax(
    node: LocalNode, x: ir.Value, axis: int, atoms: Atoms, shape: Sequence[Dim]
) -> ir.Value:
    """Emits x - max - log Σ exp(x - max) over `axis`, which `atoms` shard.

    Padding along the axis must hold the lowest value.
    """
    return _softmax_of(node, x, axis, atoms, shape, log=True)


def layer_norm_rule(view: NodeView) -> OpRule:
    """Leading dims are parallel, normalised dims special; scale and bias share their factors."""
    shape = view.shape(0)
    names = axis_names(len(shape))
    axes = normalised_axes(view)
    text = " ".join(names)
    affine, replicated = aligned_operands(view, range(1, view.arity), shape, names)
    operands = [text, *affine]
    statistics = " ".join("1" if axis in axes else n for axis, n in enumerate(names))
    outputs = [text] + [statistics] * (len(view.node.outputs) - 1)
    rule = f"{', '.join(operands)} -> {', '.join(outputs)}"
    special = [names[axis] for axis in axes if names[axis] not in replicated]
    if special:
        rule += f"; special: {' '.join(special)}"
    if replicated:
        rule += f"; replicated: {' '.join(sorted(replicated))}"
    return parse_rule(rule)


def _normalised_local(*, centre: bool) -> Callable[[LocalNode], Sequence[ir.Value]]:
    """The local form of LayerNormalization and RMSNormalization.

    Args:
        centre: Whether the mean is subtracted; it is then the second output.
    """

    def local(node: LocalNode) -> Sequence[ir.Value]:
        view, shape, dtype = node.view, node.in_shape(0), node.out_dtype()
        axes = normalised_axes(view)
        x = node.builder.cast(node.input(0), work_dtype(node.input(0).dtype))
        sizes = [view.shape(0)[axis] for axis in axes]
        epsilon = float(view.attr("epsilon", 1e-5))
        made = normalised(node, x, shape, axes, sizes, epsilon, centre=centre)
        y = node.builder.cast(made.y, dtype)
        if view.has(1):
            y = node.op("Mul", y, node.input(1), shape=shape)
        if view.has(2):
            y = node.op("Add", y, node.input(2), shape=shape)
        statistics = [value for value in (made.mean, made.inverse) if value is not None]
        outputs = [y, *statistics][: len(view.node.outputs)]
        return [
            node.builder.cast(value, node.out_dtype(index)) for index, value in enumerate(outputs)
        ]

    local.__doc__ = "Statistics are all-reduced, at most two numbers per row."
    return local


def _turned(call: KernelCall) -> int:
    """Along a dim other than the last, the kernel works on a transposed copy and writes another."""
    shape = call.inputs[0]
    axis = call.attributes.get("axis", -1)
    last = shape is None or axis in (-1, len(shape) - 1)
    return 0 if last else 2 * call.bytes(shape)


_SOFTMAX_MEMORY = Kernel(over=((0, 0),), work=_turned)


DEFS = (
    *(
        OpDef(
            "",
            name,
            1,
            softmax_rule,
            copy_or(_softmax(log=log)),
            gradient=gradient,
            upgrades={13: OF_ONE_AXIS},
            memory=_SOFTMAX_MEMORY,
        )
        for name, log, gradient in (
            ("Softmax", False, softmax_gradient),
            ("LogSoftmax", True, log_softmax_gradient),
        )
    ),
    *(
        OpDef(
            "",
            name,
            since,
            layer_norm_rule,
            copy_or(_normalised_local(centre=gradient is layer_norm_gradient)),
            gradient=gradient,
            roles=roles,
        )
        # The third is onnxruntime's name for the second, in ONNX's own domain.
        for name, since, gradient, roles in (
            ("LayerNormalization", 17, layer_norm_gradient, Roles(vectors=(1, 2))),
            ("RMSNormalization", 23, rms_norm_gradient, Roles(vectors=(1,))),
            ("SimplifiedLayerNormalization", 1, rms_norm_gradient, NO_ROLES),
        )
    ),
)
