"""The matrices of Resize against the interpolation of onnxruntime and of PyTorch."""

from importlib import import_module
from importlib.util import find_spec
from itertools import product

import numpy as np
import onnx
import pytest

from onnxpar.ops.image.interpolation import Interpolation, matrix, repeats
from tests.lockstep import evaluator

COORDINATES = (
    *("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric"),
)
SIZES = ((5, 10), (5, 7), (7, 3), (12, 5), (6, 18))


def by_onnxruntime(axis: Interpolation) -> np.ndarray:
    """The unit matrix, resized by onnxruntime."""
    node = onnx.helper.make_node(
        "Resize",
        ["x", "", "", "sizes"],
        ["y"],
        mode=axis.mode,
        coordinate_transformation_mode=axis.coordinates,
        nearest_mode=axis.nearest,
        exclude_outside=int(axis.exclude_outside),
        antialias=int(axis.antialias),
    )
    sizes = np.array([1, 1, axis.size, axis.out], np.int64)
    real = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", real, [1, 1, axis.size, axis.size])],
        [onnx.ValueInfoProto(name="y")],
        [onnx.numpy_helper.from_array(sizes, "sizes")],
    )
    opset = [onnx.helper.make_opsetid("", 19)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=9)
    unit = np.eye(axis.size, dtype=np.float32)[None, None]
    return np.asarray(evaluator(model, False)({"x": unit})["y"][0, 0].T)


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_onnxruntime(mode: str, coordinates: str) -> None:
    nearest = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    for size, out in SIZES:
        variants = product(nearest if mode == "nearest" else nearest[:1], (False, True))
        for rounding, flag in variants:
            wide = flag and mode != "nearest"
            outside = flag and mode == "cubic"
            how = (mode, coordinates, rounding, -0.75, outside, wide)
            axis = Interpolation(size, out, out / size, *how)
            # Weights are at most 1; onnxruntime computes them in float32: 8 ulp.
            np.testing.assert_allclose(
                matrix(axis), by_onnxruntime(axis), atol=1e-6, err_msg=str(axis)
            )


@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.parametrize(("size", "out"), SIZES)
def test_pytorch(size: int, out: int) -> None:
    torch = import_module("torch")
    unit = torch.eye(size, dtype=torch.float64)
    for corners, antialias in ((False, False), (True, False), (False, True)):
        made = torch.nn.functional.interpolate(
            unit[None, None],
            (size, out),
            mode="bicubic",
            align_corners=corners,
            antialias=antialias and out < size,
        )
        coordinates = "align_corners" if corners else "half_pixel"
        # Pillow, and so PyTorch, widens with another coefficient, and drops weights outside.
        wide = antialias and out < size
        how = ("cubic", coordinates, "floor", -0.5 if wide else -0.75, wide, wide)
        axis = Interpolation(size, out, out / size, *how)
        # A cubic polynomial divided by a sum of up to 12 in float64: 45 units of 2e-16.
        np.testing.assert_allclose(matrix(axis).T, made[0, 0].numpy(), atol=1e-14)


def test_repeated_elements() -> None:
    assert repeats(Interpolation(4, 8, 2.0)) == 2
    assert repeats(Interpolation(4, 12, 3.0, coordinates="asymmetric", nearest="floor")) == 3
    assert repeats(Interpolation(4, 8, 2.0, coordinates="asymmetric", nearest="ceil")) == 0
    assert repeats(Interpolation(4, 12, 3.0, coordinates="align_corners")) == 0
    assert repeats(Interpolation(4, 8, 2.0, mode="linear")) == 0
    assert repeats(Interpolation(4, 7, 1.75)) == 0
