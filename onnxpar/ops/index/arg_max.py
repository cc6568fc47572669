"""Operators that find elements: ArgMax, Hardmax, TopK, Compress, NonZero, Unique.

If the searched axis is sharded, every device finds its own candidates and sends only those: one
value and one index per row for ArgMax, k of each for TopK. Among equal values, the one with the
least global index is found, as on one device.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
import sympy

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import mask_component
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.folding import INTEGERS, MOVE
from onnxpar.ops.index.arg_max_gradient import top_k_gradient
from onnxpar.ops.local_helpers import (
    BOOL,
    FLOAT,
    copy_or,
    global_index,
    normal_axis,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.old_versions import OF_ONE_AXIS
from onnxpar.ops.old_node import OldNode, Upgrade
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, Missing, NotDifferentiable, OpDef
from onnxpar.ops.view.reshape import further

# Types that onnxruntime cannot compare, and the types in which we compare them.
_COMPARED_AS = {
    **dict.fromkeys(
        (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.INT16, ir.DataType.UINT16),
        ir.DataType.INT32,
    ),
    **dict.fromkeys((ir.DataType.FLOAT16, ir.DataType.BFLOAT16), FLOAT),
}


def arg_rule(view: NodeView) -> OpRule:
    """Every dim may be sharded; along the axis, devices exchange a value and index per row."""
    names = axis_names(len(view.shape(0)))
    axis = normal_axis(view, view.attr("axis", 0), len(names))
    keep = view.attr("keepdims", 1)
    result = [
        "1" if position == axis else name
        for position, name in enumerate(names)
        if keep or position != axis
    ]
    return parse_rule(f"{' '.join(names)} -> {' '.join(result)}; special: {names[axis]}")


def hardmax_rule(view: NodeView) -> OpRule:
    """Hardmax: every dim; along the axis, devices exchange a value and an index per row."""
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    axis = normal_axis(view, view.attr("axis", -1), len(names))
    return parse_rule(f"{text} -> {text}; special: {names[axis]}")


def hardmax_local(node: LocalNode) -> Sequence[ir.Value]:
    """One at the first index of the greatest value over all shards, zero elsewhere."""
    view, shape = node.view, node.in_shape(0)
    axis = normal_axis(view, view.attr("axis", -1), len(shape))
    factor = axis_names(len(shape))[axis]
    found, index = _first(node, axis, factor, largest=True, last=False)
    hit = node.op("Equal", index, found, dtype=BOOL, shape=shape)
    return (node.builder.cast(hit, node.out_dtype()),)


def _places(node: LocalNode, factor: str, fill: str) -> ir.Value:
    """The global index of each local element along `factor`; that of padding is `fill`."""
    index = global_index(node, factor)
    length = node.local_size(factor)
    components = node.components(factor)
    for position, component in enumerate(components):
        if component.atoms:
            index = mask_component(
                node.builder,
                index,
                [length],
                0,
                components[:position],
                component,
                components[position + 1 :],
                fill,
            )
    return index


def _arg(node: LocalNode, *, largest: bool) -> Sequence[ir.Value]:
    view, shape = node.view, node.in_shape(0)
    axis = normal_axis(view, view.attr("axis", 0), len(shape))
    factor = axis_names(len(shape))[axis]
    last = bool(view.attr("select_last_index", 0))
    found, _ = _first(node, axis, factor, largest=largest, last=last)
    return (node.builder.reshape(found, node.out_shape()),)


def _first(
    node: LocalNode, axis: int, factor: str, *, largest: bool, last: bool
) -> tuple[ir.Value, ir.Value]:
    """The first (last) global index of the extremum along an axis, and the index of each element.

    The former has size 1 along the axis, the latter is [local size, 1, …].
    """
    shape = node.in_shape(0)
    x = node.masked(node.input(0), 0, factor, "lowest" if largest else "highest")
    x = node.builder.cast(x, _COMPARED_AS.get(x.dtype or FLOAT))
    atoms = node.atoms(factor)
    top = node.builder.reduce("ReduceMax" if largest else "ReduceMin", x, [axis], keepdims=True)
    top = node.all_reduce(top, atoms, "max" if largest else "min")
    hit = node.op("Equal", x, top, dtype=BOOL, shape=shape)
    # Where nothing is equal, as with NaN: the end of the range that never beats a hit.
    size = node.builder.size(node.size(factor))
    one = node.builder.const([1])
    other = node.builder.const([0]) if last else node.op("Sub", size, one, shape=[1])
    index = _places(node, factor, "lowest" if last else "highest")
    index = node.builder.reshape(index, [shape[axis], *[1] * (len(shape) - axis - 1)])
    found = node.op("Where", hit, index, other, dtype=INT64, shape=shape)
    found = node.builder.reduce("ReduceMax" if last else "ReduceMin", found, [axis], keepdims=True)
    return node.all_reduce(found, atoms, "max" if last else "min"), index


def arg_max_local(node: LocalNode) -> Sequence[ir.Value]:
    """The greatest value over all shards, then its first (last) index, each by an all-reduce."""
    return _arg(node, largest=True)


def arg_min_local(node: LocalNode) -> Sequence[ir.Value]:
    """The least value over all shards, then its first (last) index, each by an all-reduce."""
    return _arg(node, largest=False)


def top_k_rule(view: NodeView) -> OpRule:
    """TopK: every dim; along the axis, the k values and indices of each shard are gathered."""
    names = axis_names(len(view.shape(0)))
    axis = normal_axis(view, view.attr("axis", -1), len(names))
    result = list(names)
    result[axis] = "K"
    operand, found = " ".join(names), " ".join(result)
    kinds = f"special: {names[axis]}; replicated: K"
    return parse_rule(f"{operand}{further(view)} -> {found}, {found}; {kinds}")


def top_k_local(node: LocalNode) -> Sequence[ir.Value]:
    """The k best of each shard, gathered, and the k best of those."""
    view, shape = node.view, list(node.in_shape(0))
    axis = normal_axis(view, view.attr("axis", -1), len(shape))
    factor = axis_names(len(shape))[axis]
    largest = int(view.attr("largest", 1))
    atoms, components = node.atoms(factor), node.components(factor)
    values = node.masked(node.input(0), 0, factor, "lowest" if largest else "highest")
    index = _places(node, factor, "highest")
    if len(components) == 1 or node.is_even(factor):
        # Padding comes after elements that are equal to it, so it is never preferred.
        count = _least(node.out_shape()[axis], shape[axis])
        values, place = _best(node, values, shape, axis, count, largest=largest)
        shape[axis] = count
        index = node.op("Gather", index, place, shape=shape, axis=0)
    else:
        tail = [1] * (len(shape) - axis - 1)
        index = node.builder.reshape(index, [shape[axis], *tail])
        index = node.op("Expand", index, node.builder.sizes(shape), shape=shape)
    values = node.all_gather(values, atoms, axis)
    index = node.all_gather(index, atoms, axis)
    shape[axis] = shape[axis] * node.mesh.count(atoms)
    if len(components) > 1:
        # Shards interleave: among equal values, that with the least index must come first.
        index, order = _best(node, index, shape, axis, shape[axis], largest=0)
        values = node.op("GatherElements", values, order, shape=shape, axis=axis)
    out = node.out_shape()
    values, place = _best(node, values, shape, axis, out[axis], largest=largest)
    return values, node.op("GatherElements", index, place, shape=out, axis=axis)


def _least(one: Dim, other: Dim) -> Dim:
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return sympy.Min(one, other)


def _best(
    node: LocalNode, x: ir.Value, shape: Sequence[Dim], axis: int, count: Dim, *, largest: int
) -> tuple[ir.Value, ...]:
    """The `count` greatest (least) elements along an axis and their places, in order."""
    found = [*shape[:axis], count, *shape[axis + 1 :]]
    return node.builder.ops(
        "TopK",
        [x, node.builder.size(count)],
        [(x.dtype, found), (INT64, found)],
        {"axis": axis, "largest": largest, "sorted": 1},
    )


def compress_rule(view: NodeView) -> OpRule:
    """Compress: every dim but its axis, whose size in the result depends on data."""
    names = axis_names(len(view.shape(0)))
    axis = view.attr("axis")
    result, fixed = ["K"], names
    if axis is not None:
        chosen = normal_axis(view, axis, len(names))
        result, fixed = [*names[:chosen], "K", *names[chosen + 1 :]], [names[chosen]]
    text = f"{' '.join(names)}, C -> {' '.join(result)}; replicated: {' '.join(fixed)} C K"
    return parse_rule(f"{text}; linear: any 0")


def non_zero_rule(view: NodeView) -> OpRule:
    """NonZero: replicated, since the number of elements found depends on the data of all devices.

    Raises:
        ModelError: Always.
    """
    raise view.fail(
        "how many elements are found, and in which order, depends on the data of all devices"
    )


def unique_rule(view: NodeView) -> OpRule:
    """Unique: replicated, since the number of values found depends on the data of all devices.

    Raises:
        ModelError: Always.
    """
    raise view.fail(
        "how many values are found, and in which order, depends on the data of all devices"
    )


def _count_as_operand(old: OldNode) -> None:
    old.put(1, old.constant([old.attr("k")], np.int64))
    del old.node.attributes["k"]


_SHAPE_BY_DATA = Missing("the shape of its result depends on data, but a gradient needs it")

DEFS = (
    OpDef("", "ArgMax", 1, arg_rule, copy_or(arg_max_local), gradient=NOT_DIFFERENTIABLE),
    OpDef("", "ArgMin", 1, arg_rule, copy_or(arg_min_local), gradient=NOT_DIFFERENTIABLE),
    OpDef(
        "",
        "TopK",
        1,
        top_k_rule,
        copy_or(top_k_local),
        gradient=top_k_gradient,
        host_operands=(1,),
        upgrades={10: Upgrade(_count_as_operand)},
    ),
    OpDef(
        "",
        "Hardmax",
        1,
        hardmax_rule,
        hardmax_local,
        gradient=NotDifferentiable("its derivative is 0 except at jumps"),
        upgrades={13: OF_ONE_AXIS},
    ),
    OpDef(
        "",
        "Compress",
        9,
        compress_rule,
        gradient=_SHAPE_BY_DATA,
        keeps_zero=True,
        folding=MOVE,
    ),
    OpDef("", "NonZero", 9, non_zero_rule, gradient=NOT_DIFFERENTIABLE, folding=INTEGERS),
    OpDef("", "Unique", 11, unique_rule, gradient=_SHAPE_BY_DATA),
)
