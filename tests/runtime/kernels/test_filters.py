"""Turned weights of convolutions, against numpy."""

import numpy as np
import onnx
import pytest

from tests.runtime.kernels.one_node import Run

# One element of a kernel, nine, and others; several tiles of channels, and a part of one.
SHAPES = [((4, 3), 1), ((40, 33, 3, 3), 1), ((6, 18, 2, 5), 3), ((5, 1, 4), 5), ((0, 3, 3), 1)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("shape", "group"), SHAPES, ids=str)
def test_turned(run: Run, shape: tuple[int, ...], group: int, dtype: type[np.floating]) -> None:
    w = np.random.default_rng(1).standard_normal(shape).astype(dtype)
    many, few, kernel = shape[0] // group, shape[1], shape[2:]
    want = w.reshape(group, many, few, *kernel).swapaxes(1, 2)
    want = np.flip(want, tuple(range(3, want.ndim))).reshape(group * few, many, *kernel)
    (got,) = run("TurnedWeights", w, group=group)
    np.testing.assert_array_equal(got, want)


def test_narrow_type(run: Run) -> None:
    w = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    (got,) = run("TurnedWeights", w, narrow=onnx.TensorProto.BFLOAT16)
    np.testing.assert_array_equal(got, w.swapaxes(0, 1)[:, :, ::-1])
