"""The roles of operands: weight, scale or bias of a layer, running statistic."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.ops.registry import Registry
from onnxpar.ops.slots import NO_ROLES, Roles


def _roles(node: ir.Node, registry: Registry) -> Roles:
    definition = registry.of(node)
    return NO_ROLES if definition is None else definition.roles


def is_scale_or_bias(node: ir.Node, index: int, registry: Registry) -> bool:
    """Whether an operand is in the position of a layer's scale or bias.

    That is an operand of a normalisation, Gemm or convolution, or a vector that is added to or
    multiplied by something.
    """
    value = node.inputs[index]
    if value is None or value.shape is None:
        return False
    roles = _roles(node, registry)
    return index in roles.vectors or (index in roles.row_vectors and len(value.shape) == 1)


def is_layer_bias(node: ir.Node, index: int, registry: Registry) -> bool:
    """Whether an operand is a scale or bias even if it has only one element.

    A vector of one element that is added is a layer's bias only after the layer's product;
    elsewhere it may be a constant of a formula.
    """
    if not is_scale_or_bias(node, index, registry):
        return False
    if index in _roles(node, registry).vectors:
        return True
    others = (v.producer() for i, v in enumerate(node.inputs) if i != index and v is not None)
    return any(maker is not None and _roles(maker, registry).product for maker in others)


def is_statistic(node: ir.Node, index: int, registry: Registry) -> bool:
    """Whether an operand is a running mean or variance, which no gradient changes."""
    return index in _roles(node, registry).statistics


def is_identity(node: ir.Node) -> bool:
    """Whether a node returns its operand unchanged."""
    return not node.domain and node.op_type == "Identity"


def reads_elements(node: ir.Node, registry: Registry) -> bool:
    """Whether a node reads more of its operands than their shapes."""
    definition = registry.of(node)
    return definition is None or not definition.reads_shape_only


# -- roles in graphs that exporters write ----------------------------------------------------------

_INVERSES: Mapping[str, str] = {"exp": "Exp", "neg": "Neg", "log": "Log"}


def is_weight(node: ir.Node, index: int, registry: Registry) -> bool:
    """Whether an operand is in the position of a layer's weight.

    That is an operand of a product, a convolution or a recurrent layer, or a table in which indices
    from the model's inputs are looked up.
    """
    roles = _roles(node, registry)
    if index not in roles.weights:
        return False
    return roles.indexed_by is None or _from_input(node.inputs[roles.indexed_by], registry)


def _from_input(value: ir.Value | None, registry: Registry) -> bool:
    """Whether a value is an input of the graph, perhaps rearranged."""
    while value is not None and (maker := value.producer()) is not None:
        if not rearranges(maker, registry):
            return False
        value = maker.inputs[0]
    return value is not None and value.is_graph_input()


def rearranges(node: ir.Node, registry: Registry) -> bool:
    """Whether a node's result has the elements of its first operand in another order or shape."""
    return _roles(node, registry).rearranges


def expressed_layer(node: ir.Node, registry: Registry) -> str:
    """Returns the layer that exporters express by a node with a constant scale and bias, or ""."""
    return _roles(node, registry).expresses


def missing_bias(node: ir.Node, registry: Registry) -> tuple[int, int] | None:
    """Returns index and size of the bias that a node lacks, although its operator takes one.

    None if it has a bias, if its operator takes none, or if its weight is computed.
    """
    roles = _roles(node, registry)
    if roles.bias_size is None:
        return None
    (index,), weight = roles.vectors, node.inputs[1]
    if len(node.inputs) > index and node.inputs[index] is not None:
        return None
    if weight is None or weight.const_value is None:
        return None
    return index, roles.bias_size(node, weight.const_value.shape.numpy())


def transposed(value: ir.Value, perm: tuple[int, ...]) -> ir.Node:
    """Returns a new node that permutes the dims of a value."""
    return ir.node("Transpose", [value], attributes={"perm": list(perm)})


def reshaped(value: ir.Value, shape: ir.Value) -> ir.Node:
    """Returns a new node that gives a value the shape in a 1-D int64 tensor."""
    return ir.node("Reshape", [value, shape])


def invertible(function: str) -> bool:
    """Whether `inverted` and `applied` know an elementwise function of PyTorch."""
    return function in _INVERSES


def inverted(function: str, array: NDArray[Any]) -> NDArray[Any]:
    """Returns the array that an elementwise function maps to `array`; computed in float64."""
    wide = array.astype(np.float64)
    if function == "neg":
        found = -wide
    else:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            found = np.log(wide) if function == "exp" else np.exp(wide)
    return found.astype(array.dtype)


def applied(function: str, value: ir.Value) -> ir.Node:
    """Returns a new node that computes an elementwise function of PyTorch."""
    return ir.node(_INVERSES[function], [value])
