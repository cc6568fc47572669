"""Gather: by dims of the indices, dims of the rows, and by the indexed dim (vocabulary) itself.

A device that holds a part of the vocabulary looks up the indices that are in its part and gives
zeros for the others; the sum over the devices is partial (Megatron-LM's parallel embedding,
Shoeybi et al., 2019).
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64, ir_shape
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.function import Function
from onnxpar.ops.index.gather_gradient import INDEXED_SUM, gather_gradient
from onnxpar.ops.local_helpers import locate, normal_axis, zero_unless
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import moves, selects
from onnxpar.ops.operator import Missing, OpDef, for_ranks
from onnxpar.ops.sizes.computed_sizes import gathered
from onnxpar.ops.slots import FOLLOWS, Folding, Roles

_INDEXED = "V"
_LIKE = 2
_NO_SUMS = (ir.DataType.BOOL, ir.DataType.STRING)


def gather_rule(view: NodeView) -> OpRule:
    """Gather: `a V b, i j -> a i j b; sum: V` for data of rank 3, axis 1, indices of rank 2."""
    data, indices = view.shape(0), view.shape(1)
    axis = normal_axis(view, view.attr("axis", 0), len(data))
    names = axis_names(len(data) - 1 + len(indices))
    rows, places = names[: len(data) - 1], names[len(data) - 1 :]
    operand = [*rows[:axis], _INDEXED, *rows[axis:]]
    result = [*rows[:axis], *places, *rows[axis:]]
    value = view.node.inputs[0]
    kind = "replicated" if value is None or value.dtype in _NO_SUMS else "sum"
    return parse_rule(
        f"{' '.join(operand)}, {' '.join(places)} -> {' '.join(result)}; {kind}: {_INDEXED}; "
        "linear: any 0"
    )


def gather_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up what is in this rank's part of the indexed dim; padding of indices looks up 0."""
    place, inside = indexed_place(node, 1)
    rows = node.copy([node.input(0), place])[0]
    if inside is None:
        return (rows,)
    axis = normal_axis(node.view, node.attr("axis", 0), len(node.view.shape(0)))
    trailing = len(node.view.shape(0)) - axis - 1
    inside = node.builder.reshape(inside, [*node.in_shape(1), *[1] * trailing])
    return (zero_unless(node, inside, rows),)


def indexed_place(node: LocalNode, operand: int) -> tuple[ir.Value, ir.Value | None]:
    """Returns where in this rank's part of the indexed dim `V` the indices of an operand point.

    Args:
        node: The node, whose rule calls the indexed dim `V`.
        operand: Index of the operand that is indices, into the dim as it is when undivided.

    Returns:
        The local indices, of the operand's local shape, and whether each is in this part (its local
        shape, or [1] for a scalar); None where every device has the whole dim.
    """
    indices = node.input(operand)
    shape = node.in_shape(operand)
    for dim in node.plan.rule.inputs[operand].dims:
        for factor in dim:
            indices = node.masked(indices, operand, factor, 0, known_zero=node.zero[operand])
    if not node.atoms(_INDEXED):
        return indices, None
    indices = node.builder.cast(indices, INT64)
    indices = _wrapped(node, indices, _with_one(shape))
    place, inside = locate(node, _INDEXED, indices, _with_one(shape))
    return (place if shape else node.builder.reshape(place, shape)), inside


def _wrapped(node: LocalNode, indices: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """Indices counted from the front, of local shape `shape`."""
    zero = node.builder.const([0])
    negative = node.op("Less", indices, zero, dtype=ir.DataType.BOOL, shape=shape)
    wrapped = node.op("Add", indices, node.builder.size(node.size(_INDEXED)), shape=shape)
    return node.op("Where", negative, wrapped, indices, dtype=INT64, shape=shape)


def _with_one(shape: Sequence[Dim]) -> Sequence[Dim]:
    # Sizes are tensors of shape [1], so a scalar index becomes one too.
    return shape or (1,)


def gather_grad_rule(view: NodeView) -> OpRule:
    """IndexedSum: `i j b, i j, * -> V b; sum: i j`; every device fills its own part of V."""
    names = axis_names(len(view.shape(0)))
    places = names[: len(view.shape(1))]
    rows = " ".join(names[len(places) :])
    like = "*" if view.has(_LIKE) else "-"
    text = f"{' '.join(names)}, {' '.join(places)}, {like} -> {_INDEXED} {rows}; linear: sum 0"
    return parse_rule(text + (f"; sum: {' '.join(places)}" if places else ""))


def gather_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Adds rows up at the indices that are in this rank's part of the indexed dim."""
    shape, rows = node.in_shape(1), node.in_shape(0)
    wide = _with_one(shape)
    place = _wrapped(node, node.builder.cast(node.input(1), INT64), wide)
    updates = node.builder.reshape(node.input(0), [*wide, *rows[len(shape) :]])
    if node.atoms(_INDEXED):
        place, inside = locate(node, _INDEXED, place, wide)
        inside = node.builder.reshape(inside, [*wide, *[1] * (len(rows) - len(shape))])
        updates = zero_unless(node, inside, updates)
    out = node.out_shape()
    # Zeros would be folded into a constant as large as the result.
    like = node.inputs[_LIKE]
    if like is None or like.shape != ir_shape(out):
        like = _zeros(node, updates.dtype, out)
    made = [(updates.dtype, out)]
    return node.builder.ops(GATHER_GRAD.name, [updates, place, like], made, domain=DOMAIN)


def _zeros(node: LocalNode, dtype: ir.DataType | None, shape: Sequence[Dim]) -> ir.Value:
    zero = node.builder.const(np.array(0), dtype)
    return node.op("Expand", zero, node.builder.sizes(shape), shape=shape)


def gather_indices(view: NodeView) -> list[tuple[int, Dim, Dim, int | None]]:
    """Indices count from the front, or, negative, from behind."""
    data = view.shape(0)
    size = data[normal_axis(view, view.attr("axis", 0), len(data))]
    return [(1, -size, size - 1, None)]


GATHER_GRAD = Function(
    "GatherGrad",
    ("dy", "indices", "data"),
    ("dx",),
    # Along dim 0, by indices counted from the front; of `data` only the shape is read.
    """
    number = Constant<value = float {0.0}>()
    zero = CastLike(number, dy)
    last = Constant<value = int64[1] {-1}>()
    shape = Shape(data)
    start = Expand(zero, shape)
    place = Unsqueeze(indices, last)
    dx = ScatterND<reduction = "add">(start, place, dy)
    """,
)


DEFS = (
    OpDef(
        "",
        "Gather",
        1,
        gather_rule,
        gather_local,
        gradient=gather_gradient,
        cost=selects,
        indices=gather_indices,
        roles=Roles(weights=(0,), indexed_by=1),
        precision=FOLLOWS,
        values=gathered,
        folding=Folding.MOVE,
    ),
    OpDef(
        DOMAIN,
        INDEXED_SUM,
        1,
        gather_grad_rule,
        gather_grad_local,
        gradient=Missing("it is already a gradient"),
        cost=moves,
    ),
    for_ranks(GATHER_GRAD.name, function=GATHER_GRAD),
)
