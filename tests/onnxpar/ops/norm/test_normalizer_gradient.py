"""Normalizer of ai.onnx.ml: its gradient, what it refuses, and that its kernel is not called."""

from typing import Any

import numpy as np
import pytest

from onnxpar.core.errors import ModelError
from onnxpar.core.mesh import Mesh
from tests.onnxpar.ops.gradient_harness import GradCase
from tests.onnxpar.ops.op_harness import Case

NORMS = ("MAX", "L1", "L2")


def nodes(norm: str) -> str:
    """Results are float32; the loss is summed in float64, so that all meshes give the same."""
    return f'y = ai.onnx.ml.Normalizer<norm="{norm}">(x) z = Cast<to=11>(y)'


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", ["double[N,6]", "double[5]", "double[4,S]"])
def test_gradient(norm: str, shape: str) -> None:
    """Differences of float32 results are coarse (1e-7 / 3e-4), so PyTorch tells more."""

    def function(torch: Any, x: Any) -> Any:
        if norm == "MAX":
            return x / x.amax(-1, keepdim=True)
        return torch.nn.functional.normalize(x, float(norm[1]), -1)

    GradCase(
        nodes(norm), {"x": shape}, function, reference=False, rtol=1e-2, torch_rtol=1e-6
    ).check()


@pytest.mark.parametrize("norm", NORMS)
def test_gradient_of_zeros(norm: str) -> None:
    """A row whose norm is 0 is the result, so its gradient is the cotangent."""
    rows = np.ones((5, 4))
    rows[2] = 0
    case = GradCase(nodes(norm), {"x": "double[N,4]"}, data={"x": rows}, reference=False)
    (cotangent,) = (a for n, a in case.arrays.items() if n != "x")
    # The operator computes in float32: a few roundings of 2^-24.
    np.testing.assert_allclose(case.single["x"][2], cotangent[2], rtol=1e-6)
    assert np.isfinite(case.single["x"]).all()


@pytest.mark.parametrize("norm", NORMS)
def test_kernel_is_not_called(norm: str) -> None:
    """For L2, it is wrong if it writes over its operand, which no case of one node shows."""
    case = Case(f'y = ai.onnx.ml.Normalizer<norm="{norm}">(x)', {"x": "float[4,6]"})
    emitted = case.run(Mesh.of(), {}, {}).program.builder.nodes
    assert {n.domain for n in emitted} == {""}


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("Normalizer(x)", "float[2,3,4]", "expected an operand with 1 or 2 dims, got 3"),
        ('Normalizer<norm="L3">(x)', "float[2,3]", "'norm': expected MAX, L1 or L2, got 'L3'"),
    ],
)
def test_what_it_refuses(text: str, shape: str, message: str) -> None:
    case = Case(f"y = ai.onnx.ml.{text}", {"x": shape})
    with pytest.raises(ModelError, match=message):
        _ = case.rule
