"""Propagation: from what the user fixed to a sharding of every value.

A round goes over the nodes in topological order; each is sharded by the layouts of its operands
(`choice`). In the second round, the layouts that later nodes needed are further proposals, so that
information flows in both directions. Further rounds follow while these or the hints about partial
values (`partial_hints`) change. Parameters, and values computed only from parameters, stay *free*
until a node reads them, and get the sharding that it needs: the layout of a weight costs nothing.
The backward of a node with a strategy is sharded like the node (`backward_dual`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.machine import WIRE
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.growth import large_sizes
from onnxpar.facts.program import NumberedValues, Program
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import (
    NodePlan,
    Plan,
    factor_sizes,
    operand_sharding,
    project,
    shardings,
    varying,
)
from onnxpar.graph.seeds import SPREAD, Seeds
from onnxpar.graph.shapes import itemsize
from onnxpar.graph.view_parts import Parts, structure
from onnxpar.propagation.backward_dual import Dual, dual
from onnxpar.propagation.choice import Chooser, Situation, leaving
from onnxpar.propagation.graph_inputs import shard_inputs
from onnxpar.propagation.partial_hints import Hints, partial_hints
from onnxpar.propagation.spread import spread
from onnxpar.resharding.routes import reachable

ROUNDS, MOST_ROUNDS = 2, 8


@dataclass(frozen=True)
class Alike:
    """Facts that are the same for every plan of a program, to be computed once.

    Attributes:
        parts: For each value the parts of each of its dims (see `graph.view_parts`).
        kinds: A number for each node, by name. Nodes with one number have equal rules, and operands
            and results of equal shapes, types and parts, so they are sharded alike in the same
            situation.
    """

    parts: Mapping[str, tuple[Parts, ...]]
    kinds: Mapping[str, int]


def alike(program: Program) -> Alike:
    """Returns the facts that are the same for every plan of a program."""
    nodes, env, rules = list(program.graph), program.env, program.rules
    parts = structure(nodes, rules.by_node, rules.views, env.table)
    numbers: dict[object, int] = {}
    kinds: dict[str, int] = {}
    seen = NumberedValues(
        lambda v: (v.dtype, env.shapes.get(v.name or ""), parts.get(v.name or ""))
    )
    for node in nodes:
        name = node.name or ""
        key = rules.by_node[name], seen.of(node)
        kinds[name] = numbers.setdefault(key, len(numbers))
    return Alike(parts, kinds)


def propagate(
    program: Program,
    seeds: Seeds,
    links: Mapping[str, tuple[str, ...]] | None = None,
    known: Alike | None = None,
) -> Plan:
    """Returns a plan for a program.

    Args:
        program: The program of one device; it is not changed.
        seeds: The part of the plan that the user fixed; always kept.
        links: For each cotangent its primals, by name. A cotangent is proposed to be sharded like
            its primal (where it is partial does not follow from the primal, since the two are
            dual). An output whose primal is a parameter is its gradient: it is sharded like the
            parameter, and may be partial, since it is reduced once per step.
        known: The result of `alike`, if several plans of one program are made.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    known = known or alike(program)
    if seeds.rest == SPREAD and not seeds.plans:
        seeds = spread(program, seeds, known.kinds)
    seeded = _seeded(program, seeds, known.kinds)
    wishes = _wishes(program, seeded, seeds)
    decided: dict[object, NodePlan] = {}
    around: dict[str, tuple[Dual | None, tuple[Sharding | None, ...]]] = {}
    table = program.env.table
    cost = CostModel(WIRE, seeds.mesh, table)
    chooser = Chooser(
        cost, seeds.parameter_axes, varying(seeds.inputs, table), large_sizes(program)
    )
    hints = Hints()
    for number in range(MOST_ROUNDS):
        walk = _Walk(
            program,
            seeds,
            seeded,
            known,
            wishes,
            links or {},
            chooser,
            decided,
            around,
            hints,
        )
        plan = walk.run()
        before = hints, wishes
        wishes = _wishes(program, plan.nodes, seeds)
        hints |= partial_hints(program, plan, walk.values, walk.gradients())
        if number + 1 >= ROUNDS and (hints, wishes) == before:
            break
    return shard_inputs(program, plan, seeds)


