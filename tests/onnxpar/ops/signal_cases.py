"""Small Fourier transforms."""

import numpy as np

from tests.onnxpar.ops.op_harness import Case


def _at(value: int) -> np.ndarray:
    return np.array(value, np.int64)


_WINDOW = np.linspace(0.1, 1, 4, dtype=np.float32)
CASES = (
    Case("y = DFT(x)", {"x": "float[N,6,1]"}),
    Case("y = DFT<onesided=1>(x, n, a)", {"x": "float[N,6,3,1]"}, {"n": _at(8), "a": _at(1)}),
    Case("y = DFT<inverse=1, axis=2>(x, n)", {"x": "float[N,3,6,2]"}, {"n": _at(4)}, opset=19),
    Case("y = STFT(x, s, w)", {"x": "float[N,18,1]"}, {"s": _at(3), "w": _WINDOW}),
    Case("y = STFT<onesided=0>(x, s, , n)", {"x": "float[N,17]"}, {"s": _at(2), "n": _at(5)}),
)
