"""GatherElements, GatherND, OneHot, ScatterElements and ScatterND, which read or write at indices.

A device that holds a shard of an indexed dim handles the indices in its shard. A lookup gives zeros
for the others, and the result is a partial sum; a write skips the others. The updates may be
sharded too if writes add up (or take the greatest or least).
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import SPECIAL, Operand, OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import fill_value, select
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.folding import MOVE
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.index.gather import INDEXED, from_front, in_shard, lookup_kind
from onnxpar.ops.index.index_origin import counted_columns
from onnxpar.ops.index.scatter_gradient import (
    GATHER_ND_GRAD,
    gather_elements_gradient,
    gather_nd_gradient,
    one_hot_gradient,
    scatter_gradient,
)
from onnxpar.ops.local_helpers import (
    BOOL,
    copy_or,
    global_index,
    iota,
    normal_axis,
    with_padding,
    zero_unless,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import moves, selects
from onnxpar.ops.old_node import renamed
from onnxpar.ops.operator import BY_BODY, Missing, OpDef, expanded
from onnxpar.ops.parts import Taken, taken_range
from onnxpar.ops.slots import IN_PLACE

# The update that changes nothing, by how writes are combined.
_IDENTITY: dict[str, float | str] = {"add": 0, "mul": 1, "max": "lowest", "min": "highest"}
# The kind of a dim of the updates, by how writes are combined.
_KINDS = {"add": "sum", "max": "max", "min": "min", "mul": "replicated", "none": "replicated"}
_LINEAR = {
    "none": "any 0+2, max 0, max 2, min 0, min 2",
    "add": "sum 0+2, max 0, min 0",
    "mul": "sum 0, prod 0+2",
    "max": "max 0+2, max 0, max 2, min 0",
    "min": "min 0+2, min 0, min 2, max 0",
}


def _reduction(view: NodeView) -> str:
    found = str(view.attr("reduction", "none"))
    if found not in _LINEAR:
        raise view.fail(f"expected a reduction of {', '.join(_LINEAR)}, got {found!r}")
    return found


# -- elements --------------------------------------------------------------------------------------


def _element_dims(view: NodeView) -> tuple[list[str], list[str], int, list[str]]:
    """Returns the factors of the data and of the indices, the axis, and the replicated factors."""
    data, indices = view.shape(0), view.shape(1)
    names = axis_names(len(data))
    axis = normal_axis(view, view.attr("axis", 0), len(data))
    operand, replicated = list(names), list[str]()
    operand[axis] = INDEXED
    for position, name in enumerate(names):
        if position != axis and not view.table.equal(data[position], indices[position]):
            # The indices name only some of the rows.
            operand[position] = f"{name}_all"
            replicated += [name, operand[position]]
    return operand, names, axis, replicated


def gather_elements_rule(view: NodeView) -> OpRule:
    """GatherElements: `a V b, a i b -> a i b; sum: V` for 3 dims and axis 1."""
    operand, names, _, replicated = _element_dims(view)
    places = " ".join(names)
    text = f"{' '.join(operand)}, {places} -> {places}; linear: any 0"
    return parse_rule(f"{text}; {lookup_kind(view)}: {INDEXED}; replicated: {' '.join(replicated)}")


def gather_elements_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up indices in this rank's shard of the indexed dim; indices that are padding are 0."""
    indices, shape = with_padding(node, 1), node.in_shape(1)
    if not node.atoms(INDEXED):
        return node.copy([node.input(0), indices])
    place, inside = in_shard(node, INDEXED, indices, shape)
    (rows,) = node.copy([node.input(0), place])
    return (zero_unless(node, inside, rows),)


def scatter_elements_rule(view: NodeView) -> OpRule:
    """ScatterElements: `a V b, a i b, a i b -> a V b; special: V; sum: i` if writes add up."""
    operand, names, axis, replicated = _element_dims(view)
    reduction = _reduction(view)
    places, rows = " ".join(names), " ".join(operand)
    text = f"{rows}, {places}, {places} -> {rows}; special: {INDEXED}"
    text += f"; {_KINDS[reduction]}: {names[axis]}; replicated: {' '.join(replicated)}"
    return parse_rule(f"{text}; linear: {_LINEAR[reduction]}")


def scatter_elements_local(node: LocalNode) -> Sequence[ir.Value]:
    """Writes at indices in its shard; if updates are sharded, only one device adds the data."""
    indices, shape, updates = with_padding(node, 1), node.in_shape(1), node.input(2)
    axis = normal_axis(node.view, node.attr("axis", 0), len(shape))
    data = _once(node, node.plan.rule.inputs[1].dims[axis])
    if not node.atoms(INDEXED):
        return node.copy([data, indices, updates])
    place, inside = in_shard(node, INDEXED, indices, shape)
    reduction = _reduction(node.view)
    if reduction != "none":
        return node.copy([data, place, _kept(node, updates, inside, reduction)])
    length = node.in_shape(0)[axis]
    spare = node.builder.size(length)
    place = node.op("Where", inside, place, spare, dtype=INT64, shape=shape)
    data, longer = _with_spare(node, data, axis)
    written = node.op("ScatterElements", data, place, updates, shape=longer, axis=axis)
    return (_without_spare(node, written, axis),)


