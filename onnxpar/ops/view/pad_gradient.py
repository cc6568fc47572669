"""Gradients of Pad and Tile: the cotangent of a copy is added to that of the original."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim, as_dim, dim_str
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.index.gather_gradient import indexed_gradient

# Modes that copy elements, which numpy.pad calls the same.
_COPIES = ("reflect", "edge", "wrap")


def pad_gradient(
    node: GradNode, mode: str, amounts: Mapping[int, tuple[Dim, Dim]]
) -> Sequence[ir.Value | None]:
    """Removes the border, or adds its cotangent to the elements that it was copied from.

    Args:
        node: The Pad.
        mode: The attribute `mode`.
        amounts: For each axis that gained or lost elements, how many before and after.

    Raises:
        ModelError: It is unknown whether elements were added or removed, or a border was copied
            from a dim of unknown size.
    """
    dy = node.cotangent()
    if mode != "constant":
        return [_copied(node, dy, mode, amounts)]
    for axis, ends in amounts.items():
        for end in ends:
            least, most = node.builder.table.bounds(end)
            if (least is None or least < 0) and (most is None or most > 0):
                raise node.fail(
                    "a gradient needs to know whether elements are added or removed, got "
                    f"{dim_str(ends[0])} and {dim_str(ends[1])} along axis {axis}"
                )
    added = {axis: _parts(node, ends, 1) for axis, ends in amounts.items()}
    removed = {axis: _parts(node, ends, -1) for axis, ends in amounts.items()}
    dx = dy
    if node.wants(0) or node.wants(2):
        dx = _refilled(node, _cropped(node, dy, added), removed)
    if not node.wants(2):
        return [dx]
    # The difference is the border's cotangent, and exactly zero elsewhere.
    pads = node.builder.sizes(_border(len(node.shape(dy)), amounts))
    inside = node.op("Pad", dx, pads, node.number(0, dy), shape=node.shape(dy))
    border = node.op("Sub", dy, inside)
    total = node.builder.reduce("ReduceSum", border, range(len(node.shape(dy))))
    return [dx, None, node.builder.reshape_like(total, node.input(2))]


def _parts(node: GradNode, ends: tuple[Dim, Dim], sign: int) -> tuple[Dim, Dim]:
    """The sizes of the pads of that sign, and zero for those of the other sign."""
    before, after = (
        as_dim(sign * end) if (node.builder.table.bounds(sign * end)[0] or 0) >= 0 else 0
        for end in ends
    )
    return before, after


def _border(rank: int, ends: Mapping[int, tuple[Dim, Dim]]) -> list[Dim]:
    """The operand `pads`: those before every axis, then those after."""
    none = (0, 0)
    return [ends.get(axis, none)[side] for side in (0, 1) for axis in range(rank)]


def _some(ends: Mapping[int, tuple[Dim, Dim]]) -> dict[int, tuple[Dim, Dim]]:
    return {axis: both for axis, both in ends.items() if both != (0, 0)}


def _cropped(node: GradNode, dy: ir.Value, ends: Mapping[int, tuple[Dim, Dim]]) -> ir.Value:
    """The cotangent without the elements that were added."""
    added = _some(ends)
    if not added:
        return dy
    before = node.shape(dy)
    shape = list(before)
    for axis, (first, last) in added.items():
        shape[axis] = shape[axis] - first - last
    starts = node.builder.sizes([first for first, _ in added.values()])
    stops = node.builder.sizes([before[axis] - last for axis, (_, last) in added.items()])
    axes = node.builder.const(list(added))
    return node.op("Slice", dy, starts, stops, axes, shape=shape)


def _refilled(node: GradNode, dy: ir.Value, ends: Mapping[int, tuple[Dim, Dim]]) -> ir.Value:
    """The cotangent with zeros for the elements that a negative pad removed."""
    removed = _some(ends)
    if not removed:
        return dy
    pads = node.builder.sizes(_border(len(node.shape(dy)), removed))
    return node.op("Pad", dy, pads, node.number(0, dy), shape=node.shape(node.input(0)))


def _copied(
    node: GradNode, dy: ir.Value, mode: str, amounts: Mapping[int, tuple[Dim, Dim]]
) -> ir.Value:
    """Adds the border's cotangents to the elements that it was copied from, axis by axis."""
    if mode not in _COPIES:
        raise node.fail(f"expected a mode of {', '.join(_COPIES)}, got {mode!r}")
    for axis, (before, after) in amounts.items():
        size = node.shape(node.input(0))[axis]
        both = (before, after) if isinstance(before, int) and isinstance(after, int) else None
        if not isinstance(size, int) or both is None or min(both) < 0:
            raise node.fail(
                f"a gradient of mode {mode!r} needs a constant size and constant pads of "
                f"at least 0, got {dim_str(size)} and the pads {dim_str(before)} and "
                f"{dim_str(after)} along axis {axis}"
            )
        places = np.pad(np.arange(size, dtype=np.int64), both, mode=mode)  # type: ignore[call-overload]
        shape = list(node.shape(dy))
        shape[axis] = size
        dy = indexed_gradient(node, dy, node.builder.const(places), axis, shape)
    return dy


def tile_gradient(node: GradNode, repeats: Sequence[Dim]) -> Sequence[ir.Value | None]:
    """Sums over the repetitions, which are dims of their own in a view of the cotangent."""
    dy, shape = node.cotangent(), node.shape(node.input(0))
    axes, tall = [], list[Dim]()
    for size, count in zip(shape, repeats, strict=True):
        if count != 1:
            axes.append(len(tall))
            tall.append(count)
        tall.append(size)
    if not axes:
        return [dy]
    view = node.op("Reshape", dy, node.builder.sizes(tall), shape=tall)
    return [node.builder.reduce("ReduceSum", view, axes)]
