"""What an operand is to its operator: the scale or bias of a layer, or a running statistic."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

_SCALE_AND_BIAS: Mapping[str, tuple[int, ...]] = {
    "BatchNormalization": (1, 2),
    "Conv": (2,),
    "ConvTranspose": (2,),
    "DeformConv": (3,),
    "GRU": (3,),
    "Gemm": (2,),
    "GroupNormalization": (1, 2),
    "InstanceNormalization": (1, 2),
    "LSTM": (3, 7),
    "LayerNormalization": (1, 2),
    "PRelu": (1,),
    "RMSNormalization": (1,),
    "RNN": (3,),
}
# Biases of products, and scales of normalisations written out, stand on either side.
_VECTORS: Mapping[str, tuple[int, ...]] = {"Add": (0, 1), "Mul": (0, 1)}
_PRODUCTS = frozenset({"Conv", "ConvTranspose", "MatMul"})
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
    return any(maker is not None and maker.op_type in _PRODUCTS for maker in others)


def is_statistic(node: ir.Node, index: int) -> bool:
    """Tells whether an operand is a running mean or variance, which no gradient changes."""
    return node.domain in ("", "ai.onnx") and index in _STATISTICS.get(node.op_type, ())


def is_identity(node: ir.Node) -> bool:
    """Tells whether a node hands its operand on as it is."""
    return node.domain in ("", "ai.onnx") and node.op_type == "Identity"


def reads_elements(node: ir.Node) -> bool:
    """Tells whether a node reads more of its operands than how large they are."""
    return node.domain not in ("", "ai.onnx") or node.op_type not in ("Shape", "Size")


# -- what an operand is, of graphs as exporters write them -----------------------------------------

_WEIGHTS: Mapping[str, tuple[int, ...]] = {
    "Conv": (1,),
    "ConvTranspose": (1,),
    "DeformConv": (1,),
    "Einsum": (0, 1),
    "GRU": (1, 2),
    "Gemm": (0, 1),
    "LSTM": (1, 2),
    "MatMul": (0, 1),
    "RNN": (1, 2),
}
_REARRANGED = frozenset(
    {"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"}
)
_BIAS_OF: Mapping[str, int] = {"Conv": 2, "ConvTranspose": 2, "Gemm": 2}
_INVERSES: Mapping[str, str] = {"exp": "Exp", "neg": "Neg", "log": "Log"}
_INSTANCE = "InstanceNormalization"


def is_weight(node: ir.Node, index: int) -> bool:
    """Tells whether an operand stands where a layer has its weight.

    That is an operand of a product, a convolution or a recurrent layer, and the table that indices
    of the model's inputs are looked up in.
    """
    if node.domain not in ("", "ai.onnx"):
        return False
    if node.op_type == "Gather":
        return index == 0 and _from_input(node.inputs[1])
    return index in _WEIGHTS.get(node.op_type, ())


def _from_input(value: ir.Value | None) -> bool:
    """Tells whether a value is an input of the graph, rearranged at the most."""
    while value is not None and (maker := value.producer()) is not None:
        if not rearranges(maker):
            return False
        value = maker.inputs[0]
    return value is not None and value.is_graph_input()


def rearranges(node: ir.Node) -> bool:
    """Tells whether a node's result has the elements of its first operand, in another layout."""
    return node.domain in ("", "ai.onnx") and node.op_type in _REARRANGED


def is_instance_norm(node: ir.Node) -> bool:
    """Tells whether a node is the operator that exporters write group norms with."""
    return node.domain in ("", "ai.onnx") and node.op_type == _INSTANCE


def missing_bias(node: ir.Node) -> tuple[int, int] | None:
    """Returns the index and the size of the bias that a layer may have and this one has not.

    None where it has one, where its operator takes none, or where its weight is computed.
    """
    index = _BIAS_OF.get(node.op_type) if node.domain in ("", "ai.onnx") else None
    if index is None or (len(node.inputs) > index and node.inputs[index] is not None):
        return None
    weight = node.inputs[1]
    if weight is None or weight.const_value is None:
        return None
    sizes = weight.const_value.shape.numpy()
    if node.op_type == "Conv":
        return index, sizes[0]
    if node.op_type == "Gemm":
        return index, sizes[0 if node.attributes.get_int("transB", 0) else 1]
    return index, sizes[1] * node.attributes.get_int("group", 1)


def transposed(value: ir.Value, perm: tuple[int, ...]) -> ir.Node:
    """Returns a new node that permutes the dims of a value."""
    return ir.node("Transpose", [value], attributes={"perm": list(perm)})


def reshaped(value: ir.Value, shape: ir.Value) -> ir.Node:
    """Returns a new node that gives a value the sizes that a 1-D int64 tensor has."""
    return ir.node("Reshape", [value, shape])


def invertible(function: str) -> bool:
    """Tells whether `inverted` and `applied` know an element-wise function of PyTorch."""
    return function in _INVERSES


def inverted(function: str, array: NDArray[Any]) -> NDArray[Any]:
    """Returns that of which an element-wise function is an array; computed in 64 bits."""
    wide = array.astype(np.float64)
    if function == "neg":
        found = -wide
    else:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = np.log(wide) if function == "exp" else np.exp(wide)
    return found.astype(array.dtype)


def applied(function: str, value: ir.Value) -> ir.Node:
    """Returns a new node that computes an element-wise function of PyTorch."""
    return ir.node(_INVERSES[function], [value])