def _once(node: LocalNode, places: Sequence[str]) -> ir.Value:
    """The data; zeros on all devices but the first of those that add up shards of the updates."""
    data, kinds = node.input(0), node.plan.rule.kinds
    atoms = tuple(a for factor in places if kinds[factor] == "sum" for a in node.atoms(factor))
    if not atoms:
        return data
    one = node.builder.const([1])
    first = node.op("Less", node.builder.position(atoms), one, dtype=BOOL, shape=[1])
    if not node.in_shape(0):
        first = node.builder.reshape(first, [])
    return zero_unless(node, first, data)


def _kept(node: LocalNode, updates: ir.Value, inside: ir.Value, reduction: str) -> ir.Value:
    """The updates; where `inside` is false, an update that changes nothing."""
    assert updates.dtype is not None
    fill = fill_value(updates.dtype, _IDENTITY[reduction])
    return select(node.builder, inside, updates, fill)


def _with_spare(node: LocalNode, data: ir.Value, axis: int) -> tuple[ir.Value, list[Dim]]:
    """The data with one more row along `axis`, for writes to other devices' shards."""
    shape = list(node.in_shape(0))
    spare = node.builder.zeros([*shape[:axis], 1, *shape[axis + 1 :]], data.dtype)
    longer = [*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]]
    return node.op("Concat", data, spare, shape=longer, axis=axis), longer


def _without_spare(node: LocalNode, data: ir.Value, axis: int) -> ir.Value:
    bounds = (node.builder.const([n]) for n in (0, -1, axis))
    return node.op("Slice", data, *bounds, shape=node.out_shape())


# -- rows ------------------------------------------------------------------------------------------


def _depth(view: NodeView) -> int:
    """The number of dims that an index names; ModelError if it is unknown."""
    depth = view.shape(1)[-1]
    if not isinstance(depth, int):
        raise view.fail(f"expected a known number of indexed dims, got {depth}")
    return depth


def _indexed(view: NodeView, sizes: Sequence[Dim], places: Sequence[str], batch: int) -> list[str]:
    """Returns the factors of the indexed dims: one of `places` where a column counts along it.

    Args:
        view: The node; its operand 1 holds the indices.
        sizes: Sizes of the indexed dims.
        places: Factors of all dims of the indices except the last.
        batch: Number of them that are batch dims, which the indexed tensor has too.
    """
    counted = counted_columns(view, 1)
    names = []
    for column, size in enumerate(sizes):
        dim = counted.get(column, -1)
        same = dim >= batch and view.table.equal(view.shape(1)[dim], size)
        names.append(places[dim] if same else f"{INDEXED}{column}")
    return names


def gather_nd_rule(view: NodeView) -> OpRule:
    """GatherND: `a V0 V1 b, a i 1 -> a i b; sum: V0 V1`; V0 is i if indices count along i."""
    depth, batch = _depth(view), int(view.attr("batch_dims", 0))
    lead, shape = len(view.shape(1)) - 1, view.shape(0)
    names = axis_names(lead + len(shape) - batch - depth)
    places, rows = names[:lead], names[lead:]
    indexed = _indexed(view, shape[batch : batch + depth], places, batch)
    data = [*places[:batch], *indexed, *rows]
    text = f"{' '.join(data)}, {' '.join([*places, '1'])} -> {' '.join([*places, *rows])}"
    searched = [name for name in indexed if name not in places]
    return parse_rule(f"{text}; {lookup_kind(view)}: {' '.join(searched)}; linear: any 0")


def _columns(
    node: LocalNode, indices: ir.Value, lead: Sequence[Dim], data: Operand, batch: int
) -> tuple[list[ir.Value], ir.Value | None] | None:
    """Converts global indices to indices into this rank's shard.

    Args:
        node: The node.
        indices: Global indices; those that are padding are 0.
        lead: Local sizes of all their dims except the last.
        data: The operand or the result that is indexed.
        batch: Number of batch dims.

    Returns:
        For each indexed dim the column [lead…, 1], and whether all indices of a row are in this
        shard (None if they always are); None in all if no indexed dim is sharded.
    """
    shape = [*lead, 1]
    columns: list[ir.Value] = []
    inside: ir.Value | None = None
    depth = _depth(node.view)
    factors = [dim[0] for dim in data.dims[batch : batch + depth]]
    if not any(node.atoms(factor) for factor in factors):
        return None
    places = node.plan.rule.inputs[1].dims
    for position, factor in enumerate(factors):
        if (factor,) in places and node.atoms(factor):
            columns.append(_counting(node, lead, places.index((factor,))))
            continue
        column = indices
        if depth > 1:
            chosen = node.builder.const([position])
            column = node.op("Gather", indices, chosen, shape=shape, axis=len(lead))
        column = node.builder.cast(column, INT64)
        if node.atoms(factor):
            column, here = in_shard(node, factor, column, shape)
            inside = here if inside is None else node.op("And", inside, here, shape=shape)
        columns.append(column)
    return columns, inside


