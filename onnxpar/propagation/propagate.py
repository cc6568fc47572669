"""Propagation: from what the user fixed to a sharding of every value.

Forward over the nodes in topological order, each choosing by the layouts of its operands
(`choose`); then once more with what later nodes turned out to want as further proposals, so that
information flows in both directions, and again while something new is seen of partial values
(`partial_hints`). Parameters and values made only of parameters stay *free* until a node wants
them, and take the
sharding that it wants: laying out a weight costs nothing. The backward of a node that has a
strategy is sharded as the node is (`backward_dual`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.core.symbols import symbols_of
from onnxpar.facts.program import Program
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
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.view_parts import Parts, structure
from onnxpar.propagation.backward_dual import Dual, dual
from onnxpar.propagation.choice import Chooser, Situation, leaving
from onnxpar.propagation.graph_inputs import entering
from onnxpar.propagation.partial_hints import Hints, partial_hints
from onnxpar.resharding.routes import cheapest_route, reachable

ROUNDS, MOST_ROUNDS = 2, 4
FORBIDDEN = 1 << 60
"""Bytes; the price of moving a tensor between ranks that have different sizes of it."""


@dataclass(frozen=True)
class Alike:
    """What is the same in every plan of a program, so that comparing plans finds it once.

    Attributes:
        parts: For each value the parts of each of its dims (see `graph.view_parts`).
        kinds: A number for each node, by name; nodes of one number are sharded alike in one
            situation: rule, shapes, types and parts of their operands are equal.
    """

    parts: Mapping[str, tuple[Parts, ...]]
    kinds: Mapping[str, int]


def alike(program: Program) -> Alike:
    """Returns what is the same in every plan of a program."""
    nodes, env, rules = list(program.graph), program.env, program.rules
    parts = structure(nodes, rules.by_node, rules.views, env.table)
    numbers: dict[object, int] = {}
    kinds: dict[str, int] = {}
    for node in nodes:
        operands = tuple(
            None if v is None else (v.dtype, env.shapes.get(v.name or ""), parts.get(v.name or ""))
            for v in (*node.inputs, *node.outputs)
        )
        name = node.name or ""
        kinds[name] = numbers.setdefault((rules.by_node[name], operands), len(numbers))
    return Alike(parts, kinds)


def propagate(
    program: Program,
    seeds: Seeds,
    links: Mapping[str, tuple[str, ...]] | None = None,
    known: Alike | None = None,
) -> Plan:
    """Returns a plan for the whole model.

    Args:
        program: The program of one device; it is not changed.
        seeds: What the user fixed; always kept.
        links: Of each cotangent its primals, by name. A cotangent is proposed to be split as its
            primal is (which of the two is partial says nothing of the other: they are dual). An
            output whose primal is a parameter is its gradient: it leaves split as the parameter
            is, and may still be partial, since it is reduced once a step.
        known: What `alike` returns, where several plans of a program are wanted.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    nodes, rules, table = list(program.graph), program.rules, program.env.table
    known = known or alike(program)
    wishes = _wishes(program, _pinned(program, seeds), seeds)
    decided: dict[object, NodePlan] = {}
    hints = Hints()
    for number in range(MOST_ROUNDS):
        walk = _Walk(program, seeds, known, wishes, links or {}, decided, hints)
        plan = walk.run(nodes)
        wishes = _wishes(program, plan.nodes, seeds)
        seen = hints | partial_hints(
            nodes, rules.by_node, plan.nodes, walk.values, seeds.mesh, table
        )
        if number + 1 >= ROUNDS and seen == hints:
            break
        hints = seen
    return entering(plan, nodes, program.graph.outputs, seeds, table)


def _pinned(program: Program, seeds: Seeds) -> dict[str, NodePlan]:
    plans, rules = {}, program.rules
    for node in program.graph:
        name = node.name or ""
        if name in seeds.nodes:
            plans[name] = shardings(
                rules.by_node[name],
                rules.views[name],
                seeds.nodes[name].factors,
                seeds.mesh,
                carried=seeds.nodes[name].carried,
                pinned=True,
            )
    return plans


