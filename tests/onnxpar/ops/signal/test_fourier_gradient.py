"""Gradients of Fourier transforms."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase


def at(value: int) -> np.ndarray:
    return np.array(value, np.int64)


def complex_of(torch: Any, x: Any) -> Any:
    return torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else x[..., 0]


# onnx.reference computes: onnxruntime's transforms of lengths that are no powers of 2 lose half of
# float64's digits.
@pytest.mark.parametrize(
    ("length", "inverse", "parts", "opset"),
    [(5, 0, 1, 20), (3, 0, 2, 20), (7, 0, 1, 17), (7, 1, 2, 20), (3, 1, 1, 17)],
)
def test_dft(length: int, inverse: int, parts: int, opset: int) -> None:
    def torch(torch: Any, x: Any) -> Any:
        made = torch.fft.ifft if inverse else torch.fft.fft
        return torch.view_as_real(made(complex_of(torch, x), length, 1).resolve_conj())

    attributes = f"inverse={inverse}" + (", axis=1" if opset < 20 else "")
    operands = "x, n" if opset < 20 else "x, n, a"
    GradCase(
        f"y = DFT<{attributes}>({operands})",
        {"x": f"double[N,5,2,{parts}]"},
        torch,
        sizes={"N": 3},
        consts={"n": at(length)} | ({} if opset < 20 else {"a": at(1)}),
        opset=opset,
    ).check()


@pytest.mark.parametrize("length", [4, 5])
def test_half_of_a_spectrum(length: int) -> None:
    GradCase(
        "y = DFT<onesided=1>(x, n)",
        {"x": "double[N,4,1]"},
        lambda torch, x: torch.view_as_real(torch.fft.rfft(x[..., 0], length, 1)),
        consts={"n": at(length)},
    ).check()


@pytest.mark.parametrize(("step", "frame", "size"), [(2, 4, 10), (3, 3, 9), (1, 4, 6)])
def test_stft(step: int, frame: int, size: int) -> None:
    def torch(torch: Any, x: Any, w: Any) -> Any:
        made = torch.stft(
            x[..., 0], frame, step, window=w, center=False, onesided=True, return_complex=True
        )
        return torch.view_as_real(made).transpose(1, 2)

    GradCase(
        "y = STFT(x, s, w)",
        {"x": f"double[N,{size},1]", "w": f"double[{frame}]"},
        torch,
        sizes={"N": 3},
        consts={"s": at(step)},
    ).check()
