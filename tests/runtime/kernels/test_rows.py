"""Gradients over rows, softmax and layer normalisation, against float64 numpy."""

import numpy as np
import onnx
import pytest

from tests.runtime.kernels.one_node import Run, log_softmax

TYPES = [np.float32, np.float64]
UNIT = {np.float32: 2.0**-24, np.float64: 2.0**-53}


SOFTMAX = [
    ((4, 7), -1),
    ((1, 1), 1),
    ((0, 3), -1),
    ((5, 20001), -1),
    ((3, 5, 301), 1),
    ((6, 33), 0),
    ((2, 3, 4, 1), 2),
    ((2, 3, 4, 5), -3),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "axis"), SOFTMAX, ids=str)
@pytest.mark.parametrize("logarithm", [False, True])
def test_softmax(
    run: Run, shape: tuple[int, ...], axis: int, logarithm: bool, dtype: type[np.floating]
) -> None:
    rng = np.random.default_rng(3)
    dy = rng.standard_normal(shape).astype(dtype)
    y = log_softmax(3 * rng.standard_normal(shape), axis) if dy.size else dy
    y = (y if logarithm else np.exp(y)).astype(dtype)
    d, v = dy.astype(np.float64), y.astype(np.float64)
    if logarithm:
        want = d - np.exp(v) * d.sum(axis=axis, keepdims=True)
    else:
        want = v * (d - (d * v).sum(axis=axis, keepdims=True))
    name = "LogSoftmaxGrad" if logarithm else "SoftmaxGrad"
    (dx,) = run(name, dy, y, axis=axis)
    assert dx.dtype == dtype
    # A sum of n terms errs by at most n units of the sum of their magnitudes, and in fact, with
    # four or more partial sums, by far less; all else is a few roundings. exp errs by 2 units and
    # by that of the argument, whose magnitude is below 40.
    n = shape[axis]
    magnitude = np.abs(d).sum(axis=axis, keepdims=True)
    scale = np.exp(v) * magnitude if logarithm else v * (np.abs(d * v).sum(axis, keepdims=True))
    bound = UNIT[dtype] * ((n / 4 + 40) * scale + 4 * np.abs(d) * (1 if logarithm else v))
    assert np.all(np.abs(dx - want) <= bound + 1e-45)