def _wishes(program: Program, plans: Mapping[str, NodePlan], seeds: Seeds) -> dict[str, Sharding]:
    """Returns the split that the first user of each value wants, passed back through views."""
    wishes: dict[str, Sharding] = {}
    rules = program.rules
    for node in reversed(program.graph):
        name = node.name or ""
        rule, view = rules.by_node[name], rules.views[name]
        plan = plans.get(name)
        if plan is not None:
            wanted: Sequence[Sharding | None] = plan.inputs
        else:
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
    """One forward pass. Holds the shardings found so far."""

    program: Program
    seeds: Seeds
    known: Alike
    wishes: Mapping[str, Sharding]
    links: Mapping[str, tuple[str, ...]]
    decided: dict[object, NodePlan]
    hints: Hints
    values: dict[str, Sharding] = field(default_factory=dict)
    versions: dict[str, tuple[Sharding, ...]] = field(default_factory=dict)
    plans: dict[str, NodePlan] = field(default_factory=dict)
    free: set[str] = field(default_factory=set)
    # Parameters, and what only rearranges one.
    parametric: set[str] = field(default_factory=set)
    resharded: dict[str, Sharding] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env, self.rules = self.program.env, self.program.rules

    def run(self, nodes: Sequence[ir.Node]) -> Plan:
        mesh, table = self.seeds.mesh, self.env.table
        graph = self.program.graph
        for value in graph.inputs:
            name = value.name or ""
            self.values[name] = self.seeds.inputs.get(
                name, Sharding.replicated(self.env.shapes[name])
            ).canonical(mesh, table)
        self.parametric.update(graph.initializers)
        for name in graph.initializers:
            if name in self.seeds.parameters:
                self.values[name] = self.seeds.parameters[name].canonical(mesh, table)
            else:
                self.free.add(name)
        for node in nodes:
            self._visit(node)
        for value in (*graph.outputs, *(v for node in nodes for v in node.outputs)):
            self._settle(value, None)
        for name in graph.initializers:
            self._settle(graph.initializers[name], None)
        outputs = {v.name or "": self._leaving(v.name or "") for v in graph.outputs}
        return Plan(
            mesh,
            self.plans,
            {v.name or "": self.values[v.name or ""] for v in graph.inputs},
            {n: self.values[n] for n in graph.initializers},
            outputs,
            self.resharded,
        )

    def _leaving(self, name: str) -> Sharding:
        """Returns the sharding in which an output leaves."""
        mesh, table = self.seeds.mesh, self.env.table
        if name in self.seeds.outputs:
            return self.seeds.outputs[name].canonical(mesh, table)
        made, parameter = self.values[name], self._parameter(name)
        wanted = made.with_partial(()) if parameter is None else leaving(made, parameter)
        return wanted.canonical(mesh, table)

    def _parameter(self, gradient: str) -> Sharding | None:
        """The layout of the parameter, or the rearranged parameter, whose gradient a value is."""
        primals = self.links.get(gradient, ())
        return next((self.values.get(p) for p in primals if p in self.parametric), None)

    def _visit(self, node: ir.Node) -> None:
        name = node.name or ""
        rule, view = self.rules.by_node[name], self.rules.views[name]
        seed = self.seeds.nodes.get(name)
        if seed is not None:
            plan = shardings(
                rule,
                view,
                seed.factors,
                self.seeds.mesh,
                carried=seed.carried,
                pinned=seed.pinned,
                reason=self.rules.reasons.get(name, ""),
            )
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
                if len([o for o in rule.inputs if not o.mode]) == 1:
                    self.parametric.update(v.name or "" for v in node.outputs)
                return
            plan = self._choose(node, rule, view)
        self._adopt(node, plan)
        for index, want in enumerate(seed.out if seed is not None else ()):
            if want is not None:
                out = node.outputs[index].name or ""
                self.resharded[out] = want.canonical(self.seeds.mesh, self.env.table)
                self.values[out] = self.resharded[out]

    def _holds(self, node: ir.Node, rule: OpRule) -> bool:
        """Whether the plan that another program gave a node can be kept: its operands get there."""
        plan = self.seeds.plans.get(node.name or "")
        if plan is None or plan.rule != rule:
            return False
        for value, want in zip(node.inputs, plan.inputs, strict=False):
            made = self.values.get(value.name or "") if value is not None else None
            if made is not None and want is not None and not reachable(made, want):
                return False
        return True

    def _stays_free(self, node: ir.Node, rule: OpRule) -> bool:
        """Whether the node is made of free values only, so that its user may choose its layout."""
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
        implied = self._implied(node)
        key = (self.known.kinds[node.name or ""], laid, later, implied)
        if key not in self.decided:
            parts = tuple(self.known.parts.get(n) if n is not None else None for n in names)
            itemsizes = tuple(
                int(v.dtype.itemsize) if v is not None and v.dtype is not None else 4
                for v in (*node.inputs, *node.outputs)
            )
            chooser = Chooser(
                self.seeds.mesh, self.env.table, self.seeds.parameter_axes, self._cost
            )
            situation = Situation(*laid, parts, *later, itemsizes)
            self.decided[key] = chooser.choose(rule, view, situation, implied)
        return self.decided[key]

    def _implied(self, node: ir.Node) -> Dual | None:
        """The layout of a backward node where its forward node has a strategy."""
        name = node.metadata_props.get(GRADIENT_OF, "")
        if name not in self.seeds.nodes:
            return None
        return dual(node, self.rules.views[name].node, self.plans[name], self.links)

    def _versions(self, name: str) -> tuple[Sharding, ...]:
        made = self.values.get(name)
        return () if made is None else (made, *self.versions.get(name, ()))

    def _wish(self, name: str) -> Sharding | None:
        """The split that a value's later users want; for a cotangent, that of its primal."""
        for primal in self.links.get(name, ()):
            made = self.values.get(primal)
            if made is not None and made.split_atoms:
                return made.with_partial(())
        return self.wishes.get(name)

    def _cost(self, versions: Sequence[Sharding], target: Sharding, itemsize: int) -> int:
        way = cheapest_route(versions, target, self.seeds.mesh, self.env.table, itemsize)
        for step in way.steps if self.varying else ():
            for symbol in symbols_of(step.bytes):
                if self.varying.get(symbol, frozenset()) & set(step.atoms):
                    return FORBIDDEN
        return way.bytes

    @cached_property
    def varying(self) -> Mapping[str, frozenset[int]]:
        """Along which atoms the value of a per-rank symbol differs."""
        return varying(self.seeds.inputs, self.env.table)

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
                whole = made.with_partial(()).canonical(self.seeds.mesh, self.env.table)
                self.versions[name] = (whole,)

    def _settle(self, value: ir.Value, want: Sharding | None) -> None:
        """Lays out a free value as its first user wants it, and the free values it is made of."""
        name = value.name or ""
        if name not in self.free:
            return
        self.free.discard(name)
        mesh, table = self.seeds.mesh, self.env.table
        node = value.producer()
        if node is None:
            whole = Sharding.replicated(self.env.shapes[name])
            self.values[name] = (want or whole).with_partial(()).canonical(mesh, table)
            return
        rule, view = self.rules.by_node[node.name or ""], self.rules.views[node.name or ""]
        factors = {}
        if want is not None:
            sizes = factor_sizes(rule, view)
            found = project(rule.outputs[0], want, sizes, mesh, table, rule.scaled)
            factors = {f: p for f, p in found.items() if f in rule.splittable}
        self._adopt(node, shardings(rule, view, factors, mesh))
