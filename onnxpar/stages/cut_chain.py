"""Cuts the nodes of a model into pipeline stages: between what is fixed, by cost.

The model is cut into *virtual stages*, as many as there are stages (or stages times chunks, where a
stage has several, in turn). No value goes to an earlier virtual stage. Between the user's words the
nodes stand in one topological order, and the cuts are places of it (a chain partition by dynamic
programming): first the least time that the longest can take, what it receives and sends included;
then, of all cuts that stay near it, those that send least.

What depends on no weight (masks, positions) or on weights alone is not cut: each virtual stage that
reads it computes it for itself, see `onnxpar.stages.place_nodes`.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import StrategyError
from onnxpar.graph.body_captures import read_by
from onnxpar.ops.fallback import draws
from onnxpar.ops.registry import Registry


@dataclass(frozen=True)
class Chain:
    """The nodes that are divided among the virtual stages.

    Attributes:
        nodes: In an order in which they can run.
        reads: Of each node the values it reads that other nodes of the chain make.
    """

    nodes: tuple[ir.Node, ...]
    reads: Mapping[ir.Node, tuple[ir.Value, ...]]

    def before(self, node: ir.Node) -> set[ir.Node]:
        """Returns the nodes of the chain that a node reads from."""
        return {maker for v in self.reads[node] if (maker := v.producer()) is not None}


def chain_of(graph: ir.Graph, weights: Collection[str], registry: Registry) -> Chain:
    """Returns the nodes that depend on an input and a weight, those that draw, those with bodies.

    What depends on them is of the chain, too. Where there are none (a model without weights), all
    nodes are returned.

    Args:
        graph: The graph, in topological order.
        weights: Names of the initializers that count as weights.
        registry: The table of operators.
    """
    names = frozenset(weights)
    data = set(graph.inputs)
    weighed = {v for name, v in graph.initializers.items() if name in names}
    chain: list[ir.Node] = []
    for node in graph:
        read = read_by(node)
        has_data = any(v in data for v in read)
        has_weight = any(v in weighed for v in read)
        bodies = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
        if (has_data and has_weight) or bodies or draws(node, registry):
            chain.append(node)
            has_data = has_weight = True
        if has_data:
            data.update(node.outputs)
        if has_weight:
            weighed.update(node.outputs)
    chain = chain or list(graph)
    made = {v for node in chain for v in node.outputs}
    reads = {n: tuple(dict.fromkeys(v for v in read_by(n) if v in made)) for n in chain}
    return Chain(tuple(chain), reads)


def floating(graph: ir.Graph) -> set[str]:
    """Returns the initializers that are no scalars and of a floating type."""
    return {
        name
        for name, value in graph.initializers.items()
        if value.dtype is not None and value.dtype.is_floating_point() and len(value.shape or ())
    }


BALANCE = 0.1
"""How much longer than it must the longest may take, for less traffic: costs are estimates."""


@dataclass(frozen=True)
class Costs:
    """What cuts are chosen by.

    Attributes:
        seconds: Time of each node, by name.
        crossing: Seconds that a value takes from one stage to another, by the value's name.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    crossing: Mapping[str, float] = field(default_factory=dict)


def cut_chain(
    chain: Chain,
    virtual_stages: int,
    fixed: Mapping[str, int],
    costs: Costs,
    said: Mapping[str, str] | None = None,
) -> dict[ir.Node, int]:
    """Returns the virtual stage of every node of a chain.

    Args:
        chain: The nodes.
        virtual_stages: How many virtual stages there are; each gets a node at least.
        fixed: Virtual stages that the user chose, by node name.
        costs: What the others are chosen by.
        said: Where the user chose, by node name, for messages: `line 3`.

    Raises:
        StrategyError: A value would go to an earlier virtual stage, or there are fewer nodes than
            virtual stages.
    """
    told = _Told(fixed, said or {})
    low, high = _bounds(chain, virtual_stages, told)
    nodes = _ordered(chain, low, high)
    count = len(nodes)
    if count < virtual_stages:
        raise StrategyError(
            f"pipeline: expected at least {virtual_stages} nodes, one for each virtual stage, "
            f"got {count}"
        )
    # A cut at position c puts the nodes before c into the earlier virtual stage.
    first = np.zeros(virtual_stages + 1, np.intp)
    last = np.full(virtual_stages + 1, count, np.intp)
    for virtual in range(1, virtual_stages):
        after = [i for i, n in enumerate(nodes) if high[n] < virtual]
        until = [i for i, n in enumerate(nodes) if low[n] >= virtual]
        first[virtual] = max(after[-1] + 1 if after else 0, virtual)
        last[virtual] = min(until[0] if until else count, count - virtual_stages + virtual)
        if first[virtual] > last[virtual]:
            raise _between(nodes, virtual, low, high, told)
    spent = [costs.seconds.get(n.name or "", 0.0) for n in nodes]
    cuts = _cheapest_cuts(spent, _crossing(chain, nodes, costs), virtual_stages, first, last)
    where = np.searchsorted(np.array(cuts[1:-1], np.intp), np.arange(count), side="right")
    return {node: int(virtual) for node, virtual in zip(nodes, where, strict=True)}


