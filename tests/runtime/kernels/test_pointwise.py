"""Gradients of activations and the sum of squares, against float64 arithmetic of numpy."""

import math

import numpy as np
import onnx
import pytest

from tests.runtime.kernels.one_node import Run

# One element, less than a vector, an odd number of whole vectors, and more than one piece of work.
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 3), (257,), (3, 16384 // 2 + 1)]
ROOT = math.sqrt(2 / math.pi)


def relu(y: np.ndarray) -> np.ndarray:
    return (y > 0).astype(np.float64)


def tanh(y: np.ndarray) -> np.ndarray:
    return 1 - y * y


def sigmoid(y: np.ndarray) -> np.ndarray:
    return y * (1 - y)


def gelu(x: np.ndarray) -> np.ndarray:
    below = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[float])(x)
    return below + x * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    u = ROOT * (x + 0.044715 * x**3)
    return 0.5 * (1 + np.tanh(u)) + 0.5 * x / np.cosh(u) ** 2 * ROOT * (1 + 3 * 0.044715 * x * x)


def silu(x: np.ndarray) -> np.ndarray:
    return (1 + x / (1 + np.exp(x))) / (1 + np.exp(-x))


OPS = {
    "ReluGrad": relu,
    "TanhGrad": tanh,
    "SigmoidGrad": sigmoid,
    "GeluGrad": gelu,
    "GeluTanhGrad": gelu_tanh,
    "SiluGrad": silu,
}
# The derivatives are at most 1.13, made of at most 10 roundings of numbers no greater than that
# (2^-24 or 2^-53 each), of which the library promises a sum below 1e-6 in float32.
TOLERANCE = {np.float32: 1e-6, np.float64: 10 * 1.13 * 2.0**-53}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_gradient(run: Run, name: str, shape: tuple[int, ...], dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(7)
    dy = rng.standard_normal(shape).astype(dtype)
    y = (3 * rng.standard_normal(shape)).astype(dtype)
    if name in ("TanhGrad", "SigmoidGrad"):
        y = (1 / (1 + np.exp(-y))).astype(dtype)
    (dx,) = run(name, dy, y)
    assert dx.dtype == dtype
    assert dx.shape == shape
    want = dy.astype(np.float64) * OPS[name](y.astype(np.float64))
    assert np.all(np.abs(dx - want) <= TOLERANCE[dtype] * np.abs(dy))


def gelu_itself(x: np.ndarray) -> np.ndarray:
    below = np.vectorize(lambda v: 0.5 * math.erfc(-v / math.sqrt(2)), otypes=[float])(x)
    return np.asarray(x * below)


def gelu_tanh_itself(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-2 * ROOT * (x + 0.044715 * x**3))))


