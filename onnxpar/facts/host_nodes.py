"""The nodes of a rank graph that compute on the host while the others compute on a device.

Small integer nodes compute the sizes of this rank from system inputs (values of symbols,
coordinates). Kernels read these sizes in host memory: the shape of a Reshape, the bounds of a
Slice. By default onnxruntime computes them on the device, which has kernels for them, and copies
each to the host; every such copy waits until the device is idle. So these nodes are marked for the
host, and nothing is copied.
"""

from collections.abc import Collection, Iterable, Sequence
from math import prod

import onnx_ir as ir

from onnxpar.graph.body_captures import bodies_of
from onnxpar.ops.operand_roles import reads_elements
from onnxpar.ops.registry import Registry

LAYER, HOST = "layer_ann", "onnxpar.host"
"""Metadata of a node that computes on the host even if others compute on a device. The key is
onnxruntime's, whose session option `session.layer_assignment_settings` gives the word a meaning."""
SMALL = 100
"""The most elements of a value that is worth computing on the host."""


def host_nodes(
    nodes: Sequence[ir.Node], given: Collection[ir.Value], registry: Registry
) -> frozenset[ir.Node]:
    """Returns the nodes that shall compute on the host.

    These are the nodes whose operands are all on the host, whose results are all small, and whose
    results, or those of an equal node, some kernel reads in host memory, directly or through other
    such nodes. The kernels in bodies of control flow count as readers; nodes in bodies are not
    returned.

    Args:
        nodes: The nodes of a graph in topological order.
        given: Values that are on the host before the run: system inputs and small constants.
        registry: The table of operators.
    """
    on_host = set(given)
    able = []
    for node in nodes:
        if not reads_elements(node, registry):
            on_host.update(node.outputs)
        elif _able(node, on_host):
            on_host.update(node.outputs)
            able.append(node)
    wanted = _wanted(nodes, registry)
    found = set()
    for alike in reversed(_alike(able)):
        if any(value in wanted for node in alike for value in node.outputs):
            found.update(alike)
            wanted.update(v for node in alike for v in node.inputs if v is not None)
    return frozenset(found)


def size_nodes(graph: ir.Graph, registry: Registry) -> frozenset[ir.Node]:
    """Returns the nodes of a global graph that only compute sizes for kernels.

    These are the nodes that `host_nodes` returns and those before them that read the sizes of a
    tensor, not its elements.

    Args:
        graph: The graph of a model that has not been partitioned.
        registry: The table of operators.
    """
    nodes = tuple(graph)
    found = host_nodes(nodes, {v for v in graph.initializers.values() if is_small(v)}, registry)
    read = {value for node in found for value in node.inputs} | _wanted(nodes, registry)
    first = (n for n in nodes if not reads_elements(n, registry) and read.issuperset(n.outputs))
    return found | frozenset(first)


def _alike(nodes: Iterable[ir.Node]) -> list[list[ir.Node]]:
    """Groups nodes that compute the same from the same operands; groups are in topological order.

    onnxruntime merges such nodes before it places them, and keeps the mark of only one of them.
    """
    groups: dict[object, list[ir.Node]] = {}
    same: dict[ir.Value, tuple[object, int]] = {}
    for node in nodes:
        operands = tuple(v if v is None else same.get(v, v) for v in node.inputs)
        attributes = tuple(sorted((a.name, str(a.value)) for a in node.attributes.values()))
        key = (node.op_type, operands, attributes, len(node.outputs))
        groups.setdefault(key, []).append(node)
        first = groups[key][0]
        for index, value in enumerate(node.outputs):
            same[value] = (first, index)
    return list(groups.values())


def is_small(value: ir.Value) -> bool:
    """Whether the number of elements of a value is known and at most `SMALL`."""
    shape = value.shape
    return shape is not None and shape.is_static() and prod(shape.numpy()) <= SMALL


def _able(node: ir.Node, on_host: Collection[ir.Value]) -> bool:
    """Whether the host can compute a node without waiting for the device."""
    return (
        node.domain in ("", "ai.onnx")
        and bool(node.inputs)
        and not bodies_of(node)
        and all(value is None or value in on_host for value in node.inputs)
        and all(is_small(value) for value in node.outputs)
    )


def _wanted(nodes: Iterable[ir.Node], registry: Registry) -> set[ir.Value]:
    """Returns the values that kernels, including those of bodies, read in host memory."""
    found: set[ir.Value] = set()
    for node in nodes:
        definition = registry.of(node)
        for index in definition.host_operands if definition is not None else ():
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is not None:
                found.add(value)
        for body in bodies_of(node).values():
            found |= _wanted(body, registry)
    return found
