"""What can be recomputed of a forward pass, and what a layer's share of it is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxpar.analysis.layers import Layer
from onnxpar.analysis.shapes import GRADIENT_OF

KEEP, AGAIN = "keep", "recompute"
COMMUNICATION = (KEEP, AGAIN)
_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass(frozen=True)
class RecomputeOptions:
    """What the user asks to recompute.

    Attributes:
        nodes: Names of nodes, and patterns of them (`fnmatch`).
        layers: Every so many-th layer of those that repeat; 0 none.
        communication: Whether what collectives inside brought is kept, or communicated again.
        memory: Bytes that a device may hold in training; as little is recomputed as that needs.
        where: Where the user said so, for messages.
    """

    nodes: tuple[str, ...] = ()
    layers: int = 0
    communication: str = AGAIN
    memory: int | None = None
    where: str = "recompute"

    @property
    def entry(self) -> dict[str, Any]:
        """What a strategy file says of it."""
        said: dict[str, Any] = {"nodes": list(self.nodes)} if self.nodes else {}
        said |= {"layers": self.layers} if self.layers else {}
        said |= {"memory": self.memory} if self.memory is not None else {}
        return {**said, "communication": self.communication}

    def __bool__(self) -> bool:
        """Whether anything is to be recomputed."""
        return bool(self.nodes or self.layers or self.memory is not None)


NOTHING = RecomputeOptions()


@dataclass(frozen=True)
class ForwardPass:
    """The nodes of a differentiated graph that autodiff did not add.

    Attributes:
        nodes: All of them, in order.
        able: Names of those that can be recomputed: that have no bodies, and read more than
            parameters and constants, since the rest is no load of a batch.
    """

    nodes: tuple[ir.Node, ...]
    able: frozenset[str]

    @staticmethod
    def of(graph: ir.Graph) -> "ForwardPass":
        """Returns the forward pass of a graph."""
        nodes = tuple(node for node in graph if GRADIENT_OF not in node.metadata_props)
        varying = _varying(nodes)
        return ForwardPass(nodes, frozenset(n.name or "" for n in nodes if _able(n)) & varying)

    def inside(self, layer: Layer) -> frozenset[str]:
        """Names of what is recomputed of a layer: not what hands its results on to later nodes."""
        number = {id(node): i for i, node in enumerate(self.nodes)}
        found = set()
        for node in self.nodes[layer.start : layer.stop]:
            users = (id(user) for out in node.outputs for user in out.consumers())
            if all(number.get(user, 0) < layer.stop for user in users):
                found.add(node.name or "")
        return self.able & found


def _able(node: ir.Node) -> bool:
    return bool(node.outputs) and all(a.type not in _BODIES for a in node.attributes.values())


def _varying(nodes: Sequence[ir.Node]) -> frozenset[str]:
    """Names of nodes that read more than parameters and constants."""
    varies: dict[str, bool] = {}
    found = set()
    for node in nodes:
        given = [v for v in node.inputs if v is not None]
        moves = any(
            varies.get(v.name or "", False) if v.producer() is not None else v.is_graph_input()
            for v in given
        )
        for out in node.outputs:
            varies[out.name or ""] = moves
        if moves:
            found.add(node.name or "")
    return frozenset(found)
