"""DeformConv as a body of standard operators, which is differentiated in its place.

Each element of the kernel reads the image at its own place, moved by an offset. The value there is
the weighted sum of the four elements around it; places outside count as zero. These values are then
multiplied by the weights. (Dai et al., "Deformable convolutional networks", ICCV 2017; with masks
Zhu et al., 2019.)
"""

from collections.abc import Sequence
from itertools import product

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.local_helpers import BOOL


def deform_conv_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """Reads the image at the position of each element of the kernel; multiplies by the weights.

    Raises:
        ModelError: Sizes other than the batch's are symbolic.
    """
    view = node.view
    batch, channels, *image = node.shape(node.input(0))
    many, few, *kernel = node.shape(node.input(1))
    results = view.out_shape()[2:]
    fixed = (channels, many, few, *image, *kernel, *results)
    if len(kernel) != 2 or not all(isinstance(size, int) for size in fixed):
        raise node.fail("its body needs two spatial dims, and constant sizes except for the batch")
    offsets = int(view.attr("offset_group", 1))
    taps = int(kernel[0]) * int(kernel[1])
    count = taps * int(results[0]) * int(results[1])
    rows: list[Dim] = [batch * offsets, 1, count]
    cotangents: list[Dim] = [batch * offsets, taps, 2, count // taps]
    moves = node.builder.reshape(node.input(2), cotangents)
    axes = []
    for axis, size in enumerate(image):
        column = node.builder.const(axis)
        move = node.op("Gather", moves, column, shape=[*cotangents[:2], count // taps], axis=2)
        start = node.builder.const(_starts(node, axis, kernel, results), move.dtype)
        at = node.op("Add", node.builder.reshape(move, rows), start, shape=rows)
        axes.append(_corners(node, at, int(size), rows))
    deep: list[Dim] = [batch * offsets, int(channels) // offsets, count]
    pixels = node.builder.reshape(node.input(0), [*deep[:2], int(image[0]) * int(image[1])])
    total: ir.Value | None = None
    for (y, y_weight), (x, x_weight) in product(*axes):
        width = node.number(int(image[1]), y)
        index = node.op("Add", node.op("Mul", y, width, shape=rows), x, shape=rows)
        index = node.op("Cast", index, dtype=INT64, shape=rows, to=int(INT64))
        index = node.op("Expand", index, node.builder.sizes(deep), shape=deep)
        value = node.op("GatherElements", pixels, index, shape=deep, axis=2)
        weight = node.op("Mul", y_weight, x_weight, shape=rows)
        value = node.op("Mul", value, weight, shape=deep)
        total = value if total is None else node.op("Add", total, value, shape=deep)
    assert total is not None
    if node.has(4):
        total = node.op("Mul", total, node.builder.reshape(node.input(4), rows), shape=deep)
    return [_multiplied(node, total, batch, taps, results)]


def _multiplied(
    node: BodyNode, read: ir.Value, batch: Dim, taps: int, results: Sequence[Dim]
) -> ir.Value:
    """The product of the values read with the weights, group by group, plus the bias."""
    many, few = (int(size) for size in node.shape(node.input(1))[:2])
    group = int(node.attr("group", 1))
    places = int(results[0]) * int(results[1])
    columns = node.builder.reshape(read, [batch, group, few * taps, places])
    weights = node.builder.reshape(node.input(1), [group, many // group, few * taps])
    y = node.op("MatMul", weights, columns, shape=[batch, group, many // group, places])
    y = node.builder.reshape(y, [batch, many, *results])
    if not node.has(3):
        return y
    return node.op("Add", y, node.builder.reshape(node.input(3), [many, 1, 1]))


def _starts(node: BodyNode, axis: int, kernel: Sequence[Dim], results: Sequence[Dim]) -> np.ndarray:
    """The place of each element of the kernel of each result along an axis, before offsets."""
    strides = node.attr("strides") or [1, 1]
    dilations = node.attr("dilations") or [1, 1]
    pads = node.attr("pads") or [0, 0, 0, 0]
    sizes = [int(kernel[0]), int(kernel[1]), int(results[0]), int(results[1])]
    at = np.indices(sizes)
    places = at[2 + axis] * strides[axis] - pads[axis] + at[axis] * dilations[axis]
    return np.asarray(places.reshape(1, 1, -1))


def _corners(
    node: BodyNode, at: ir.Value, size: int, shape: Sequence[Dim]
) -> list[tuple[ir.Value, ir.Value]]:
    """The elements below and above each place, clipped, and their weights: 0 if out of range."""

    def op(
        op_type: str, a: ir.Value, b: float | ir.Value, dtype: ir.DataType | None = None
    ) -> ir.Value:
        other = b if isinstance(b, ir.Value) else node.number(b, a)
        return node.op(op_type, a, other, shape=shape, dtype=dtype)

    low = node.op("Floor", at, shape=shape)
    rest = op("Sub", at, low)
    found = []
    for step in (0, 1):
        corner = op("Add", low, float(step))
        weight = rest if step else op("Add", node.op("Neg", rest, shape=shape), 1.0)
        above = op("GreaterOrEqual", corner, 0.0, dtype=BOOL)
        below = op("LessOrEqual", corner, float(size - 1), dtype=BOOL)
        inside = node.op("And", above, below, dtype=BOOL, shape=shape)
        zero = node.number(0, weight)
        weight = node.op("Where", inside, weight, zero, dtype=weight.dtype, shape=shape)
        ends = (node.number(0, corner), node.number(size - 1, corner))
        found.append((node.op("Clip", corner, *ends, shape=shape), weight))
    return found
