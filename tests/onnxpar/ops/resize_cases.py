"""Small nodes of Resize and Upsample."""

import numpy as np

from tests.onnxpar.ops.op_harness import HALF, Array, Case


def _to(*sizes: int) -> dict[str, Array]:
    return {"s": np.array(sizes, np.int64)}


def _by(*scales: float) -> dict[str, Array]:
    return {"s": np.array(scales, np.float32)}


def _sized(attributes: str, shape: str, *sizes: int, rtol: float = 1e-5) -> Case:
    text = f"y = Resize<{attributes}>(x, , , s)"
    return Case(text, {"x": shape}, _to(*sizes), opset=19, rtol=rtol)


def _scaled(attributes: str, shape: str, *scales: float, opset: int = 19) -> Case:
    return Case(f"y = Resize<{attributes}>(x, , s)", {"x": shape}, _by(*scales), opset=opset)


_AXES = "axes=[2,3]"
CASES = (
    # An enlargement by integers: shards line up if the sharding is even, such as 9 over 3.
    _scaled('mode="nearest"', "float[2,2,9,3]", 1, 1, 2, 2),
    _scaled(
        'mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"',
        "uint8[2,3,3,5]",
        1,
        1,
        3,
        2,
    ),
    _scaled('mode="nearest", axes=[2,3]', "float[N,3,3,5]", 2, 2),
    Case(
        'y = Resize<mode="nearest">(x, , s)',
        {"x": "float[N,3,H,5]"},
        _by(1, 1, 2, 2),
        sizes={"N": 5, "H": 4},
    ),
    _scaled('mode="linear"', "float[N,2,5,6]", 1, 1, 2, 1.5),
    _scaled('mode="linear"', "uint8[N,2,5,6]", 1, 1, 2, 1),
    _sized(
        f'mode="linear", coordinate_transformation_mode="align_corners", {_AXES}',
        "float[N,2,7,6]",
        4,
        9,
    ),
    _sized(f'mode="linear", antialias=1, {_AXES}', "float[N,2,7,6]", 3, 4),
    _sized(f'mode="cubic", {_AXES}', "float[N,2,5,6]", 7, 12),
    _sized(f'mode="cubic", exclude_outside=1, antialias=1, {_AXES}', "float[N,2,7,6]", 3, 4),
    _sized(
        f'mode="linear", keep_aspect_ratio_policy="not_larger", {_AXES}', "float[N,2,4,6]", 7, 7
    ),
    _sized('mode="linear"', "float[4,6,5,7]", 4, 6, 7, 3),
    _sized('mode="linear", axes=[-1]', "float[N,3,5]", 8),
    _sized('mode="nearest", axes=[2,3,4]', "float[N,2,3,4,5]", 6, 4, 7),
    _sized('mode="linear", axes=[2,3,4]', "float[N,2,3,4,5]", 6, 3, 7),
    _sized(f'mode="linear", {_AXES}', "float16[N,2,5,6]", 3, 9, rtol=HALF),
    Case('y = Resize<mode="nearest">(x, s)', {"x": "float[2,3,7,5]"}, _by(1, 1, 0.6, 2), opset=10),
    Case(
        "y = Resize(x, r, s)",
        {"x": "float[2,3,3,5]"},
        _by(1, 1, 2, 1) | {"r": np.array([], np.float32)},
        opset=11,
    ),
    Case('y = Upsample<mode="linear">(x, s)', {"x": "float[2,3,4,6]"}, _by(1, 1, 2, 3), opset=9),
    Case(
        'y = Resize<mode="linear", coordinate_transformation_mode="tf_crop_and_resize", '
        "extrapolation_value=3.0>(x, r, , s)",
        {"x": "float[4,3,5,6]"},
        _to(4, 3, 6, 4) | {"r": np.array([0, 0, -0.2, 0.1, 1, 1, 1.2, 0.8], np.float32)},
    ),
)
