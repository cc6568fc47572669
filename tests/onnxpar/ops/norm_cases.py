"""Normalisations by statistics of the batch, of groups of channels and of single rows."""

import numpy as np

from tests.onnxpar.ops.op_harness import HALF, Case

_VARIANCE = {"v": np.linspace(0.5, 2, 6)}
_CHANNELS = {k: "float[6]" for k in "sbmv"}


def _batch(attributes: str, shape: str, **more: object) -> Case:
    outputs = "y, p, q" if "training_mode=1" in attributes else "y"
    node = f"{outputs} = BatchNormalization<{attributes}>(x, s, b, m, v)"
    return Case(node, {"x": shape, **_CHANNELS}, feeds=_VARIANCE, **more)  # type: ignore[arg-type]


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
        feeds={"x": _FAR, **_VARIANCE},
        rtol=3e-5,
    ),
    Case(
        "y, p, q = BatchNormalization<training_mode=1>(x, s, b, m, v)",
        {"x": "float16[N,6,2]", **{k: "float16[6]" for k in "sbmv"}},
        feeds=_VARIANCE,
        rtol=HALF,
    ),
)

_WITH_ZEROS = np.arange(30).reshape(5, 6) * (np.arange(5) != 2)[:, None]
_ROWS = {"x": "float[N,3,7]", "s": "float[7]"}
ROWS = (
    Case("y = RMSNormalization(x, s)", _ROWS, opset=23),
    Case(
        "y = RMSNormalization<axis=1, epsilon=0.1>(x, s)",
        {"x": "float[N,3,5]", "s": "float[3,5]"},
        opset=23,
    ),
    Case(
        "y = RMSNormalization<axis=-1>(x, s)",
        {"x": "float16[N,7]", "s": "float16[7]"},
        opset=23,
        rtol=HALF,
    ),
    Case("y, i = SimplifiedLayerNormalization(x, s)", _ROWS),
    Case("y = SimplifiedLayerNormalization<epsilon=0.1>(x, s)", _ROWS),
    Case("y = MeanVarianceNormalization(x)", {"x": "float[N,3,2,6]"}),
    Case("y = MeanVarianceNormalization<axes=[1]>(x)", {"x": "float[N,7]"}),
    Case("y = LpNormalization<axis=1, p=2>(x)", {"x": "float[N,7,3]"}),
    Case("y = LpNormalization<axis=-1, p=1>(x)", {"x": "float[N,6]"}),
    Case("y = LpNormalization(x)", {"x": "float[N,6]"}, feeds={"x": _WITH_ZEROS}),
)
NORMALIZER = tuple(
    Case(f'y = ai.onnx.ml.Normalizer<norm="{norm}">(x)', {"x": shape}, feeds=feeds)
    for norm in ("MAX", "L1", "L2")
    for shape, feeds in (
        ("float[N,7]", {}),
        ("float[7]", {}),
        ("int64[N,6]", {"x": _WITH_ZEROS - 6 * (_WITH_ZEROS > 20)}),
        ("double[N,6]", {"x": -_WITH_ZEROS}),
    )
)
_AFFINE = {k: "float[6]" for k in "sb"}
GROUPS = (
    Case("y = InstanceNormalization(x, s, b)", {"x": "float[N,6,7]", **_AFFINE}),
    Case("y = InstanceNormalization<epsilon=0.1>(x, s, b)", {"x": "float[N,6,3,5]", **_AFFINE}),
    Case(
        "y = GroupNormalization<num_groups=3>(x, s, b)", {"x": "float[N,6,5]", **_AFFINE}, opset=21
    ),
    Case(
        "y = GroupNormalization<num_groups=2, epsilon=0.1>(x, s, b)",
        {"x": "float[N,6,3,2]", **_AFFINE},
        opset=21,
    ),
    Case("y = LRN<size=3, alpha=0.5, beta=0.6, bias=2.0>(x)", {"x": "float[N,6,2,3]"}),
)


def _skip(call: str, skip: str = "float[N,3,7]", kind: str = "float") -> Case:
    outputs, rest = call.split(" = ")
    vectors = {k: "float[7]" for k in "gbc" if f" {k}" in rest}
    operands = {"x": "float[N,3,7]", "k": skip, **vectors}
    operands = {k: v.replace("float", kind) for k, v in operands.items()}
    text = f"{outputs} = com.microsoft.{rest}"
    return Case(text, operands) if kind == "float" else Case(text, operands, rtol=HALF)


RESIDUAL = (
    _skip("y = SkipLayerNormalization<epsilon=0.1>(x, k, g)"),
    _skip("y, m, i, t = SkipLayerNormalization(x, k, g, b, c)"),
    _skip("y, , , t = SkipLayerNormalization(x, k, g, b)"),
    _skip("y, , , t = SkipLayerNormalization<epsilon=0.1>(x, k, g, , c)", "float[1,3,7]"),
    _skip("y, , , t = SkipSimplifiedLayerNormalization<epsilon=0.1>(x, k, g)"),
    _skip("y, , i = SkipSimplifiedLayerNormalization(x, k, g, c)"),
    _skip("y, , , t = SkipSimplifiedLayerNormalization(x, k, g)", kind="float16"),
)

CASES = (*BATCH, *ROWS, *NORMALIZER, *GROUPS, *RESIDUAL)
