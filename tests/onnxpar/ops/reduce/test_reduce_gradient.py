"""Gradients of reductions and casts."""

from typing import Any

import numpy as np
import pytest

from onnxpar.autodiff.differentiate import Differentiated
from tests.onnxpar.ops.gradient_harness import GradCase, between
from tests.tiers import covering

NSX = {"x": "double[N,S,4]"}
POSITIVE = {"x": between(0.3, 2)}


def axes(*values: int) -> dict[str, np.ndarray]:
    return {"a": np.array(values, np.int64)}


REDUCTIONS: dict[str, tuple[Any, Any]] = {
    "ReduceSum": (lambda torch, x, d, k: x.sum(d, k), {}),
    "ReduceMean": (lambda torch, x, d, k: x.mean(d, k), {}),
    "ReduceMax": (lambda torch, x, d, k: x.amax(d, k), {}),
    "ReduceMin": (lambda torch, x, d, k: x.amin(d, k), {}),
    "ReduceL1": (lambda torch, x, d, k: x.abs().sum(d, k), {}),
    "ReduceL2": (lambda torch, x, d, k: (x * x).sum(d, k).sqrt(), {}),
    "ReduceSumSquare": (lambda torch, x, d, k: (x * x).sum(d, k), {}),
    "ReduceLogSum": (lambda torch, x, d, k: x.sum(d, k).log(), POSITIVE),
    "ReduceLogSumExp": (lambda torch, x, d, k: torch.logsumexp(x, d, k), {}),
}


@pytest.mark.parametrize(
    ("name", "dims", "keep"),
    covering(REDUCTIONS, [(1,), (0, 2), (0, 1, 2), (-1,)], [0, 1]),
)
def test_reduction(name: str, dims: tuple[int, ...], keep: int) -> None:
    function, data = REDUCTIONS[name]
    GradCase(
        f"y = {name}<keepdims={keep}>(x, a)",
        NSX,
        lambda torch, x: function(torch, x, dims, bool(keep)),
        data=data,
        consts=axes(*dims),
    ).check()


@pytest.mark.parametrize("name", [*REDUCTIONS, "ReduceProd"])
def test_a_parameter_is_reduced(name: str) -> None:
    _, data = REDUCTIONS.get(name, (None, {}))
    GradCase(f"y = {name}(x, a)", {"x": "double[5,6]"}, data=data, consts=axes(0)).check()


@pytest.mark.parametrize(
    "nodes", ["y = ReduceMean<axes=[1]>(x)", "y = ReduceMax<axes=[0], keepdims=0>(x)"]
)
def test_axes_as_attributes(nodes: str) -> None:
    GradCase(nodes, NSX, opset=13).check()


@pytest.mark.parametrize(
    ("name", "empty"), covering([*REDUCTIONS, "ReduceProd"], ["", "<noop_with_empty_axes=1>"])
)
def test_no_axes(name: str, empty: str) -> None:
    # Without axes these are x, |x|, x² and log x where they reduce nothing.
    GradCase(f"y = {name}{empty}(x)", {"x": "double[N,3]"}, data=POSITIVE).check()


@pytest.mark.parametrize("zeros", [0, 1, 2])
@pytest.mark.parametrize("dim", [0, 1])
def test_product_with_zeros(zeros: int, dim: int) -> None:
    def data(rng: np.random.Generator, shape: list[int]) -> Any:
        x = rng.uniform(0.5, 2, shape)
        x[0, :zeros] = 0
        x[-1, -1] = -1
        return x

    GradCase(
        "y = ReduceProd<keepdims=0>(x, a)",
        {"x": "double[N,4]"},
        lambda torch, x: x.prod(dim),
        data={"x": data},
        consts=axes(dim),
    ).check()


TIED = np.array([[1.0, 3, 3, 0], [0, 0, 0, 0], [-2, -2, 1, -2]])


@pytest.mark.parametrize(
    ("name", "torch"),
    [
        ("ReduceMax", lambda torch, x: x.amax(1, True)),
        ("ReduceMin", lambda torch, x: x.amin(1, True)),
        ("ReduceL1", lambda torch, x: x.abs().sum(1, True)),
        ("ReduceL2", lambda torch, x: x.norm(2, 1, True)),
    ],
)
def test_kinks_are_as_in_pytorch(name: str, torch: Any) -> None:
    case = GradCase(
        f"y = {name}(x, a)", {"x": "double[3,4]"}, torch, data={"x": TIED}, consts=axes(1)
    )
    case.check_torch()
    case.check_meshes()


def test_log_sum_exp_of_a_masked_row() -> None:
    rows = np.array([[0.5, -np.inf, 1], [-np.inf, -np.inf, -np.inf]])
    case = GradCase(
        "y = ReduceLogSumExp(x, a)\n z = Exp(y)",
        {"x": "double[2,3]"},
        data={"x": rows},
        consts=axes(1),
        reference=False,  # onnx.reference makes NaN of such a row
    )
    # z is the sum of exp(x).
    np.testing.assert_allclose(case.single["x"], np.exp(rows) * case.arrays["onnxpar.weight.z"])
    case.check_meshes()


@pytest.mark.parametrize("exclusive", [0, 1])
@pytest.mark.parametrize("reverse", [0, 1])
@pytest.mark.parametrize("axis", [0, -1])
def test_cumulative_sum(axis: int, exclusive: int, reverse: int) -> None:
    GradCase(
        f"y = CumSum<exclusive={exclusive}, reverse={reverse}>(x, a)",
        {"x": "double[N,4]"},
        consts={"a": np.array(axis)},
    ).check()


@pytest.mark.parametrize(
    "nodes",
    [
        "h = Cast<to=1>(x)\n y = Cast<to=11>(h)",
        "h = CastLike(x, f)\n y = Cast<to=11>(h)",
        "y = CastLike(x, w)",
    ],
)
def test_cast_between_floats(nodes: str) -> None:
    case = GradCase(
        nodes,
        {"x": "double[N,6]", "w": "double[N]"} if "w" in nodes else {"x": "double[N,6]"},
        lambda torch, x, **_: x.float().double() if "f" in nodes else x + 0,
        consts={"f": np.zeros(1, np.float32)} if "f" in nodes else {},
        flat=["w"] if "w" in nodes else [],
        torch_rtol=1e-6,  # a float32 in between rounds to 6e-8
    )
    case.check_program()
    case.check_torch()
    case.check_meshes()


@pytest.mark.parametrize("nodes", ["h = Cast<to=7>(x)\n y = Cast<to=11>(h)", "y = Floor(x)"])
def test_steps_stop_the_gradient_with_the_reason(nodes: str) -> None:
    case = GradCase(nodes, {"x": "double[N,6]"}, flat=["x"])
    case.check_program()
    done: Differentiated = case.program.done
    assert "only through nodes without a derivative" in done.unreached["x"]
