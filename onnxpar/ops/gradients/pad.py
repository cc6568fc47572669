"""Gradients of Pad and Tile: a copy of an element adds its cotangent to the element's."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.errors import ModelError
from onnxpar.ops.gradient import GradNode
from onnxpar.ops.gradients.gather import indexed_gradient
from onnxpar.symbols import Dim, dim_str

# As numpy.pad calls what the operator does.
_COPIES = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}
_MIN_OPSET = 11


def pad_gradient(
    node: GradNode, mode: str, amounts: Mapping[int, tuple[Dim, Dim]]
) -> Sequence[ir.Value | None]:
    """Cuts the border off, or adds it up where it was copied from.

    Args:
        node: The Pad.
        mode: How the border was made.
        amounts: Of each axis that got or lost elements, how many before and after.

    Raises:
        ModelError: How many they are is not known, or a border was copied from a dim of unknown
            size, or the model's opset is before 11.
    """
    what = f"node {node.view.name!r} (Pad)"
    if node.builder.opset < _MIN_OPSET:
        raise ModelError(
            f"{what}: a gradient needs opset {_MIN_OPSET}, the model has {node.builder.opset}"
        )
    ends: dict[int, tuple[int, int]] = {}
    for axis, (before, after) in amounts.items():
        if not isinstance(before, int) or not isinstance(after, int):
            raise ModelError(
                f"{what}: the pads must be known for a gradient, got {dim_str(before)} and "
                f"{dim_str(after)} along axis {axis}"
            )
        ends[axis] = before, after
    dy = node.cotangent()
    if mode != "constant":
        return [_copied(node, dy, mode, ends)]
    dx = _uncut(node, _cropped(node, dy, ends), ends) if node.wants(0) or node.wants(2) else None
    if not node.wants(2):
        return [dx]
    # The border alone: exactly zero elsewhere.
    assert dx is not None
    pads = _border(len(node.shape(dy)), ends)
    zero = node.number(0, dy)
    inside = node.op("Pad", dx, node.builder.const(pads), zero, shape=node.shape(dy))
    border = node.op("Sub", dy, inside)
    total = node.builder.reduce("ReduceSum", border, range(len(node.shape(dy))))
    return [dx, None, node.builder.reshape_like(total, node.input(2))]


def _border(rank: int, ends: Mapping[int, tuple[int, int]]) -> np.ndarray:
    pads = np.zeros((2, rank), np.int64)
    for axis, both in ends.items():
        pads[:, axis] = both
    return pads.ravel()


def _cropped(node: GradNode, dy: ir.Value, ends: Mapping[int, tuple[int, int]]) -> ir.Value:
    """The cotangent without what was added."""
    added = {axis: (max(b, 0), max(a, 0)) for axis, (b, a) in ends.items() if b > 0 or a > 0}
    if not added:
        return dy
    shape = list(node.shape(dy))
    for axis, (before, after) in added.items():
        shape[axis] = shape[axis] - before - after
    starts = [before for before, _ in added.values()]
    stops = [-after if after else np.iinfo(np.int64).max for _, after in added.values()]
    bounds = (node.builder.const(np.array(v, np.int64)) for v in (starts, stops, list(added)))
    return node.op("Slice", dy, *bounds, shape=shape)


def _uncut(node: GradNode, dy: ir.Value, ends: Mapping[int, tuple[int, int]]) -> ir.Value:
    """The cotangent with zeros for what a negative pad took away."""
    cut = {axis: (max(-b, 0), max(-a, 0)) for axis, (b, a) in ends.items() if b < 0 or a < 0}
    if not cut:
        return dy
    pads = node.builder.const(_border(len(node.shape(dy)), cut))
    return node.op("Pad", dy, pads, node.number(0, dy), shape=node.shape(node.input(0)))


def _copied(
    node: GradNode, dy: ir.Value, mode: str, ends: Mapping[int, tuple[int, int]]
) -> ir.Value:
    """Adds the cotangents up where a border was copied from, axis by axis."""
    what = f"node {node.view.name!r} (Pad)"
    if mode not in _COPIES:
        raise ModelError(f"{what}: expected a mode of {', '.join(_COPIES)}, got {mode!r}")
    for axis, both in ends.items():
        size = node.shape(node.input(0))[axis]
        if not isinstance(size, int) or min(both) < 0:
            raise ModelError(
                f"{what}: a gradient of mode {mode!r} needs a constant size and no negative pads, "
                f"got {dim_str(size)} and {both} along axis {axis}"
            )
        places = np.pad(np.arange(size, dtype=np.int64), both, mode=_COPIES[mode])  # type: ignore[call-overload]
        shape = list(node.shape(dy))
        shape[axis] = size
        dy = indexed_gradient(node, dy, node.builder.const(places), axis, shape)
    return dy


def tile_gradient(node: GradNode, repeats: Sequence[Dim]) -> Sequence[ir.Value | None]:
    """Sums over the copies, which a view of the cotangent has as dims of their own."""
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
