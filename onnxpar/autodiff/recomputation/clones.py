"""Recomputation: forward values are computed again where the backward pass reads them.

Nodes of the forward pass are cloned right before the first backward node that reads their results
(Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost"), so the original results are
freed after their last forward reader. A clone reads clones of other recomputed values, and values
that are kept through a Barrier. This pass runs after planning: a clone is sharded as its original,
so the arithmetic is the same.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeGuard

import onnx_ir as ir

from onnxpar.core.rule import ANY, OpRule
from onnxpar.core.sharding import Sharding
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import GRADIENT_OF, RECOMPUTED_FROM, VIRTUAL_STAGE
from onnxpar.graph.names import Names
from onnxpar.graph.new_nodes import twin
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.pipeline_places import virtual_stage_of
from onnxpar.graph.plan import NodePlan, Plan
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.collective.barrier import DEFS, barrier_node, barrier_rule
from onnxpar.ops.node_rules import Rules, completed
from onnxpar.ops.operator import OpDef
from onnxpar.ops.registry import Registry
from onnxpar.resharding.routes import cheapest_route


@dataclass(frozen=True)
class Recomputation:
    """What is to be recomputed.

    Attributes:
        nodes: Names of forward nodes.
        keep_communication: Whether results of collectives between forward nodes are kept, instead
            of communicating again.
    """

    nodes: frozenset[str]
    keep_communication: bool = False


@dataclass(frozen=True)
class Planned:
    """A program that has been planned.

    Attributes:
        program: The program.
        plan: Its plan.
        added: Nodes that recomputation has added, each with the node that it was put before.
    """

    program: Program
    plan: Plan
    added: Mapping[str, str] = field(default_factory=dict)


def recompute(planned: Planned, wanted: Recomputation) -> Planned:
    """Returns a program in which some nodes are recomputed; what is given is not changed.

    Args:
        planned: Forward and backward of a model.
        wanted: What to recompute.
    """
    if not wanted.nodes:
        return planned
    return _Recompute(planned, wanted).run()


class _Views(Mapping[str, NodeView]):
    """The views of nodes, each made when it is asked for: a price asks for one of each kind."""

    def __init__(
        self,
        nodes: Mapping[str, ir.Node],
        env: ShapeEnv,
        opset: int,
        ops: Mapping[str, OpDef],
        registry: Registry,
    ) -> None:
        self._nodes, self._env, self._opset = nodes, env, opset
        self._ops, self._registry = ops, registry
        self._known: dict[str, NodeView] = {}
        for name in nodes:
            # A body may be changed later.
            if name in ops and ops[name].reads_bodies:
                self[name]

    def __getitem__(self, name: str) -> NodeView:
        known = self._known.get(name)
        if known is None:
            view = NodeView(self._nodes[name], self._env, self._opset)
            known = self._known[name] = completed(view, self._ops.get(name), self._registry)
        return known

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


@dataclass
class _Recompute:
    old: Planned
    wanted: Recomputation
    # The clone of each value; and for each kept value, sharding and virtual stage its Barrier.
    clones: dict[str, ir.Value] = field(default_factory=dict)
    barriers: dict[tuple[str, Sharding, int], ir.Value] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        old = self.old.program
        self.model = old.model.clone()
        env, rules = old.env, old.rules
        self.shapes, self.contents = dict(env.shapes), dict(env.contents)
        self.env = ShapeEnv(self.shapes, self.contents, env.table)
        self.rules, self.reasons = dict(rules.by_node), dict(rules.reasons)
        self.ops = dict(rules.ops)
        self.plans = dict(self.old.plan.nodes)
        self.resharded = dict(self.old.plan.resharded)
        self.opset = next((v.opset for v in rules.views.values()), 1)
        self.names = Names([*self.plans, *self.shapes, *self.model.graph.initializers])

    def run(self) -> Planned:
        graph = self.model.graph
        nodes = list(graph)
        self.forward = [n for n in nodes if GRADIENT_OF not in n.metadata_props]
        self.made = self._made()
        self.read = self._forward_versions()
        self.backward = {n for n in nodes if GRADIENT_OF in n.metadata_props}
        self.last = self.forward[-1].outputs[0]
        # In each virtual stage, the last value made, and those that its backward pass is given.
        self.reached: dict[int, ir.Value] = {}
        self.entering = self._entering(nodes)
        self.passed: set[ir.Node] = set()
        for node in nodes:
            if node in self.backward:
                self._redirect(node)
                self.passed.add(node)
                self.last = self.reached[virtual_stage_of(node)] = node.outputs[0]
        registry = self.old.program.registry
        made = {node.name or "": node for node in graph}
        views = _Views(made, self.env, self.opset, self.ops, registry)
        rules = Rules(self.rules, views, self.reasons, self.ops)
        plan = replace(self.old.plan, nodes=self.plans, resharded=self.resharded)
        program = Program(self.model, self.env, rules, registry)
        return Planned(program, plan, self.added)

    def _made(self) -> dict[str, Sharding]:
        """The sharding of each value of a forward node after it has been made."""
        found = {}
        for node in self.forward:
            for value, sharding in zip(
                node.outputs, self.plans[node.name or ""].outputs, strict=True
            ):
                name = value.name or ""
                found[name] = self.resharded.get(name, sharding)
        return found

    def _forward_versions(self) -> dict[str, set[Sharding]]:
        """The shardings in which the forward pass reads each value."""
        found: dict[str, set[Sharding]] = {}
        for node in self.forward:
            for value, want in zip(node.inputs, self.plans[node.name or ""].inputs, strict=False):
                if value is not None and want is not None:
                    found.setdefault(value.name or "", set()).add(want)
        return found

    def _redirect(self, node: ir.Node) -> None:
        """Makes a backward node read values that are computed again, right before it."""
        plan = self.plans[node.name or ""]
        for index, value in enumerate(tuple(node.inputs)):
            if value is None or (value.name or "") not in self.made:
                continue
            want = self._want(plan, index, value)
            maker = value.producer()
            bar = (value.name or "", want, virtual_stage_of(node))
            if self._again(maker, node) and not self._kept(value, want):
                node.replace_input_with(index, self._clone_of(value, node))
            elif bar in self.barriers:
                # The kept value is then freed at its Barrier, which takes over its memory.
                node.replace_input_with(index, self.barriers[bar])

    def _again(self, maker: ir.Node | None, reader: ir.Node) -> TypeGuard[ir.Node]:
        """Whether a reader gets a node's result from the node's clone.

        A reader in another virtual stage does not: that stage has received the value and keeps it.
        """
        if maker is None or maker.name not in self.wanted.nodes:
            return False
        return virtual_stage_of(maker) == virtual_stage_of(reader)

    def _want(self, plan: NodePlan, index: int, value: ir.Value) -> Sharding:
        want = plan.inputs[index] if index < len(plan.inputs) else None
        return self.made[value.name or ""] if want is None else want

    def _kept(self, value: ir.Value, want: Sharding) -> bool:
        """Whether a value that is recomputed is kept in a sharding that needed communication."""
        name = value.name or ""
        if not self.wanted.keep_communication or want not in self.read.get(name, ()):
            return False
        return self._moves(value, want)

    def _moves(self, value: ir.Value, want: Sharding) -> bool:
        plan = self.old.plan
        size = 4 if value.dtype is None else int(value.dtype.itemsize)
        home = (self.made[value.name or ""],)
        return cheapest_route(home, want, plan.mesh, self.env.table, size).bytes > 0

    def _clone_of(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """Returns the clone of a value; makes it before a node if it does not exist."""
        name = value.name or ""
        if name not in self.clones:
            maker = value.producer()
            assert maker is not None
            self._clone(maker, before)
        return self.clones[name]

    def _clone(self, target: ir.Node, before: ir.Node) -> None:
        """Clones a node after the recomputed nodes that it reads."""
        stack = [target]
        while stack:
            node = stack[-1]
            if (node.outputs[0].name or "") in self.clones:
                stack.pop()
                continue
            missing = [
                maker
                for index, value in enumerate(node.inputs)
                if value is not None
                and (maker := self._to_clone(node, index, value)) is not None
                and (value.name or "") not in self.clones
            ]
            if missing:
                stack += reversed(missing)
            else:
                stack.pop()
                self._emit(node, before)

    def _to_clone(self, node: ir.Node, index: int, value: ir.Value) -> ir.Node | None:
        """The node whose clone makes an operand of a clone; None if the operand is kept."""
        maker = value.producer()
        if not self._again(maker, node) or (value.name or "") not in self.made:
            return None
        want = self._want(self.plans[node.name or ""], index, value)
        return None if self._kept(value, want) else maker

    def _emit(self, node: ir.Node, before: ir.Node) -> None:
        name = node.name or ""
        plan = self.plans[name]
        operands: list[ir.Value | None] = []
        for index, value in enumerate(node.inputs):
            if value is None:
                operands.append(None)
            elif self._to_clone(node, index, value) is not None:
                operands.append(self.clones[value.name or ""])
            elif value.producer() is None or (value.name or "") in self.contents:
                # Inputs and parameters are always there, and sizes take no memory.
                operands.append(value)
            else:
                operands.append(self._barrier(node, index, value, before))
        if all(new is old for new, old in zip(operands, node.inputs, strict=True)):
            index = next(i for i, v in enumerate(operands) if v is not None)
            value = operands[index]
            assert value is not None
            operands[index] = self._barrier(node, index, value, before)
        clone = twin(node, operands)
        clone.name = self.names.fresh(f"{name}/recomputed")
        for out, value in zip(node.outputs, clone.outputs, strict=True):
            known = out.name or ""
            if known:
                value.name = self.names.fresh(f"{known}.recomputed")
                self._copy_facts(known, value.name)
                self.clones[known] = value
                if known in self.resharded:
                    self.resharded[value.name] = self.resharded[known]
        self._place(clone, before, {RECOMPUTED_FROM: name})
        self._adopt(clone, plan, self.rules[name], self.ops.get(name))
        if name in self.reasons:
            self.reasons[clone.name or ""] = self.reasons[name]

    def _barrier(self, node: ir.Node, index: int, value: ir.Value, before: ir.Node) -> ir.Value:
        """Returns a kept value behind a Barrier, for a clone to read."""
        name = value.name or ""
        want = self._barred(node, index, value)
        bar = (name, want, virtual_stage_of(before))
        if bar not in self.barriers:
            kept_name = self.names.fresh(f"{name}.kept")
            kept = ir.Value(name=kept_name, type=value.type, shape=value.shape)
            self._copy_facts(name, kept_name)
            name_of_node = self.names.fresh(f"{name}/Barrier")
            barrier = barrier_node(name_of_node, value, self._reached(before), kept)
            self._place(barrier, before, {})
            rule = barrier_rule(NodeView(barrier, self.env, self.opset))
            self._adopt(barrier, NodePlan(rule, {}, (want, None), (want,)), rule, DEFS[0])
            self.barriers[bar] = kept
        return self.barriers[bar]

    def _reached(self, before: ir.Node) -> ir.Value:
        """A value that exists only when the backward pass has reached a node.

        onnxruntime gives fused nodes higher numbers than other nodes, and would run clones before
        their originals.
        """
        for value in before.inputs:
            maker = None if value is None else value.producer()
            if value is not None and maker is not None and maker in self.backward:
                return value
        stage = virtual_stage_of(before)
        if stage in self.reached:
            return self.reached[stage]
        # Another value of a later stage, such as the gradient of a parameter there, would have to
        # be sent for this alone.
        given = (v for v in self.entering.get(stage, ()) if v.producer() in self.passed)
        return next(given, self.last)

    def _entering(self, nodes: Sequence[ir.Node]) -> dict[int, list[ir.Value]]:
        """The values that the backward pass of each virtual stage gets from that of others."""
        found: dict[int, list[ir.Value]] = {}
        for node in nodes:
            stage = virtual_stage_of(node)
            for value in node.inputs if node in self.backward else ():
                maker = None if value is None else value.producer()
                if value is None or maker is None or maker not in self.backward:
                    continue
                if virtual_stage_of(maker) != stage:
                    found.setdefault(stage, []).append(value)
        return found

    def _barred(self, node: ir.Node, index: int, value: ir.Value) -> Sharding:
        """The sharding in which a value is kept: as it was made, or as it was resharded.

        A partial value is kept reduced, as in the forward pass. Other collectives are repeated
        unless their results are to be kept.
        """
        name = value.name or ""
        home = self.made.get(name) or self._given(name)
        plan = self.plans[node.name or ""]
        want = plan.inputs[index] if index < len(plan.inputs) else None
        if want is None or plan.rule.inputs[index].mode == ANY:
            return home
        return want if home.partial or self.wanted.keep_communication else home

    def _given(self, name: str) -> Sharding:
        plan = self.old.plan
        return plan.inputs[name] if name in plan.inputs else plan.parameters[name]

    # -- pieces ----------------------------------------------------------------------------------

    def _copy_facts(self, known: str, name: str) -> None:
        """Gives a new value the shape and the content of another, if they are known."""
        if known in self.shapes:
            self.shapes[name] = self.shapes[known]
        if known in self.contents:
            self.contents[name] = self.contents[known]

    def _place(self, node: ir.Node, before: ir.Node, metadata: Mapping[str, str]) -> None:
        """Puts a node before a backward node, and into the same gradient and virtual stage."""
        node.metadata_props.update(metadata)
        if VIRTUAL_STAGE in before.metadata_props:
            node.metadata_props[VIRTUAL_STAGE] = before.metadata_props[VIRTUAL_STAGE]
        node.metadata_props[GRADIENT_OF] = before.metadata_props[GRADIENT_OF]
        self.added[node.name or ""] = before.name or ""
        self.model.graph.insert_before(before, node)

    def _adopt(self, node: ir.Node, plan: NodePlan, rule: OpRule, op: OpDef | None) -> None:
        name = node.name or ""
        self.plans[name] = plan
        self.rules[name] = rule
        if op is not None:
            self.ops[name] = op
