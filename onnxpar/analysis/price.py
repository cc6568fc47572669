"""What a plan of a whole program costs: each node, what moves for it, the memory at its peak."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.analysis.cost import CostModel, Work
from onnxpar.analysis.plan import Plan
from onnxpar.analysis.propagate import Rules
from onnxpar.ops.rule import ANY
from onnxpar.sharding import Sharding


@dataclass(frozen=True)
class NodePrice:
    """What one node costs a device.

    Attributes:
        name: Its name.
        work: Its arithmetic and memory traffic.
        moving: Seconds in which its operands are brought to where it wants them, and its outputs
            to where the user wants them.
    """

    name: str
    work: Work
    moving: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.work.seconds + self.work.special + self.moving


@dataclass(frozen=True)
class Price:
    """What a plan costs one device.

    Attributes:
        nodes: Each node, in order.
        gradients: Seconds in which gradients are reduced, as far as nothing hides them.
        updating: Seconds in which the optimizer reads and writes what it trains.
        held: Bytes held all the time: parameters and, where they are trained, their gradients and
            moments.
        peak: Bytes held at the peak, values between nodes included.
    """

    nodes: tuple[NodePrice, ...]
    gradients: float
    updating: float
    held: int
    peak: int

    @property
    def computing(self) -> float:
        """Seconds of computing."""
        return self.updating + sum(node.work.seconds for node in self.nodes)

    @property
    def communicating(self) -> float:
        """Seconds of communication."""
        return self.gradients + sum(node.work.special + node.moving for node in self.nodes)

    @property
    def seconds(self) -> float:
        """Seconds of one run, or of one step."""
        return self.computing + self.communicating


def price(
    model: ir.Model,
    rules: Rules,
    plan: Plan,
    cost: CostModel,
    states: Mapping[str, int] | None = None,
    gradients: Collection[str] = (),
) -> Price:
    """Prices a plan.

    Args:
        model: The normalised model that the plan is of.
        rules: The rule of each of its nodes.
        plan: The plan.
        cost: The cost model.
        states: Of each trained parameter how many tensors like it are held besides it.
        gradients: Names of the outputs that are gradients of parameters.
    """
    return _Pricing(model, rules, plan, cost, states or {}, frozenset(gradients)).run()


@dataclass
class _Pricing:
    model: ir.Model
    rules: Rules
    plan: Plan
    cost: CostModel
    states: Mapping[str, int]
    gradients: frozenset[str]

    def run(self) -> Price:
        graph, plan = self.model.graph, self.plan
        made: dict[str, tuple[Sharding, ...]] = {
            name: (s,) for name, s in (*plan.inputs.items(), *plan.parameters.items())
        }
        itemsizes = {
            v.name or "": int(v.dtype.itemsize) if v.dtype is not None else 4
            for v in (*graph.inputs, *graph.initializers.values())
        }
        held = sum(
            self._bytes(s, itemsizes[name]) * (1 + self.states.get(name, 0))
            for name, s in plan.parameters.items()
        )
        nodes = list(graph)
        last = self._last_uses(nodes)
        live = sum(self._bytes(s, itemsizes[name]) for name, s in plan.inputs.items())
        peak, prices, bytes_of = live, [], dict.fromkeys(plan.inputs, 0)
        for name, s in plan.inputs.items():
            bytes_of[name] = self._bytes(s, itemsizes[name])
        for step, node in enumerate(nodes):
            name = node.name or ""
            rule, view, chosen = self.rules.rules[name], self.rules.views[name], plan.nodes[name]
            moving = 0.0
            for value, want, operand in zip(node.inputs, chosen.inputs, rule.inputs, strict=False):
                if value is None or want is None or operand.mode == ANY:
                    continue
                source = value.name or ""
                there = made.get(source)
                if there is None or want in there:
                    continue
                itemsize = itemsizes[source]
                moving += min(self.cost.reshard(s, want, itemsize) for s in there)
                made[source] = (*there, want)
                more = self._bytes(want, itemsize)
                live += more
                bytes_of[source] = bytes_of.get(source, 0) + more
            for value, out in zip(node.outputs, chosen.outputs, strict=True):
                key = value.name or ""
                itemsizes[key] = int(value.dtype.itemsize) if value.dtype is not None else 4
                made[key] = (out,)
                bytes_of[key] = self._bytes(out, itemsizes[key])
                live += bytes_of[key]
                wanted = plan.resharded.get(key)
                if wanted is not None and wanted != out:
                    moving += self.cost.reshard(out, wanted, itemsizes[key])
                    made[key] = (wanted,)
            peak = max(peak, live)
            for key in last.get(step, ()):
                live -= bytes_of.pop(key, 0)
            work = self.cost.node(rule, view, chosen, self.rules.costs.get(name))
            prices.append(NodePrice(name, work, moving))
        # Of a parameter and its moments, all are read and written, and its gradient is read.
        updated = sum(
            self._bytes(plan.parameters[name], itemsizes[name]) * (2 * count + 1)
            for name, count in self.states.items()
            if count
        )
        updating = updated / self.cost.machine.bandwidth
        return Price(tuple(prices), self._leaving(made, itemsizes), updating, held, held + peak)

    def _leaving(
        self, made: Mapping[str, tuple[Sharding, ...]], itemsizes: Mapping[str, int]
    ) -> float:
        """Seconds in which outputs are brought to where they leave, and gradients reduced."""
        seconds = 0.0
        for name, leaving in self.plan.outputs.items():
            there = made.get(name, ())
            if not there:
                continue
            seconds += min(self.cost.reshard(s, leaving, itemsizes[name]) for s in there)
            if name in self.gradients and leaving.partial:
                reduced = self.cost.reshard(leaving, leaving.with_partial(()), itemsizes[name])
                seconds += (1 - self.cost.machine.overlap) * reduced
        return seconds

    def _bytes(self, sharding: Sharding, itemsize: int) -> int:
        return self.cost.elements(sharding) * itemsize

    def _last_uses(self, nodes: list[ir.Node]) -> dict[int, list[str]]:
        """For each node, by number, the values that nobody reads after it."""
        last: dict[str, int] = {}
        for step, node in enumerate(nodes):
            for value in (*node.inputs, *node.outputs):
                if value is not None:
                    last[value.name or ""] = step
        kept = {v.name for v in self.model.graph.outputs} | set(self.model.graph.initializers)
        found: dict[int, list[str]] = {}
        for name, step in last.items():
            if name not in kept:
                found.setdefault(step, []).append(name)
        return found
