"""Rotary positions and their gradient, against float64 numpy."""

import numpy as np
import pytest

from tests.runtime.kernels.one_node import Run

UNIT = {np.float32: 2.0**-24, np.float64: 2.0**-53}
# The shapes of x and of its angles: broadcast over heads, over samples, over groups in turn, over
# nothing, over all; fewer dims; several pieces of work; no rows.
SHAPES = [
    ((2, 3, 5, 8), (1, 1, 5, 8)),
    ((2, 3, 5, 8), (2, 1, 5, 8)),
    ((2, 3, 2, 2, 6), (2, 1, 2, 1, 6)),
    ((3, 1, 5, 2), (1, 1, 5, 2)),
    ((4, 6), (4, 6)),
    ((4, 6), (6,)),
    ((3, 4, 6), (4, 6)),
    ((3, 4, 100, 64), (100, 64)),
    ((0, 3, 4), (3, 4)),
    ((8,), (8,)),
]


def turned(x: np.ndarray) -> np.ndarray:
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([-b, a], axis=-1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "angles"), SHAPES, ids=str)
def test_rotary(
    run: Run, shape: tuple[int, ...], angles: tuple[int, ...], dtype: type[np.floating]
) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal(shape).astype(dtype)
    # Those of both halves differ.
    cos, sin = (rng.standard_normal(angles).astype(dtype) for _ in "cs")
    wide, c, s = (a.astype(np.float64) for a in (x, cos, sin))
    for name, want in (
        ("RotaryEmbedding", wide * c + turned(wide) * s),
        # The transpose of `turned` is its opposite.
        ("RotaryEmbeddingGrad", wide * c - turned(wide * s)),
    ):
        (y,) = run(name, x, cos, sin)
        assert y.dtype == dtype and y.shape == shape
        # Two products and a sum, of three roundings.
        size = np.abs(wide * c) + np.abs(turned(wide)) * np.abs(s) + np.abs(turned(wide * s))
        assert np.all(np.abs(y - want) <= 2 * UNIT[dtype] * size)


@pytest.mark.parametrize(
    ("x", "angles", "said"),
    [
        ((2, 3), (3,), "an even number of elements in the last dim"),
        ((2, 4), (2,), "expected one that broadcasts to that of x, [2, 4]"),
        ((2, 4), (3, 4), "expected one that broadcasts to that of x, [2, 4]"),
        ((4,), (1, 4), "expected one that broadcasts to that of x, [4]"),
    ],
)
def test_shapes_that_do_not_fit(
    run: Run, x: tuple[int, ...], angles: tuple[int, ...], said: str
) -> None:
    given = [np.zeros(shape, np.float32) for shape in (x, angles, angles)]
    with pytest.raises(Exception) as error:
        run("RotaryEmbedding", *given)
    assert said in str(error.value)
