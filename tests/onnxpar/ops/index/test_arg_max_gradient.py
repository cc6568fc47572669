"""Gradients of TopK, and operators whose indices have no gradient."""

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase


@pytest.mark.parametrize("shape", ["double[N,6]", "double[5,6]"])
@pytest.mark.parametrize(("axis", "largest", "k"), [(1, 1, 2), (-1, 0, 3), (0, 1, 5)])
def test_top_k(axis: int, largest: int, k: int, shape: str) -> None:
    GradCase(
        f"y, i = TopK<axis={axis}, largest={largest}>(x, k)",
        {"x": shape},
        lambda torch, x: x.topk(k, axis, bool(largest)).values,
        consts={"k": np.array([k])},
    ).check()


def test_found_indices_have_no_gradient() -> None:
    case = GradCase(
        "i = ArgMax<keepdims=0>(x)\n f = Cast<to=11>(i)\n y = Mul(f, w)",
        {"x": "double[N,3]", "w": "double[3]"},
        flat=["x"],
    )
    case.check_program()
    assert "without a derivative" in case.program.done.unreached["x"]
