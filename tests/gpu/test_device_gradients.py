"""Gradients of activations and norms, and rotary positions, on devices against those on the CPU."""

from itertools import product

import numpy as np
import pytest

from tests.gpu.device_nodes import (
    REAL,
    SHAPES,
    TYPES,
    Both,
    both_widths,
    close,
    normal,
)
from tests.tiers import FULL

POINTWISE = ["ReluGrad", "TanhGrad", "SigmoidGrad", "GeluGrad", "GeluTanhGrad", "SiluGrad"]


@pytest.mark.parametrize(
    ("op", "kind"),
    # All of them convert 16 bits by the same function.
    [*product(POINTWISE, TYPES)]
    if FULL
    else [*product(POINTWISE, ["float32"]), *product(["GeluGrad", "SiluGrad"], ["bfloat16"])],
)
def test_pointwise(both: Both, op: str, kind: str) -> None:
    for shape in SHAPES:
        dy, y = normal(1, shape, kind), normal(2, shape, kind, 3)
        (want,), (got,) = both(op, dy, y)
        if op == "ReluGrad":
            np.testing.assert_array_equal(got, want)
        # Each promises an error below 1e-6 (float32) or of 10 roundings of at most 1.13.
        error = 2 * (10 * 1.13 * REAL[kind] if kind == "float64" else 1e-6)
        slope = np.abs(dy.astype(np.float64)) * (9 + np.abs(y.astype(np.float64)) ** 2)
        close(got, want, kind, error * (slope if op in ("TanhGrad", "SigmoidGrad") else abs(dy)))


@pytest.mark.parametrize("op", ["GeluGrad", "GeluTanhGrad", "SiluGrad"])
def test_slopes_far_out(both: Both, op: str) -> None:
    x = np.array([-1e30, -1e4, -30, -9, -0.0, 9, 30, 1e4, 1e30, np.nan], np.float32)
    (want,), (got,) = both(op, np.ones_like(x), x)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-6)


GATED = ["GatedGeluGrad", "GatedGeluTanhGrad", "GatedSiluGrad"]


@pytest.mark.parametrize(
    ("op", "kind"),
    [*product(GATED, TYPES)]
    if FULL
    else [*product(GATED, ["float32"]), ("GatedSiluGrad", "bfloat16")],
)
def test_gated(both: Both, op: str, kind: str) -> None:
    for shape in SHAPES:
        dy, gate, up = normal(1, shape, kind), normal(2, shape, kind, 3), normal(3, shape, kind)
        wants, gots = both(op, dy, gate, up, outputs=[True, True])
        (want,), (got,) = both(op.removesuffix("Grad"), gate, up)
        wants, gots = [*wants, want], [*gots, got]
        d, g, u = (np.abs(a.astype(np.float64)) for a in (dy, gate, up))
        # As above, and one more rounding.
        error = 4 * (10 * 1.13 * REAL[kind] if kind == "float64" else 1e-6)
        for want, got, size in zip(wants, gots, (d * u, d * g, g * u), strict=True):
            close(got, want, kind, error * size)


@pytest.mark.parametrize("op", GATED)
def test_gates_far_out(both: Both, op: str) -> None:
    gate = np.array([-np.inf, -1e30, -1e4, -30, -9, 9, 30, 1e4, 1e30, np.inf, np.nan], np.float32)
    (want,), (got,) = both(op.removesuffix("Grad"), gate, np.ones_like(gate))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


ROTATIONS = [
    ((2, 3, 5, 8), (1, 1, 5, 8)),
    ((2, 3, 2, 2, 6), (2, 1, 2, 1, 6)),
    ((3, 4, 100, 64), (100, 64)),
    ((0, 3, 4), (3, 4)),
]


@pytest.mark.parametrize("op", ["RotaryEmbedding", "RotaryEmbeddingGrad"])
@pytest.mark.parametrize("kind", list(TYPES) if FULL else ["float32", "bfloat16"])
def test_rotary(both: Both, op: str, kind: str) -> None:
    for shape, angles in ROTATIONS:
        x, cos, sin = normal(1, shape, kind), normal(2, angles, kind), normal(3, angles, kind)
        (want,), (got,) = both(op, x, cos, sin)
        # Two products and a sum, of three roundings, of numbers below 6 times 6; twice.
        close(got, want, kind, 2 * 3 * REAL[kind] * 72)


