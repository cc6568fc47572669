"""Gradients of fused activations and products against PyTorch; onnx.reference lacks them."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, shown

XB = {"x": "double[N,S,6]", "b": "double[6]"}
GEMM = {"a": "double[N,6]", "w": "double[4,6]", "c": "double[4]"}


def gelu(torch: Any, x: Any, b: Any = 0.0, *, how: str = "none") -> Any:
    return torch.nn.functional.gelu(x + b, approximate=how)


def fast_gelu(torch: Any, x: Any, b: Any = 0.0) -> Any:
    return gelu(torch, x, b, how="tanh")


@pytest.mark.parametrize(
    ("node", "inputs", "torch", "opset"),
    [
        ("Gelu(x)", {"x": "double[N,6]"}, gelu, 20),
        ("Gelu(x)", {"x": "double[N,S,6]"}, gelu, 17),
        ("BiasGelu(x, b)", XB, gelu, 20),
        ("FastGelu(x)", {"x": "double[N,6]"}, fast_gelu, 17),
        ("FastGelu(x, b)", XB, fast_gelu, 20),
        (
            "QuickGelu<alpha=1.5>(x)",
            {"x": "double[N,6]"},
            lambda torch, x: x * torch.sigmoid(1.5 * x),
            20,
        ),
        (
            'FusedGemm<activation="Tanh", transB=1, beta=0.5>(a, w, c)',
            GEMM,
            lambda torch, a, w, c: torch.tanh(a @ w.T + 0.5 * c),
            20,
        ),
        (
            'FusedGemm<activation="LeakyRelu", activation_alpha=0.25, transB=1>(a, w)',
            {"a": "double[N,6]", "w": "double[4,6]"},
            lambda torch, a, w: torch.nn.functional.leaky_relu(a @ w.T, 0.25),
            20,
        ),
    ],
    ids=shown,
)
def test_fused(node: str, inputs: Mapping[str, str], torch: Any, opset: int) -> None:
    case = GradCase(f"y = com.microsoft.{node}", inputs, torch, opset=opset)
    case.check_program()
    case.check_torch()
    case.check_meshes()
