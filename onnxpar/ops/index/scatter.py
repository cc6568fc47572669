"""GatherElements, GatherND, OneHot, the Scatters and others that use given places.

A device that holds a part of an indexed dim looks after the places that lie in its part: a lookup
gives zeros for the others and leaves a sum partial, a write leaves the others out. What is written
may be split too where writes add up (or take the greatest or least).
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import SPECIAL, Operand, OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN, INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import fill_value, select
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.grad_node import GradNode
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
    locate,
    normal_axis,
    zero_unless,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import moves, selects
from onnxpar.ops.old_node import renamed
from onnxpar.ops.operator import BY_BODY, Missing, OpDef, expanded
from onnxpar.ops.slots import IN_PLACE, Folding

_INDEXED = "V"
_NO_SUMS = (BOOL, ir.DataType.STRING)
# What a write leaves as it is, by how writes are combined.
_IDENTITY: dict[str, float | str] = {"add": 0, "mul": 1, "max": "lowest", "min": "highest"}
# Pending reduction that a split of the writes leaves.
_PENDING = {"add": "sum", "max": "max", "min": "min"}
_LINEAR = {
    "none": "any 0+2, max 0, max 2, min 0, min 2",
    "add": "sum 0+2, max 0, min 0",
    "mul": "sum 0, prod 0+2",
    "max": "max 0+2, max 0, max 2, min 0",
    "min": "min 0+2, min 0, min 2, max 0",
}


def _summable(view: NodeView) -> str:
    """The kind of a factor that is looked up: booleans and strings have no sums."""
    value = view.node.inputs[0]
    return "replicated" if value is None or value.dtype in _NO_SUMS else "sum"


def _reduction(view: NodeView) -> str:
    found = str(view.attr("reduction", "none"))
    if found not in _LINEAR:
        raise view.fail(f"expected a reduction of {', '.join(_LINEAR)}, got {found!r}")
    return found


def _in_range(node: LocalNode, operand: int) -> ir.Value:
    """Operand `operand`, indices, its padding set to 0 so that it names a place that is there."""
    indices = node.input(operand)
    for dim in node.plan.rule.inputs[operand].dims:
        for factor in dim:
            # Padding of a greatest or least has been set to an end of the type's range.
            zero = node.zero[operand] and node.plan.rule.kinds[factor] not in ("max", "min")
            indices = node.masked(indices, operand, factor, 0, known_zero=zero)
    return indices


def _found(
    node: LocalNode, factor: str, indices: ir.Value, shape: Sequence[Dim]
) -> tuple[ir.Value, ir.Value]:
    """Where in this rank's shard indices lie that may count from the end, and whether they do."""
    indices = node.builder.cast(indices, INT64)
    negative = node.op("Less", indices, node.builder.const([0]), dtype=BOOL, shape=shape)
    wrapped = node.op("Add", indices, node.builder.size(node.size(factor)), shape=shape)
    indices = node.op("Where", negative, wrapped, indices, dtype=INT64, shape=shape)
    return locate(node, factor, indices, shape)


# -- elements --------------------------------------------------------------------------------------


def _element_dims(view: NodeView) -> tuple[list[str], list[str], int, list[str]]:
    """Returns the dims of the data and of the indices, the axis, and what must be whole."""
    data, indices = view.shape(0), view.shape(1)
    names = axis_names(len(data))
    axis = normal_axis(view, view.attr("axis", 0), len(data))
    operand, whole = list(names), list[str]()
    operand[axis] = _INDEXED
    for position, name in enumerate(names):
        if position != axis and not view.table.equal(data[position], indices[position]):
            # Fewer rows are indexed than there are.
            operand[position] = f"{name}_all"
            whole += [name, operand[position]]
    return operand, names, axis, whole


def gather_elements_rule(view: NodeView) -> OpRule:
    """GatherElements: `a V b, a i b -> a i b; sum: V` for rank 3 and axis 1."""
    operand, names, _, whole = _element_dims(view)
    places = " ".join(names)
    kind = _summable(view)
    if kind == "replicated":
        whole = [*whole, _INDEXED]
    text = f"{' '.join(operand)}, {places} -> {places}; linear: any 0"
    text += f"; sum: {_INDEXED}" if kind == "sum" else ""
    return parse_rule(text + (f"; replicated: {' '.join(whole)}" if whole else ""))


