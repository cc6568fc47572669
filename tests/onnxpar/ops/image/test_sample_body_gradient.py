"""Gradients of GridSample, AffineGrid and RoiAlign."""

from typing import Any

import numpy as np
import pytest

from onnxpar.core.errors import ModelError
from tests.onnxpar.ops.gradient_harness import GradCase

_TORCH = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}


def places(size: int, align: int) -> Any:
    """Places for images of size x size, some outside, away from where a derivative jumps."""

    def draw(rng: np.random.Generator, shape: list[int]) -> np.ndarray:
        part = rng.uniform(0.1, 0.4, shape) + rng.choice([0, 0.5], shape)
        pixel = rng.integers(-1, size, shape) + part
        place = 2 * pixel / (size - 1) if align else (2 * pixel + 1) / size
        return np.asarray(place - 1)

    return draw


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grid_sample(mode: str, padding: str) -> None:
    align = int(padding == "border")

    def torch(torch: Any, x: Any, g: Any) -> Any:
        return torch.nn.functional.grid_sample(
            x, g, mode=_TORCH[mode], padding_mode=padding, align_corners=bool(align)
        )

    case = GradCase(
        f'y = GridSample<mode="{mode}", padding_mode="{padding}", align_corners={align}>(x, g)',
        {"x": "double[N,2,3,3]", "g": "double[N,1,3,2]"},
        torch,
        sizes={"N": 3},
        data={"g": places(3, align)},
        by=("x",) if mode == "nearest" else None,
        reference=False,  # onnx.reference computes places in float32
    )
    case.check_program()
    case.check_differences()
    case.check_torch()
    # All bodies consist of taps, which shard in the same way.
    if mode == "linear" and padding == "zeros":
        case.check_meshes()


def test_grid_sample_of_volumes() -> None:
    GradCase(
        "y = GridSample(x, g)",
        {"x": "double[2,1,3,3,3]", "g": "double[2,2,1,2,3]"},
        lambda torch, x, g: torch.nn.functional.grid_sample(x, g, align_corners=False),
        data={"g": places(3, 0)},
        reference=False,
    ).check()


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("sizes", [(3, 4), (2, 3), (2, 3, 2)], ids=str)
def test_affine_grid(sizes: tuple[int, ...], align: int) -> None:
    rank = len(sizes)
    GradCase(
        f"y = AffineGrid<align_corners={align}>(t, s)",
        {"t": f"double[5,{rank},{rank + 1}]"},
        lambda torch, t: torch.nn.functional.affine_grid(
            t, [5, 2, *sizes], align_corners=bool(align)
        ),
        consts={"s": np.array([5, 2, *sizes], np.int64)},
        reference=False,
    ).check()


@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
@pytest.mark.parametrize(("samples", "bins"), [(2, (2, 3)), (1, (3, 1)), (3, (1, 2))])
def test_roi_align(mode: str, samples: int, bins: tuple[int, int]) -> None:
    regions = np.array([[0.1, 0.2, 2.7, 1.9], [1, 1.1, 3.3, 3.2], [-1.4, 0.4, 2.1, 5.6]])
    case = GradCase(
        f'y = RoiAlign<coordinate_transformation_mode="{mode}", output_height={bins[0]}, '
        f"output_width={bins[1]}, sampling_ratio={samples}, spatial_scale=0.7>(x, r, i)",
        {"x": "double[2,2,3,2]", "r": "double[R,4]", "i": "int64[R]"},
        sizes={"R": 3},
        data={"r": regions, "i": [1, 0, 1]},
        reference=False,  # onnx.reference differs at the border
    )
    case.check_program()
    case.check_differences()
    if samples == 1 and mode == "half_pixel":
        case.check_meshes()


def test_samples_that_depend_on_the_region_are_refused() -> None:
    case = GradCase(
        "y = RoiAlign(x, r, i)",
        {"x": "double[2,2,4,5]", "r": "double[R,4]", "i": "int64[R]"},
        sizes={"R": 3},
    )
    with pytest.raises(ModelError, match="sampling_ratio"):
        _ = case.program
