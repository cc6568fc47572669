"""Bodies of GridSample, AffineGrid and RoiAlign, in operators that have rules and gradients.

The value of an image at a place between its elements is a weighted sum of the elements around it,
the taps. The weights depend on the place. A tap is a gather from a flattened image, so the gradient
of the image adds up at the taps, and the gradient of the places comes from the weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.body_node import BodyNode

BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64
_CUBIC = -0.75


@dataclass(frozen=True)
class Tap:
    """One element near each place, along one axis: [N, 1, places].

    Attributes:
        at: Its index in the image, an integer in a float type.
        weight: Its weight, zero if the element is outside the image.
    """

    at: ir.Value
    weight: ir.Value


class _Arithmetic:
    """Short names for arithmetic on values of one shape and numbers."""

    def __init__(self, node: BodyNode, shape: Sequence[Dim]) -> None:
        self.node, self.shape = node, shape

    def __call__(self, op_type: str, *operands: ir.Value | float) -> ir.Value:
        like = next(v for v in operands if isinstance(v, ir.Value))
        values = [v if isinstance(v, ir.Value) else self.node.number(v, like) for v in operands]
        return self.node.op(op_type, *values, dtype=like.dtype, shape=self.shape)

    def compare(self, op_type: str, x: ir.Value, y: float) -> ir.Value:
        return self.node.op(op_type, x, self.node.number(y, x), dtype=BOOL, shape=self.shape)

    def within(self, x: ir.Value, size: int) -> ir.Value:
        """1 where 0 <= x <= size - 1, else 0."""
        low = self.compare("GreaterOrEqual", x, 0)
        high = self.compare("LessOrEqual", x, size - 1)
        both = self.node.op("And", low, high, dtype=BOOL, shape=self.shape)
        assert x.dtype is not None
        return self.node.builder.cast(both, x.dtype)


def _sizes(node: BodyNode, shape: Sequence[Dim]) -> list[int]:
    if not all(isinstance(d, int) for d in shape):
        raise node.fail(f"its body needs images of constant size, got {list(shape)}")
    return [int(d) for d in shape if isinstance(d, int)]


def grid_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """GridSample: for each position, a weighted sum of the elements around it.

    Raises:
        ModelError: The size of the images is symbolic, or a mode is unknown.
    """
    image, grid = node.input(0), node.input(1)
    sizes = _sizes(node, node.shape(image)[2:])
    batch, channels = node.shape(image)[:2]
    places = node.shape(grid)[1:-1]
    count: Dim = 1
    for size in places:
        count = count * size
    rows = _Arithmetic(node, [batch, 1, count])
    axes: list[list[Tap]] = []
    for axis, size in enumerate(sizes):
        # The last dim of the grid begins with x, the last spatial dim.
        column = len(sizes) - 1 - axis
        bounds = (node.builder.const(np.array([v], np.int64)) for v in (column, column + 1, -1))
        at = node.op("Slice", grid, *bounds, shape=[batch, *places, 1])
        at = node.builder.reshape(at, rows.shape)
        axes.append(list(_taps(node, rows, at, size)))
    pixels = node.builder.reshape(image, [batch, channels, prod(sizes)])
    made = [batch, channels, count]
    total: ir.Value | None = None
    for taps in product(*axes):
        index, weight = taps[0].at, taps[0].weight
        for tap, size in zip(taps[1:], sizes[1:], strict=True):
            index = rows("Add", rows("Mul", index, float(size)), tap.at)
            weight = rows("Mul", weight, tap.weight)
        index = node.builder.cast(index, INT64)
        index = node.op("Expand", index, node.builder.sizes(made), shape=made)
        value = node.op("GatherElements", pixels, index, shape=made, axis=2)
        value = node.op("Mul", value, weight, shape=made)
        total = value if total is None else node.op("Add", total, value, shape=made)
    assert total is not None
    return [node.builder.reshape(total, [batch, channels, *places])]


def _taps(node: BodyNode, rows: _Arithmetic, place: ir.Value, size: int) -> Iterator[Tap]:
    """The taps along one axis of places from -1 to 1."""
    align = bool(node.attr("align_corners", 0))
    mode = str(node.attr("mode", "linear")).removeprefix("bi")
    if align:
        at = rows("Mul", rows("Add", place, 1.0), (size - 1) / 2)
    else:
        at = rows("Div", rows("Sub", rows("Mul", rows("Add", place, 1.0), float(size)), 1.0), 2.0)
    if mode != "cubic":
        at = _bordered(node, rows, at, size, align)
    if mode == "nearest":
        yield _tap(rows, rows("Round", at), None, size)
        return
    floor = rows("Floor", at)
    rest = rows("Sub", at, floor)
    if mode == "linear":
        yield _tap(rows, floor, rows("Sub", rows("Neg", rest), -1.0), size)
        yield _tap(rows, rows("Add", floor, 1.0), rest, size)
        return
    if mode != "cubic":
        raise node.fail(f"expected a mode of nearest, linear or cubic, got {mode!r}")
    for step in (-1, 0, 1, 2):
        distance = rows("Abs", rows("Sub", rest, float(step)))
        weight = _keys(rows, distance, near=step in (0, 1))
        at = rows("Add", floor, float(step))
        yield _tap(rows, _bordered(node, rows, at, size, align), weight, size)


def _keys(rows: _Arithmetic, x: ir.Value, *, near: bool) -> ir.Value:
    """Keys's cubic kernel at distances up to 1 (near) or from 1 to 2."""
    a = _CUBIC
    factors = (a + 2, -(a + 3), 0.0, 1.0) if near else (a, -5 * a, 8 * a, -4 * a)
    total = rows("Mul", x, factors[0])
    for factor in factors[1:-1]:
        total = rows("Mul", rows("Add", total, factor), x)
    return rows("Add", total, factors[-1])


