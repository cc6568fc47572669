"""Which nodes of a rank's graph compute on the host where the others compute on a device.

Sizes of this rank are computed from system inputs (values of symbols, coordinates) by small integer
nodes, and are read by kernels in host memory: the shape of a Reshape, the bounds of a Slice. Left
alone, onnxruntime computes them on the device, which has kernels for them, and copies each to the
host; every such copy waits for all that the device has to do. So these nodes are marked for the
host, and nothing is copied.
"""

from collections.abc import Collection, Iterable, Sequence

import onnx_ir as ir

from onnxpar.ops.operand_roles import reads_elements
from onnxpar.ops.registry import Registry

LAYER, HOST = "layer_ann", "onnxpar.host"
"""Metadata of a node that computes on the host also where others compute on a device. The key is
onnxruntime's, whose session option `session.layer_assignment_settings` says what the word means."""
SMALL = 100
"""Elements of a value that is worth computing on the host at most."""


def host_nodes(
    nodes: Sequence[ir.Node], given: Collection[ir.Value], registry: Registry
) -> frozenset[ir.Node]:
    """Returns the nodes that are to compute on the host.

    A node is one where all that it reads is on the host, all that it gives is small, and some
    kernel reads that, or what an equal node gives, in host memory, directly or through other such
    nodes. Bodies of control flow are read, and decide nothing of their own nodes.

    Args:
        nodes: The nodes of a graph in topological order.
        given: Values that are on the host from the start: system inputs and small constants.
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


def _alike(nodes: Iterable[ir.Node]) -> list[list[ir.Node]]:
    """Groups nodes that compute the same from the same, the groups in topological order.

    onnxruntime merges them before it places them, and keeps the mark of whichever stays.
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
    """Tells whether the number of elements of a value is known and no more than `SMALL`."""
    if value.shape is None or not value.shape.is_static():
        return False
    count = 1
    for size in value.shape.numpy():
        count *= size
    return count <= SMALL


def _able(node: ir.Node, on_host: Collection[ir.Value]) -> bool:
    """Whether the host can compute a node without waiting for the device."""
    return (
        node.domain in ("", "ai.onnx")
        and bool(node.inputs)
        and not _bodies(node)
        and all(value is None or value in on_host for value in node.inputs)
        and all(is_small(value) for value in node.outputs)
    )


def _wanted(nodes: Iterable[ir.Node], registry: Registry) -> set[ir.Value]:
    """Returns what kernels, those of bodies included, read in host memory."""
    found: set[ir.Value] = set()
    for node in nodes:
        definition = registry.of(node)
        for index in definition.host_operands if definition is not None else ():
            value = node.inputs[index] if index < len(node.inputs) else None
            if value is not None:
                found.add(value)
        for body in _bodies(node):
            found |= _wanted(body, registry)
    return found


def _bodies(node: ir.Node) -> list[ir.Graph]:
    graphs = [a for a in node.attributes.values() if a.type == ir.AttributeType.GRAPH]
    return [attribute.as_graph() for attribute in graphs]