LAYER = [((6, 7), -1), ((2, 3, 4), 1), ((130, 129), -1), ((1, 20000), 1), ((5, 4), 0)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "axis"), LAYER, ids=str)
@pytest.mark.parametrize("statistics", TYPES)
def test_layer_norm(
    run: Run,
    shape: tuple[int, ...],
    axis: int,
    dtype: type[np.floating],
    statistics: type[np.floating],
) -> None:
    rng = np.random.default_rng(4)
    at = axis % len(shape)
    x = (rng.standard_normal(shape) + 0.5).astype(dtype)
    dy = rng.standard_normal(shape).astype(dtype)
    scale = rng.standard_normal(shape[at:]).astype(dtype)
    axes = tuple(range(at, len(shape)))
    mean = x.astype(np.float64).mean(axis=axes, keepdims=True).astype(statistics)
    deviation = x.astype(np.float64).std(axis=axes, keepdims=True)
    inverse = (1 / np.sqrt(deviation**2 + 1e-5)).astype(statistics)
    outputs = run(
        "LayerNormalizationGrad", dy, x, scale, mean, inverse, outputs=[True] * 3, axis=axis
    )
    d = dy.astype(np.float64)
    h = (x.astype(np.float64) - mean) * inverse.astype(np.float64)
    w = d * scale
    dx = inverse * (
        w - w.mean(axis=axes, keepdims=True) - h * (w * h).mean(axis=axes, keepdims=True)
    )
    rows = tuple(range(at))
    want = [dx, (d * h).sum(axis=rows), d.sum(axis=rows)]
    # Sums of up to 130 rows or means of 20000 elements, in at least 4 partial sums: errors of
    # independent roundings grow with the square root of the count, taken here 4 times as large.
    n, m = x[(0,) * at].size, x.size // scale.size
    unit = UNIT[dtype]
    if dtype == np.float64 and statistics == np.float32:
        assert outputs[0].dtype == np.float64
    for got, wanted, count in zip(outputs, want, (n, m, m), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=unit * 4 * (np.sqrt(count) + 8) * max(1, abs(wanted).max())
        )


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "axis"), LAYER, ids=str)
def test_rms_norm(run: Run, shape: tuple[int, ...], axis: int, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(4)
    at = axis % len(shape)
    axes, rows = tuple(range(at, len(shape))), tuple(range(at))
    x, dy = (rng.standard_normal(shape).astype(dtype) for _ in "xy")
    scale = rng.standard_normal(shape[at:]).astype(dtype)
    wide, d = x.astype(np.float64), dy.astype(np.float64)
    square = (wide**2).mean(axis=axes, keepdims=True)
    inverse = (1 / np.sqrt(square + 1e-5)).astype(np.float32)
    outputs = run("RMSNormalizationGrad", dy, x, scale, inverse, outputs=[True] * 2, axis=axis)
    h, w = wide * inverse.astype(np.float64), d * scale
    want = [inverse * (w - h * (w * h).mean(axis=axes, keepdims=True)), (d * h).sum(axis=rows)]
    # As for layer normalisation.
    for got, wanted, count in zip(outputs, want, (scale.size, x.size // scale.size), strict=True):
        assert got.dtype == dtype
        bound = UNIT[dtype] * 4 * (np.sqrt(count) + 8) * max(1, abs(wanted).max())
        np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)
    (alone,) = run("RMSNormalizationGrad", dy, x, scale, inverse, outputs=[True], axis=axis)
    np.testing.assert_array_equal(alone, outputs[0])


def test_layer_norm_outputs_left_out(run: Run) -> None:
    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal((5, 6)).astype(np.float32) for _ in range(2))
    scale = rng.standard_normal(6).astype(np.float32)
    mean, inverse = x.mean(1), 1 / x.std(1)
    given = (dy, x, scale, mean, inverse)
    everything = run("LayerNormalizationGrad", *given, outputs=[True] * 3)
    for wanted in ([True], [True, True], [True, False, True]):
        some = run("LayerNormalizationGrad", *given, outputs=wanted)
        kept = [y for y, keep in zip(everything, wanted, strict=False) if keep]
        for got, full in zip(some, kept, strict=True):
            np.testing.assert_array_equal(got, full)


def test_layer_norm_without_rows(run: Run) -> None:
    x = np.zeros((0, 3), np.float32)
    none = np.zeros((0, 1), np.float32)
    dx, dscale, dbias = run(
        "LayerNormalizationGrad", x, x, np.ones(3, np.float32), none, none, outputs=[True] * 3
    )
    assert dx.shape == (0, 3)
    np.testing.assert_array_equal([dscale, dbias], np.zeros((2, 3)))


@pytest.mark.parametrize("kind", [onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16])
def test_narrow_types(run: Run, kind: int) -> None:
    y = np.exp(log_softmax(np.random.default_rng(2).standard_normal((9, 33)), 1))
    # 8 bits, so that the casts are exact.
    y = (np.round(y * 256) / 256).astype(np.float32)
    dy = np.random.default_rng(3).integers(-16, 17, (9, 33)).astype(np.float32)
    (dx,) = run("SoftmaxGrad", dy, y, narrow=kind)
    want = y * (dy - (dy * y).sum(axis=1, keepdims=True))
    half = 2.0**-11 if kind == onnx.TensorProto.FLOAT16 else 2.0**-8
    # All is exact but the rounding of the result; float16 has steps of 2^-24 below 2^-14.
    np.testing.assert_allclose(dx, want, rtol=half, atol=2.0**-25)