def _bordered(node: BodyNode, rows: _Arithmetic, at: ir.Value, size: int, align: bool) -> ir.Value:
    """A place, moved into the image if padding_mode copies the border or reflects."""
    mode = node.attr("padding_mode", "zeros")
    if mode == "zeros":
        return at
    if mode == "reflection":
        low, span = (0.0, float(size - 1)) if align else (-0.5, float(size))
        if span == 0:
            at = rows("Mul", at, 0.0)
        else:
            away = rows("Abs", rows("Sub", at, low))
            flips = rows("Floor", rows("Div", away, span))
            rest = rows("Sub", away, rows("Mul", flips, span))
            pairs = rows("Floor", rows("Div", flips, 2.0))
            odd = rows("Sub", flips, rows("Mul", pairs, 2.0))
            back = rows("Sub", span, rows("Mul", rest, 2.0))
            at = rows("Add", rows("Add", rest, rows("Mul", odd, back)), low)
    elif mode != "border":
        raise node.fail(f"expected a padding of zeros, border or reflection, got {mode!r}")
    return rows("Clip", at, 0.0, float(size - 1))


def _tap(rows: _Arithmetic, at: ir.Value, weight: ir.Value | None, size: int) -> Tap:
    """A tap; outside the image its weight becomes zero, and its index that of the border."""
    inside = rows.within(at, size)
    weight = inside if weight is None else rows("Mul", weight, inside)
    return Tap(rows("Clip", at, 0.0, float(size - 1)), weight)


def affine_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """AffineGrid: the product of the points of a regular grid with each matrix.

    Raises:
        ModelError: The sizes are unknown before the model runs, or one is 1 with aligned corners.
    """
    theta = node.input(0)
    known = node.view.contents(1)
    if known is None:
        raise node.fail("its body needs sizes that are known before the model runs")
    batch, spatial = known[0], _sizes(node, known[2:])
    align = bool(node.attr("align_corners", 0))
    if align and 1 in spatial:
        raise node.fail(
            "with aligned corners, the position of a single sample is undefined: expected at "
            "least two for its body"
        )
    lines = []
    for size in spatial:
        half = np.arange(size) + (0.0 if align else 0.5)
        end = size - 1 if align else size
        lines.append(half * (2 / end) - 1)
    places = np.stack([*np.meshgrid(*lines, indexing="ij")][::-1], axis=-1)
    places = np.concatenate([places, np.ones([*spatial, 1])], axis=-1).reshape(
        1, -1, len(lines) + 1
    )
    turned = [batch, len(lines) + 1, len(lines)]
    right = node.op("Transpose", theta, shape=turned, perm=[0, 2, 1])
    left = node.builder.const(places, theta.dtype)
    made = node.op("MatMul", left, right, shape=[batch, prod(spatial), len(lines)])
    out = [batch, *spatial, len(lines)]
    # 0 keeps the batch as it is: symbols may have no values yet.
    target = node.builder.const(np.array([0, *spatial, len(lines)], np.int64))
    return [node.op("Reshape", made, target, shape=out)]


