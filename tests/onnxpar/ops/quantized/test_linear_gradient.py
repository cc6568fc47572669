"""Gradients of fake quantisation: straight through inside the range, none outside."""

from typing import Any

import numpy as np
import pytest

from onnxpar.core.errors import ModelError
from tests.onnxpar.ops.gradient_harness import GradCase

# The operators have no float64. By the scale, two sums of a dozen products of up to 130 steps each
# cancel to what rounding moved: 12 · 130 · 2^-24 = 1e-4, of which chance leaves the tenth.
_PAIR = (
    "a = Cast<to=1>(x) b = Cast<to=1>(s) q = QuantizeLinear{0}(a, b, z) "
    "d = DequantizeLinear{0}(q, b, z) y = Cast<to=11>(d)"
)
_RTOL = 1e-5
# From 2 to 3 steps of 0.25 beyond either end of int8 at the zero point 5; no value halfway.
_X = np.array([-33.9, -33.3, -33.21, -1.3, 0.06, 0.31, 2.2, 30.4, 30.55, 31.3, 7.7, -7.7])


def fake(torch: Any, x: Any, s: Any, z: int, low: int, high: int) -> Any:
    """What torch.fake_quantize computes, in float64 and differentiated by the scale too."""
    steps = x / s
    rounded = steps + (torch.round(steps) - steps).detach()
    inside = (rounded + z >= low) & (rounded + z <= high)
    held = torch.clamp(torch.round(steps) + z, low, high) - z
    # Outside, the scale moves the end of the range.
    return torch.where(inside, rounded * s, held.detach() * s)


def check(case: GradCase) -> None:
    """Differences see steps, so PyTorch must say it; by `x` nothing is summed, on any mesh."""
    case.check_program()
    case.check_torch()
    if case.by == ("x",):
        case.check_meshes()


@pytest.mark.parametrize("by", ["x", "s"])
def test_the_pair_is_that_of_pytorch(by: str) -> None:
    check(
        GradCase(
            _PAIR.format(""),
            {"x": "double[N,4]", "s": "double[1]"},
            lambda torch, x, s: fake(torch, x, s, 5, -128, 127),
            sizes={"N": 3},
            data={"x": _X.reshape(3, 4), "s": np.array([0.25])},
            consts={"z": np.array([5], np.int8)},
            by=(by,),
            opset=21,
            split=2,
            torch_rtol=_RTOL,
        )
    )


@pytest.mark.parametrize("by", ["x", "s"])
def test_scales_of_an_axis(by: str) -> None:
    def torch(torch: Any, x: Any, s: Any) -> Any:
        return fake(torch, x, s.reshape(-1, 1), 0, 0, 255)

    check(
        GradCase(
            _PAIR.format("<axis=1>").replace(", z", ""),
            {"x": "double[N,3,2]", "s": "double[3]"},
            torch,
            data={"s": np.array([0.25, 0.13, 0.07])},
            by=(by,),
            opset=21,
            split=2,
            torch_rtol=_RTOL,
        )
    )


def test_pytorch_itself() -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(_X, dtype=torch.float32, requires_grad=True)
    torch.fake_quantize_per_tensor_affine(x, 0.25, 5, -128, 127).sum().backward()
    mine = torch.tensor(_X, requires_grad=True)
    fake(torch, mine, torch.tensor(0.25, dtype=torch.float64), 5, -128, 127).sum().backward()
    assert x.grad.tolist() == mine.grad.tolist()


def test_what_is_quantised_for_inference_alone_is_named() -> None:
    case = GradCase(
        "q, s, z = DynamicQuantizeLinear(f) y = DequantizeLinear(q, s, z)",
        {"f": "float[N,3]"},
        by=("f",),
    )
    with pytest.raises(ModelError, match="DynamicQuantizeLinear"):
        _ = case.program