def _counting(node: LocalNode, lead: Sequence[Dim], axis: int) -> ir.Value:
    """A column that counts along a dim of the indices."""
    line: list[Dim] = [1] * (len(lead) + 1)
    line[axis] = lead[axis]
    shape = [*lead, 1]
    index = node.builder.reshape(iota(node, lead[axis]), line)
    return node.op("Expand", index, node.builder.sizes(shape), dtype=INT64, shape=shape)


def _joined(node: LocalNode, columns: Sequence[ir.Value], lead: Sequence[Dim]) -> ir.Value:
    if len(columns) == 1:
        return columns[0]
    return node.op("Concat", *columns, shape=[*lead, len(columns)], axis=len(lead))


def gather_nd_takes(view: NodeView) -> Sequence[Taken] | None:
    """A range of dim 0, if the indices are for this dim alone."""
    shape = view.shape(1)
    if view.attr("batch_dims", 0) or len(shape) > 2 or shape[-1] != 1:
        return None
    return taken_range(0, view.shape(0)[0], view.contents(1), squeezed=len(shape) == 1)


def gather_nd_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up indices in this rank's shard of the indexed dims; indices that are padding are 0."""
    indices, lead, out = with_padding(node, 1), node.in_shape(1)[:-1], node.out_shape()
    batch = int(node.attr("batch_dims", 0))
    found = _columns(node, indices, lead, node.plan.rule.inputs[0], batch)
    if found is None:
        return node.copy([node.input(0), indices])
    columns, inside = found
    (rows,) = node.copy([node.input(0), _joined(node, columns, lead)])
    if inside is None:
        return (rows,)
    inside = node.builder.reshape(inside, [*lead, *[1] * (len(out) - len(lead))])
    return (zero_unless(node, inside, rows),)


def scatter_nd_rule(view: NodeView) -> OpRule:
    """ScatterND: `V0 V1 b, i 1, i b -> V0 V1 b; special: V0 V1; sum: i` if writes add up.

    V0 is i, and parallel, if the indices of dim 0 count along i.
    """
    depth, reduction = _depth(view), _reduction(view)
    lead, shape = len(view.shape(1)) - 1, view.shape(0)
    names = axis_names(lead + len(shape) - depth)
    places, rows = names[:lead], names[lead:]
    indexed = _indexed(view, shape[:depth], places, 0)
    data = " ".join([*indexed, *rows])
    text = f"{data}, {' '.join([*places, '1'])}, {' '.join(names)} -> {data}"
    text += f"; special: {' '.join(name for name in indexed if name not in places)}"
    text += f"; {_KINDS[reduction]}: {' '.join(name for name in places if name not in indexed)}"
    return parse_rule(f"{text}; linear: {_LINEAR[reduction]}")


def scatter_nd_local(node: LocalNode) -> Sequence[ir.Value]:
    """Writes at indices in its shard; if updates are sharded, only one device adds the data."""
    indices, lead, shape = with_padding(node, 1), node.in_shape(1)[:-1], node.in_shape(2)
    updates, reduction, rule = node.input(2), _reduction(node.view), node.plan.rule
    data = _once(node, [f for dim in rule.inputs[1].dims for f in dim])
    found = _columns(node, indices, lead, rule.inputs[0], 0)
    if found is None:
        return node.copy([data, indices, updates])
    columns, inside = found
    if inside is None:
        return node.copy([data, _joined(node, columns, lead), updates])
    if reduction != "none":
        there = node.builder.reshape(inside, [*lead, *[1] * (len(shape) - len(lead))])
        updates = _kept(node, updates, there, reduction)
        return node.copy([data, _joined(node, columns, lead), updates])
    axis = next(i for i, (f,) in enumerate(rule.inputs[0].dims) if f in node.split_factors(SPECIAL))
    spare = node.builder.size(node.in_shape(0)[axis])
    columns[axis] = node.op("Where", inside, columns[axis], spare, dtype=INT64, shape=[*lead, 1])
    data, longer = _with_spare(node, data, axis)
    written = node.op("ScatterND", data, _joined(node, columns, lead), updates, shape=longer)
    return (_without_spare(node, written, axis),)