def roi_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """RoiAlign: each bin is the mean of samples, each of four elements around it.

    Raises:
        ModelError: The samples are not averaged, their number depends on the region, or the size of
            the images is symbolic.
    """
    view = node.view
    image, rois, index = node.input(0), node.input(1), node.input(2)
    batch, channels, *rest = node.shape(image)
    height, width = _sizes(node, rest)
    samples = int(view.attr("sampling_ratio", 0))
    if samples <= 0 or view.attr("mode", "avg") != "avg":
        raise node.fail(
            "its body needs mode 'avg' and a fixed number of samples (sampling_ratio above 0)"
        )
    regions = node.shape(rois)[0]
    bins = int(view.attr("output_height", 1)), int(view.attr("output_width", 1))
    half = view.attr("coordinate_transformation_mode", "half_pixel") == "half_pixel"
    taps_y = _line(node, 1, height, bins[0], samples, half=half)
    taps_x = _line(node, 0, width, bins[1], samples, half=half)
    grid = [regions, bins[0] * samples, bins[1] * samples]
    last = node.op("Transpose", image, shape=[batch, height, width, channels], perm=[0, 2, 3, 1])
    image_rows = node.builder.reshape(last, [batch * height * width, channels])
    scaled = node.op("Mul", node.builder.cast(index, INT64), node.number(height * width, index))
    start = node.builder.unsqueeze(scaled, [1, 2])
    total: ir.Value | None = None
    for down, across in product(taps_y, taps_x):
        row, row_weight = (node.builder.unsqueeze(v, [2]) for v in (down.at, down.weight))
        column, weight = (node.builder.unsqueeze(v, [1]) for v in (across.at, across.weight))
        place = node.op("Mul", row, node.number(width, row), shape=node.shape(row))
        place = node.op("Add", place, column, shape=grid)
        place = node.op("Add", node.builder.cast(place, INT64), start, shape=grid)
        weight = node.op("Mul", row_weight, weight, shape=grid)
        value = node.op("Gather", image_rows, place, shape=[*grid, channels], axis=0)
        weight = node.builder.unsqueeze(weight, [3])
        value = node.op("Mul", value, weight, shape=[*grid, channels])
        total = value if total is None else node.op("Add", total, value, shape=[*grid, channels])
    assert total is not None
    total = node.builder.reshape(total, [regions, bins[0], samples, bins[1], samples, channels])
    mean = node.builder.reduce("ReduceMean", total, [2, 4])
    return [node.op("Transpose", mean, shape=[regions, channels, *bins], perm=[0, 3, 1, 2])]


def _line(
    node: BodyNode, first: int, size: int, bins: int, samples: int, *, half: bool
) -> list[Tap]:
    """The two taps along one axis of all samples of each region, [regions, bins · samples]."""
    rois = node.input(1)
    count = node.shape(rois)[0]
    scale, offset = float(node.attr("spatial_scale", 1.0)), 0.5 if half else 0.0
    one = _Arithmetic(node, [count, 1])
    ends = []
    for column in (first, first + 2):
        bounds = (node.builder.const(np.array([v], np.int64)) for v in (column, column + 1, 1))
        end = node.op("Slice", rois, *bounds, shape=one.shape)
        ends.append(one("Sub", one("Mul", end, scale), offset))
    length = one("Sub", ends[1], ends[0])
    if not half:
        length = one("Max", length, 1.0)
    part = (np.arange(bins * samples) + 0.5) / (bins * samples)
    rows = _Arithmetic(node, [count, bins * samples])
    parts = node.builder.const(part[None], rois.dtype)
    at = rows("Add", rows("Mul", length, parts), ends[0])
    valid = rows.within(rows("Add", at, 1.0), size + 2)
    at = rows("Clip", at, 0.0, float(size - 1))
    low = rows("Floor", at)
    rest = rows("Sub", at, low)
    high = rows("Min", rows("Add", low, 1.0), float(size - 1))
    near = rows("Mul", rows("Sub", rows("Neg", rest), -1.0), valid)
    return [Tap(low, near), Tap(high, rows("Mul", rest, valid))]