def _seeded(program: Program, seeds: Seeds, kinds: Mapping[str, int]) -> dict[str, NodePlan]:
    """The plans of the nodes that have a strategy, by name."""
    rules, found = program.rules, dict[str, NodePlan]()
    made: dict[object, NodePlan] = {}
    for name in (node.name or "" for node in program.graph):
        if name not in seeds.nodes:
            continue
        seed, reason = seeds.nodes[name], rules.reasons.get(name, "")
        given = tuple(seed.factors.items()), tuple(seed.carried.items()), seed.pinned, reason
        key = kinds[name], given
        if key not in made:
            made[key] = shardings(
                rules.by_node[name],
                rules.views[name],
                seed.factors,
                seeds.mesh,
                carried=seed.carried,
                pinned=seed.pinned,
                reason=reason,
            )
        found[name] = made[key]
    return found


def _wishes(program: Program, plans: Mapping[str, NodePlan], seeds: Seeds) -> dict[str, Sharding]:
    """Returns the sharding that the first reader of each value needs.

    A reader that needs all of it, but has no strategy, passes on what the readers of its results
    need.
    """
    wishes: dict[str, Sharding] = {}
    rules = program.rules
    for node in reversed(program.graph):
        name = node.name or ""
        rule, view = rules.by_node[name], rules.views[name]
        plan = plans.get(name)
        wanted: Sequence[Sharding | None] = (None,) * len(rule.inputs)
        if plan is not None:
            wanted = plan.inputs
        if name not in seeds.nodes and not any(s is not None and s.split_atoms for s in wanted):
            sizes = factor_sizes(rule, view)
            factors: dict[str, DimSharding] = {}
            for index, operand in enumerate(rule.outputs):
                wish = wishes.get(node.outputs[index].name or "")
                if wish is not None:
                    factors |= project(operand, wish, sizes, seeds.mesh, view.table, rule.scaled)
            wanted = [
                operand_sharding(o, view.shape(i), factors, sizes, rule.scaled)
                if factors and not o.mode and view.has(i)
                else None
                for i, o in enumerate(rule.inputs)
            ]
        for value, want in zip(node.inputs, wanted, strict=False):
            if value is not None and value.name and want is not None and want.split_atoms:
                wishes[value.name] = want.with_partial(())
    return wishes


