"""Attention without a matrix of all scores, and its gradient, against float64 in numpy."""

from dataclasses import dataclass

import numpy as np
import onnx
import pytest

from tests.runtime.kernels.one_node import Run

INF = np.inf
SCALE = float(np.float32(0.3))


@dataclass(frozen=True)
class Case:
    """Shapes of q, kt and v, what `bias_of` adds, and a scale that float32 holds exactly."""

    q: tuple[int, ...]
    kt: tuple[int, ...]
    v: tuple[int, ...]
    bias: str = "none"
    scale: float = SCALE

    @property
    def scores(self) -> tuple[int, ...]:
        return (*np.broadcast_shapes(self.q[:-2], self.kt[:-2]), self.q[-2], self.kt[-1])


def bias_of(case: Case) -> np.ndarray:
    rng = np.random.default_rng(3)
    s, t = case.scores[-2:]
    seen = np.tril(np.ones((s, t)), t - s)
    if case.bias == "none":
        return np.zeros(())
    if case.bias == "causal":
        return np.where(seen > 0, 0.0, -INF)
    if case.bias == "window":
        return np.where(seen - np.tril(seen, t - s - 9) > 0, 0.5, -1e38)
    if case.bias == "padding":
        hidden = np.arange(t) >= t - 5
        return np.where(hidden, -INF, 0.0)[None, None, None, :].repeat(case.scores[0], 0)
    if case.bias == "rows":
        return rng.standard_normal((s, 1))
    if case.bias == "learned":
        return rng.standard_normal(case.scores)
    assert case.bias == "keys"
    return rng.standard_normal(t)


CASES = {
    "plain": Case((2, 3, 7, 5), (2, 3, 5, 9), (2, 3, 9, 4)),
    "one": Case((1, 1), (1, 1), (1, 1)),
    "no batch": Case((30, 16), (16, 40), (40, 16), "keys"),
    "many keys": Case((2, 200, 8), (2, 8, 3000), (2, 3000, 24), "learned"),
    "causal": Case((2, 2, 300, 64), (2, 2, 64, 300), (2, 2, 300, 64), "causal"),
    "causal behind others": Case((1, 2, 100, 16), (1, 2, 16, 260), (1, 2, 260, 16), "causal"),
    "window": Case((2, 400, 33), (2, 33, 400), (2, 400, 17), "window"),
    "padding": Case((2, 2, 31, 12), (2, 2, 12, 45), (2, 2, 45, 8), "padding"),
    "rows": Case((2, 31, 12), (2, 12, 45), (2, 45, 8), "rows"),
    "grouped heads": Case((2, 2, 3, 20, 6), (2, 2, 1, 6, 50), (2, 2, 1, 50, 7), "learned"),
    "shared": Case((4, 11, 6), (6, 21), (21, 7), "keys"),
    "no queries": Case((2, 0, 6), (2, 6, 5), (2, 5, 7)),
    "no batches": Case((0, 4, 6), (0, 6, 5), (0, 5, 7)),
}


