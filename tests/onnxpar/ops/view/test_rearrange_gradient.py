"""Gradients of DepthToSpace, SpaceToDepth, ReverseSequence and OneHot."""

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
@pytest.mark.parametrize("shape", ["double[N,8,S,1]", "double[2,4,3,2]", "double[1,4,N,S]"])
def test_depth_to_space(mode: str, shape: str) -> None:
    GradCase(
        f'y = DepthToSpace<blocksize=2, mode="{mode}">(x)',
        {"x": shape},
        (lambda torch, x: torch.nn.functional.pixel_shuffle(x, 2)) if mode == "CRD" else None,
    ).check()


@pytest.mark.parametrize("shape", ["double[N,2,4,2]", "double[2,1,6,2]", "double[S,1,2,4]"])
@pytest.mark.parametrize("opset", [20, 28])
def test_space_to_depth(opset: int, shape: str) -> None:
    # The mode came with opset 28.
    mode, torch = "", None
    if opset == 28:
        mode, torch = ', mode="CRD"', lambda torch, x: torch.nn.functional.pixel_unshuffle(x, 2)
    GradCase(f"y = SpaceToDepth<blocksize=2{mode}>(x)", {"x": shape}, torch, opset=opset).check()


@pytest.mark.parametrize(
    ("axes", "shape", "lengths"),
    [
        ((1, 0), "double[4,N,2]", [4, 1, 3, 2, 1]),
        ((0, 1), "double[N,4]", [4, 1, 3, 2, 1]),
        ((0, 1), "double[5,3]", [1, 3, 2, 3, 2]),
    ],
)
def test_reverse_sequence(axes: tuple[int, int], shape: str, lengths: list[int]) -> None:
    GradCase(
        f"y = ReverseSequence<batch_axis={axes[0]}, time_axis={axes[1]}>(x, s)",
        {"x": shape, "s": "int64[N]"},
        data={"s": lengths},
    ).check()


@pytest.mark.parametrize(
    ("axis", "shape"), [(-1, "int64[N]"), (0, "int64[N,2]"), (1, "int64[S,2]")]
)
def test_one_hot_values(axis: int, shape: str) -> None:
    GradCase(
        f"y = OneHot<axis={axis}>(i, d, v)",
        {"i": shape, "v": "double[2]"},
        consts={"d": np.array(3)},
    ).check()