def gather_elements_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up what is in this rank's part of the indexed dim; padding of indices looks up 0."""
    indices, shape = _in_range(node, 1), node.in_shape(1)
    if not node.atoms(_INDEXED):
        return node.copy([node.input(0), indices])
    place, inside = _found(node, _INDEXED, indices, shape)
    (rows,) = node.copy([node.input(0), place])
    return (zero_unless(node, inside, rows),)


def scatter_elements_rule(view: NodeView) -> OpRule:
    """ScatterElements: `a V b, a i b, a i b -> a V b; special: V; sum: i` where writes add up."""
    operand, names, axis, whole = _element_dims(view)
    reduction = _reduction(view)
    places, rows = " ".join(names), " ".join(operand)
    text = f"{rows}, {places}, {places} -> {rows}; special: {_INDEXED}"
    if reduction in _PENDING:
        text += f"; {_PENDING[reduction]}: {names[axis]}"
    else:
        whole = [*whole, names[axis]]
    text += f"; replicated: {' '.join(whole)}" if whole else ""
    return parse_rule(f"{text}; linear: {_LINEAR[reduction]}")


def scatter_elements_local(node: LocalNode) -> Sequence[ir.Value]:
    """Writes what lies in this rank's part; split writes that add up see the data on one device."""
    indices, shape, updates = _in_range(node, 1), node.in_shape(1), node.input(2)
    axis = normal_axis(node.view, node.attr("axis", 0), len(shape))
    data = _once(node, node.plan.rule.inputs[1].dims[axis])
    if not node.atoms(_INDEXED):
        return node.copy([data, indices, updates])
    place, inside = _found(node, _INDEXED, indices, shape)
    reduction = _reduction(node.view)
    if reduction != "none":
        return node.copy([data, place, _kept(node, updates, inside, shape, reduction)])
    length = node.in_shape(0)[axis]
    spare = node.builder.size(length)
    place = node.op("Where", inside, place, spare, dtype=INT64, shape=shape)
    data, longer = _with_spare(node, data, axis)
    written = node.op("ScatterElements", data, place, updates, shape=longer, axis=axis)
    return (_without_spare(node, written, axis),)


def _once(node: LocalNode, places: Sequence[str]) -> ir.Value:
    """The data, or zeros on all devices but the first of those that add up parts of the writes."""
    data, kinds = node.input(0), node.plan.rule.kinds
    atoms = tuple(a for factor in places if kinds[factor] == "sum" for a in node.atoms(factor))
    if not atoms:
        return data
    one = node.builder.const([1])
    first = node.op("Less", node.builder.position(atoms), one, dtype=BOOL, shape=[1])
    if not node.in_shape(0):
        first = node.builder.reshape(first, [])
    return zero_unless(node, first, data)


def _kept(
    node: LocalNode, updates: ir.Value, inside: ir.Value, shape: Sequence[Dim], reduction: str
) -> ir.Value:
    """The writes, those of other devices' places changed to what leaves everything as it is."""
    assert updates.dtype is not None
    fill = fill_value(updates.dtype, _IDENTITY[reduction])
    return select(node.builder, inside, updates, fill)


def _with_spare(node: LocalNode, data: ir.Value, axis: int) -> tuple[ir.Value, list[Dim]]:
    """The data with one more row along `axis`, for writes to places that are elsewhere."""
    shape = list(node.in_shape(0))
    row = [*shape[:axis], 1, *shape[axis + 1 :]]
    zero = node.builder.const(np.array(0), data.dtype)
    spare = node.op("Expand", zero, node.builder.sizes(row), shape=row)
    longer = [*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]]
    return node.op("Concat", data, spare, shape=longer, axis=axis), longer


def _without_spare(node: LocalNode, data: ir.Value, axis: int) -> ir.Value:
    bounds = (node.builder.const([n]) for n in (0, -1, axis))
    return node.op("Slice", data, *bounds, shape=node.out_shape())


# -- rows ------------------------------------------------------------------------------------------


def _depth(view: NodeView) -> int:
    """How many dims an index names."""
    depth = view.shape(1)[-1]
    if not isinstance(depth, int):
        raise view.fail("the number of indexed dims must be known")
    return depth


