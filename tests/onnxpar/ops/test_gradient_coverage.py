"""Every operator that is differentiable is differentiated at three shapes and beside PyTorch."""

from onnxpar.ops.operator import Missing
from onnxpar.ops.table import REGISTRY
from tests.onnxpar.ops.gradient_coverage import checked

SHAPES = 3
_HARNESS = "its tests build other programs than this folder's cases"
_SAME = "the same gradient, by the same function, as the operator of the default domain"
# Operators that cases of this folder check at fewer shapes, and why that is enough.
FEWER: dict[tuple[str, str], str] = {
    ("", "CenterCropPad"): "in training its body stands in its place, of Pad and Slice",
    ("", "RotaryEmbedding"): _HARNESS,
    ("", "Scatter"): "ScatterElements of an older opset",
    ("", "Upsample"): "Resize of an older opset",
    **dict.fromkeys([("", "QuantizeLinear"), ("", "DequantizeLinear")], "elementwise"),
    ("", "MaxUnpool"): "a gather of places; the shapes are those of MaxPool",
    ("", "Col2Im"): "the transposed convolution has cases",
    **dict.fromkeys([("", "AffineGrid"), ("", "GridSample"), ("", "RoiAlign")], "slow bodies"),
    **dict.fromkeys(
        [("com.microsoft", n) for n in ("QuantizeLinear", "DequantizeLinear", "GridSample")], _SAME
    ),
    **dict.fromkeys([("com.microsoft", n) for n in ("Attention", "MultiHeadAttention")], _HARNESS),
    **dict.fromkeys(
        [("com.microsoft", n) for n in ("BiasGelu", "FastGelu", "FusedGemm", "Gelu", "QuickGelu")],
        "its body's operators have cases of their own",
    ),
}
# Operators that PyTorch has in no form that tells more than the differences do, or not here: the
# package without torchvision has neither deformable convolutions nor regions of interest.
NOT_IN_PYTORCH = {("", n) for n in ("Col2Im", "DeformConv", "RoiAlign")}


def differentiable() -> set[tuple[str, str]]:
    return {(d.domain, d.op_type) for d in REGISTRY.defs if not isinstance(d.gradient, Missing)}


def test_three_shapes_each() -> None:
    found = checked()
    few = {
        op: sorted(found[op].shapes) if op in found else []
        for op in sorted(differentiable() - set(FEWER))
        if op not in found or len(found[op].shapes) < SHAPES
    }
    assert not few, f"differentiated at fewer than {SHAPES} shapes: {few}"


def test_pytorch_is_asked_where_it_has_the_operator() -> None:
    found = checked()
    unasked = {op for op in differentiable() if op in found and not found[op].torch}
    assert unasked <= NOT_IN_PYTORCH, unasked - NOT_IN_PYTORCH


def test_excuses_are_of_operators_that_are_differentiable() -> None:
    assert set(FEWER) <= differentiable()
