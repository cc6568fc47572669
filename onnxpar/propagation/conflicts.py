"""What a plan pays because two neighbours want a value in different layouts, and why it does.

A value whose maker and reader agree is there already; one that waits for a reduction costs that
reduction, whatever the reader. All else that is sent between nodes is a conflict: the maker (a
node, the data set, an earlier reader of a parameter) has laid the value out in one way and the
reader wants another. Beside what was chosen stands the price of the other way to resolve it: that
the reader takes the value in its current layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.core.symbols import Dim
from onnxpar.facts.program import Program
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import Factors, NodePlan, Plan, factor_sizes, project, shardings
from onnxpar.propagation.choice import Chooser, Situation
from onnxpar.propagation.partial_hints import partial_hints
from onnxpar.resharding.routes import Route, cheapest_route

REDUCING = ("slice", "all_reduce", "reduce_scatter")

STRATEGY, OPERATOR, COST, WHOLE_PLAN = "strategy", "operator", "cost", "plan"
"""Why a reader does not take a value in its current layout: the user's strategy says so; its
operator cannot; that would not send fewer bytes; it would send fewer here, but more elsewhere."""

_WORDS = {STRATEGY: "strategy given", COST: "cheapest", WHOLE_PLAN: "for the whole plan"}


@dataclass(frozen=True)
class Conflict:
    """A reshard between neighbours.

    Attributes:
        node: The reader; an output of the graph that leaves in another layout has none.
        operand: Number of its operand; of the output where `node` brings its own result into the
            layout that the user asked for.
        value: The value.
        maker: The node that made it, or "" for what enters the graph.
        held: The sharding that it is brought from.
        wanted: The sharding that it is brought into.
        steps: Kinds of the steps, in order.
        bytes: Bytes that one device sends for it, possibly symbolic.
        typical: The same at typical sizes.
        why: One of `STRATEGY`, `OPERATOR`, `COST` and `WHOLE_PLAN`.
        detail: Where `why` is `OPERATOR` and the node has no rule: the reason for that.
        cost: Bytes that the choice for the reader sends, all operands and what its results wait
            for included, at typical sizes.
        other: The same if it took the value in its current layout; None where it cannot.
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
        if self.why == OPERATOR:
            return self.detail or "the operator cannot take it in its current layout"
        text = f"{_WORDS[self.why]}: {self.cost:,} bytes"
        return text if self.other is None else f"{text}, {self.other:,} bytes in its current layout"


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
        gathered: Values that are kept in parts and gathered for whoever reads them (optimizer
            parallel): their readers do not disagree.
    """
    return tuple(c for c in _Replay(program, plan).run() if c.value not in gathered)


@dataclass
class _Replay:
    """The nodes in order, with the layouts in which each value is there by then."""

    program: Program
    plan: Plan
    made: dict[str, Sharding] = field(default_factory=dict)
    versions: dict[str, tuple[Sharding, ...]] = field(default_factory=dict)
    known: dict[object, tuple[int, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.env, self.rules = self.program.env, self.program.rules

    def run(self) -> Iterator[Conflict]:
        graph, plan = self.program.graph, self.plan
        nodes = list(graph)
        self.made.update(plan.inputs)
        self.made.update(plan.parameters)
        for node in nodes:
            for value, made in zip(node.outputs, plan.nodes[node.name or ""].outputs, strict=True):
                name = value.name or ""
                self.made[name] = plan.resharded.get(name, made)
        self.versions.update({n: (s,) for n, s in (*plan.inputs.items(), *plan.parameters.items())})
        self.joined = partial_hints(
            nodes, self.rules.by_node, plan.nodes, self.made, plan.mesh, self.env.table
        ).joined
        # Nobody has read them yet: they lie as their first reader wants them.
        self.unread = set(plan.parameters)
        for node in nodes:
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
            way = self._way(there, want, value)
            if _pays(way):
                why, detail, cost, other = self._why(node, index)
                yield self._conflict(
                    value, name, index, way, want, why=why, detail=detail, cost=cost, other=other
                )
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
                way = self._way((made,), after, value)
                self.versions[key] = (after, made)
                if _pays(way):
                    yield self._conflict(value, name, index, way, after, why=STRATEGY)

    def _leaving(self, value: ir.Value) -> Iterator[Conflict]:
        name = value.name or ""
        want, there = self.plan.outputs[name], self._there(value)
        if there and want not in there:
            way = self._way(there, want, value)
            if _pays(way):
                yield self._conflict(value, "", 0, way, want, why=STRATEGY)

    def _there(self, value: ir.Value | None) -> tuple[Sharding, ...]:
        return () if value is None else self.versions.get(value.name or "", ())

    def _way(self, there: Sequence[Sharding], want: Sharding, value: ir.Value) -> Route:
        mesh, table = self.plan.mesh, self.env.table
        return cheapest_route(there, want, mesh, table, _itemsize(value))

    def _conflict(
        self,
        value: ir.Value,
        node: str,
        operand: int,
        way: Route,
        wanted: Sharding,
        *,
        why: str,
        detail: str = "",
        cost: int = 0,
        other: int | None = None,
    ) -> Conflict:
        sent: Dim = 0
        for step in way.steps:
            sent = sent + step.bytes
        maker = value.producer()
        return Conflict(
            node,
            operand,
            value.name or "",
            (maker.name or "") if maker is not None else "",
            way.source,
            wanted,
            tuple(step.kind for step in way.steps),
            sent,
            way.bytes,
            why,
            detail,
            cost or way.bytes,
            other,
        )

    # -- the other way ---------------------------------------------------------------------------

    def _why(self, node: ir.Node, index: int) -> tuple[str, str, int, int | None]:
        """Why a node does not take an operand in its current layout, and the bytes of both ways."""
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
        # Repeated layers ask the same.
        key = (
            plan.rule.inputs,
            plan.rule.outputs,
            tuple(plan.rule.kinds.items()),
            plan.rule.linear,
            tuple(plan.rule.sizes.items()),
            plan.rule.scaled,
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

        def sent(versions: Sequence[Sharding], target: Sharding, itemsize: int) -> int:
            return cheapest_route(versions, target, mesh, table, itemsize).bytes

        chooser = Chooser(mesh, table, (), sent)
        held = situation.operands[index]
        assert held is not None
        split = held.with_partial(()).canonical(mesh, table)
        others = []
        for factors in _agreeing(plan, view, situation, index, self.plan):
            for carried in _carries(plan.rule, factors, situation, held):
                try:
                    found = shardings(plan.rule, view, factors, mesh, carried=carried)
                except ShardingError:
                    continue
                want = found.inputs[index]
                if want is not None and want.with_partial(()).canonical(mesh, table) == split:
                    price = chooser.price(plan.rule, found, view, situation, bool(carried))
                    others.append(price[0])
        chosen = chooser.price(plan.rule, plan, view, situation, bool(plan.carried))
        return chosen[0], min(others, default=None)

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
            tuple(_itemsize(v) for v in (*node.inputs, *node.outputs)),
        )

    def _gradient(self, name: str) -> Sharding | None:
        """The layout of the parameter whose gradient leaves as this output, still to be reduced."""
        leaves = self.plan.outputs.get(name)
        return leaves.with_partial(()) if leaves is not None and leaves.partial else None


def _agreeing(
    plan: NodePlan, view: NodeView, situation: Situation, index: int, whole: Plan
) -> Iterator[Factors]:
    """Yields factor splits with which a node takes an operand in its current layout."""
    rule, sizes = plan.rule, factor_sizes(plan.rule, view)

    def splits_of(number: int) -> dict[str, DimSharding]:
        held = situation.operands[number] if number < len(situation.operands) else None
        if held is None or rule.inputs[number].mode:
            return {}
        found = project(rule.inputs[number], held, sizes, whole.mesh, view.table, rule.scaled)
        return {name: parts for name, parts in found.items() if name in rule.splittable}

    first = splits_of(index)
    others = [splits_of(i) for i in range(len(rule.inputs)) if i != index and not situation.free[i]]
    yield _merged([first, dict(plan.factors)])
    yield _merged([first, *others])
    yield first


def _merged(proposals: Sequence[Mapping[str, DimSharding]]) -> Factors:
    """The splits of each proposal that clash with none before it."""
    merged: dict[str, DimSharding] = {}
    used: set[int] = set()
    for proposal in proposals:
        for name, parts in proposal.items():
            atoms = {a for c in parts for a in c.atoms}
            if name not in merged and not atoms & used:
                merged[name] = parts
                used |= atoms
    return merged


def _carries(
    rule: OpRule, factors: Factors, situation: Situation, held: Sharding
) -> Iterator[dict[int, tuple[Atoms, str]]]:
    """Ways in which what an operand waits for may pass: it is reduced first, or passed on."""
    yield {}
    used = {a for parts in factors.values() for c in parts for a in c.atoms}
    if not held.partial or used & set(held.partial):
        return
    waiting = (held.partial, held.reduction)
    alike = {
        i for i, s in enumerate(situation.operands) if s and (s.partial, s.reduction) == waiting
    }
    for reduction, group in rule.linear:
        if reduction == held.reduction and group <= alike:
            yield dict.fromkeys(sorted(group), waiting)


def _pays(way: Route) -> bool:
    """Whether a way sends more than the reduction that its value waits for."""
    return way.bytes > 0 and any(step.kind not in REDUCING for step in way.steps)


def _itemsize(value: ir.Value | None) -> int:
    return int(value.dtype.itemsize) if value is not None and value.dtype is not None else 4
