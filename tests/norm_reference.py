"""Normalisations for onnx.reference, which has them in float32 only, or not as specified."""

import numpy as np
from numpy.typing import NDArray
from onnx.reference.op_run import OpRun

Array = NDArray[np.generic]


class LRN(OpRun):  # type: ignore[misc]
    """Of any rank; onnx.reference sums as many channels as there are rows."""

    op_domain = ""

    def _run(self, x: Array, alpha: float, beta: float, bias: float, size: int) -> tuple[Array]:
        before = (size - 1) // 2
        pads = [(0, 0)] * x.ndim
        pads[1] = (before, size - 1 - before)
        square = np.pad(np.asarray(x) ** 2, pads)
        total = np.sum([square[:, i : i + x.shape[1]] for i in range(size)], axis=0)
        return (np.asarray(x / (bias + alpha / size * total) ** beta, x.dtype),)


class MeanVarianceNormalization(OpRun):  # type: ignore[misc]
    """In the type of its operand; onnx.reference adds a float32 to it."""

    op_domain = ""

    def _run(self, x: Array, axes: list[int]) -> tuple[Array]:
        over = tuple(axes)
        deviation = np.std(np.asarray(x), axis=over, keepdims=True)
        mean = np.mean(np.asarray(x), axis=over, keepdims=True)
        return (np.asarray((x - mean) / (deviation + 1e-9), x.dtype),)


class SkipLayerNormalization(OpRun):  # type: ignore[misc]
    """In any type, without statistics; onnxruntime has it in float32 and narrower."""

    op_domain = "com.microsoft"

    def _run(
        self,
        x: Array,
        skip: Array,
        scale: Array,
        beta: Array | None = None,
        bias: Array | None = None,
        epsilon: float = 1e-12,
    ) -> tuple[Array, ...]:
        total = np.asarray(x + skip if bias is None else x + skip + bias)
        centred = total - np.mean(total, axis=-1, keepdims=True)
        y = centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + epsilon) * scale
        return y if beta is None else y + beta, total, total, total


class SkipSimplifiedLayerNormalization(OpRun):  # type: ignore[misc]
    """In any type, without statistics; onnxruntime has it in float32 and narrower."""

    op_domain = "com.microsoft"

    def _run(
        self,
        x: Array,
        skip: Array,
        scale: Array,
        bias: Array | None = None,
        epsilon: float = 1e-12,
    ) -> tuple[Array, ...]:
        total = np.asarray(x + skip if bias is None else x + skip + bias)
        root = np.sqrt(np.mean(total**2, axis=-1, keepdims=True) + epsilon)
        return total / root * scale, total, total, total


class RMSNormalization(OpRun):  # type: ignore[misc]
    """In the type of its operand; onnx.reference has statistics in float32 only."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ) -> tuple[Array]:
        return SimplifiedLayerNormalization._run(self, x, scale, axis, epsilon)[:1]


class SimplifiedLayerNormalization(OpRun):  # type: ignore[misc]
    """Known to onnxruntime only, in ONNX's own domain."""

    op_domain = ""

    def _run(
        self, x: Array, scale: Array, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
    ) -> tuple[Array, Array]:
        over = tuple(range(axis % x.ndim, x.ndim))
        root = np.sqrt(np.mean(np.asarray(x) ** 2, axis=over, keepdims=True) + epsilon)
        return np.asarray(x / root * scale), np.asarray(1 / root)


OPERATORS = [
    LRN,
    MeanVarianceNormalization,
    RMSNormalization,
    SimplifiedLayerNormalization,
    SkipLayerNormalization,
    SkipSimplifiedLayerNormalization,
]
