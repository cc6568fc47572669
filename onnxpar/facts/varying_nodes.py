"""Finds the nodes of a training program that differ between the micro-batches of a step."""

from collections.abc import Collection, Iterable

import onnx_ir as ir

from onnxpar.core.rule import ANY
from onnxpar.graph.plan import Plan
from onnxpar.ops.fallback import draws
from onnxpar.ops.registry import Registry


def varying_nodes(
    nodes: Iterable[ir.Node], inputs: Collection[str], plan: Plan, registry: Registry
) -> frozenset[str]:
    """Returns the names of the nodes that depend on the micro-batch; the others are there once.

    A node that reads only the sizes of an operand does not depend on it: micro-batches that take
    turns have equal sizes.

    Args:
        nodes: The nodes of the undivided program, in order.
        inputs: The inputs and states that differ between micro-batches.
        plan: The plan of the program.
        registry: The table of operators.
    """
    varying, found = set(inputs), set[str]()
    for node in nodes:
        name = node.name or ""
        operands = plan.nodes[name].rule.inputs if name in plan.nodes else ()
        read = {
            value.name
            for index, value in enumerate(node.inputs)
            if value is not None and not (index < len(operands) and operands[index].mode == ANY)
        }
        if not varying.isdisjoint(read) or draws(node, registry):
            found.add(name)
            varying.update(value.name or "" for value in node.outputs)
    return frozenset(found)
