"""Normalisations by statistics of the batch, of groups of channels and of single rows."""

import numpy as np
from op_harness import Case

N5 = {"N": 5}
_VARIANCE = {"v": np.linspace(0.5, 2, 6)}
_CHANNELS = {k: "float[6]" for k in "sbmv"}


def _batch(attributes: str, shape: str, **more: object) -> Case:
    outputs = "y, p, q" if "training_mode=1" in attributes else "y"
    node = f"{outputs} = BatchNormalization<{attributes}>(x, s, b, m, v)"
    return Case(node, {"x": shape, **_CHANNELS}, N5, feeds=_VARIANCE, **more)  # type: ignore[arg-type]


_FAR = 1000 + np.arange(60, dtype=np.float32).reshape(5, 6, 2) ** 2 / 50
BATCH = (
    *(_batch("epsilon=0.1", shape) for shape in ("float[N,6]", "float[N,6,3]", "float[N,6,2,3]")),
    _batch("epsilon=0.1", "float[N,6,3]", opset=9),
    _batch("training_mode=1", "float[N,6]"),
    _batch("training_mode=1, momentum=0.7", "float[N,6,3]"),
    _batch("training_mode=1, epsilon=0.1", "float[N,6,3,2]", opset=14),
    # A mean of 1000 against a deviation of 20: a rounded mean is off by 1000/20 · 2^-24 = 3e-6.
    Case(
        "y, p, q = BatchNormalization<training_mode=1>(x, s, b, m, v)",
        {"x": "float[N,6,2]", **_CHANNELS},
        N5,
        feeds={"x": _FAR, **_VARIANCE},
        rtol=3e-5,
    ),
    Case(
        "y, p, q = BatchNormalization<training_mode=1>(x, s, b, m, v)",
        {"x": "float16[N,6,2]", **{k: "float16[6]" for k in "sbmv"}},
        N5,
        feeds=_VARIANCE,
        rtol=2e-3,
    ),
)

CASES = (*BATCH,)
