"""Nodes that choose between two bodies by a constant."""

import onnx_ir as ir

from onnxpar.ops.registry import Registry


def decided_body(node: ir.Node, registry: Registry) -> ir.Graph | None:
    """Returns the body that a node runs, if a constant chooses it; else None."""
    definition = registry.of(node)
    if definition is None or definition.branches is None:
        return None
    condition = node.inputs[0]
    tensor = None if condition is None else condition.const_value
    if tensor is None or tensor.size != 1:
        return None
    return node.attributes[definition.branches[0 if tensor.numpy().item() else 1]].as_graph()
