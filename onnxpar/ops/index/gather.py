"""Gather, sharded by dims of the indices, by dims of the rows, and by the indexed dim (vocabulary).

A device that holds a shard of the vocabulary looks up the indices in its shard and gives zeros for
the others. The result is a partial sum (Megatron-LM's parallel embedding, Shoeybi et al., 2019).
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64, ir_shape
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.folding import MOVE
from onnxpar.ops.function import Function
from onnxpar.ops.index.gather_gradient import INDEXED_SUM, gather_gradient
from onnxpar.ops.local_helpers import locate, normal_axis, with_padding, zero_unless
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import moves, selects
from onnxpar.ops.operator import Missing, OpDef, for_ranks
from onnxpar.ops.parts import Taken, taken_range
from onnxpar.ops.sizes.computed_sizes import gathered
from onnxpar.ops.slots import FOLLOWS, Roles

INDEXED = "V"
"""Name of the indexed dim in rules."""
_LIKE = 2
_NO_SUMS = (ir.DataType.BOOL, ir.DataType.STRING)


def lookup_kind(view: NodeView) -> str:
    """Returns the kind of a factor by which operand 0 is indexed: booleans have no sums."""
    value = view.node.inputs[0]
    return "replicated" if value is None or value.dtype in _NO_SUMS else "sum"


def gather_rule(view: NodeView) -> OpRule:
    """Gather: `a V b, i j -> a i j b; sum: V` for data with 3 dims, axis 1, indices with 2."""
    data, indices = view.shape(0), view.shape(1)
    axis = normal_axis(view, view.attr("axis", 0), len(data))
    names = axis_names(len(data) - 1 + len(indices))
    rows, places = names[: len(data) - 1], names[len(data) - 1 :]
    operand = [*rows[:axis], INDEXED, *rows[axis:]]
    result = [*rows[:axis], *places, *rows[axis:]]
    text = f"{' '.join(operand)}, {' '.join(places)} -> {' '.join(result)}"
    return parse_rule(f"{text}; {lookup_kind(view)}: {INDEXED}; linear: any 0")


def gather_takes(view: NodeView) -> Sequence[Taken] | None:
    """One index, or a range of them, of a dim whose size is a number."""
    axis = normal_axis(view, view.attr("axis", 0), len(view.shape(0)))
    size, places, rank = view.shape(0)[axis], view.contents(1), len(view.shape(1))
    return taken_range(axis, size, places, squeezed=rank == 0) if rank < 2 else None


def gather_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up indices in this rank's shard of the indexed dim; indices that are padding are 0."""
    place, inside = indexed_place(node)
    rows = node.copy([node.input(0), place])[0]
    if inside is None:
        return (rows,)
    axis = normal_axis(node.view, node.attr("axis", 0), len(node.view.shape(0)))
    trailing = len(node.view.shape(0)) - axis - 1
    inside = node.builder.reshape(inside, [*node.in_shape(1), *[1] * trailing])
    return (zero_unless(node, inside, rows),)


def indexed_place(node: LocalNode) -> tuple[ir.Value, ir.Value | None]:
    """Converts the global indices in operand 1 to indices into this rank's shard.

    Args:
        node: The node, whose rule calls the indexed dim `V`.

    Returns:
        The local indices, of the operand's local shape, and whether each is in this shard (its
        local shape, or [1] for a scalar); None instead of the latter if the dim is replicated.
    """
    indices, shape = with_padding(node, 1), node.in_shape(1)
    if not node.atoms(INDEXED):
        return indices, None
    place, inside = in_shard(node, INDEXED, indices, _with_one(shape))
    return (place if shape else node.builder.reshape(place, shape)), inside


def from_front(node: LocalNode, factor: str, indices: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    """Returns global indices along `factor`, of local `shape`, counted from the front as int64.

    Negative ones of the given indices count from the end.
    """
    indices = node.builder.cast(indices, INT64)
    zero = node.builder.const([0])
    negative = node.op("Less", indices, zero, dtype=ir.DataType.BOOL, shape=shape)
    wrapped = node.op("Add", indices, node.builder.size(node.size(factor)), shape=shape)
    return node.op("Where", negative, wrapped, indices, dtype=INT64, shape=shape)


def in_shard(
    node: LocalNode, factor: str, indices: ir.Value, shape: Sequence[Dim]
) -> tuple[ir.Value, ir.Value]:
    """As `locate`, for indices of any integer type that may be negative (see `from_front`)."""
    return locate(node, factor, from_front(node, factor, indices, shape), shape)


def _with_one(shape: Sequence[Dim]) -> Sequence[Dim]:
    # Sizes are tensors of shape [1], so a scalar index gets this shape too.
    return shape or (1,)


def gather_grad_rule(view: NodeView) -> OpRule:
    """IndexedSum: `i j b, i j, * -> V b; sum: i j`; every device fills its own shard of V."""
    names = axis_names(len(view.shape(0)))
    places = names[: len(view.shape(1))]
    rows = " ".join(names[len(places) :])
    like = "*" if view.has(_LIKE) else "-"
    text = f"{' '.join(names)}, {' '.join(places)}, {like} -> {INDEXED} {rows}; linear: sum 0"
    return parse_rule(f"{text}; sum: {' '.join(places)}")


def gather_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Adds up the rows of indices in this rank's shard of the indexed dim."""
    shape, rows = node.in_shape(1), node.in_shape(0)
    wide = _with_one(shape)
    place = from_front(node, INDEXED, node.input(1), wide)
    updates = node.builder.reshape(node.input(0), [*wide, *rows[len(shape) :]])
    if node.atoms(INDEXED):
        place, inside = locate(node, INDEXED, place, wide)
        inside = node.builder.reshape(inside, [*wide, *[1] * (len(rows) - len(shape))])
        updates = zero_unless(node, inside, updates)
    out = node.out_shape()
    like = node.inputs[_LIKE]
    if like is None or like.shape != ir_shape(out):
        # Only if needed: onnxruntime folds these zeros into a constant as large as the result.
        like = node.builder.zeros(out, updates.dtype)
    made = [(updates.dtype, out)]
    return node.builder.ops(GATHER_GRAD.name, [updates, place, like], made, domain=DOMAIN)


def gather_indices(view: NodeView) -> list[tuple[int, Dim, Dim, int | None]]:
    """Indices count from the front; negative ones count from the end."""
    data = view.shape(0)
    size = data[normal_axis(view, view.attr("axis", 0), len(data))]
    return [(1, -size, size - 1, None)]


# Along dim 0; indices are not negative. Only the shape of `data` is read.
GATHER_GRAD = Function("""
    GatherGrad (dy, indices, data) => (dx) {
        number = Constant<value = float {0.0}>()
        zero = CastLike(number, dy)
        last = Constant<value = int64[1] {-1}>()
        shape = Shape(data)
        start = Expand(zero, shape)
        place = Unsqueeze(indices, last)
        dx = ScatterND<reduction = "add">(start, place, dy)
    }
""")


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
        folding=MOVE,
        takes=gather_takes,
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
