"""Nodes of a rank graph that one node replaces, and the graph in which they are found."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.graph.body_captures import read_by
from onnxpar.ops.collective.barrier import is_barrier


@dataclass(frozen=True)
class FusedNodes:
    """Nodes that one node replaces.

    Attributes:
        domain: Domain of the new node.
        op_type: Its operator.
        attributes: Its attributes.
        nodes: The old nodes; the last one computes the main result.
        inputs: The values that the new node reads; the last may be None, which stands for zero.
        outputs: The values that it computes; None for one that nobody reads.
        inverted: Whether the last input is true where that of the new node must be false.
    """

    domain: str
    op_type: str
    attributes: Mapping[str, float | int]
    nodes: tuple[ir.Node, ...]
    inputs: tuple[ir.Value | None, ...]
    outputs: tuple[ir.Value | None, ...]
    inverted: bool = False


class NodeGraph:
    """Who makes and who reads a value, among some nodes.

    Attributes:
        nodes: The nodes, in order.
    """

    def __init__(self, nodes: Sequence[ir.Node], kept: Collection[ir.Value]) -> None:
        """Takes the nodes, and the values that must be computed: the graph's outputs."""
        self.nodes = nodes
        self._set, self._kept = set(nodes), set(kept)
        self._readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
        for node in nodes:
            # For its further operands, a Barrier only waits.
            read = node.inputs[:1] if is_barrier(node) else read_by(node)
            for value in dict.fromkeys(read):
                if value is not None:
                    self._readers[value].append(node)

    def readers(self, value: ir.Value) -> list[ir.Node]:
        """The nodes that read a value."""
        return self._readers[value]

    def needs(self, values: Iterable[ir.Value], nodes: Collection[ir.Node]) -> bool:
        """Whether some of the values are needed by others than these nodes."""
        return any(v in self._kept or not set(nodes).issuperset(self._readers[v]) for v in values)

    def maker(self, value: ir.Value | None) -> ir.Node | None:
        """The node that makes a value."""
        node = None if value is None else value.producer()
        return node if node in self._set else None