@dataclass(frozen=True)
class _Told:
    """What the user says of nodes, by name: their virtual stages, and where that is written."""

    fixed: Mapping[str, int]
    said: Mapping[str, str]

    def node(self, node: ir.Node) -> str:
        """Returns the node in messages, with the place of what is said of it."""
        where = self.said.get(node.name or "")
        return f"node {node.name!r}{f' ({where})' if where else ''}"


def _between(
    nodes: Sequence[ir.Node],
    virtual: int,
    low: Mapping[ir.Node, int],
    high: Mapping[ir.Node, int],
    told: _Told,
) -> StrategyError:
    early = next((n for n in reversed(nodes) if high[n] < virtual), None)
    late = next((n for n in nodes if low[n] >= virtual), None)
    ends = [f"{word} {told.node(n)}" for word, n in (("after", early), ("before", late)) if n]
    return StrategyError(
        "pipeline: 'assign' leaves no room for the stage boundary before virtual stage "
        f"{virtual}: it must "
        f"come {' and '.join(ends)}, with a node for every virtual stage"
    )


def _bounds(
    chain: Chain, virtual_stages: int, told: _Told
) -> tuple[dict[ir.Node, int], dict[ir.Node, int]]:
    """The earliest and latest virtual stage of each node, by the user's words on and around it."""
    low: dict[ir.Node, int] = {}
    cause: dict[ir.Node, ir.Node] = {}
    for node in chain.nodes:
        low[node] = 0
        for other in chain.before(node):
            if low[other] > low[node]:
                low[node], cause[node] = low[other], cause.get(other, other)
        wanted = told.fixed.get(node.name or "")
        if wanted is None:
            continue
        if wanted < low[node]:
            other = cause[node]
            raise StrategyError(
                f"pipeline: {told.node(node)} is assigned to virtual stage {wanted}, but it "
                f"reads a value from {told.node(other)} of virtual stage {low[node]}; values "
                "can only flow to later stages"
            )
        if wanted > low[node]:
            low[node], cause[node] = wanted, node
    high = {node: virtual_stages - 1 for node in chain.nodes}
    for node in reversed(chain.nodes):
        wanted = told.fixed.get(node.name or "")
        if wanted is not None:
            high[node] = min(high[node], wanted)
        for other in chain.before(node):
            high[other] = min(high[other], high[node])
    return low, high


def _ordered(
    chain: Chain, low: Mapping[ir.Node, int], high: Mapping[ir.Node, int]
) -> list[ir.Node]:
    """A topological order in which what must be early comes early; else the order that is there."""
    place = {node: i for i, node in enumerate(chain.nodes)}
    waiting = {node: len(chain.before(node)) for node in chain.nodes}
    after: dict[ir.Node, list[ir.Node]] = {node: [] for node in chain.nodes}
    for node in chain.nodes:
        for other in chain.before(node):
            after[other].append(node)
    ready = [(high[n], low[n], place[n]) for n in chain.nodes if not waiting[n]]
    heapq.heapify(ready)
    found = []
    while ready:
        node = chain.nodes[heapq.heappop(ready)[2]]
        found.append(node)
        for other in after[node]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (high[other], low[other], place[other]))
    return found


def _cheapest_cuts(
    seconds: Sequence[float],
    move: NDArray[np.float64],
    virtual_stages: int,
    first: NDArray[np.intp],
    last: NDArray[np.intp],
) -> list[int]:
    """Positions of the cuts, both ends included: least bottleneck, and least traffic among equals.

    Args:
        seconds: Time of each node.
        move: Time of what a cut at each position lets pass, 0 at both ends.
        virtual_stages: Number of virtual stages.
        first: The first position where each cut may be.
        last: The last one.
    """
    limit = inf
    for pick_traffic in (False, True):
        cuts, worst = _cuts_within(seconds, move, virtual_stages, first, last, limit, pick_traffic)
        limit = worst * (1 + BALANCE)
    return cuts