def _indexed(view: NodeView, sizes: Sequence[Dim], places: Sequence[str], batch: int) -> list[str]:
    """Factors of the indexed dims, of these sizes: one of `places` where a column counts along it.

    Args:
        view: The node, whose operand 1 are the indices.
        sizes: Sizes of the indexed dims.
        places: Factors of the dims of the indices, but for the last.
        batch: How many of them are batch dims, which the indexed tensor has anyway.
    """
    counted = counted_columns(view, 1)
    names = []
    for column, size in enumerate(sizes):
        dim = counted.get(column, -1)
        same = dim >= batch and view.table.equal(view.shape(1)[dim], size)
        names.append(places[dim] if same else f"{_INDEXED}{column}")
    return names


def gather_nd_rule(view: NodeView) -> OpRule:
    """GatherND: `a V0 V1 b, a i 1 -> a i b; sum: V0 V1`; where indices count along i, V0 is i."""
    depth, batch = _depth(view), int(view.attr("batch_dims", 0))
    lead, shape = len(view.shape(1)) - 1, view.shape(0)
    names = axis_names(lead + len(shape) - batch - depth)
    places, rows = names[:lead], names[lead:]
    indexed = _indexed(view, shape[batch : batch + depth], places, batch)
    data = [*places[:batch], *indexed, *rows]
    text = f"{' '.join(data)}, {' '.join([*places, '1'])} -> {' '.join([*places, *rows])}"
    searched = [name for name in indexed if name not in places]
    text += f"; {_summable(view)}: {' '.join(searched)}" if searched else ""
    return parse_rule(f"{text}; linear: any 0")


def _columns(
    node: LocalNode, indices: ir.Value, lead: Sequence[Dim], data: Operand, batch: int
) -> tuple[list[ir.Value], ir.Value | None] | None:
    """Indices into this rank's shard.

    Args:
        node: The node.
        indices: Global indices, their padding 0.
        lead: Local sizes of their dims, but for the last.
        data: The operand that is indexed, or the result.
        batch: Number of batch dims.

    Returns:
        For each indexed dim the column [lead…, 1], and whether all of them are there, None if they
        always are; None where the indices may stay as they are.
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
            column, here = _found(node, factor, column, shape)
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


def gather_nd_local(node: LocalNode) -> Sequence[ir.Value]:
    """Looks up what is in this rank's part of the indexed dims; padding of indices looks up 0."""
    indices, lead, out = _in_range(node, 1), node.in_shape(1)[:-1], node.out_shape()
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
    """ScatterND: `V0 V1 b, i 1, i b -> V0 V1 b; special: V0 V1; sum: i` where writes add up.

    V0 is i, and parallel, where the indices of dim 0 count along i.
    """
    depth, reduction = _depth(view), _reduction(view)
    lead, shape = len(view.shape(1)) - 1, view.shape(0)
    names = axis_names(lead + len(shape) - depth)
    places, rows = names[:lead], names[lead:]
    indexed = _indexed(view, shape[:depth], places, 0)
    data = " ".join([*indexed, *rows])
    text = f"{data}, {' '.join([*places, '1'])}, {' '.join(names)} -> {data}"
    kinds = {
        "special": [name for name in indexed if name not in places],
        _PENDING.get(reduction, "replicated"): [name for name in places if name not in indexed],
    }
    text += "".join(f"; {kind}: {' '.join(found)}" for kind, found in kinds.items() if found)
    return parse_rule(f"{text}; linear: {_LINEAR[reduction]}")


def scatter_nd_local(node: LocalNode) -> Sequence[ir.Value]:
    """Writes what lies in this rank's part; split writes that add up see the data on one device."""
    indices, lead, shape = _in_range(node, 1), node.in_shape(1)[:-1], node.in_shape(2)
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
        updates = _kept(node, updates, there, shape, reduction)
        return node.copy([data, _joined(node, columns, lead), updates])
    axis = next(i for i, (f,) in enumerate(rule.inputs[0].dims) if f in node.split_factors(SPECIAL))
    spare = node.builder.size(node.in_shape(0)[axis])
    columns[axis] = node.op("Where", inside, columns[axis], spare, dtype=INT64, shape=[*lead, 1])
    data, longer = _with_spare(node, data, axis)
    written = node.op("ScatterND", data, _joined(node, columns, lead), updates, shape=longer)
    return (_without_spare(node, written, axis),)


