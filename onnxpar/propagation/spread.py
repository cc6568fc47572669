"""Spreads strategies from node to node, as MindSpore's sharding propagation does.

The nodes with a strategy are taken in the order of the graph. From each one, the strategies spread
breadth first: first to the readers of its results, then to the nodes that make its operands, and on
from these. They do not pass through another node with a strategy. A node waits for a node that
makes its operand and is about to be decided.

A node chooses among all strategies that use every device, or as many as its sizes allow. It takes
the one with the fewest bytes to reshard its operands from the nodes that make them and are decided
(or, if it was reached from a reader, its results for that reader); then the one that slices the
fewest elements for this; then the one with the fewest bytes of its own (for partial sums); then the
one whose numbers of shards come first in lexicographic order. The first criterion ignores what
follows: this is what MindSpore does, not what is cheapest.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from onnxpar.core.errors import MeshError
from onnxpar.core.machine import WIRE
from onnxpar.core.rule import PARALLEL, OpRule
from onnxpar.core.sharding import REDUCTIONS, Component, DimSharding, Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import Carried, Factors, NodePlan, factor_sizes, shardings
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.graph.shapes import itemsize
from onnxpar.propagation.choice import Chooser, Situation


@dataclass(frozen=True)
class SpreadingChooser(Chooser):
    """Chooses a node's strategy by its decided neighbours alone."""

    def candidates(
        self, rule: OpRule, view: NodeView, situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        """Yields every way to shard parallel and reduced factors over all devices, or over most."""
        sizes = factor_sizes(rule, view)
        names = [n for n, kind in rule.kinds.items() if kind == PARALLEL or kind in REDUCTIONS]
        limits = [sizes[name] for name in names]
        devices = self.mesh.size
        for used in (n for n in range(devices, 0, -1) if devices % n == 0):
            found = False
            for counts in _products(used, limits):
                try:
                    runs = self.mesh.matrix(counts)
                except MeshError:
                    continue
                found = True
                parts = zip(names, limits, runs, strict=True)
                yield {name: (Component(size, atoms),) for name, size, atoms in parts if atoms}
            if found:
                return

    def carries(self, rule: OpRule, factors: Factors, situation: Situation) -> list[Carried]:
        """Returns that no operand stays partial."""
        return [{}]

    def rank(
        self, rule: OpRule, plan: NodePlan, view: NodeView, situation: Situation, carries: bool
    ) -> tuple[object, ...]:
        """Returns what is least for the strategy that is chosen."""
        edges = [
            (made, want, situation.itemsizes[index])
            for index, (made, want) in enumerate(zip(situation.operands, plan.inputs, strict=False))
            if made is not None and want is not None
        ]
        edges += [
            (made.with_partial(()), wish, situation.itemsizes[len(situation.operands) + index])
            for index, (made, wish) in enumerate(zip(plan.outputs, situation.wishes, strict=False))
            if wish is not None
        ]
        moved = sliced = 0
        for source, target, width in edges:
            route = self.cost.route((source,), target, width)
            moved += route.bytes
            sliced += sum(
                self.cost.elements(step.before) for step in route.steps if step.kind == "slice"
            )
        alone = replace(situation, versions=tuple(() for _ in situation.versions))
        own, _, _ = self.price(rule, plan, view, alone, carries)
        counts = tuple(() if s is None else s.strategy(self.mesh) for s in plan.inputs)
        return moved, sliced, own, counts


def _products(count: int, sizes: Sequence[object]) -> Iterator[tuple[int, ...]]:
    """Yields every tuple of a divisor of each size whose product is `count`; symbols divide."""
    if not sizes:
        if count == 1:
            yield ()
        return
    for n in (n for n in range(1, count + 1) if count % n == 0):
        if not isinstance(sizes[0], int) or sizes[0] % n == 0:
            for others in _products(count // n, sizes[1:]):
                yield (n, *others)


def spread(program: Program, seeds: Seeds, kinds: Mapping[str, int]) -> Seeds:
    """Returns seeds with a strategy for every forward node that can be reached from one that has.

    Args:
        program: The program; it is not changed.
        seeds: What the user fixed; it is kept.
        kinds: A number for each node, by name; nodes with one number choose alike.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    return _Spreading(program, seeds, kinds).run()


@dataclass
class _Spreading:
    """The strategies found so far.

    Attributes:
        program: The program.
        seeds: What the user fixed.
        kinds: A number for each node, by name; nodes with one number choose alike.
        made: For each value of a decided node, its sharding after the node, complete.
        plans: The plan of each decided node, by name.
        parametric: Values that are computed from parameters only; their layouts cost nothing.
    """

    program: Program
    seeds: Seeds
    kinds: Mapping[str, int]
    made: dict[str, Sharding] = field(default_factory=dict)
    plans: dict[str, NodePlan] = field(default_factory=dict)
    parametric: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rules = self.program.rules
        cost = CostModel(WIRE, self.seeds.mesh, self.program.env.table)
        self.chooser = SpreadingChooser(cost)
        graph = self.program.graph
        self.parametric.update(graph.initializers)
        self.nodes: dict[str, ir.Node] = {}
        self.chosen: dict[object, NodePlan] = {}
        for node in graph:
            read = {v.name or "" for v in node.inputs if v is not None}
            if read <= self.parametric:
                self.parametric.update(v.name or "" for v in node.outputs)
            elif not self.rules.views[node.name or ""].is_backward:
                self.nodes[node.name or ""] = node

    def run(self) -> Seeds:
        mesh = self.seeds.mesh
        given = [node for name, node in self.nodes.items() if name in self.seeds.nodes]
        for node in given:
            seed, name = self.seeds.nodes[node.name or ""], node.name or ""
            rule, view = self.rules.by_node[name], self.rules.views[name]
            plan = shardings(rule, view, seed.factors, mesh, carried=seed.carried)
            self._decide(node, plan, seed.out)
        for node in given:
            self._from(node)
        nodes = {
            name: NodeSeed(name, plan.factors, pinned=False)
            for name, plan in self.plans.items()
            if name not in self.seeds.nodes
        }
        return replace(self.seeds, nodes={**nodes, **self.seeds.nodes})

    def _decide(self, node: ir.Node, plan: NodePlan, out: Sequence[Sharding | None] = ()) -> None:
        self.plans[node.name or ""] = plan
        for index, (value, made) in enumerate(zip(node.outputs, plan.outputs, strict=True)):
            after = out[index] if index < len(out) else None
            self.made[value.name or ""] = (after or made).with_partial(())

    def _from(self, start: ir.Node) -> None:
        """Spreads the strategy of one node breadth first."""
        # Each node that was reached; for one reached from a reader, what the reader needs of it.
        waiting: dict[str, dict[str, Sharding]] = {}

        def meet(node: ir.Node) -> None:
            readers = (use.node.name or "" for value in node.outputs for use in value.uses())
            plan = self.plans[node.name or ""]
            needs = {
                v.name or "": want.with_partial(())
                for v, want in zip(node.inputs, plan.inputs, strict=False)
                if v is not None and want is not None
            }
            for names, wishes in ((readers, {}), (_makers(node), needs)):
                for name in names:
                    if name in self.nodes and name not in self.plans:
                        waiting.setdefault(name, wishes)

        meet(start)
        while waiting:
            ready = (n for n in waiting if not waiting.keys() & set(_makers(self.nodes[n])))
            name = next(ready)
            node = self.nodes[name]
            self._decide(node, self._choose(node, waiting.pop(name)))
            meet(node)

    def _choose(self, node: ir.Node, wishes: Mapping[str, Sharding]) -> NodePlan:
        """Chooses for a node that was reached from a reader with wishes, or from its operands."""
        name = node.name or ""
        rule, view = self.rules.by_node[name], self.rules.views[name]
        if name in self.rules.reasons:
            reason = self.rules.reasons[name]
            return shardings(rule, view, {}, self.seeds.mesh, reason=reason)
        known = {} if wishes else self.made
        free = tuple(v is not None and v.name in self.parametric for v in node.inputs)
        made = tuple(
            None if v is None or is_free else known.get(v.name or "")
            for v, is_free in zip(node.inputs, free, strict=True)
        )
        nothing = (None,) * len(node.outputs)
        situation = Situation(
            made,
            tuple(() if s is None else (s,) for s in made),
            free,
            (None,) * len(node.inputs),
            tuple(wishes.get(v.name or "") for v in node.outputs),
            nothing,
            (frozenset(),) * len(node.outputs),
            tuple(map(itemsize, (*node.inputs, *node.outputs))),
        )
        key = (self.kinds[name], situation)
        if key not in self.chosen:
            self.chosen[key] = self.chooser.choose(rule, view, situation)
        return self.chosen[key]


def _makers(node: ir.Node) -> list[str]:
    """The names of the nodes that make the operands of a node."""
    makers = [v.producer() for v in node.inputs if v is not None]
    return [m.name or "" for m in makers if m is not None]
