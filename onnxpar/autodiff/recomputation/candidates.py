"""Which nodes of a forward pass can be recomputed, and which of them belong to a layer."""

from collections.abc import Collection, Mapping, Sequence
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

    def outside(self, layers: Sequence[Layer]) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the nodes before the first layer, and of those after the last one."""
        if not layers:
            return frozenset(), frozenset()
        start = self._places[self.row[layers[0].start]]
        stop = self._places[self.row[layers[-1].stop - 1]] + 1
        before, after = (
            frozenset(node.name or "" for node in end)
            for end in (self.nodes[:start], self.nodes[stop:])
        )
        return before, after

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
    rows = alike_layers(forward, layers)
    inside = {name for row in rows for block in row for name in block.nodes}
    rest = tuple(name for n in forward.nodes if (name := n.name or "") not in inside)
    found: list[frozenset[str]] = []
    taken: frozenset[str] = frozenset()
    for row, step in _in_order(forward, [*rows, [LayerNodes(rest, rest)]], loads):
        for block in row:
            taken |= forward.able.intersection(block.own[p] for p in step.positions)
            found.append(taken)
    return found


@dataclass(frozen=True)
class LayerPart:
    """Nodes of layers that can be recomputed, the same in all layers that are alike.

    Attributes:
        alike: The names of each of these nodes in all layers that are alike; "" in a layer in which
            it cannot be recomputed.
        freed: Bytes that are freed, of all layers.
        seconds: Seconds of the recomputation.
    """

    alike: tuple[tuple[str, ...], ...]
    freed: float
    seconds: float


def parts_of_layers(
    forward: ForwardPass, rows: Sequence[Sequence["LayerNodes"]], loads: Loads
) -> list[LayerPart]:
    """Returns growing parts of layers: each contains the one before it, as in `by_cost`.

    Args:
        forward: The forward pass.
        rows: Its layers, those that are alike together.
        loads: The memory of values and the time of nodes; those of the first of layers that are
            alike are enough.
    """
    found: list[LayerPart] = []
    taken: dict[tuple[int, int], tuple[str, ...]] = {}
    freed = seconds = 0.0
    numbers = {id(row): number for number, row in enumerate(rows)}
    for row, step in _in_order(forward, rows, loads):
        for position in step.positions:
            names = (block.own[position] for block in row)
            able = tuple(name if name in forward.able else "" for name in names)
            taken[numbers[id(row)], position] = able
        freed, seconds = freed + len(row) * step.freed, seconds + len(row) * step.seconds
        found.append(LayerPart(tuple(taken.values()), freed, seconds))
    return found


@dataclass(frozen=True)
class LayerNodes:
    """A layer.

    Attributes:
        nodes: The names of its nodes.
        own: The same; "" for nodes that cannot be recomputed, or whose results later nodes read.
    """

    nodes: tuple[str, ...]
    own: tuple[str, ...]


def alike_layers(forward: ForwardPass, layers: Sequence[Layer]) -> list[list[LayerNodes]]:
    """Returns the layers, those that are alike together."""
    names = [node.name or "" for node in forward.row]
    kinds = [node.op_type for node in forward.row]
    rows: dict[tuple[str, ...], list[LayerNodes]] = {}
    for layer in layers:
        place = slice(layer.start, layer.stop)
        kept = forward.inside(layer)
        own = tuple(n if n in kept else "" for n in names[place])
        rows.setdefault(tuple(kinds[place]), []).append(LayerNodes(tuple(names[place]), own))
    return list(rows.values())


@dataclass(frozen=True)
class _Step:
    """Nodes that are recomputed together: positions in a block, bytes freed, and seconds."""

    positions: tuple[int, ...]
    freed: float
    seconds: float

    @property
    def ratio(self) -> float:
        """Bytes freed per second."""
        return self.freed / max(self.seconds, 1e-12)


def _in_order(
    forward: ForwardPass, rows: Sequence[Sequence[LayerNodes]], loads: Loads
) -> list[tuple[Sequence[LayerNodes], _Step]]:
    """The steps of all rows of blocks that are alike, best first."""
    steps: list[tuple[float, int, int, _Step]] = []
    for number, row in enumerate(rows):
        least = float("inf")
        for place, step in enumerate(_greedy(forward, row[0].own, loads)):
            # A later step may be better only because an earlier one was taken.
            least = min(least, step.ratio)
            steps.append((-least, number, place, step))
    return [(rows[number], step) for _, number, _, step in sorted(steps, key=lambda s: s[:3])]


def _greedy(forward: ForwardPass, block: Sequence[str], loads: Loads) -> list[_Step]:
    """The steps of a block, best first.

    A step takes a node whose results are kept, and all nodes that must run to compute these results
    from other results that are kept. Results that share memory are taken together.
    """
    at = {name: i for i, name in enumerate(block) if name}
    nodes = {n.name or "": n for n in forward.nodes if n.name in at and n.name in forward.able}
    kept = {name for name, node in nodes.items() if any(map(_read_backward, node.outputs))}
    groups: dict[str, list[str]] = {}
    for name in nodes:
        if name in kept:
            groups.setdefault(_owner(name, nodes, loads.views), []).append(name)
    # What a node outside of the block made is kept, however many views of it there are.
    sizes = {
        owner: sum(loads.bytes.get(o.name or "", 0) for o in nodes[owner].outputs if o.uses())
        if owner in nodes
        else 0
        for owner in groups
    }
    taken: set[str] = set()

    def chain(names: Sequence[str]) -> list[str]:
        """The nodes to run for some nodes, including themselves, that have not been taken."""
        found, stack = set(names), list(names)
        while stack:
            for value in nodes[stack.pop()].inputs:
                maker = None if value is None else value.producer()
                source = "" if maker is None else maker.name or ""
                if source in nodes and source not in found and source not in kept:
                    found.add(source)
                    stack.append(source)
        return [n for n in found if n not in taken]

    found: list[_Step] = []
    while groups:
        best: tuple[str, _Step] | None = None
        for owner, names in groups.items():
            run = chain(names)
            seconds = sum(loads.seconds.get(n, 0.0) for n in run)
            step = _Step(tuple(sorted(at[n] for n in run)), sizes[owner], seconds)
            if best is None or step.ratio > best[1].ratio:
                best = owner, step
        assert best is not None
        owner, step = best
        kept.difference_update(groups.pop(owner))
        taken.update(block[position] for position in step.positions)
        found.append(step)
    return found


def _owner(name: str, nodes: Mapping[str, ir.Node], views: Collection[str]) -> str:
    """The node that made the memory of a node's result; "" for one outside of the block."""
    while name in views:
        value = nodes[name].inputs[0]
        maker = None if value is None else value.producer()
        name = "" if maker is None else maker.name or ""
        if name not in nodes:
            return ""
    return name


def _read_backward(value: ir.Value) -> bool:
    return any(GRADIENT_OF in user.metadata_props for user in value.consumers())
