"""Gradients of the operators that stand by themselves."""

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, between

NS = {"N": 3, "S": 4}


def zeros_among(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
    """Numbers of both signs, one in four of them zero."""
    return np.asarray(rng.uniform(0.5, 1.5, shape) * rng.choice([-1, 0, 1, 1], shape))


def running(exclusive: int, reverse: int, axis: int, rank: int = 3) -> GradCase:
    dims = ("N", "S", "2")[3 - rank :]

    def torch_form(torch, x):  # type: ignore[no-untyped-def]
        if reverse:
            x = x.flip(axis)
        y = torch.cumprod(x, axis)
        if exclusive:
            ones = torch.ones_like(x.narrow(axis, 0, 1))
            y = torch.cat([ones, torch.cumprod(x.narrow(axis, 0, x.shape[axis] - 1), axis)], axis)
        return y.flip(axis) if reverse else y

    return GradCase(
        f"y = CumProd<exclusive={exclusive}, reverse={reverse}>(x, axis)",
        {"x": f"double[{','.join(dims)}]"},
        torch_form,
        NS,
        {"x": zeros_among},
        consts={"axis": np.array(axis)},
        opset=26,
    )


CASES = (
    *(running(exclusive, reverse, 1) for exclusive in (0, 1) for reverse in (0, 1)),
    running(0, 0, 0),
    running(1, 1, 2),
    GradCase("y = Det(x)", {"x": "double[N,3,3]"}, lambda torch, x: torch.linalg.det(x), NS),
    GradCase("y = Det(x)", {"x": "double[N,S,2,2]"}, lambda torch, x: torch.linalg.det(x), NS),
    GradCase("y = Det(x)", {"x": "double[N,1,1]"}, lambda torch, x: torch.linalg.det(x), NS),
    # A matrix of rank 1 has cofactors, but no inverse: PyTorch's gradient of it is 0.
    GradCase("y = Det(x)", {"x": "double[2,2]"}, data={"x": np.array([[1.0, 2.0], [2.0, 4.0]])}),
    GradCase(
        "y = Mean(a, b, c)",
        {"a": "double[N,S]", "b": "double[S]", "c": "double[N,1]"},
        lambda torch, a, b, c: (a + b + c) / 3,
        NS,
    ),
    GradCase("y = Mean(a)", {"a": "double[N,S]"}, lambda torch, a: a, NS),
    GradCase("y = Mean(a, b)", {"a": "double[2,3]", "b": "double[2,1]"}),
    *(
        GradCase(
            f"y = Swish<alpha={alpha}>(x)",
            {"x": shape},
            lambda torch, x, alpha=alpha: x * torch.sigmoid(alpha * x),
            NS,
            opset=24,
        )
        for alpha, shape in ((1.0, "double[N,S]"), (1.5, "double[N]"), (-0.5, "double[N,2,S]"))
    ),
    # Away from the jumps, at ±0.5 and ±0.25.
    *(
        GradCase(
            f"y = Shrink<lambd={jump}, bias={bias}>(x)",
            {"x": "double[N,S]"},
            None,
            NS,
            {"x": lambda rng, shape, low=low: rng.choice([-2, -1, -low, low, 0.9, 1.7], shape)},
            opset=opset,
        )
        for jump, bias, low, opset in ((0.5, 0.25, 0.3, 20), (0.25, 0.5, 0.1, 13))
    ),
    GradCase(
        "y = Shrink<lambd=0.5, bias=0.5>(x)",
        {"x": "double[6]"},
        lambda torch, x: torch.nn.functional.softshrink(x, 0.5),
        data={"x": [-2, -1, -0.3, 0.2, 0.9, 1.7]},
    ),
    GradCase(
        "y = Shrink<lambd=1.0>(x)",
        {"x": "double[N,1,S]"},
        lambda torch, x: torch.nn.functional.hardshrink(x, 1.0),
        NS,
        {"x": between(1.1, 2)},
    ),
)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.nodes}|{','.join(c.inputs.values())}")
def test_gradient(case: GradCase) -> None:
    case.check()
