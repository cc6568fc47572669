"""Which nodes of a forward pass can be recomputed, and which of them belong to a layer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxpar.facts.layers import Layer, carriers
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.ops.registry import Registry

_BODIES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclass(frozen=True)
class ForwardPass:
    """The nodes of a differentiated graph that autodiff did not add.

    Attributes:
        nodes: All of them, in order.
        row: The nodes among which layers are found: the carriers (see `onnxpar.facts.layers`),
            without the nodes of our own domain.
        able: Names of the nodes that can be recomputed: they have no bodies, are not of our own
            domain, and read more than parameters and constants (other results take memory that
            does not depend on the batch).
    """

    nodes: tuple[ir.Node, ...]
    row: tuple[ir.Node, ...]
    able: frozenset[str]

    @staticmethod
    def of(graph: ir.Graph, registry: Registry) -> "ForwardPass":
        """Returns the forward pass of a graph."""
        nodes = tuple(node for node in graph if GRADIENT_OF not in node.metadata_props)
        row = tuple(node for node in carriers(nodes, registry) if node.domain != DOMAIN)
        varying = _varying(nodes)
        able = (n for n in nodes if n.name in varying and n.domain != DOMAIN and _able(n))
        return ForwardPass(nodes, row, frozenset(n.name or "" for n in able))

    def inside(self, layer: Layer) -> frozenset[str]:
        """Names of the nodes of a layer that can be recomputed and that no later node reads.

        All nodes between the first and the last node of a layer belong to the layer.
        """
        at = self._places
        start, stop = at[self.row[layer.start]], at[self.row[layer.stop - 1]] + 1
        found = set()
        for node in self.nodes[start:stop]:
            readers = [user for out in node.outputs for user in out.consumers() if user in at]
            if all(at[user] < stop and user.domain != DOMAIN for user in readers):
                found.add(node.name or "")
        return self.able & found

    @cached_property
    def _places(self) -> Mapping[ir.Node, int]:
        """The place of each node among all of them."""
        return {node: i for i, node in enumerate(self.nodes)}


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


@dataclass(frozen=True)
class Loads:
    """The memory and time of one device.

    Attributes:
        bytes: Bytes of each value, by name.
        seconds: Seconds of each node, by name.
        views: Names of nodes whose results share the memory of their operands.
    """

    bytes: Mapping[str, int]
    seconds: Mapping[str, float]
    views: frozenset[str]


def by_cost(forward: ForwardPass, layers: Sequence[Layer], loads: Loads) -> list[frozenset[str]]:
    """Returns growing sets of nodes to recompute: each contains the one before it.

    Nodes are added in the order of bytes freed per second of recomputation. The results of a node
    that the backward pass reads are freed. Of equal layers only the first is priced. The same nodes
    of all these layers are added one after another, early layers first, because their results are
    kept longest.

    Args:
        forward: The forward pass.
        layers: Its layers; results that later nodes read are kept.
        loads: The memory of values and the time of nodes.
    """
    rows = _alike(forward, layers)
    steps: list[tuple[float, int, int, tuple[str, ...]]] = []
    for number, row in enumerate(rows):
        order = _greedy(forward, row[0], loads)
        least = float("inf")
        for place, (positions, ratio) in enumerate(order):
            # A later step may be better only because an earlier one was taken.
            least = min(least, ratio)
            for block in row:
                steps.append((-least, number, place, tuple(block[p] for p in positions)))
    found: list[frozenset[str]] = []
    taken: frozenset[str] = frozenset()
    for *_, names in sorted(steps, key=lambda step: step[:3]):
        taken |= forward.able.intersection(names)
        found.append(taken)
    return found


def _alike(forward: ForwardPass, layers: Sequence[Layer]) -> list[list[list[str]]]:
    """Lists of blocks of nodes: one list for each kind of layer, and one for the other nodes."""
    names = [node.name or "" for node in forward.row]
    kinds = [node.op_type for node in forward.row]
    inside = {i for layer in layers for i in range(layer.start, layer.stop)}
    rows: dict[tuple[str, ...], list[list[str]]] = {}
    for layer in layers:
        kind = tuple(kinds[layer.start : layer.stop])
        kept = forward.inside(layer)
        # Nodes whose results later nodes read have no name here, so they are never taken.
        block = [n if n in kept else "" for n in names[layer.start : layer.stop]]
        rows.setdefault(kind, []).append(block)
    placed = {names[i] for i in inside}
    rest = [n.name or "" for n in forward.nodes if n.name not in placed]
    return [*rows.values(), [rest]]


def _greedy(
    forward: ForwardPass, block: Sequence[str], loads: Loads
) -> list[tuple[tuple[int, ...], float]]:
    """The steps of a block, best first: positions of nodes, and bytes freed per second.

    A step takes a node whose results are kept, and all nodes that must run to compute these results
    from other results that are kept.
    """
    at = {name: i for i, name in enumerate(block) if name}
    nodes = {n.name or "": n for n in forward.nodes if n.name in at and n.name in forward.able}
    saved = {
        name: [o.name or "" for o in node.outputs if _read_backward(o)]
        for name, node in nodes.items()
    }
    saved = {name: kept for name, kept in saved.items() if kept}
    taken: set[str] = set()

    def chain(name: str) -> list[str]:
        """The nodes to run for a node, including itself, that have not been taken."""
        found, stack = {name}, [name]
        while stack:
            for value in nodes[stack.pop()].inputs:
                maker = None if value is None else value.producer()
                source = "" if maker is None else maker.name or ""
                if source in nodes and source not in found and source not in saved:
                    found.add(source)
                    stack.append(source)
        return [n for n in found if n not in taken]

    found: list[tuple[tuple[int, ...], float]] = []
    while saved:
        best: tuple[float, str, list[str]] | None = None
        for name, kept in saved.items():
            run = chain(name)
            freed = 0 if name in loads.views else sum(loads.bytes.get(v, 0) for v in kept)
            ratio = freed / max(sum(loads.seconds.get(n, 0.0) for n in run), 1e-12)
            if best is None or ratio > best[0]:
                best = ratio, name, run
        assert best is not None
        ratio, name, run = best
        del saved[name]
        taken.update(run)
        found.append((tuple(sorted(at[n] for n in run)), ratio))
    return found


def _read_backward(value: ir.Value) -> bool:
    return any(GRADIENT_OF in user.metadata_props for user in value.consumers())