def silu_itself(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


GATED = {
    "GatedGeluGrad": (gelu_itself, gelu),
    "GatedGeluTanhGrad": (gelu_tanh_itself, gelu_tanh),
    "GatedSiluGrad": (silu_itself, silu),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", GATED)
def test_gated(run: Run, name: str, shape: tuple[int, ...], dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(7)
    dy, up = (rng.standard_normal(shape).astype(dtype) for _ in "yu")
    gate = (3 * rng.standard_normal(shape)).astype(dtype)
    results = run(name, dy, gate, up, outputs=[True, True])
    d, g, u = (a.astype(np.float64) for a in (dy, gate, up))
    itself, slope = GATED[name]
    # As for the slopes alone, and one more rounding; the activation is below 1.13 |gate| likewise.
    for got, want, size in zip(
        results, (d * u * slope(g), d * itself(g)), (np.abs(d * u), np.abs(d * g)), strict=True
    ):
        assert got.dtype == dtype and got.shape == shape
        assert np.all(np.abs(got - want) <= 2 * TOLERANCE[dtype] * size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", GATED)
def test_gated_forward(run: Run, name: str, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(7)
    for shape in SHAPES:
        gate, up = (3 * rng.standard_normal(shape)).astype(dtype), rng.standard_normal(shape)
        (y,) = run(name.removesuffix("Grad"), gate, up.astype(dtype))
        assert y.dtype == dtype and y.shape == shape
        g, u = gate.astype(np.float64), up.astype(dtype).astype(np.float64)
        # As for the gradient.
        assert np.all(np.abs(y - GATED[name][0](g) * u) <= 2 * TOLERANCE[dtype] * np.abs(g * u))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", GATED)
def test_gates_far_out(run: Run, name: str, dtype: type[np.floating]) -> None:
    gate = np.array([-np.inf, -1e30, -1e4, -0.0, 1e4, 1e30, np.inf], dtype)
    one = np.ones_like(gate)
    dgate, dup = run(name, one, gate, one, outputs=[True, True])
    np.testing.assert_allclose(dgate, [0, 0, 0, 0.5, 1, 1, 1], rtol=0, atol=1e-6)
    (y,) = run(name.removesuffix("Grad"), gate, one)
    for active in (dup, y):
        np.testing.assert_allclose(active, np.maximum(gate, 0), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["GeluGrad", "GeluTanhGrad", "SiluGrad"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_slopes_everywhere(run: Run, name: str, dtype: type[np.floating]) -> None:
    x = np.concatenate([np.linspace(-20, 20, 20001), [-1e30, -1e4, -0.0, 1e4, 1e30]]).astype(dtype)
    (dx,) = run(name, np.ones_like(x), x)
    with np.errstate(over="ignore", invalid="ignore"):
        want = OPS[name](x.astype(np.float64))
    want[-5:] = [0, 0, 0.5, 1, 1]
    np.testing.assert_allclose(dx, want, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", OPS)
def test_nan_stays(run: Run, name: str) -> None:
    dy = np.array([np.nan, 1.0, 1.0], np.float32)
    y = np.array([0.5, np.nan, 0.5], np.float32)
    (dx,) = run(name, dy, y)
    assert np.isnan(dx[0])
    # Where Relu's result is no number, nothing is known of its slope; it is 0 as in Where(y > 0).
    assert dx[1] == 0 if name == "ReluGrad" else np.isnan(dx[1])
    assert np.isfinite(dx[2])


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_narrow_types(run: Run, kind: int) -> None:
    rng = np.random.default_rng(8)
    # Multiples of 1/8 below 4 have at most 5 bits, so that the casts are exact.
    dy, x = (rng.integers(-31, 32, 1000).astype(np.float32) / 8 for _ in range(2))
    (dx,) = run("GeluGrad", dy, x, narrow=kind)
    # One rounding of the result to 11 or 8 bits, and to multiples of 2^-24 at least.
    half = 2.0**-11 if kind == onnx.TensorProto.FLOAT16 else 2.0**-8
    np.testing.assert_allclose(dx, dy * gelu(x.astype(np.float64)), rtol=half, atol=4e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_square_sum(run: Run, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(9)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in SHAPES]
    (total,) = run("SquareSum", *arrays)
    assert total.dtype == dtype
    assert total.shape == ()
    want = math.fsum(float(v) ** 2 for array in arrays for v in array.ravel().astype(np.float64))
    # Summed in float64: for float32 the one rounding of the result counts, for float64 at most
    # one rounding of the running sum for each of the 16384 elements of a piece.
    bound = 2.0**-24 if dtype == np.float32 else 16384 * 2.0**-53
    assert total == pytest.approx(want, rel=bound, abs=0)


def test_square_sum_does_not_overflow_between(run: Run) -> None:
    x = np.full(4, 1.5e19, np.float32)
    (total,) = run("SquareSum", x)
    assert total == np.inf  # 9e38 is beyond float32, and is not said to be anything else
    (total,) = run("SquareSum", x[:1])
    assert total == pytest.approx(2.25e38, rel=1e-6)
