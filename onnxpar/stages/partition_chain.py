"""Partitions the nodes of a model into virtual stages: as the user assigns them, the rest by cost.

There are as many *virtual stages* as stages; with interleaving, as many as stages times chunks. No
value goes to an earlier virtual stage. The nodes are put into one topological order, and the stage
boundaries are positions in it (chain partitioning by dynamic programming). First the time of the
slowest virtual stage is minimised, including what it receives and sends. Then, among all
partitions that are nearly as fast, the one that sends least is taken; if several send equally
little, the one whose virtual stages take the most equal times. With interleaving, boundaries then
move so that stages, each with all its virtual stages, take more equal times, too.

Nodes that depend on no weight (masks, positions) or only on weights are not in the chain: each
virtual stage that reads their results computes them itself, see `onnxpar.stages.place_nodes`.
"""

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import StrategyError
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.ops.fallback import draws
from onnxpar.ops.registry import Registry
from onnxpar.stages.rebalance import Rebalance


@dataclass(frozen=True)
class Chain:
    """The nodes that are partitioned into virtual stages.

    Attributes:
        nodes: The nodes, in topological order.
        reads: For each node, the values it reads that other nodes of the chain make.
    """

    nodes: tuple[ir.Node, ...]
    reads: Mapping[ir.Node, tuple[ir.Value, ...]]

    def before(self, node: ir.Node) -> set[ir.Node]:
        """Returns the nodes of the chain that a node reads from."""
        return self._before[node]

    @cached_property
    def _before(self) -> Mapping[ir.Node, set[ir.Node]]:
        return {
            node: {maker for v in self.reads[node] if (maker := v.producer()) is not None}
            for node in self.nodes
        }


