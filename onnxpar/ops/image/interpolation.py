"""Interpolation along one axis as a matrix; Resize interpolates one axis after another.

Resize is linear in its operand and separable: along each axis a result is a weighted sum of inputs.
`matrix` gives these weights, as the specification of Resize (opset 19) defines them. Antialiasing
widens the filter by the factor of reduction, as in Pillow. Weights beyond the border are added to
those at the border, unless `exclude_outside` drops them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar.core.errors import ModelError

AxisWeights = NDArray[np.float64]


@dataclass(frozen=True)
class Interpolation:
    """How one axis is resized.

    Attributes:
        size: Elements before.
        out: Elements after.
        scale: Ratio of elements after to elements before, from which coordinates are computed.
        mode: nearest, linear or cubic.
        coordinates: `coordinate_transformation_mode`.
        nearest: `nearest_mode`, or "": rounds up in a reduction, else down.
        cubic: `cubic_coeff_a`.
        exclude_outside: Whether weights beyond the border are dropped.
        antialias: Whether a reduction widens the filter.
    """

    size: int
    out: int
    scale: float
    mode: str = "nearest"
    coordinates: str = "half_pixel"
    nearest: str = "round_prefer_floor"
    cubic: float = -0.75
    exclude_outside: bool = False
    antialias: bool = False


def places(axis: Interpolation, real: type[np.floating[Any]] = np.float64) -> NDArray[Any]:
    """Returns the coordinate before of each element after, computed in the type `real`.

    Raises:
        ModelError: The mode of coordinates is unknown, or crops.
    """
    index, scale = np.arange(axis.out, dtype=real), real(axis.scale)
    half = real(0.5)
    if axis.coordinates == "half_pixel":
        found = (index + half) / scale - half
    elif axis.coordinates == "half_pixel_symmetric":
        stretch = real(axis.out) / (scale * real(axis.size))
        centre = real(axis.size) / real(2)
        found = centre * (real(1) - stretch) + ((index + half) / scale - half)
    elif axis.coordinates == "pytorch_half_pixel":
        found = (index + half) / scale - half if axis.out > 1 else np.zeros(1, real)
    elif axis.coordinates == "align_corners":
        last = real(axis.out - 1)
        found = index * real(axis.size - 1) / last if axis.out > 1 else np.zeros(1, real)
    elif axis.coordinates == "asymmetric":
        found = index / scale
    elif axis.coordinates == "tf_half_pixel_for_nn":
        found = (index + half) / scale
    else:
        raise ModelError(f"Resize: unknown 'coordinate_transformation_mode' {axis.coordinates!r}")
    return np.asarray(found, real)


def nearest(axis: Interpolation) -> NDArray[np.int64]:
    """Returns the index before of each element after, for mode nearest.

    Raises:
        ModelError: The mode of rounding is unknown.
    """
    # In float32, as in onnxruntime: the last bit decides what rounds up and what rounds down.
    at = places(axis, np.float32)
    half = np.float32(0.5)
    if axis.nearest == "round_prefer_floor":
        found = np.ceil(at - half)
    elif axis.nearest == "round_prefer_ceil":
        found = np.floor(at + half)
    elif axis.nearest == "floor" or (axis.nearest == "" and axis.scale >= 1):
        found = np.floor(at)
    elif axis.nearest in ("ceil", ""):
        found = np.ceil(at)
    else:
        raise ModelError(f"Resize: unknown 'nearest_mode' {axis.nearest!r}")
    return np.asarray(np.clip(found, 0, axis.size - 1), np.int64)


def repeats(axis: Interpolation) -> int:
    """How often each element is repeated in place; 0 if the axis is interpolated otherwise."""
    times, rest = divmod(axis.out, axis.size)
    if axis.mode != "nearest" or rest or times == 0:
        return 0
    return times if np.array_equal(nearest(axis), np.arange(axis.out) // times) else 0


@lru_cache(maxsize=256)
def matrix(axis: Interpolation) -> AxisWeights:
    """Returns the weights, [elements after, elements before].

    Raises:
        ModelError: A mode is unknown.
    """
    found = np.zeros((axis.out, axis.size))
    rows = np.arange(axis.out)
    if axis.mode == "nearest":
        found[rows, nearest(axis)] = 1
        return found
    if axis.mode not in ("linear", "cubic"):
        raise ModelError(f"Resize: expected a mode of nearest, linear or cubic, got {axis.mode!r}")
    wide = axis.antialias and axis.scale < 1
    at = places(axis)
    stretch = axis.scale if wide else 1.0
    support = (1 if axis.mode == "linear" else 2) / stretch
    if axis.mode == "linear" and not wide:
        at = np.clip(at, 0, axis.size - 1)
    kernel = _triangle if axis.mode == "linear" else _cubic(axis.cubic)
    first = np.floor(at - support).astype(np.int64)
    for tap in range(int(np.ceil(2 * support)) + 2):
        place = first + tap
        weight = kernel((place - at) * stretch)
        if axis.exclude_outside:
            weight = np.where((place < 0) | (place >= axis.size), 0, weight)
        np.add.at(found, (rows, np.clip(place, 0, axis.size - 1)), weight)
    if wide or axis.exclude_outside:
        found /= found.sum(axis=1, keepdims=True)
    return found


def _triangle(x: AxisWeights) -> AxisWeights:
    return np.asarray(np.maximum(0, 1 - np.abs(x)))


def _cubic(a: float) -> Callable[[AxisWeights], AxisWeights]:
    """Keys's kernel (Cubic convolution interpolation for digital image processing, 1981)."""

    def kernel(x: AxisWeights) -> AxisWeights:
        x = np.abs(x)
        near = ((a + 2) * x - (a + 3)) * x * x + 1
        far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
        return np.asarray(np.where(x < 1, near, np.where(x < 2, far, 0)))

    return kernel
