"""Sums over channels and the gradient of batch normalisation, against float64 numpy."""

import numpy as np
import pytest

from tests.runtime.kernels.one_node import Run

TYPES = [np.float32, np.float64]
UNIT = {np.float32: 2.0**-24, np.float64: 2.0**-53}
# Runs of one element, of a block and a bit, of more channels than one piece of work has.
SHAPES = [
    (6, 3),
    (700, 300),
    (1, 1, 1),
    (3, 5, 7),
    (2, 3, 20, 13),
    (2, 600, 5, 11),
    (3, 2, 40, 1, 40),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_norm(run: Run, shape: tuple[int, ...], dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(4)
    # A mean far from zero, which squares that are not centred would lose digits to.
    x, dy = ((rng.standard_normal(shape) + offset).astype(dtype) for offset in (50, 0.5))
    axes, channels = (0, *range(2, len(shape))), [-1 if d == 1 else 1 for d in range(len(shape))]
    wide, d = x.astype(np.float64), dy.astype(np.float64)
    mean = wide.mean(axes).astype(dtype)
    centred = wide - mean.astype(np.float64).reshape(channels)
    count = x.size // shape[1]
    # Sums of `count` terms in blocks of 256, each with at least 4 partial sums.
    terms = min(count, 256) / 4 + count / 256 + 8

    def close(got: np.ndarray, want: np.ndarray, magnitude: np.ndarray) -> None:
        assert got.dtype == dtype and got.shape == want.shape
        assert np.all(np.abs(got - want) <= terms * UNIT[dtype] * magnitude)

    (squares,) = run("ChannelSquareSum", x, mean)
    # x - mean is rounded once, to half a unit of the difference itself.
    close(squares, (centred**2).sum(axes), (centred**2).sum(axes))
    total, along = run("ChannelSums", dy, x, mean, outputs=[True, True])
    close(total, d.sum(axes), np.abs(d).sum(axes))
    close(along, (d * centred).sum(axes), np.abs(d * centred).sum(axes))

    inverse = (1 / np.sqrt((centred**2).mean(axes) + 1e-5)).astype(dtype)
    scale = rng.standard_normal(shape[1]).astype(dtype)
    slope = along * inverse
    given = (scale, mean, inverse, total, slope, np.array([count], dtype))
    (dx,) = run("BatchNormalizationInputGrad", dy, x, *given)
    s, _, i, t, p = (v.astype(np.float64).reshape(channels) for v in given[:5])
    parts = (d, t / count, centred * i * p / count)
    magnitude = np.abs(s * i) * sum(np.abs(part) for part in parts)
    assert dx.dtype == dtype
    # At most nine roundings.
    want = s * i * (parts[0] - parts[1] - parts[2])
    assert np.all(np.abs(dx - want) <= 9 * UNIT[dtype] * magnitude)


def test_without_images(run: Run) -> None:
    x, zero = np.zeros((0, 3, 4), np.float32), np.zeros(3, np.float32)
    for made in run("ChannelSums", x, x, zero, outputs=[True, True]):
        np.testing.assert_array_equal(made, zero)