def gather_nd_grad_rule(view: NodeView) -> OpRule:
    """GatherNDGrad: `a i b, a i 1 -> a V0 V1 b; sum: i`; every device fills its own part of V."""
    depth, batch = _depth(view), int(view.attr("batch_dims", 0))
    names = axis_names(len(view.shape(0)))
    lead = len(view.shape(1)) - 1
    places, rows = names[:lead], names[lead:]
    indexed = _indexed(view, view.out_shape()[batch : batch + depth], places, batch)
    result = " ".join([*places[:batch], *indexed, *rows])
    text = f"{' '.join(names)}, {' '.join([*places, '1'])} -> {result}; linear: sum 0"
    added = [name for name in places[batch:] if name not in indexed]
    return parse_rule(text + (f"; sum: {' '.join(added)}" if added else ""))


def gather_nd_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Adds rows up at the places that are in this rank's part."""
    place, lead, shape = _in_range(node, 1), node.in_shape(1)[:-1], node.in_shape(0)
    batch, updates = int(node.attr("batch_dims", 0)), node.input(0)
    found = _columns(node, place, lead, node.plan.rule.outputs[0], batch)
    columns, inside = found or ([node.builder.cast(place, INT64)], None)
    if inside is not None:
        there = node.builder.reshape(inside, [*lead, *[1] * (len(shape) - len(lead))])
        updates = zero_unless(node, there, updates)
    columns = [*(_counting(node, lead, axis) for axis in range(batch)), *columns]
    out = node.out_shape()
    if len(columns) > 1:
        whole = [*lead, batch + _depth(node.view)]
        place = node.op("Concat", *columns, dtype=INT64, shape=whole, axis=len(lead))
    else:
        place = columns[0]
    zero = node.builder.const(np.array(0), updates.dtype)
    start = node.op("Expand", zero, node.builder.sizes(out), shape=out)
    return (node.op("ScatterND", start, place, updates, shape=out, reduction="add"),)


# -- one-hot ---------------------------------------------------------------------------------------


def one_hot_rule(view: NodeView) -> OpRule:
    """OneHot: `i j -> i V j`; every device makes its own part of the classes V."""
    names = axis_names(len(view.shape(0)))
    axis = normal_axis(view, view.attr("axis", -1), len(names) + 1)
    result = [*names[:axis], _INDEXED, *names[axis:]]
    return parse_rule(f"{' '.join(names)}, ., . -> {' '.join(result)}; special: {_INDEXED}")


def one_hot_local(node: LocalNode) -> Sequence[ir.Value]:
    """Compares global classes where they are split."""
    shape, out = node.in_shape(0), node.out_shape()
    axis = normal_axis(node.view, node.attr("axis", -1), len(out))
    wide = [*shape[:axis], 1, *shape[axis:]]
    index = node.builder.cast(node.builder.reshape(node.input(0), wide), INT64)
    negative = node.op("Less", index, node.builder.const([0]), dtype=BOOL, shape=wide)
    wrapped = node.op("Add", index, node.builder.size(node.size(_INDEXED)), shape=wide)
    index = node.op("Where", negative, wrapped, index, dtype=INT64, shape=wide)
    classes: list[Dim] = [out[axis], *[1] * (len(out) - axis - 1)]
    classes_value = node.builder.reshape(global_index(node, _INDEXED), classes)
    hit = node.builder.cast(node.op("Equal", index, classes_value, dtype=BOOL, shape=out), INT64)
    # A lookup: onnxruntime has no Where for some of the types that the values may have.
    return (node.op("Gather", node.input(2), hit, dtype=node.out_dtype(), shape=out, axis=0),)


def scattered_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Reads the cotangent where something was written."""
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
        folding=Folding.MOVE,
    ),
    OpDef(
        "",
        "GatherND",
        11,
        gather_nd_rule,
        gather_nd_local,
        gradient=gather_nd_gradient,
        cost=selects,
        folding=Folding.MOVE,
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
        folding=Folding.MOVE,
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