def _cuts_within(
    seconds: Sequence[float],
    move: NDArray[np.float64],
    virtual_stages: int,
    first: NDArray[np.intp],
    last: NDArray[np.intp],
    limit: float,
    traffic: bool,
) -> tuple[list[int], float]:
    """Cuts of least bottleneck, or of least traffic among those within a limit; the bottleneck."""
    count = len(seconds)
    spent = np.concatenate([[0.0], np.cumsum(seconds)])
    best = np.full(count + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros((virtual_stages + 1, count + 1), np.intp)

    def time(begin: Any, end: int) -> Any:
        """Of a virtual stage: its nodes, what it receives and what it sends."""
        return spent[end] - spent[begin] + move[begin] + move[end]

    for virtual in range(1, virtual_stages + 1):
        found = np.full(count + 1, np.inf)
        lowest = int(first[virtual]) if virtual < virtual_stages else count
        for end in range(lowest, int(last[virtual]) + 1):
            begin = np.arange(int(first[virtual - 1]), min(int(last[virtual - 1]) + 1, end))
            begin = begin if virtual > 1 else begin[:1]
            if not len(begin):
                continue
            seen = time(begin, end)
            if traffic:
                value = np.where(seen <= limit, best[begin] + move[end], np.inf)
            else:
                value = np.maximum(best[begin], seen)
            pick = int(np.argmin(value))
            found[end], choice[virtual, end] = value[pick], begin[pick]
        best = found
    cuts = [count]
    for virtual in range(virtual_stages, 0, -1):
        cuts.append(int(choice[virtual, cuts[-1]]))
    cuts.reverse()
    return cuts, max(float(time(a, b)) for a, b in pairwise(cuts))


def _crossing(chain: Chain, nodes: Sequence[ir.Node], costs: Costs) -> NDArray[np.float64]:
    """Seconds of all values that a cut before each position lets pass; 0 at both ends."""
    place = {node: i for i, node in enumerate(nodes)}
    last: dict[ir.Value, int] = {}
    for node in nodes:
        last.update(dict.fromkeys(chain.reads[node], place[node]))
    change = np.zeros(len(nodes) + 2)
    for value, reader in last.items():
        maker = value.producer()
        assert maker is not None
        cost = costs.crossing.get(value.name or "", 0.0)
        change[place[maker] + 1] += cost
        change[reader + 1] -= cost
    found = np.maximum(np.cumsum(change)[: len(nodes) + 1], 0.0)
    found[0] = found[-1] = 0.0
    return found


def known_virtual_stages(chain: Chain, known: Mapping[str, int]) -> dict[ir.Node, int]:
    """Returns the virtual stage of every node, as another program of the same model was cut.

    Nodes that it did not have go to the virtual stage of the latest that they read.

    Args:
        chain: The nodes.
        known: Virtual stages in the other program, by node name.
    """
    virtual_by_node: dict[ir.Node, int] = {}
    for node in chain.nodes:
        least = max((virtual_by_node[other] for other in chain.before(node)), default=0)
        virtual_by_node[node] = max(known.get(node.name or "", least), least)
    return virtual_by_node


def where_needed(
    graph: ir.Graph, virtual_by_node: Mapping[ir.Node, int]
) -> dict[ir.Node, tuple[int, ...]]:
    """Returns the virtual stages that compute each node, ascending; the nodes in their order.

    Args:
        graph: The graph, in topological order.
        virtual_by_node: The virtual stages of the nodes that are cut. Every other node is computed
            by each that reads it, and by the first where none does or where it makes an output.
    """
    outputs = set(graph.outputs)
    wanted: dict[ir.Value, set[int]] = {}
    found = {}
    for node in reversed(list(graph)):
        if node in virtual_by_node:
            mine = {virtual_by_node[node]}
        else:
            mine = set().union(*(wanted.get(value, ()) for value in node.outputs))
            if not mine or any(value in outputs for value in node.outputs):
                mine.add(0)
        found[node] = tuple(sorted(mine))
        for value in read_by(node):
            wanted.setdefault(value, set()).update(mine)
    return dict(reversed(found.items()))
