"""Gradients of Resize and Upsample."""

from typing import Any

import numpy as np
import pytest

from onnxpar.core.errors import ModelError
from tests.onnxpar.ops.gradient_harness import GradCase


def resized(mode: str, size: tuple[int, ...], **more: Any) -> Any:
    return lambda torch, x: torch.nn.functional.interpolate(x, size, mode=mode, **more)


def case(attributes: str, shape: str, size: tuple[int, ...], torch: Any, **more: Any) -> GradCase:
    axes = list(range(2, 2 + len(size)))
    return GradCase(
        f"y = Resize<axes={axes}, {attributes}>(x, , , s)",
        {"x": shape},
        torch,
        sizes={"N": 3},
        consts={"s": np.array(size, np.int64)},
        **more,
    )


@pytest.mark.parametrize(
    ("shape", "size"),
    [("double[N,1,4]", (7,)), ("double[N,1,4,3]", (3, 6)), ("double[2,1,3,4]", (3, 3))],
    ids=str,
)
@pytest.mark.parametrize("corners", [False, True])
def test_linear(shape: str, size: tuple[int, ...], corners: bool) -> None:
    mode = "linear" if len(size) == 1 else "bilinear"
    how = "align_corners" if corners else "pytorch_half_pixel"
    text = f'mode="linear", coordinate_transformation_mode="{how}"'
    case(text, shape, size, resized(mode, size, align_corners=corners)).check()


@pytest.mark.parametrize("size", [(5, 6), (3, 4), (7, 2)])
def test_cubic(size: tuple[int, ...]) -> None:
    text = 'mode="cubic", coordinate_transformation_mode="pytorch_half_pixel"'
    # onnx.reference, which computes the loss, has weights in float32. test_interpolation compares
    # ours in float64, and they shard as for linear.
    rounded = {"rtol": 1e-5, "torch_rtol": 1e-6}
    cubic = case(text, "double[N,1,4,3]", size, resized("bicubic", size), **rounded)
    cubic.check_program()
    cubic.check_differences()
    cubic.check_torch()


@pytest.mark.parametrize("size", [(8, 6), (3, 5), (8, 3)])
def test_nearest(size: tuple[int, ...]) -> None:
    text = 'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"'
    case(text, "double[N,1,4,3]", size, resized("nearest", size)).check()


def test_the_middle_one_of_three_axes() -> None:
    text = 'mode="linear", coordinate_transformation_mode="half_pixel"'
    case(text, "double[2,1,3,2,2]", (5, 2, 3), resized("trilinear", (5, 2, 3))).check()


def test_repeated_elements_of_an_image_of_any_size() -> None:
    GradCase(
        "y = Resize(x, , s)",
        {"x": "double[N,1,S,2]"},
        lambda torch, x: x.repeat_interleave(2, 2).repeat_interleave(3, 3),
        consts={"s": np.array([1, 1, 2, 3], np.float32)},
        sizes={"N": 2, "S": 3},
        opset=13,
    ).check()


def test_an_image_of_unknown_size_is_refused() -> None:
    refused = GradCase(
        'y = Resize<mode="linear">(x, , s)',
        {"x": "double[N,2,S,3]"},
        consts={"s": np.array([1, 1, 2, 3], np.float32)},
    )
    with pytest.raises(ModelError, match="needs constant sizes"):
        _ = refused.program
