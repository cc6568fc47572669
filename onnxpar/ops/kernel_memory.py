"""The memory that the kernel of a node uses, from the record of its operator (`Kernel`)."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.ops.registry import Registry
from onnxpar.ops.slots import PLAIN, Kernel, KernelCall, Shape


def kernel(node: ir.Node, registry: Registry) -> Kernel:
    """Returns how the kernel of a node, or its local form, uses memory."""
    definition = registry.of(node)
    return PLAIN if definition is None else definition.memory


def call(
    node: ir.Node,
    inputs: Sequence[Shape | None],
    outputs: Sequence[Shape | None],
    itemsize: int,
    registry: Registry,
) -> KernelCall:
    """Returns the call of a node's kernel.

    Args:
        node: The node.
        inputs: Shape of each operand; None if it is absent or unknown.
        outputs: Shape of each result.
        itemsize: Bytes of an element of the first result.
        registry: The table of operators.
    """
    attributes = {a.name: a.value for a in node.attributes.values()}
    return KernelCall(
        tuple(inputs), tuple(outputs), itemsize, attributes, after_bias(node, registry)
    )


def after_bias(node: ir.Node, registry: Registry) -> bool:
    """Whether a node's first operand is the sum with a vector that no other node reads."""
    value = node.inputs[0] if node.inputs else None
    made = value.producer() if value is not None else None
    if value is None or made is None or len(value.uses()) != 1:
        return False
    definition = registry.of(made)
    if definition is None or not definition.roles.adds:
        return False
    return any(v is not None and v.shape is not None and len(v.shape) == 1 for v in made.inputs)