def numbers(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def operands(case: Case, dtype: type[np.floating]) -> list[np.ndarray]:
    arrays = [numbers(*case.q, seed=1), numbers(*case.kt, seed=2), numbers(*case.v, seed=4)]
    return [a.astype(dtype) for a in (*arrays, bias_of(case))]


def shares_of(case: Case, arrays: list[np.ndarray]) -> np.ndarray:
    q, kt, _, bias = (a.astype(np.float64) for a in arrays)
    scores = case.scale * (q @ kt) + bias
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def gradients(case: Case, arrays: list[np.ndarray], dy: np.ndarray) -> list[np.ndarray]:
    q, kt, v, _ = (a.astype(np.float64) for a in arrays)
    shares = shares_of(case, arrays)
    dshares = dy @ v.swapaxes(-1, -2)
    slopes = case.scale * shares * (dshares - (dshares * shares).sum(-1, keepdims=True))
    return [
        slopes @ kt.swapaxes(-1, -2),
        q.swapaxes(-1, -2) @ slopes,
        shares.swapaxes(-1, -2) @ dy,
    ]


def close(got: np.ndarray, want: np.ndarray, terms: int) -> None:
    """Asserts equality up to the rounding of sums of so many terms, each of a few roundings."""
    unit = float(np.finfo(got.dtype).eps)
    assert got.shape == want.shape
    # Errors of single terms are independent, so their sum grows with the root of their number; and
    # no sum of the cases is of terms that are more than a few times as large as its results.
    bound = 32 * unit * (8 + np.sqrt(terms)) * max(1.0, float(np.abs(want).max(initial=0)))
    np.testing.assert_allclose(got, want, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_forward(run: Run, name: str, dtype: type[np.floating]) -> None:
    case = CASES[name]
    arrays = operands(case, dtype)
    (y,) = run("ScaledDotProductAttention", *arrays, scale=case.scale)
    assert y.dtype == dtype
    close(y, shares_of(case, arrays) @ arrays[2].astype(np.float64), case.scores[-1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", CASES)
def test_gradient(run: Run, name: str, dtype: type[np.floating]) -> None:
    case = CASES[name]
    arrays = operands(case, dtype)
    dy = numbers(*case.scores[:-1], case.v[-1], seed=5).astype(dtype)
    op, every = "ScaledDotProductAttentionGrad", (True, True, True)
    found = run(op, dy, *arrays, outputs=every, scale=case.scale)
    wanted = gradients(case, arrays, dy.astype(np.float64))
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        close(got, want, sum(case.scores[-2:]))
    (dq,) = run(op, dy, *arrays, outputs=(True, False, False), scale=case.scale)
    np.testing.assert_array_equal(dq, found[0])
    (dkt,) = run(op, dy, *arrays, outputs=(False, True, False), scale=case.scale)
    np.testing.assert_array_equal(dkt, found[1])


def hidden_row() -> list[np.ndarray]:
    """Of 40 queries, the third sees no key."""
    case = CASES["plain"]
    q, kt, v, _ = operands(Case((1, 40, 5), (1, 5, 20), (1, 20, 4)), np.float32)
    bias = np.zeros((40, 20), np.float32)
    bias[:, 12:] = -INF
    bias[2] = -INF
    assert case.bias == "none"
    return [q, kt, v, bias]


def test_a_query_without_keys(run: Run) -> None:
    arrays = hidden_row()
    dy = numbers(1, 40, 4, seed=6).astype(np.float32)
    (plain,) = run("ScaledDotProductAttention", *arrays, scale=SCALE)
    (safe,) = run("SafeScaledDotProductAttention", *arrays, scale=SCALE)
    assert np.isnan(plain[0, 2]).all()
    np.testing.assert_array_equal(safe[0, 2], np.zeros(4))
    others = np.arange(40) != 2
    np.testing.assert_array_equal(safe[0, others], plain[0, others])
    every = (True, True, True)
    found = run("SafeScaledDotProductAttentionGrad", dy, *arrays, outputs=every, scale=SCALE)
    np.testing.assert_array_equal(found[0][0, 2], np.zeros(5))
    # It adds nothing to the gradients of keys and values.
    less = [arrays[0][:, others], *arrays[1:3], arrays[3][others]]
    without = run(
        "SafeScaledDotProductAttentionGrad", dy[:, others], *less, outputs=every, scale=0.3
    )
    # The same sums in other blocks: at most 40 terms below 20.
    for got, want in zip(found[1:], without[1:], strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=40 * 20 * 2.0**-24)


def test_a_query_whose_keys_are_all_hidden_by_a_finite_number_sees_all(run: Run) -> None:
    arrays = hidden_row()
    arrays[3] = np.where(np.isinf(arrays[3]), np.finfo(np.float32).min, 0).astype(np.float32)
    (y,) = run("ScaledDotProductAttention", *arrays, scale=SCALE)
    np.testing.assert_allclose(y[0, 2], arrays[2][0].mean(0), rtol=0, atol=20 * 4 * 2.0**-24)


def test_no_keys(run: Run) -> None:
    """A sum over no key is zero, as in a product of matrices."""
    q, kt, v = (np.ones(shape, np.float32) for shape in ((2, 3, 5), (2, 5, 0), (2, 0, 4)))
    none = np.zeros((), np.float32)
    (y,) = run("ScaledDotProductAttention", q, kt, v, none)
    np.testing.assert_array_equal(y, np.zeros((2, 3, 4)))
    dy, every = np.ones((2, 3, 4), np.float32), (True, True, True)
    dq, dkt, dv = run("ScaledDotProductAttentionGrad", dy, q, kt, v, none, outputs=every)
    np.testing.assert_array_equal(dq, np.zeros((2, 3, 5)))
    assert dkt.shape == (2, 5, 0) and dv.shape == (2, 0, 4)


MISTAKES = {
    "kt has 4 rows, expected 5": ((2, 3, 5), (2, 4, 6), (2, 6, 4), (3, 6)),
    "v has 7 rows, expected 6": ((2, 3, 5), (2, 5, 6), (2, 7, 4), (3, 6)),
    "bias has 2 rows, expected 3": ((2, 3, 5), (2, 5, 6), (2, 6, 4), (2, 6)),
    "bias has 5 columns, expected 6": ((2, 3, 5), (2, 5, 6), (2, 6, 4), (3, 5)),
    r"v has leading dims \[3\], expected dims that broadcast against \[2\]": (
        (2, 3, 5),
        (2, 5, 6),
        (3, 6, 4),
        (3, 6),
    ),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(run: Run, message: str) -> None:
    arrays = [np.zeros(shape, np.float32) for shape in MISTAKES[message]]
    with pytest.raises(Exception, match=f"ScaledDotProductAttention 'node': .*{message}"):
        run("ScaledDotProductAttention", *arrays)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [(50, 60), (3, 1, 60), (50, 1), ()])
@pytest.mark.parametrize("hidden", [-1e30, -1e4, -1.0, 5.0])
def test_a_mask_of_booleans(
    run: Run, hidden: float, shape: tuple[int, ...], dtype: type[np.floating]
) -> None:
    case = Case((3, 50, 8), (3, 8, 60), (3, 60, 9), scale=0.25)
    arrays = operands(case, dtype)[:3]
    seen = np.random.default_rng(9).random(shape) > 0.3
    if seen.ndim == 2 and seen.shape[1] > 1:
        seen[:, 40:] = False
        seen[7] = False
    dy = numbers(*case.scores[:-1], 9, seed=5).astype(dtype)
    op, given = "MaskedScaledDotProductAttention", {"scale": 0.25, "hidden": hidden}
    (y,) = run(op, *arrays, seen, **given)
    found = run(f"{op}Grad", dy, *arrays, seen, outputs=(True, True, True), **given)
    q, kt, v = (a.astype(np.float64) for a in arrays)
    scores = np.where(seen, 0.25 * (q @ kt), hidden)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True)
    close(y, shares @ v, 60)
    dshares = dy @ v.swapaxes(-1, -2)
    slopes = shares * (dshares - (dshares * shares).sum(-1, keepdims=True))
    slopes = np.where(seen, 0.25 * slopes, 0)
    wanted = [
        slopes @ kt.swapaxes(-1, -2),
        q.swapaxes(-1, -2) @ slopes,
        shares.swapaxes(-1, -2) @ dy,
    ]
    for got, want in zip(found, wanted, strict=True):
        close(got, want, 110)


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_narrow_types(run: Run, kind: int) -> None:
    case = CASES["grouped heads"]
    # Multiples of 1/4 below 2 have at most 3 bits, so that the casts are exact.
    rng = np.random.default_rng(8)
    shapes = (case.q, case.kt, case.v, case.scores)
    arrays = [rng.integers(-7, 8, shape).astype(np.float32) / 4 for shape in shapes]
    (y,) = run("ScaledDotProductAttention", *arrays, narrow=kind, scale=0.5)
    case = Case(case.q, case.kt, case.v, scale=0.5)
    want = shares_of(case, arrays) @ arrays[2].astype(np.float64)
    # One rounding of a result below 2, to 11 or 8 bits.
    half = 2.0**-11 if kind == onnx.TensorProto.FLOAT16 else 2.0**-8
    np.testing.assert_allclose(y, want, rtol=0, atol=2 * half)