@dataclass
class _Walk:
    """One round over the nodes, with the shardings found so far."""

    program: Program
    seeds: Seeds
    seeded: Mapping[str, NodePlan]
    known: Alike
    wishes: Mapping[str, Sharding]
    links: Mapping[str, tuple[str, ...]]
    chooser: Chooser
    decided: dict[object, NodePlan]
    around: dict[str, tuple[Dual | None, tuple[Sharding | None, ...]]]
    hints: Hints
    values: dict[str, Sharding] = field(default_factory=dict)
    versions: dict[str, tuple[Sharding, ...]] = field(default_factory=dict)
    plans: dict[str, NodePlan] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    # Parameters, and values that only rearrange them.
    parametric: set[str] = field(default_factory=set)
    resharded: dict[str, Sharding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env, self.rules = self.program.env, self.program.rules

    def run(self) -> Plan:
        graph = self.program.graph
        for value in graph.inputs:
            name = value.name or ""
            replicated = Sharding.replicated(self.env.shapes[name])
            self.values[name] = self._canonical(self.seeds.inputs.get(name, replicated))
        self.parametric.update(graph.initializers)
        for name in graph.initializers:
            if name in self.seeds.parameters:
                self.values[name] = self._canonical(self.seeds.parameters[name])
            else:
                self.free.add(name)
        for node in graph:
            self._visit(node)
        made = (v for node in graph for v in node.outputs)
        for value in (*graph.outputs, *made, *graph.initializers.values()):
            self._settle(value, None)
        return Plan(
            self.seeds.mesh,
            self.plans,
            {v.name or "": self.values[v.name or ""] for v in graph.inputs},
            {n: self.values[n] for n in graph.initializers},
            {v.name or "": self._leaving(v.name or "") for v in graph.outputs},
            self.resharded,
        )

    def _canonical(self, sharding: Sharding) -> Sharding:
        return sharding.canonical(self.seeds.mesh, self.env.table)

    def _leaving(self, name: str) -> Sharding:
        """Returns the sharding of a graph output."""
        if name in self.seeds.outputs:
            return self._canonical(self.seeds.outputs[name])
        made, parameter = self.values[name], self._parameter(name)
        return self._canonical(
            made.with_partial(()) if parameter is None else leaving(made, parameter)
        )

    def gradients(self) -> dict[str, Sharding]:
        """For each output that is a gradient, the layout of its parameter."""
        found = {v.name or "": self._parameter(v.name or "") for v in self.program.graph.outputs}
        return {name: layout for name, layout in found.items() if layout is not None}

    def _parameter(self, gradient: str) -> Sharding | None:
        """The layout of the parameter, possibly rearranged, whose gradient a value is."""
        primals = self.links.get(gradient, ())
        return next((self.values.get(p) for p in primals if p in self.parametric), None)

    def _visit(self, node: ir.Node) -> None:
        name = node.name or ""
        rule, view = self.rules.by_node[name], self.rules.views[name]
        if self._rearranges_parameters(node, rule):
            self.parametric.update(v.name or "" for v in node.outputs)
        if name in self.seeded:
            plan = self.seeded[name]
        elif self._holds(node, rule):
            plan = self.seeds.plans[name]
        elif name in self.rules.reasons or (
            self.seeds.rest == "replicate" and not view.is_backward
        ):
            reason = self.rules.reasons.get(name, "")
            plan = shardings(rule, view, {}, self.seeds.mesh, reason=reason)
        else:
            if self._stays_free(node, rule):
                self.free.update(v.name or "" for v in node.outputs)
                return
            plan = self._choose(node, rule, view)
        self._adopt(node, plan)
        for index, want in enumerate(self.seeds.nodes[name].out if name in self.seeded else ()):
            if want is not None:
                out = node.outputs[index].name or ""
                self.resharded[out] = self.values[out] = self._canonical(want)

    def _holds(self, node: ir.Node, rule: OpRule) -> bool:
        """Whether the node's plan in another program can be kept: its operands can be resharded."""
        plan = self.seeds.plans.get(node.name or "")
        if plan is None or plan.rule != rule:
            return False
        for value, want in zip(node.inputs, plan.inputs, strict=False):
            made = self.values.get(value.name or "") if value is not None else None
            if made is not None and want is not None and not reachable(made, want):
                return False
        return True

    def _rearranges_parameters(self, node: ir.Node, rule: OpRule) -> bool:
        """Whether a node computes its results from one parameter, or joins several.

        Of the operators with several operands, only those that join them may take maxima over
        devices afterwards as well as sums.
        """
        read = [i for i, o in enumerate(rule.inputs) if not o.mode]
        values = [node.inputs[i] for i in read if i < len(node.inputs)]
        if not values or any(v is not None and v.name not in self.parametric for v in values):
            return False
        return len(read) == 1 or {("sum", frozenset(read)), ("max", frozenset(read))} <= set(
            rule.linear
        )

    def _stays_free(self, node: ir.Node, rule: OpRule) -> bool:
        """Whether all operands are free, so that the reader of the result may choose its layout."""
        operands = [
            v
            for v, o in zip(node.inputs, rule.inputs, strict=False)
            if v is not None and not o.mode
        ]
        return (
            len(operands) > 0
            and len(node.outputs) == 1
            and not rule.outputs[0].mode
            and all((v.name or "") in self.free for v in operands)
        )

    def _choose(self, node: ir.Node, rule: OpRule, view: NodeView) -> NodePlan:
        names = [v.name if v is not None else None for v in node.inputs]
        outs = [v.name or "" for v in node.outputs]
        laid = (
            tuple(self.values.get(n) if n is not None else None for n in names),
            tuple(self._versions(n) if n is not None else () for n in names),
            tuple(n is not None and n in self.free for n in names),
        )
        later = (
            tuple(self._wish(n) for n in outs),
            tuple(self._parameter(n) for n in outs),
            tuple(self.hints.joined.get(n, frozenset()) for n in outs),
        )
        implied, demands = self._strategies(node)
        key = (self.known.kinds[node.name or ""], laid, later, implied, demands)
        if key not in self.decided:
            parts = tuple(self.known.parts.get(n) if n is not None else None for n in names)
            itemsizes = tuple(map(itemsize, (*node.inputs, *node.outputs)))
            situation = Situation(*laid, parts, *later, itemsizes, demands)
            self.decided[key] = self.chooser.choose(rule, view, situation, implied)
        return self.decided[key]

    def _strategies(self, node: ir.Node) -> tuple[Dual | None, tuple[Sharding | None, ...]]:
        """What the strategies of other nodes say about a node: the same in every round."""
        name = node.name or ""
        if name not in self.around:
            self.around[name] = self._implied(node), tuple(map(self._demand, node.outputs))
        return self.around[name]

    def _implied(self, node: ir.Node) -> Dual | None:
        """The layout of a backward node whose forward node has a strategy."""
        name = node.metadata_props.get(GRADIENT_OF, "")
        if name not in self.seeds.nodes:
            return None
        return dual(node, self.rules.views[name].node, self.seeded[name], self.links)

    def _demand(self, value: ir.Value) -> Sharding | None:
        """The sharding that the only reader of a value needs, if it has a strategy."""
        uses = list(value.uses())
        if len(uses) != 1 or value.is_graph_output():
            return None
        plan = self.seeded.get(uses[0].node.name or "")
        want = None if plan is None else plan.inputs[uses[0].idx]
        return None if want is None or want.partial else want

    def _versions(self, name: str) -> tuple[Sharding, ...]:
        made = self.values.get(name)
        return () if made is None else (made, *self.versions.get(name, ()))

    def _wish(self, name: str) -> Sharding | None:
        """The sharding that later readers of a value need; for a cotangent, that of its primal."""
        for primal in self.links.get(name, ()):
            made = self.values.get(primal)
            if made is not None and made.split_atoms:
                return made.with_partial(())
        return self.wishes.get(name)

    def _adopt(self, node: ir.Node, plan: NodePlan) -> None:
        self.plans[node.name or ""] = plan
        for value, want in zip(node.inputs, plan.inputs, strict=False):
            if value is not None:
                self._settle(value, want)
                versions = self._versions(value.name or "")
                if want is not None and want not in versions:
                    self.versions[value.name or ""] = (*versions[1:], want)
        for value, made in zip(node.outputs, plan.outputs, strict=True):
            name = value.name or ""
            self.values[name] = made
            self.free.discard(name)
            if name in self.hints.early and made.partial:
                self.versions[name] = (self._canonical(made.with_partial(())),)

    def _settle(self, value: ir.Value, want: Sharding | None) -> None:
        """Gives a free value, and the free values behind it, the layout of its first reader."""
        name = value.name or ""
        if name not in self.free:
            return
        self.free.discard(name)
        mesh, table = self.seeds.mesh, self.env.table
        node = value.producer()
        if node is None:
            layout = want or Sharding.replicated(self.env.shapes[name])
            self.values[name] = self._canonical(layout.with_partial(()))
            return
        rule, view = self.rules.by_node[node.name or ""], self.rules.views[node.name or ""]
        factors = {}
        if want is not None:
            sizes = factor_sizes(rule, view)
            found = project(rule.outputs[0], want, sizes, mesh, table, rule.scaled)
            factors = {f: p for f, p in found.items() if f in rule.splittable}
        self._adopt(node, shardings(rule, view, factors, mesh))
