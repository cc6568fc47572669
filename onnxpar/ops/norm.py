"""Softmax, LogSoftmax, LayerNormalization: a split axis communicates statistics, not the data."""

from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxpar.analysis.shapes import NodeView
from onnxpar.mesh import Atoms
from onnxpar.ops.broadcast import aligned, axis_names
from onnxpar.ops.forms import cast, copy_or, count_of, normal_axis, reduce, reduced, work_dtype
from onnxpar.ops.gradients.norm import (
    layer_norm_gradient,
    log_softmax_gradient,
    softmax_gradient,
)
from onnxpar.ops.local import LocalNode
from onnxpar.ops.registry import OpDef
from onnxpar.ops.rule import OpRule, parse_rule
from onnxpar.symbols import Dim


def softmax_axes(view: NodeView) -> tuple[int, ...]:
    """Returns the axes normalised together: one since opset 13, before it `axis` and all after."""
    rank = len(view.shape(0))
    if view.opset >= 13:
        return (normal_axis(view, view.attr("axis", -1), rank),)
    first = view.attr("axis", 1)
    return tuple(range(first + rank if first < 0 else first, rank))


def softmax_rule(view: NodeView) -> OpRule:
    """Every dim may be split; those of the normalised axis by the communicating form."""
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    special = " ".join(names[axis] for axis in softmax_axes(view))
    return parse_rule(f"{text} -> {text}" + (f"; special: {special}" if special else ""))


def _softmax(*, log: bool) -> Callable[[LocalNode], Sequence[ir.Value]]:
    def special(node: LocalNode) -> Sequence[ir.Value]:
        shape = node.in_shape(0)
        x = node.input(0)
        for factor in node.split_factors("special"):
            x = node.masked(x, 0, factor, "lowest")
        x = cast(node, x, work_dtype(x.dtype), shape)
        y = _normalised(node, x, softmax_axes(node.view), split_atoms(node), shape, log=log)
        return (cast(node, y, node.out_dtype(), shape),)

    special.__doc__ = "The maximum, then the sum of powers, each all-reduced, one number a row."
    return special


def split_atoms(node: LocalNode) -> Atoms:
    """Returns the atoms that split the node's special factors."""
    return tuple(a for f in node.split_factors("special") for a in node.atoms(f))


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
    top = node.all_reduce(reduce(node, "ReduceMax", x, axes, shape), atoms, kept, "max")
    low = node.op("Sub", x, top, shape=shape)
    powers = node.op("Exp", low, shape=shape)
    total = node.all_reduce(reduce(node, "ReduceSum", powers, axes, shape), atoms, kept)
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
        rule += f"; whole: {' '.join(sorted(whole))}"
    return parse_rule(rule)


def layer_norm_local(node: LocalNode) -> Sequence[ir.Value]:
    """Mean, then the centred sum of squares, each summed over the parts and the global count.

    Two passes, since E[x²] - E[x]² loses all digits where the mean is large (Chan, Golub and
    LeVeque, 1983).
    """
    view = node.view
    axes = _norm_axes(view)
    atoms = split_atoms(node)
    shape = node.in_shape(0)
    kept = reduced(shape, axes)
    dtype = node.out_dtype()
    wide = work_dtype(dtype)
    split = node.split_factors("special")
    x = cast(node, node.input(0), wide, shape)
    for factor in split:
        x = node.masked(x, 0, factor, 0, known_zero=node.zero[0])
    sizes = view.shape(0)
    count = count_of(node, [sizes[axis] for axis in axes], wide)
    total = node.all_reduce(reduce(node, "ReduceSum", x, axes, shape), atoms, kept)
    mean = node.op("Div", total, count, shape=kept)
    centred = node.op("Sub", x, mean, shape=shape)
    for factor in split:
        centred = node.masked(centred, 0, factor, 0)
    squares = node.op("Mul", centred, centred, shape=shape)
    total = node.all_reduce(reduce(node, "ReduceSum", squares, axes, shape), atoms, kept)
    variance = node.op("Div", total, count, shape=kept)
    epsilon = node.builder.const(float(view.attr("epsilon", 1e-5)), wide)
    deviation = node.op("Sqrt", node.op("Add", variance, epsilon, shape=kept), shape=kept)
    inverse = node.op("Reciprocal", deviation, shape=kept)
    y = cast(node, node.op("Mul", centred, inverse, shape=shape), dtype, shape)
    if view.has(1):
        y = node.op("Mul", y, node.input(1), shape=shape)
    if view.has(2):
        y = node.op("Add", y, node.input(2), shape=shape)
    outputs = [y, mean, inverse][: len(view.node.outputs)]
    return [
        cast(node, value, node.out_dtype(index), node.out_shape(index))
        for index, value in enumerate(outputs)
    ]


DEFS = (
    OpDef(
        "",
        "Softmax",
        1,
        softmax_rule,
        copy_or(_softmax(log=False)),
        gradient=softmax_gradient(softmax_axes),
    ),
    OpDef(
        "",
        "LogSoftmax",
        1,
        softmax_rule,
        copy_or(_softmax(log=True)),
        gradient=log_softmax_gradient(softmax_axes),
    ),
    OpDef(
        "",
        "LayerNormalization",
        17,
        layer_norm_rule,
        copy_or(layer_norm_local),
        gradient=layer_norm_gradient(_norm_axes),
    ),
)
