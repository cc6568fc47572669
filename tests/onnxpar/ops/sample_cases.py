"""Small nodes that read images at given places."""

import numpy as np

from tests.onnxpar.ops.contrib_cases import contrib
from tests.onnxpar.ops.op_harness import Case

_ROIS = np.array([[0, 0, 5, 4], [1, 1, 3, 3], [-2, 0.5, 4, 9], [0.5, 0, 5, 2], [2, 2, 4, 3]])
_PLACED = {"r": _ROIS, "i": np.array([0, 2, 1, 2, 0])}
_ALIGN = {"x": "float[3,7,5,6]", "r": "float[N,4]", "i": "int64[N]"}

CASES = (
    Case("y = GridSample(x, g)", {"x": "float[N,6,4,5]", "g": "float[N,3,7,2]"}),
    Case(
        'y = GridSample<mode="nearest", padding_mode="border">(x, g)',
        {"x": "float[N,6,4,5]", "g": "float[N,3,7,2]"},
    ),
    Case(
        'y = GridSample<mode="bicubic", padding_mode="reflection">(x, g)',
        {"x": "float[N,6,4,5]", "g": "float[N,3,7,2]"},
        opset=16,
    ),
    Case("y = GridSample(x, g)", {"x": "float[N,3,4,3,5]", "g": "float[N,3,2,7,3]"}),
    Case(
        "y = RoiAlign<output_height=2, output_width=3, sampling_ratio=2>(x, r, i)",
        _ALIGN,
        feeds=_PLACED,
    ),
    Case(
        'y = RoiAlign<output_height=2, mode="max", sampling_ratio=1>(x, r, i)',
        {"x": "float[3,7,5,6]", "i": "int64[5]"},
        {"r": _ROIS.astype(np.float32)},
        {"i": _PLACED["i"]},
        opset=16,
    ),
    Case(
        "y = MaxRoiPool<pooled_shape=[2,3]>(x, r)",
        {"x": "float[3,7,5,6]"},
        {"r": np.concatenate([_PLACED["i"][:, None], np.abs(_ROIS)], axis=1).astype(np.float32)},
    ),
    contrib(
        "y = CropAndResize(x, r, i, s)",
        {"x": "float[3,7,5,6]", "r": "float[N,4]", "i": "int32[N]"},
        {"s": np.array([2, 3], np.int32)},
        feeds={"r": np.abs(_ROIS) / 10, "i": _PLACED["i"]},
    ),
)
