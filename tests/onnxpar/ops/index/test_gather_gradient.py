"""Gradients of Gather."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase


@pytest.mark.parametrize("opset", [16, 20])
@pytest.mark.parametrize(
    ("data", "indices", "axis"),
    [("6,4", "N", 0), ("6,4", "N,S", 0), ("4,6", "N", 1), ("4,6,3", "N,S", 1), ("N,6", "S", -1)],
    ids=str,
)
def test_gather(data: str, indices: str, axis: int, opset: int) -> None:
    def torch(torch: Any, x: Any, i: Any) -> Any:
        found = x.index_select(axis, i.flatten())
        place = axis % x.dim()
        return found.reshape([*x.shape[:place], *i.shape, *x.shape[place + 1 :]])

    GradCase(
        f"y = Gather<axis={axis}>(x, i)",
        {"x": f"double[{data}]", "i": f"int64[{indices}]"},
        torch,
        opset=opset,
    ).check()


def test_indices_from_the_end() -> None:
    GradCase(
        "y = Gather(x, i)",
        {"x": "double[6,4]", "i": "int32[N]"},
        lambda torch, x, i: x[i.long()],
        data={"i": np.array([-1, 2, -6, 5, -1])},
    ).check()


def test_one_index() -> None:
    GradCase(
        "y = Gather(x, i)",
        {"x": "double[6,4]", "i": "int64"},
        lambda torch, x, i: x[i],
        data={"i": np.array(4)},
    ).check()