def chain_of(graph: ir.Graph, weights: Collection[str], registry: Registry) -> Chain:
    """Returns the chain of a graph.

    It consists of the nodes that depend on an input and a weight, nodes that draw random numbers,
    nodes with bodies, and all nodes that depend on one of these. If there are none (a model without
    weights), the chain consists of all nodes.

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
    """Returns the names of the floating-point initializers that are not scalars."""
    return {
        name
        for name, value in graph.initializers.items()
        if value.dtype is not None and value.dtype.is_floating_point() and len(value.shape or ())
    }


BALANCE = 0.03
"""How much slower, as a share, the slowest virtual stage may be to save traffic. Costs are
estimates, but all stages wait for the slowest one."""
_ROUNDING = 1e-9
"""Traffic that differs by less than this share is equal."""
_ROWS = 256
"""Ends of virtual stages that are considered at the same time."""
_SAMPLES = 8
"""Positions for each virtual stage from which a first partition is made."""


@dataclass(frozen=True)
class Costs:
    """The costs by which stage boundaries are chosen.

    Attributes:
        seconds: Time of each node, by name.
        crossing: Seconds to send a value from one stage to another, by the value's name.
    """

    seconds: Mapping[str, float] = field(default_factory=dict)
    crossing: Mapping[str, float] = field(default_factory=dict)


def partition_chain(
    chain: Chain,
    virtual_stages: int,
    fixed: Mapping[str, int],
    costs: Costs,
    where: Mapping[str, str] = MappingProxyType({}),
    *,
    stages: int = 0,
) -> dict[ir.Node, int]:
    """Returns the virtual stage of every node of a chain.

    Args:
        chain: The nodes.
        virtual_stages: Number of virtual stages; each gets at least one node.
        fixed: The virtual stages that the user assigned, by node name.
        costs: The costs by which the other nodes are assigned.
        where: Where the user assigned a node, such as `line 3`, by node name, for messages.
        stages: Number of stages: virtual stage v belongs to stage v % stages. 0 if there are as
            many as virtual stages.

    Raises:
        StrategyError: A value would go to an earlier virtual stage, or there are fewer nodes than
            virtual stages.
    """
    low, high = _bounds(chain, virtual_stages, fixed, where)
    nodes = _ordered(chain, low, high)
    count = len(nodes)
    if count < virtual_stages:
        raise StrategyError(
            f"pipeline: expected at least {virtual_stages} nodes, one for each virtual stage, "
            f"got {count}"
        )
    # Boundary v is the position of the first node of virtual stage v; the last one is the end.
    first = np.zeros(virtual_stages + 1, np.intp)
    last = np.full(virtual_stages + 1, count, np.intp)
    last[0], first[-1] = 0, count
    lowest, highest = (np.array([bound[n] for n in nodes], np.intp) for bound in (low, high))
    for virtual in range(1, virtual_stages):
        after, until = np.flatnonzero(highest < virtual), np.flatnonzero(lowest >= virtual)
        first[virtual] = max(after[-1] + 1 if len(after) else 0, virtual)
        last[virtual] = min(until[0] if len(until) else count, count - virtual_stages + virtual)
        if first[virtual] > last[virtual]:
            raise _no_room(nodes, virtual, low, high, where)
    seconds = [costs.seconds.get(n.name or "", 0.0) for n in nodes]
    move = _crossing(chain, nodes, costs)
    # First the slowest virtual stage as fast as can be, then the least traffic near that.
    _, slowest = _boundaries(seconds, move, first, last)
    limit = slowest * (1 + BALANCE)
    found, _ = _boundaries(seconds, move, first, last, limit)
    if 1 < stages < virtual_stages:
        spent = np.concatenate([[0.0], np.cumsum(seconds)])
        found = Rebalance(stages, spent, move, first, last, limit).run(found)
    virtual_of = np.searchsorted(np.array(found[1:-1], np.intp), np.arange(count), side="right")
    return {node: int(virtual) for node, virtual in zip(nodes, virtual_of, strict=True)}


def _title(node: ir.Node, where: Mapping[str, str]) -> str:
    """A node in messages, with the place where the user assigned it."""
    place = where.get(node.name or "")
    return f"node {node.name!r}{f' ({place})' if place else ''}"


def _no_room(
    nodes: Sequence[ir.Node],
    virtual: int,
    low: Mapping[ir.Node, int],
    high: Mapping[ir.Node, int],
    where: Mapping[str, str],
) -> StrategyError:
    early = next((n for n in reversed(nodes) if high[n] < virtual), None)
    late = next((n for n in nodes if low[n] >= virtual), None)
    ends = [f"{word} {_title(n, where)}" for word, n in (("after", early), ("before", late)) if n]
    return StrategyError(
        f"pipeline: 'assign' leaves no room for the stage boundary before virtual stage {virtual}: "
        f"it must come {' and '.join(ends)}, with a node for every virtual stage"
    )


def _bounds(
    chain: Chain, virtual_stages: int, fixed: Mapping[str, int], where: Mapping[str, str]
) -> tuple[dict[ir.Node, int], dict[ir.Node, int]]:
    """The earliest and latest virtual stage of each node that the assigned nodes allow."""
    low: dict[ir.Node, int] = {}
    cause: dict[ir.Node, ir.Node] = {}
    for node in chain.nodes:
        low[node] = 0
        for other in chain.before(node):
            if low[other] > low[node]:
                low[node], cause[node] = low[other], cause.get(other, other)
        wanted = fixed.get(node.name or "", low[node])
        if wanted < low[node]:
            raise StrategyError(
                f"pipeline: {_title(node, where)} is assigned to virtual stage {wanted}, but it "
                f"reads a value from {_title(cause[node], where)} of virtual stage {low[node]}; "
                "values can only flow to later stages"
            )
        if wanted > low[node]:
            low[node], cause[node] = wanted, node
    high = {node: virtual_stages - 1 for node in chain.nodes}
    for node in reversed(chain.nodes):
        high[node] = min(high[node], fixed.get(node.name or "", high[node]))
        for other in chain.before(node):
            high[other] = min(high[other], high[node])
    return low, high


def _ordered(
    chain: Chain, low: Mapping[ir.Node, int], high: Mapping[ir.Node, int]
) -> list[ir.Node]:
    """A topological order by latest virtual stage, then earliest, then the order of the chain."""
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


def _boundaries(
    seconds: Sequence[float],
    move: NDArray[np.float64],
    first: NDArray[np.intp],
    last: NDArray[np.intp],
    limit: float | None = None,
) -> tuple[list[int], float]:
    """The positions of the boundaries, both ends included, and the seconds of the slowest stage.

    Args:
        seconds: Time of each node.
        move: Time to send the values that cross a boundary at each position, 0 at both ends.
        first: The first position where each boundary may be.
        last: The last position where each boundary may be.
        limit: The most seconds that a virtual stage may take, with the least traffic and then the
            most equal stages; None for the fastest slowest stage.
    """
    count, virtual_stages = len(seconds), len(first) - 1
    spent = np.concatenate([[0.0], np.cumsum(seconds)])
    # For the nodes before each position: the traffic; and the seconds of the slowest stage, or with
    # a limit the sum of squares of all stages, which is least where they take equal times.
    traffic, slow = np.full((2, count + 1), np.inf)
    traffic[0] = slow[0] = 0.0
    choice = np.zeros((virtual_stages + 1, count + 1), np.intp)
    # No virtual stage that ends at a position begins before this one.
    most = limit if limit is not None else _most(seconds, move, first, last)
    slack = _ROUNDING * spent[-1]
    earliest = np.searchsorted(spent, spent - most - slack, side="left")
    for virtual in range(1, virtual_stages + 1):
        before, slower = traffic, slow
        traffic, slow = np.full((2, count + 1), np.inf)
        # The virtual stages before its end do not take more than that, nor do those after it.
        begins = int(np.searchsorted(spent, spent[-1] - (virtual_stages - virtual) * most - slack))
        ends_at = int(np.searchsorted(spent, virtual * most + slack, side="right")) - 1
        lowest, highest = max(int(first[virtual]), begins), min(int(last[virtual]), ends_at)
        every = np.arange(lowest, highest + 1)
        for ends in np.array_split(every, len(every) // _ROWS + 1):
            low = np.maximum(earliest[ends], first[virtual - 1])
            high = np.minimum(ends - 1, last[virtual - 1])
            width = int((high - low).max()) + 1
            if width < 1:
                continue
            begin = low[:, None] + np.arange(width)
            valid = begin <= high[:, None]
            begin = np.minimum(begin, count)
            seen = (spent[ends] + move[ends])[:, None] - spent[begin] + move[begin]
            if limit is None:
                value = np.where(valid, np.maximum(slower[begin], seen), np.inf)
            else:
                sent = np.where(valid & (seen <= limit), before[begin], np.inf)
                # Sums of the same numbers in another order differ by rounding.
                least = sent <= sent.min(axis=1, keepdims=True) * (1 + _ROUNDING)
                value = np.where(least & np.isfinite(sent), slower[begin] + seen**2, np.inf)
            pick = np.argmin(value, axis=1)
            rows = np.arange(len(ends))
            chosen = begin[rows, pick]
            choice[virtual, ends] = chosen
            slow[ends] = value[rows, pick]
            traffic[ends] = np.where(np.isfinite(slow[ends]), before[chosen] + move[ends], np.inf)
    boundaries = [count]
    for virtual in range(virtual_stages, 0, -1):
        boundaries.append(int(choice[virtual, boundaries[-1]]))
    boundaries.reverse()
    slowest = max(float(spent[b] - spent[a] + move[a] + move[b]) for a, b in pairwise(boundaries))
    return boundaries, slowest


def _most(
    seconds: Sequence[float],
    move: NDArray[np.float64],
    first: NDArray[np.intp],
    last: NDArray[np.intp],
) -> float:
    """An upper bound on the slowest virtual stage of the best partition.

    It is the slowest stage of a partition whose boundaries are among few positions: the one at
    which least is sent, of every so many.
    """
    count, virtual_stages = len(seconds), len(first) - 1
    each = np.arange(virtual_stages + 1)
    if (first[1:-1] > each[1:-1]).any() or (last[1:-1] < count - virtual_stages + each[1:-1]).any():
        return sum(seconds) + 2 * float(move.max())
    step = count // (_SAMPLES * virtual_stages)
    if step < 2:
        # Stages that are filled until they take their share exceed it by less than one node.
        return sum(seconds) / virtual_stages + max(seconds) + 2 * float(move.max())
    inner = [i + int(move[i : i + step].argmin()) for i in range(1, count - step + 1, step)]
    few = np.array([0, *inner, count])
    sums = np.add.reduceat(np.asarray(seconds), few[:-1]).tolist()
    return _boundaries(sums, move[few], each, len(sums) - virtual_stages + each)[1]


def _crossing(chain: Chain, nodes: Sequence[ir.Node], costs: Costs) -> NDArray[np.float64]:
    """Seconds to send all values that cross a boundary at each position; 0 at both ends."""
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
    """Returns the virtual stage of every node, following another program of the same model.

    A node that the other program does not have goes to the latest virtual stage that it reads from.

    Args:
        chain: The nodes.
        known: Virtual stages in the other program, by node name.
    """
    virtual_by_node: dict[ir.Node, int] = {}
    for node in chain.nodes:
        least = max((virtual_by_node[other] for other in chain.before(node)), default=0)
        virtual_by_node[node] = max(known.get(node.name or "", least), least)
    return virtual_by_node


def weightless_nodes(program: Program) -> frozenset[str]:
    """Returns the forward nodes that depend on inputs and on no weight: masks, positions.

    Each stage computes them in its forward, and again in its backward. Otherwise it would keep them
    for each micro-batch. Sizes take no memory and are left out.

    Args:
        program: A program with its backward.
    """
    graph, contents = program.graph, program.env.contents
    chain = set(chain_of(graph, floating(graph), program.registry).nodes)
    data, found = set(graph.inputs), set()
    for node in graph:
        if node in chain or GRADIENT_OF in node.metadata_props:
            continue
        if not data.isdisjoint(read_by(node)):
            data.update(node.outputs)
            if any((value.name or "") not in contents for value in node.outputs):
                found.add(node.name or "")
    return frozenset(found)


def where_needed(
    graph: ir.Graph, virtual_by_node: Mapping[ir.Node, int]
) -> dict[ir.Node, tuple[int, ...]]:
    """Returns the virtual stages that compute each node, ascending; the nodes in topological order.

    Args:
        graph: The graph, in topological order.
        virtual_by_node: The virtual stages of the nodes of the chain. Every other node is computed
            by each virtual stage that reads it; by the first if none does, or if it makes an output
            of the graph.
    """
    outputs = set(graph.outputs)
    wanted: dict[ir.Value, set[int]] = {}
    found: dict[ir.Node, tuple[int, ...]] = {}
    for node in reversed(list(graph)):
        if node in virtual_by_node:
            mine: tuple[int, ...] = (virtual_by_node[node],)
        else:
            readers = set[int]().union(*(wanted.get(value, ()) for value in node.outputs))
            if not readers or any(value in outputs for value in node.outputs):
                readers.add(0)
            mine = tuple(sorted(readers))
        found[node] = mine
        for value in read_by(node):
            wanted.setdefault(value, set()).update(mine)
    return dict(reversed(found.items()))
