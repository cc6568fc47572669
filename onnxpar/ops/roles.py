"""What an operand is to its operator: the scale or bias of a layer, or a running statistic."""

from collections.abc import Mapping

import onnx_ir as ir

_SCALE_AND_BIAS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
}
# Biases of products, and scales of normalisations written out, stand on either side.
_VECTORS: Mapping[str, tuple[int, ...]] = {"Add": (0, 1), "Mul": (0, 1)}
_PRODUCTS: Mapping[str, bool] = {"Conv": True, "ConvTranspose": True, "MatMul": True}
_STATISTICS: Mapping[str, tuple[int, ...]] = {"BatchNormalization": (3, 4)}


def is_scale_or_bias(node: ir.Node, index: int) -> bool:
    """Tells whether an operand stands where a layer has its scale or its bias.

    That is the place of one in a normalisation, Gemm or convolution, or a vector that is added to
    or multiplied with something.
    """
    value = node.inputs[index]
    if node.domain not in ("", "ai.onnx") or value is None or value.shape is None:
        return False
    if index in _SCALE_AND_BIAS.get(node.op_type, ()):
        return True
    return index in _VECTORS.get(node.op_type, ()) and len(value.shape) == 1


def is_layer_bias(node: ir.Node, index: int) -> bool:
    """Tells whether an operand is a scale or bias even where it has but one element.

    A vector of one element that is added is the bias of a layer only behind the layer's product;
    elsewhere it may as well be a constant of a formula.
    """
    if not is_scale_or_bias(node, index):
        return False
    if index in _SCALE_AND_BIAS.get(node.op_type, ()):
        return True
    others = (v.producer() for i, v in enumerate(node.inputs) if i != index and v is not None)
    return any(maker is not None and _PRODUCTS.get(maker.op_type, False) for maker in others)


def is_statistic(node: ir.Node, index: int) -> bool:
    """Tells whether an operand is a running mean or variance, which no gradient changes."""
    return node.domain in ("", "ai.onnx") and index in _STATISTICS.get(node.op_type, ())


def is_identity(node: ir.Node) -> bool:
    """Tells whether a node hands its operand on as it is."""
    return node.domain in ("", "ai.onnx") and node.op_type == "Identity"


def reads_elements(node: ir.Node) -> bool:
    """Tells whether a node reads more of its operands than how large they are."""
    return node.domain not in ("", "ai.onnx") or node.op_type not in ("Shape", "Size")
