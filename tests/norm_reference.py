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


OPERATORS = [LRN, MeanVarianceNormalization]
