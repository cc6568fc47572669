"""Operators that split and join along a dim: Slice, Split, Concat, Expand, Where.

Such a dim is replicated, unless it consists of equal pieces: it is then `(t d)`, t pieces of d
elements, and d may be sharded. So a fused projection to queries, keys and values is sharded by
heads.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import aligned, axis_names, broadcast_rule
from onnxpar.ops.elementwise.elementwise_gradient import where_gradient
from onnxpar.ops.fallback import require_readable
from onnxpar.ops.folding import MOVE, requested_elements
from onnxpar.ops.grad_node import GradNode, Placed
from onnxpar.ops.local_helpers import axis_of, normal_axis
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import selects
from onnxpar.ops.old_node import OldNode, Upgrade, operands
from onnxpar.ops.operator import OpDef
from onnxpar.ops.parts import Taken, same_node
from onnxpar.ops.sizes.computed_sizes import chosen, concatenated, expanded, parts, sliced
from onnxpar.ops.slots import FOLLOWS, Kernel, KernelCall
from onnxpar.ops.value_patterns import repeated, side_by_side
from onnxpar.ops.view.inference import infer_concat, infer_expand, infer_slice, infer_split
from onnxpar.ops.view.reshape import further
from onnxpar.ops.view.reshape_gradient import expand_gradient
from onnxpar.ops.view.slice_gradient import (
    AxisSlice,
    concat_gradient,
    slice_gradient,
    split_gradient,
)

# Exporters write "to the end" of a symbolic dim as any of the greatest integers of their types.
_TO_THE_END = 2**31 - 1


def _piece_rule(view: NodeView, joined: Sequence[Dim], axis: int, pieces: Sequence[Dim]) -> OpRule:
    """Returns the rule of Split or Concat, between one tensor and its pieces along `axis`."""
    names = axis_names(len(joined))
    equal = all(view.table.equal(pieces[0], piece) for piece in pieces)
    sizes: dict[str, Dim] = {}
    if equal:
        last = "d" if pieces[0] != 1 else ""
        replicated = ["t"]
        sizes = {"t": len(pieces)} | ({"d": pieces[0]} if last else {})
        outer, inner = [f"(t {last})"], [last or "1"] * len(pieces)
    else:
        inner = [f"p{i}" for i in range(len(pieces))]
        replicated = ["p", *inner]
        outer = ["p"]

    def words(middle: str) -> str:
        rest = [f"_{name}" for name in names]
        rest[axis] = middle
        return " ".join(rest)

    one, many = words(outer[0]), [words(piece) for piece in inner]
    if view.op_type == "Split":
        text = f"{one}{further(view)} -> {', '.join(many)}; linear: any 0"
    else:
        everyone = "+".join(map(str, range(len(many))))
        text = f"{', '.join(many)} -> {one}; linear: any {everyone}"
        if len(many) > 1:
            # A replicated value is its own maximum, but not its own sum.
            text += "".join(f", max {i}, min {i}" for i in range(len(many)))
            # Replicated zeros are a sum of zeros.
            values = enumerate(view.node.inputs)
            others = [str(i) for i, v in values if v is None or not view.pattern_of(v).zero]
            if 0 < len(others) < len(many):
                text += f", sum {'+'.join(others)}"
    return parse_rule(f"{text}; replicated: {' '.join(replicated)}", sizes)


def split_rule(view: NodeView) -> OpRule:
    """Split: `(t d) -> d, d, …` for results of equal size; otherwise the axis is replicated."""
    shape = view.shape(0)
    axis = axis_of(view, 0)
    pieces = [view.out_shape(i)[axis] for i in range(len(view.node.outputs))]
    return _piece_rule(view, shape, axis, pieces)


def split_takes(view: NodeView) -> Sequence[Taken] | None:
    """The pieces, one after another."""
    axis, at = axis_of(view, 0), 0
    found = []
    for index in range(len(view.node.outputs)):
        size = view.out_shape(index)[axis]
        if not isinstance(size, int):
            return None
        found.append(Taken(axis, at, at + size))
        at += size
    return found


def split_local(node: LocalNode) -> Sequence[ir.Value]:
    """Gives the node the local sizes of its results, if it has sizes."""
    if not node.view.has(1) or "d" not in node.plan.factors:
        return node.copy()
    pieces: list[Dim] = [node.local_size("d")] * len(node.view.node.outputs)
    return node.copy([node.input(0), node.builder.sizes(pieces)])


def concat_rule(view: NodeView) -> OpRule:
    """Concat: `d, d, … -> (t d)` for operands of equal size; otherwise the axis is replicated."""
    shapes = [view.shape(i) for i in range(view.arity)]
    axis = axis_of(view, 1)
    return _piece_rule(view, view.out_shape(), axis, [shape[axis] for shape in shapes])


def _slices(view: NodeView) -> dict[int, int]:
    """Returns for each sliced axis its position in starts, ends and steps.

    Raises:
        ModelError: The axes, or their number, are not constant.
    """
    rank = len(view.shape(0))
    axes = view.ints(3)
    (count,) = view.shape(1)
    if axes is None and not isinstance(count, int):
        raise view.fail(f"expected a constant number of starts, got {count}")
    found = axes if axes is not None else range(int(count))
    return {normal_axis(view, axis, rank): position for position, axis in enumerate(found)}


def _bounds(view: NodeView, index: int, position: int) -> Dim | None:
    if not view.has(index):
        return 1
    known = view.contents(index)
    return None if known is None else known[position]


def _keeps_all(view: NodeView, axis: int, position: int) -> bool:
    """Whether the slice of an axis is proved to keep all its elements."""
    start = _bounds(view, 1, position)
    end = _bounds(view, 2, position)
    step = _bounds(view, 4, position)
    if start != 0 or step != 1 or end is None:
        return False
    size = view.shape(0)[axis]
    if isinstance(end, int):
        return end >= (size if isinstance(size, int) else _TO_THE_END)
    return view.table.equal(end, size)


def slice_rule(view: NodeView) -> OpRule:
    """Slice: a dim that keeps all its elements may be sharded, the others are replicated."""
    shape = view.shape(0)
    names = axis_names(len(shape))
    sliced = {axis for axis, at in _slices(view).items() if not _keeps_all(view, axis, at)}
    result = [f"{n}_cut" if axis in sliced else n for axis, n in enumerate(names)]
    text = f"{' '.join(names)}{further(view)} -> {' '.join(result)}; linear: any 0"
    if sliced:
        text += f"; replicated: {' '.join(f'{names[a]} {names[a]}_cut' for a in sorted(sliced))}"
    return parse_rule(text)


def slice_takes(view: NodeView) -> Sequence[Taken] | None:
    """A range of one axis, if it has known bounds and the other axes are kept."""
    cut = [(a, at) for a, at in _slices(view).items() if not _keeps_all(view, a, at)]
    if len(cut) != 1:
        return None
    axis, position = cut[0]
    bounds = [_bounds(view, index, position) for index in (1, 2, 4)]
    size = view.shape(0)[axis]
    if not isinstance(size, int) or not all(isinstance(b, int) for b in bounds) or bounds[2] != 1:
        return None
    start, stop, _ = slice(bounds[0], bounds[1]).indices(size)
    return [Taken(axis, start, stop)] if start < stop else None


def slice_local(node: LocalNode) -> Sequence[ir.Value]:
    """Drops the axes that keep all their elements, since their ends are global sizes."""
    view = node.view
    if not node.plan.factors:
        return node.copy()
    slices = _slices(view)
    kept = {axis: at for axis, at in slices.items() if not _keeps_all(view, axis, at)}
    if not kept:
        return (node.op("Identity", node.input(0), shape=node.out_shape()),)
    if kept == slices:
        return node.copy()
    positions = list(kept.values())
    chosen = node.builder.const(np.array(positions, np.int64))

    def kept_of(index: int) -> ir.Value:
        return node.op("Gather", node.input(index), chosen, shape=[len(positions)], axis=0)

    starts, ends = kept_of(1), kept_of(2)
    operands = [node.input(0), starts, ends, node.builder.const(list(kept), starts.dtype)]
    if view.has(4):
        operands.append(kept_of(4))
    return node.copy(operands)


def sliced_gradient(node: GradNode) -> Sequence[ir.Value | Placed]:
    """Gives zeros to the elements that were not taken."""
    view = node.view
    slices: dict[int, AxisSlice] = {}
    for axis, position in _slices(view).items():
        if _keeps_all(view, axis, position):
            continue
        size, taken = view.shape(0)[axis], view.out_shape()[axis]
        given = _bounds(view, 4, position)
        step = given if isinstance(given, int) else None
        if step != 1 or not view.table.equal(taken, size):
            slices[axis] = AxisSlice(position, _first(view, position, size, step), step)
    return [slice_gradient(node, slices)]


def _first(view: NodeView, position: int, size: Dim, step: int | None) -> Dim | None:
    """The first index of an axis that is taken, counted from the front; None if unknown."""
    start = _bounds(view, 1, position)
    if start is None or step is None:
        return None
    if isinstance(start, int) and isinstance(size, int):
        return slice(start, None, step).indices(size)[0]
    least, most = view.table.bounds(start)
    if least is not None and least >= 0:
        return start
    from_end = most is not None and most < 0
    least, _ = view.table.bounds(size + start)
    return size + start if from_end and least is not None and least >= 0 else None


def expand_rule(view: NodeView) -> OpRule:
    """Expand: added dims are factors of the output alone, so each device makes its shard."""
    out = view.out_shape()
    require_readable(view, "the shape of the output", out)
    names = axis_names(len(out))
    operand, replicated = aligned(view.shape(0), out, names)
    result = " ".join("1" if size == 1 else n for n, size in zip(names, out, strict=True))
    text = f"{operand}, . -> {result}; linear: any 0"
    if replicated:
        text += f"; replicated: {' '.join(sorted(replicated))}"
    return parse_rule(text)


def expand_local(node: LocalNode) -> Sequence[ir.Value]:
    """Expands to the local shape."""
    if not node.plan.factors:
        return node.copy()
    return node.copy([node.input(0), node.builder.sizes(node.out_shape())])


def where_rule(view: NodeView) -> OpRule:
    """Where: both branches may be partial together; one alone if the other is zero."""
    linear = "any 1+2, max 1, max 2, min 1, min 2"
    for held, other in ((1, 2), (2, 1)):
        value = view.node.inputs[other]
        constant = None if value is None else value.const_value
        if constant is not None and constant.size == 1 and not constant.numpy().any():
            linear += f", sum {held}, prod {held}"
    return broadcast_rule(view, linear)


def _spread(call: KernelCall) -> int:
    """The kernel broadcasts both choices to the condition before it joins them."""
    condition, *choices = call.inputs[:3]
    if condition is None or any(c is None for c in choices):
        return 0
    spread = [np.broadcast_shapes(condition, c) for c in choices if c is not None]
    return sum(map(call.bytes, spread))


def _count_parts(old: OldNode) -> None:
    """Without sizes of the parts, the number of results said how many there are."""
    if old.input(1) is None:
        old.node.attributes.add(ir.AttrInt64("num_outputs", len(old.node.outputs)))


_move = partial(OpDef, "", keeps_zero=True, precision=FOLLOWS, folding=MOVE)

DEFS = (
    _move(
        "Split",
        2,
        split_rule,
        split_local,
        gradient=split_gradient,
        host_operands=(1,),
        infer=infer_split,
        values=parts,
        takes=split_takes,
        upgrades={13: operands(split=1), 18: Upgrade(_count_parts)},
    ),
    _move(
        "Concat",
        4,
        concat_rule,
        gradient=concat_gradient,
        infer=infer_concat,
        values=concatenated,
        pattern=side_by_side,
    ),
    _move(
        "Slice",
        1,
        slice_rule,
        slice_local,
        gradient=sliced_gradient,
        cost=selects,
        host_operands=(1, 2, 3, 4),
        infer=infer_slice,
        values=sliced,
        takes=slice_takes,
        on_part=same_node,
        upgrades={10: operands(starts=1, ends=2, axes=3)},
    ),
    _move(
        "Expand",
        8,
        expand_rule,
        expand_local,
        gradient=expand_gradient,
        host_operands=(1,),
        infer=infer_expand,
        values=expanded,
        pattern=repeated,
        folding=replace(MOVE, size=requested_elements),
    ),
    _move(
        "Where",
        9,
        where_rule,
        gradient=where_gradient,
        memory=Kernel(work=_spread),
        broadcasts=True,
        values=chosen,
        on_part=same_node,
    ),
)