def gather_nd_grad_rule(view: NodeView) -> OpRule:
    """GatherNDGrad: `a i b, a i 1 -> a V0 V1 b; sum: i`; every device fills its own shard of V."""
    depth, batch = _depth(view), int(view.attr("batch_dims", 0))
    names = axis_names(len(view.shape(0)))
    lead = len(view.shape(1)) - 1
    places, rows = names[:lead], names[lead:]
    indexed = _indexed(view, view.out_shape()[batch : batch + depth], places, batch)
    result = " ".join([*places[:batch], *indexed, *rows])
    text = f"{' '.join(names)}, {' '.join([*places, '1'])} -> {result}; linear: sum 0"
    added = [name for name in places[batch:] if name not in indexed]
    return parse_rule(f"{text}; sum: {' '.join(added)}")


def gather_nd_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Adds up the rows of indices in this rank's shard."""
    place, lead, shape = with_padding(node, 1), node.in_shape(1)[:-1], node.in_shape(0)
    batch, updates = int(node.attr("batch_dims", 0)), node.input(0)
    found = _columns(node, place, lead, node.plan.rule.outputs[0], batch)
    columns, inside = found or ([node.builder.cast(place, INT64)], None)
    if inside is not None:
        there = node.builder.reshape(inside, [*lead, *[1] * (len(shape) - len(lead))])
        updates = zero_unless(node, there, updates)
    columns = [*(_counting(node, lead, axis) for axis in range(batch)), *columns]
    out = node.out_shape()
    if len(columns) > 1:
        shape = (*lead, batch + _depth(node.view))
        place = node.op("Concat", *columns, dtype=INT64, shape=shape, axis=len(lead))
    else:
        place = columns[0]
    start = node.builder.zeros(out, updates.dtype)
    return (node.op("ScatterND", start, place, updates, shape=out, reduction="add"),)


# -- one-hot ---------------------------------------------------------------------------------------


def one_hot_rule(view: NodeView) -> OpRule:
    """OneHot: `i j -> i V j`; every device computes its own shard of the classes V."""
    names = axis_names(len(view.shape(0)))
    axis = normal_axis(view, view.attr("axis", -1), len(names) + 1)
    result = [*names[:axis], INDEXED, *names[axis:]]
    return parse_rule(f"{' '.join(names)}, ., . -> {' '.join(result)}; special: {INDEXED}")


def one_hot_local(node: LocalNode) -> Sequence[ir.Value]:
    """Compares the indices with the global numbers of this rank's classes."""
    shape, out = node.in_shape(0), node.out_shape()
    axis = normal_axis(node.view, node.attr("axis", -1), len(out))
    wide = [*shape[:axis], 1, *shape[axis:]]
    index = from_front(node, INDEXED, node.builder.reshape(node.input(0), wide), wide)
    classes: list[Dim] = [out[axis], *[1] * (len(out) - axis - 1)]
    classes_value = node.builder.reshape(global_index(node, INDEXED), classes)
    hit = node.builder.cast(node.op("Equal", index, classes_value, dtype=BOOL, shape=out), INT64)
    # A lookup, since onnxruntime has no Where for some types of values.
    return (node.op("Gather", node.input(2), hit, dtype=node.out_dtype(), shape=out, axis=0),)


def scattered_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Reads the cotangent where updates were written."""
    return scatter_gradient(node, _reduction(node.view))


DEFS = (
    OpDef(
        "",
        "OneHot",
        9,
        one_hot_rule,
        copy_or(one_hot_local),
        gradient=one_hot_gradient,
        host_operands=(1, 2),
    ),
    OpDef(
        "",
        "GatherElements",
        11,
        gather_elements_rule,
        gather_elements_local,
        gradient=gather_elements_gradient,
        cost=selects,
    ),
    OpDef(
        "",
        "Scatter",
        9,
        expanded,
        gradient=BY_BODY,
        upgrades={11: renamed("ScatterElements")},
    ),
    OpDef(
        "",
        "ScatterElements",
        11,
        scatter_elements_rule,
        scatter_elements_local,
        gradient=scattered_gradient,
        cost=moves,
        keeps_zero=True,
        memory=IN_PLACE,
        folding=MOVE,
    ),
    OpDef(
        "",
        "GatherND",
        11,
        gather_nd_rule,
        gather_nd_local,
        gradient=gather_nd_gradient,
        cost=selects,
        folding=MOVE,
        takes=gather_nd_takes,
    ),
    OpDef(
        "",
        "ScatterND",
        11,
        scatter_nd_rule,
        scatter_nd_local,
        gradient=scattered_gradient,
        cost=moves,
        keeps_zero=True,
        folding=MOVE,
    ),
    OpDef(
        DOMAIN,
        GATHER_ND_GRAD,
        1,
        gather_nd_grad_rule,
        gather_nd_grad_local,
        gradient=Missing("it is already a gradient"),
        cost=moves,
    ),
)