SOFTMAX = [
    ((4, 7), -1),
    ((1, 1), 1),
    ((0, 3), -1),
    ((9, 64), -1),
    ((3, 2056), -1),
    ((3, 1500), -1),
    ((2, 5, 301), 1),
    ((6, 33), 0),
    ((2, 3, 4, 1), 2),
]


@both_widths
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax(both: Both, kind: str, logarithm: bool) -> None:
    for shape, axis in SOFTMAX:
        dy = normal(3, shape, kind)
        x = normal(4, shape, "float64", 3)
        if x.size:
            x = x - x.max(axis=axis, keepdims=True)
            x = x - np.log(np.exp(x).sum(axis=axis, keepdims=True))
        y = (x if logarithm else np.exp(x)).astype(TYPES[kind])
        op = "LogSoftmaxGrad" if logarithm else "SoftmaxGrad"
        (want,), (got,) = both(op, dy, y, axis=axis)
        d, v = dy.astype(np.float64), y.astype(np.float64)
        n = shape[axis]
        # As for the CPU: a sum in at least four partial ones, exp, and a few roundings; twice.
        if logarithm:
            scale = np.exp(v) * np.abs(d).sum(axis=axis, keepdims=True)
        else:
            scale = v * np.abs(d * v).sum(axis=axis, keepdims=True)
        bound = (n / 4 + 40) * scale + 4 * np.abs(d) * (1 if logarithm else v)
        close(got, want, kind, 2 * REAL[kind] * bound + 1e-45)


LAYER = [((6, 7), -1), ((2, 3, 4), 1), ((130, 136), -1), ((2, 1500), 1), ((5, 4), 0), ((0, 3), -1)]


@both_widths
@pytest.mark.parametrize("wide_statistics", [False, True])
def test_layer_norm(both: Both, kind: str, wide_statistics: bool) -> None:
    for shape, axis in LAYER:
        at = axis % len(shape)
        x, dy = normal(5, shape, kind), normal(6, shape, kind)
        scale = normal(7, shape[at:], kind)
        axes = tuple(range(at, len(shape)))
        wide = x.astype(np.float64)
        given = np.dtype(np.float32) if wide_statistics else TYPES[kind]
        mean = wide.mean(axis=axes, keepdims=True).astype(given)
        inverse = (1 / np.sqrt(wide.var(axis=axes, keepdims=True) + 1e-5)).astype(given)
        op = "LayerNormalizationGrad"
        wants, gots = both(op, dy, x, scale, mean, inverse, outputs=[True] * 3, axis=axis)
        n, m = int(np.prod(shape[at:])), int(np.prod(shape[:at]))
        # Independent roundings grow with the root of the count, taken 4 times as large, twice.
        for want, got, count in zip(wants, gots, (n, m, m), strict=True):
            size = max(1.0, np.abs(want.astype(np.float64)).max(initial=0))
            close(got, want, kind, 2 * REAL[kind] * 4 * (np.sqrt(count) + 8) * size)


@both_widths
def test_rms_norm(both: Both, kind: str) -> None:
    for shape, axis in LAYER:
        at = axis % len(shape)
        x, dy = normal(5, shape, kind), normal(6, shape, kind)
        scale = normal(7, shape[at:], kind)
        square = (x.astype(np.float64) ** 2).mean(axis=tuple(range(at, len(shape))), keepdims=True)
        inverse = (1 / np.sqrt(square + 1e-5)).astype(np.float32)
        given = (dy, x, scale, inverse)
        wants, gots = both("RMSNormalizationGrad", *given, outputs=[True] * 2, axis=axis)
        n, m = int(np.prod(shape[at:])), int(np.prod(shape[:at]))
        # As for layer normalisation.
        for want, got, count in zip(wants, gots, (n, m), strict=True):
            size = max(1.0, np.abs(want.astype(np.float64)).max(initial=0))
            close(got, want, kind, 2 * REAL[kind] * 4 * (np.sqrt(count) + 8) * size)


def test_layer_norm_outputs_left_out(both: Both) -> None:
    x, dy, scale = (normal(i, s, "float32") for i, s in enumerate([(5, 6), (5, 6), (6,)]))
    given = (dy, x, scale, x.mean(1), 1 / x.std(1))
    for outputs in ([True], [True, True], [True, False, True]):
        wants, gots = both("LayerNormalizationGrad", *given, outputs=outputs)
        for want, got in zip(wants, gots, strict=True):
            np.testing.assert_allclose(got, want, rtol=0, atol=2.0**-24 * 100)
