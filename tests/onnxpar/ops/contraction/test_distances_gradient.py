"""Gradients of CDist."""

import pytest

from tests.onnxpar.ops.gradient_harness import GradCase


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize(("a", "b"), [("N,4", "6,4"), ("5,S", "2,S"), ("3,2", "N,2")])
def test_cdist(a: str, b: str, root: bool) -> None:
    metric = "euclidean" if root else "sqeuclidean"
    GradCase(
        f'y = com.microsoft.CDist<metric="{metric}">(a, b)',
        {"a": f"double[{a}]", "b": f"double[{b}]"},
        lambda torch, a, b: torch.cdist(a, b) if root else torch.cdist(a, b) ** 2,
        reference=False,
    ).check()
