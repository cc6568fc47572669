"""The reshards of a plan that are due to two neighbours with different layouts, and their reasons.

If the node that computes a value and its reader have the same layout, nothing is sent. A partial
value costs a reduction for every reader. All other communication between nodes is a conflict: the
value has one layout (from a node, the data set, or an earlier reader of a parameter), and the
reader needs another. Each conflict has two prices: that of the plan, and that of the reader taking
the value in the value's own layout.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.machine import WIRE
from onnxpar.core.mesh import Mesh
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.core.symbols import Dim
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import (
    Carried,
    Factors,
    NodePlan,
    Plan,
    factor_sizes,
    project,
    shardings,
    used_atoms,
)
from onnxpar.graph.shapes import itemsize
from onnxpar.propagation.choice import Chooser, Situation, merged
from onnxpar.propagation.partial_hints import partial_hints
from onnxpar.resharding.routes import Route, cheapest_route

REDUCING = ("slice", "all_reduce", "reduce_scatter")

STRATEGY, OPERATOR, COST, WHOLE_PLAN = "strategy", "operator", "cost", "plan"
"""Why a reader does not take a value in the value's layout: the user's strategy requires another;
the operator cannot; no bytes would be saved; bytes would be saved here, but lost elsewhere."""

_WORDS = {
    STRATEGY: "the strategy requires this layout",
    OPERATOR: "the operator cannot be computed in the value's layout",
    COST: "this layout costs no more than the value's",
    WHOLE_PLAN: "the plan as a whole is better with this layout",
}


@dataclass(frozen=True)
class Conflict:
    """A reshard between neighbours.

    Attributes:
        node: The reader; "" for an output of the graph.
        operand: Number of its operand; number of its output if `node` reshards its own result as
            the user's strategy requires.
        value: The value.
        maker: The node that computed it, or "" for inputs and initializers.
        held: The sharding from which it is brought.
        wanted: The sharding into which it is brought.
        steps: Kinds of the steps, in order.
        bytes: Bytes that one device sends for it, possibly symbolic.
        typical: The same at typical sizes.
        why: One of `STRATEGY`, `OPERATOR`, `COST` and `WHOLE_PLAN`.
        detail: If `why` is `OPERATOR` and the node has no rule: the reason for that.
        cost: Bytes that the reader's plan sends for all its operands and for the reductions of its
            results, at typical sizes.
        other: The same if it took the value in the value's own layout; None if it cannot.
    """

    node: str
    operand: int
    value: str
    maker: str
    held: Sharding
    wanted: Sharding
    steps: tuple[str, ...]
    bytes: Dim
    typical: int
    why: str
    detail: str = ""
    cost: int = 0
    other: int | None = None

    @property
    def reason(self) -> str:
        """The reason in words, with both prices."""
        text = self.detail or _WORDS[self.why]
        if self.other is None:
            return text
        return (
            f"{text}; at typical sizes, a device sends {self.cost:,} bytes for the node, "
            f"and would send {self.other:,} in the value's layout"
        )


def conflicts(
    program: Program,
    plan: Plan,
    gathered: frozenset[str] = frozenset(),
) -> tuple[Conflict, ...]:
    """Returns the conflicts of a plan, in the order of the nodes and their operands.

    They follow from the plan alone, however it was found.

    Args:
        program: The program of one device; it is not changed.
        plan: Its plan.
        gathered: Values that optimizer parallel gathers for each reader; they are not conflicts.
    """
    return tuple(c for c in _Replay(program, plan).run() if c.value not in gathered)


@dataclass
class _Replay:
    """Goes over the nodes in order, with the versions of each value at that point."""

    program: Program
    plan: Plan
    made: dict[str, Sharding] = field(default_factory=dict)
    versions: dict[str, tuple[Sharding, ...]] = field(default_factory=dict)
    known: dict[object, tuple[int, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env, self.rules = self.program.env, self.program.rules

    def run(self) -> Iterator[Conflict]:
        graph, plan = self.program.graph, self.plan
        self.made.update({**plan.inputs, **plan.parameters})
        self.versions.update({name: (sharding,) for name, sharding in self.made.items()})
        for node in graph:
            for value, made in zip(node.outputs, plan.nodes[node.name or ""].outputs, strict=True):
                name = value.name or ""
                self.made[name] = plan.resharded.get(name, made)
        leaving = {v.name or "": self._gradient(v.name or "") for v in graph.outputs}
        gradients = {name: layout for name, layout in leaving.items() if layout is not None}
        self.joined = partial_hints(self.program, plan, self.made, gradients).joined
        # The layout of a parameter is that of its first reader.
        self.unread = set(plan.parameters)
        for node in graph:
            yield from self._node(node)
        for value in graph.outputs:
            yield from self._leaving(value)

    def _node(self, node: ir.Node) -> Iterator[Conflict]:
        name = node.name or ""
        plan = self.plan.nodes[name]
        for index, (value, want) in enumerate(zip(node.inputs, plan.inputs, strict=False)):
            there = self._there(value)
            if value is None or want is None or not there or want in there:
                continue
            route = self._route(there, want, value)
            if _conflicts(route):
                why, detail, cost, other = self._why(node, index)
                yield self._conflict(value, name, index, route, want, why, detail, cost, other)
        for value, want in zip(node.inputs, plan.inputs, strict=False):
            key = value.name or "" if value is not None else ""
            self.unread.discard(key)
            if want is not None and want not in self.versions.get(key, (want,)):
                self.versions[key] = (*self.versions[key], want)
        for index, (value, made) in enumerate(zip(node.outputs, plan.outputs, strict=True)):
            key = value.name or ""
            self.versions[key] = (made,)
            after = self.plan.resharded.get(key)
            if after is not None and after != made:
                route = self._route((made,), after, value)
                self.versions[key] = (after, made)
                if _conflicts(route):
                    yield self._conflict(value, name, index, route, after, STRATEGY)

    def _leaving(self, value: ir.Value) -> Iterator[Conflict]:
        name = value.name or ""
        want, there = self.plan.outputs[name], self._there(value)
        if there and want not in there:
            route = self._route(there, want, value)
            if _conflicts(route):
                yield self._conflict(value, "", 0, route, want, STRATEGY)

    def _there(self, value: ir.Value | None) -> tuple[Sharding, ...]:
        return () if value is None else self.versions.get(value.name or "", ())

    def _route(self, there: Sequence[Sharding], want: Sharding, value: ir.Value) -> Route:
        mesh, table = self.plan.mesh, self.env.table
        return cheapest_route(there, want, mesh, table, itemsize(value))

    def _conflict(
        self,
        value: ir.Value,
        node: str,
        operand: int,
        route: Route,
        wanted: Sharding,
        why: str,
        detail: str = "",
        cost: int = 0,
        other: int | None = None,
    ) -> Conflict:
        maker = value.producer()
        return Conflict(
            node,
            operand,
            value.name or "",
            (maker.name or "") if maker is not None else "",
            route.source,
            wanted,
            tuple(step.kind for step in route.steps),
            sum(step.bytes for step in route.steps),
            route.bytes,
            why,
            detail,
            cost or route.bytes,
            other,
        )

    # -- the other way ---------------------------------------------------------------------------

    def _why(self, node: ir.Node, index: int) -> tuple[str, str, int, int | None]:
        """Why a node does not take an operand in its current layout, and the bytes of both."""
        plan = self.plan.nodes[node.name or ""]
        if plan.reason:
            return OPERATOR, plan.reason, 0, None
        cost, other = self._prices(node, index)
        if plan.pinned:
            return STRATEGY, "", cost, other
        if other is None:
            return OPERATOR, "", cost, None
        return (COST if cost <= other else WHOLE_PLAN), "", cost, other

    def _prices(self, node: ir.Node, index: int) -> tuple[int, int | None]:
        name = node.name or ""
        plan, view = self.plan.nodes[name], self.rules.views[name]
        situation = self._situation(node)
        # Repeated layers have equal keys.
        key = (
            plan.rule,
            tuple(
                view.env.shapes.get(v.name or "") if v is not None else None for v in node.inputs
            ),
            tuple(plan.factors.items()),
            tuple(plan.carried.items()),
            situation,
            index,
        )
        if key not in self.known:
            self.known[key] = self._priced(plan, view, situation, index)
        return self.known[key]

    def _priced(
        self, plan: NodePlan, view: NodeView, situation: Situation, index: int
    ) -> tuple[int, int | None]:
        mesh, table = self.plan.mesh, self.env.table

        chooser = Chooser(CostModel(WIRE, mesh, table))
        held = situation.operands[index]
        assert held is not None
        sharded = held.with_partial(()).canonical(mesh, table)
        others = []
        for factors in _agreeing(plan, view, situation, index, mesh):
            for carried in _carries(plan.rule, factors, situation, held):
                try:
                    found = shardings(plan.rule, view, factors, mesh, carried=carried)
                except ShardingError:
                    continue
                want = found.inputs[index]
                if want is not None and want.with_partial(()).canonical(mesh, table) == sharded:
                    price = chooser.price(plan.rule, found, view, situation, bool(carried))
                    others.append(round(price[0]))
        chosen = chooser.price(plan.rule, plan, view, situation, bool(plan.carried))
        return round(chosen[0]), min(others, default=None)

    def _situation(self, node: ir.Node) -> Situation:
        names = [v.name or "" if v is not None else "" for v in node.inputs]
        outs = [v.name or "" for v in node.outputs]
        free = tuple(n in self.unread for n in names)
        return Situation(
            tuple(self.made.get(n) if self.versions.get(n) else None for n in names),
            tuple(
                () if open_ else self.versions.get(n, ())
                for n, open_ in zip(names, free, strict=True)
            ),
            free,
            (None,) * len(names),
            (None,) * len(outs),
            tuple(self._gradient(n) for n in outs),
            tuple(self.joined.get(n, frozenset()) for n in outs),
            tuple(map(itemsize, (*node.inputs, *node.outputs))),
        )

    def _gradient(self, name: str) -> Sharding | None:
        """The layout of the parameter whose gradient this graph output is, if it is partial."""
        leaves = self.plan.outputs.get(name)
        return leaves.with_partial(()) if leaves is not None and leaves.partial else None


def _agreeing(
    plan: NodePlan, view: NodeView, situation: Situation, index: int, mesh: Mesh
) -> Iterator[Factors]:
    """Yields sharded factors with which a node takes an operand in its current layout."""
    rule, sizes = plan.rule, factor_sizes(plan.rule, view)

    def factors_of(number: int) -> dict[str, DimSharding]:
        held = situation.operands[number] if number < len(situation.operands) else None
        if held is None or rule.inputs[number].mode:
            return {}
        found = project(rule.inputs[number], held, sizes, mesh, view.table, rule.scaled)
        return {name: parts for name, parts in found.items() if name in rule.splittable}

    first = factors_of(index)
    numbers = (i for i in range(len(rule.inputs)) if i != index and not situation.free[i])
    yield merged([first, plan.factors], rule)
    yield merged([first, *map(factors_of, numbers)], rule)
    yield first


def _carries(
    rule: OpRule, factors: Factors, situation: Situation, held: Sharding
) -> Iterator[Carried]:
    """The choices for a partial operand: it is reduced first, or stays partial."""
    yield {}
    if not held.partial or used_atoms(factors) & set(held.partial):
        return
    partial = (held.partial, held.reduction)
    alike = {
        i for i, s in enumerate(situation.operands) if s and (s.partial, s.reduction) == partial
    }
    for reduction, group in rule.linear:
        if reduction == held.reduction and group <= alike:
            yield dict.fromkeys(sorted(group), partial)


def _conflicts(route: Route) -> bool:
    """Whether a route sends more than the reduction of a partial value."""
    return route.bytes > 0 and any(step.kind not in REDUCING for step in route.steps)
