"""Gradients of linear quantisation: inside the range, the cotangent passes through the rounding.

This is the straight-through estimator (Bengio, Léonard & Courville, Estimating or Propagating
Gradients Through Stochastic Neurons, 2013) in the form of PyTorch's fake_quantize: the slope is 1
where the rounded value is in the range of the integers, and 0 outside. A trained scale gets the
gradient of Learned Step Size Quantization (Esser et al., 2020), which follows from the same
estimator. The cotangent of the integers between the two operators is a float of the scale's type.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import BOOL, axis_of

# The ranges of integers that numpy does not have.
_RANGES = {ir.DataType.INT4: (-8, 7), ir.DataType.UINT4: (0, 15)}


def _wide(node: GradNode, value: ir.Value) -> ir.Value:
    """A scale or zero point, shaped so that it broadcasts against the tensor.

    Raises:
        ModelError: It has one element for each block, for which there is no gradient.
    """
    shape, rank = node.shape(value), len(node.shape(node.input(0)))
    if len(shape) == 0 or (len(shape) == 1 and shape[0] == 1):
        return node.op("Reshape", value, node.builder.const(np.array([], np.int64)), shape=[])
    if len(shape) == 1:
        ones = [1] * (rank - axis_of(node.view, 1) - 1)
        return node.op("Reshape", value, node.builder.const([-1, *ones]), shape=[*shape, *ones])
    raise node.fail(
        "a gradient needs one scale for the tensor or one for each index of an axis, got the "
        f"shape {list(shape)}"
    )


def _to_scale(node: GradNode, x: ir.Value) -> ir.Value:
    """Sums the derivatives by the scale over the elements that share it."""
    scale, rank = node.input(1), len(node.shape(x))
    axes = list(range(rank))
    if len(node.shape(scale)) == 1 and node.shape(scale)[0] != 1:
        axes.remove(axis_of(node.view, 1))
    if axes:
        x = node.builder.reduce("ReduceSum", x, axes)
    return node.builder.reshape_like(x, scale)


def dequantize_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """For y = s (q - z): dq = s dy, ds = Σ dy (q - z)."""
    dy, scale = node.cotangent(), node.input(1)
    shape = node.shape(dy)
    wide = _wide(node, scale)
    integers = node.op("Mul", dy, wide, shape=shape) if node.wants(0) else None
    if not node.wants(1):
        return [integers]
    steps = node.builder.cast(node.input(0), scale.dtype)
    if node.has(2):
        zero = node.builder.cast(_wide(node, node.input(2)), scale.dtype)
        steps = node.op("Sub", steps, zero, shape=shape)
    return [integers, _to_scale(node, node.op("Mul", dy, steps, shape=shape))]


def quantize_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """For q = round(x / s) + z inside the range: dx = dq / s, ds = -Σ dq x / s².

    Raises:
        ModelError: The result has small floats, not integers.
    """
    x, scale, dq = node.input(0), node.input(1), node.cotangent()
    shape = node.shape(x)
    wide = _wide(node, scale)
    steps = node.op("Div", x, wide, shape=shape)
    rounded = node.op("Round", steps, shape=shape)
    if node.has(2):
        zero = node.builder.cast(_wide(node, node.input(2)), scale.dtype)
        rounded = node.op("Add", rounded, zero, shape=shape)
    low, high = (node.number(limit, scale) for limit in _limits(node))
    above = node.op("GreaterOrEqual", rounded, low, dtype=BOOL, shape=shape)
    below = node.op("LessOrEqual", rounded, high, dtype=BOOL, shape=shape)
    inside = node.op("And", above, below, dtype=BOOL, shape=shape)
    passed = node.op("Where", inside, dq, node.number(0, dq), dtype=dq.dtype, shape=shape)
    dx = node.op("Div", passed, wide, shape=shape)
    if not node.wants(1):
        return [dx]
    slope = node.op("Neg", node.op("Mul", dx, steps, shape=shape), shape=shape)
    return [dx, _to_scale(node, slope)]


def _limits(node: GradNode) -> tuple[int, int]:
    kind = node.output().dtype
    if kind in _RANGES:
        return _RANGES[kind]
    if kind is None or not np.issubdtype(kind.numpy(), np.integer):
        raise node.fail(f"a gradient needs integers, got {kind}")
    limits = np.iinfo(kind.numpy())
    return limits.min, limits.max
