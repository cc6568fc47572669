"""Gradients of DeformConv, by its body."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, chosen


def _offsets(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    """Moves of up to 2 elements that end between elements, where there is no kink."""
    return np.asarray(rng.integers(-2, 2, shape) + rng.uniform(0.2, 0.8, shape))


def _case(attributes: str, opset: int = 22, **shapes: str) -> GradCase:
    operands = ", ".join(n if n in shapes else "" for n in "xwobm").rstrip(", ")
    types = {n: f"double[{shapes[n]}]" for n in "xwobm" if n in shapes}
    data: dict[str, Any] = {"o": _offsets}
    sizes = {"N": 2}
    return GradCase(
        f"y = DeformConv<{attributes}>({operands})", types, None, sizes, data=data, opset=opset
    )


CASES = (
    _case("pads=[1,0,0,1]", x="N,2,2,3", w="2,2,2,2", o="N,8,2,3", b="2"),
    _case("offset_group=2", x="N,4,2,3", w="1,4,2,2", o="N,16,1,2", m="N,8,1,2"),
    _case(
        "group=2, strides=[2,1], dilations=[1,2]",
        19,
        x="1,2,4,3",
        w="2,1,2,2",
        o="1,8,2,1",
        m="1,4,2,1",
    ),
)


@pytest.mark.parametrize("case", chosen(CASES, 1), ids=lambda c: c.nodes)
def test_deformed_convolutions(case: GradCase) -> None:
    case.check()
