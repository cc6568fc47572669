"""Softmax, LayerNormalization, RMSNormalization: a split axis communicates statistics alone."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import aligned, axis_names
from onnxpar.ops.local_helpers import copy_or, normal_axis, reduced, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.old_versions import OF_ONE_AXIS
from onnxpar.ops.norm.softmax_layer_norm_gradient import (
    layer_norm_gradient,
    log_softmax_gradient,
    rms_norm_gradient,
    softmax_gradient,
)
from onnxpar.ops.norm.split_statistics import (
    inverse_deviation,
    masker,
    mean_and_variance,
    split_atoms,
)
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import NO_ROLES, Kernel, KernelCall, Roles


def softmax_axes(view: NodeView) -> tuple[int, ...]:
    """Returns the axis that is normalised."""
    return (normal_axis(view, view.attr("axis", -1), len(view.shape(0))),)


def softmax_rule(view: NodeView) -> OpRule:
    """Every dim may be split; those of the normalised axis by the communicating form."""
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    (axis,) = softmax_axes(view)
    return parse_rule(f"{text} -> {text}; special: {names[axis]}")


def _softmax(*, log: bool) -> Callable[[LocalNode], Sequence[ir.Value]]:
    def special(node: LocalNode) -> Sequence[ir.Value]:
        shape = node.in_shape(0)
        x = node.input(0)
        for factor in node.split_factors("special"):
            x = node.masked(x, 0, factor, "lowest")
        x = node.builder.cast(x, work_dtype(x.dtype))
        y = _normalised(node, x, softmax_axes(node.view), split_atoms(node), shape, log=log)
        return (node.builder.cast(y, node.out_dtype()),)

    special.__doc__ = "The maximum, then the sum of powers, each all-reduced, one number per row."
    return special


def _normalised(
    node: LocalNode,
    x: ir.Value,
    axes: Sequence[int],
    atoms: Atoms,
    shape: Sequence[Dim],
    *,
    log: bool,
) -> ir.Value:
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
    """Emits x - max - log Σ exp(x - max) over `axis`, which `atoms` split.

    Padding along the axis must hold the lowest value.
    """
    return _normalised(node, x, (axis,), atoms, shape, log=True)


def _norm_axes(view: NodeView) -> tuple[int, ...]:
    rank = len(view.shape(0))
    return tuple(range(normal_axis(view, view.attr("axis", -1), rank), rank))


def layer_norm_rule(view: NodeView) -> OpRule:
    """Leading dims parallel, normalised dims special; scale and bias go with the dims they have."""
    shape = view.shape(0)
    names = axis_names(len(shape))
    axes = _norm_axes(view)
    text = " ".join(names)
    operands, whole = [text], set[str]()
    for index in range(1, view.arity):
        if not view.has(index):
            operands.append("-")
            continue
        operand, fixed = aligned(view.shape(index), shape, names)
        operands.append(operand)
        whole |= fixed
    statistics = " ".join("1" if axis in axes else n for axis, n in enumerate(names))
    outputs = [text] + [statistics] * (len(view.node.outputs) - 1)
    rule = f"{', '.join(operands)} -> {', '.join(outputs)}"
    special = [names[axis] for axis in axes if names[axis] not in whole]
    if special:
        rule += f"; special: {' '.join(special)}"
    if whole:
        rule += f"; replicated: {' '.join(sorted(whole))}"
    return parse_rule(rule)


def _normalised_local(
    *, centre: bool, statistics: tuple[str, ...]
) -> Callable[[LocalNode], Sequence[ir.Value]]:
    """The local form of LayerNormalization and of what leaves the mean in.

    Args:
        centre: Whether the mean is taken off.
        statistics: What the further outputs are: "mean", "inverse".
    """

    def local(node: LocalNode) -> Sequence[ir.Value]:
        view, shape, dtype = node.view, node.in_shape(0), node.out_dtype()
        axes = _norm_axes(view)
        wide = work_dtype(node.input(0).dtype)
        x = node.builder.cast(node.input(0), wide)
        sizes = [view.shape(0)[axis] for axis in axes]
        centred, mean, variance = mean_and_variance(
            node, x, shape, axes, sizes, masker(node), centre=centre
        )
        kept = reduced(shape, axes)
        inverse = inverse_deviation(node, variance, float(view.attr("epsilon", 1e-5)), kept)
        y = node.builder.cast(node.op("Mul", centred, inverse, shape=shape), dtype)
        if view.has(1):
            y = node.op("Mul", y, node.input(1), shape=shape)
        if view.has(2):
            y = node.op("Add", y, node.input(2), shape=shape)
        known = {"mean": mean, "inverse": inverse}
        outputs = [y]
        for what, _ in zip(statistics, view.node.outputs[1:], strict=False):
            value = known[what]
            assert value is not None
            outputs.append(value)
        return [
            node.builder.cast(value, node.out_dtype(index)) for index, value in enumerate(outputs)
        ]

    local.__doc__ = "Statistics summed over the shards, at most two numbers per row."
    return local


def _turned(call: KernelCall) -> int:
    """Along another dim than the last it works on a transposed copy, and writes another."""
    shape = call.inputs[0]
    axis = call.attributes.get("axis", -1)
    last = shape is None or axis in (-1, len(shape) - 1)
    return 0 if last else 2 * call.bytes(shape)


_SOFTMAX_MEMORY = Kernel(over=((0, 0),), work=_turned)


DEFS = (
    OpDef(
        "",
        "Softmax",
        1,
        softmax_rule,
        copy_or(_softmax(log=False)),
        gradient=softmax_gradient(softmax_axes),
        upgrades={13: OF_ONE_AXIS},
        memory=_SOFTMAX_MEMORY,
    ),
    OpDef(
        "",
        "LogSoftmax",
        1,
        softmax_rule,
        copy_or(_softmax(log=True)),
        gradient=log_softmax_gradient(softmax_axes),
        upgrades={13: OF_ONE_AXIS},
        memory=_SOFTMAX_MEMORY,
    ),
    OpDef(
        "",
        "LayerNormalization",
        17,
        layer_norm_rule,
        copy_or(_normalised_local(centre=True, statistics=("mean", "inverse"))),
        gradient=layer_norm_gradient(_norm_axes),
        roles=Roles(vectors=(1, 2)),
    ),
    *(
        OpDef(
            "",
            name,
            since,
            layer_norm_rule,
            copy_or(_normalised_local(centre=False, statistics=("inverse",))),
            gradient=rms_norm_gradient(_norm_axes),
            roles=roles,
        )
        # The second is onnxruntime's name for it, in ONNX's own domain.
        for name, since, roles in (
            ("RMSNormalization", 23, Roles(vectors=(1,))),
            ("SimplifiedLayerNormalization", 1, NO_ROLES),
        )
    ),
)
