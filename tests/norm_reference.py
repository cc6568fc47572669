"""Normalisations for onnx.reference, which has them in float32 only, or not as specified."""

import numpy as np
from numpy.typing import NDArray

from tests.numpy_operators import numpy_operators

Array = NDArray[np.generic]


def lrn(x: Array, *, alpha: float, beta: float, bias: float, size: int) -> Array:
    """Of any rank; onnx.reference sums as many channels as there are rows."""
    before = (size - 1) // 2
    pads = [(0, 0)] * x.ndim
    pads[1] = (before, size - 1 - before)
    square = np.pad(np.asarray(x) ** 2, pads)
    total = np.sum([square[:, i : i + x.shape[1]] for i in range(size)], axis=0)
    return np.asarray(x / (bias + alpha / size * total) ** beta, x.dtype)


def mean_variance_norm(x: Array, *, axes: list[int]) -> Array:
    """In the type of its operand; onnx.reference adds a float32 to it."""
    over = tuple(axes)
    deviation = np.std(np.asarray(x), axis=over, keepdims=True)
    mean = np.mean(np.asarray(x), axis=over, keepdims=True)
    return np.asarray((x - mean) / (deviation + 1e-9), x.dtype)


def skip_layer_norm(
    x: Array,
    skip: Array,
    scale: Array,
    beta: Array | None = None,
    bias: Array | None = None,
    *,
    epsilon: float = 1e-12,
) -> tuple[Array, ...]:
    """In any type, without statistics; onnxruntime has it in float32 and narrower."""
    total = np.asarray(x + skip if bias is None else x + skip + bias)
    centred = total - np.mean(total, axis=-1, keepdims=True)
    y, _ = rms_norm(centred, scale, epsilon=epsilon)
    return y if beta is None else y + beta, total, total, total


def skip_rms_norm(
    x: Array, skip: Array, scale: Array, bias: Array | None = None, *, epsilon: float = 1e-12
) -> tuple[Array, ...]:
    """In any type, without statistics, likewise."""
    total = np.asarray(x + skip if bias is None else x + skip + bias)
    y, _ = rms_norm(total, scale, epsilon=epsilon)
    return y, total, total, total


def rms_norm(
    x: Array, scale: Array, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> tuple[Array, Array]:
    """In the type of its operand; onnx.reference has statistics in float32 only.

    The second result is that of SimplifiedLayerNormalization, which only onnxruntime has.
    """
    over = tuple(range(axis % x.ndim, x.ndim))
    root = np.sqrt(np.mean(np.asarray(x) ** 2, axis=over, keepdims=True) + epsilon)
    return np.asarray(x / root * scale), np.asarray(1 / root)


OPERATORS = [
    *numpy_operators(
        "",
        LRN=lrn,
        MeanVarianceNormalization=mean_variance_norm,
        RMSNormalization=rms_norm,
        SimplifiedLayerNormalization=rms_norm,
    ),
    *numpy_operators(
        "com.microsoft",
        SkipLayerNormalization=skip_layer_norm,
        SkipSimplifiedLayerNormalization=skip_rms_norm,
    ),
]
