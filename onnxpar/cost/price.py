"""What the plan of a program costs: each node, what moves for it, the memory at its peak."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import onnx_ir as ir

from onnxpar.core.rule import ANY, IDENTITY
from onnxpar.core.sharding import Component, Sharding
from onnxpar.cost.cost_model import CostModel, Work
from onnxpar.cost.live_memory import Made, MemoryStep, live_peak, makes
from onnxpar.cost.optimizer_parallel import Shards
from onnxpar.facts.program import Program
from onnxpar.graph.plan import NodePlan, Plan
from onnxpar.ops.kernel_memory import call, kernel


@dataclass(frozen=True)
class NodePrice:
    """What one node costs a device.

    Attributes:
        name: Its name.
        work: Its arithmetic and memory traffic.
        filling: Seconds in which the padding of its operands is set that it would read.
        moving: Seconds in which its operands are brought to where it wants them, and its outputs
            to where the user wants them.
        local: The shapes of its results on a device.
        made: Bytes of these.
    """

    name: str
    work: Work
    filling: float
    moving: float
    local: tuple[tuple[int, ...], ...]
    made: int

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing + self.work.special + self.moving

    @property
    def computing(self) -> float:
        """What is no communication."""
        return self.work.seconds + self.filling


@dataclass(frozen=True)
class Price:
    """What a plan costs one device.

    Attributes:
        nodes: Each node, in order.
        outputs: Seconds in which outputs are brought to where they leave.
        gradients: Seconds in which gradients are reduced, as far as nothing hides them.
        updating: Seconds in which the optimizer reads and writes what it trains.
        held: Bytes held all the time: parameters and, where they are trained, their gradients and
            moments.
        peak: Bytes held at the peak: inputs, outputs and values between nodes besides, or what the
            optimizer needs, whichever is more.
        fullest: The node at which the values take the most.
        kept: Of each parameter what is held of it all the time.
    """

    nodes: tuple[NodePrice, ...]
    outputs: float
    gradients: float
    updating: float
    held: int
    peak: int
    fullest: str
    kept: Mapping[str, int]

    @property
    def computing(self) -> float:
        """Seconds of computing."""
        return self.updating + sum(node.computing for node in self.nodes)

    @property
    def communicating(self) -> float:
        """Seconds of communication."""
        once = self.outputs + self.gradients
        return once + sum(node.work.special + node.moving for node in self.nodes)

    @property
    def seconds(self) -> float:
        """Seconds of one run, or of one step."""
        return self.computing + self.communicating

    def step(self, micro_batches: int) -> float:
        """Returns the seconds of a step of so many micro-batches, or of so many runs."""
        once = self.outputs + self.gradients + self.updating
        return micro_batches * (self.seconds - once) + once


def price(
    program: Program,
    plan: Plan,
    cost: CostModel,
    shards: Shards | None = None,
    moments: int = 0,
) -> tuple[Price, tuple[MemoryStep, ...]]:
    """Prices a plan; returns its price, and its steps as memory is counted by them.

    Args:
        program: The program that the plan is of.
        plan: The plan.
        cost: The cost model.
        shards: How the buffers of what is trained lie; None for a forward program.
        moments: Tensors like a trained parameter that its optimizer keeps.
    """
    shards = shards or Shards(plan, {})
    laid = shards.training(program)
    pricing = _Pricing(program, laid.plan, cost, shards, moments, laid.gathered)
    return pricing.run(), tuple(pricing.steps)


@dataclass
class _Pricing:
    program: Program
    plan: Plan
    cost: CostModel
    shards: Shards
    moments: int
    gathered: frozenset[str]
    made: dict[str, dict[Sharding, str]] = field(default_factory=dict)
    itemsizes: dict[str, int] = field(default_factory=dict)
    steps: list[MemoryStep] = field(default_factory=list)
    outside: set[str] = field(default_factory=set)

    def run(self) -> Price:
        graph, plan = self.program.graph, self.plan
        for value in (*graph.inputs, *graph.initializers.values()):
            self._typed(value)
        for name, sharding in (*plan.inputs.items(), *plan.parameters.items()):
            self._define(name, sharding)
            self.outside.add(name)
        prices = tuple(self._node(node) for node in graph)
        outputs, gradients = self._leaving(), self._reducing()
        # Of a parameter and its moments, all are read and written, and its gradient is read.
        trained = ((self.shards.moment(n), self.itemsizes[n]) for n in self.shards.gradients)
        updated = (2 * (1 + self.moments) + 1) * sum(self._bytes(s, i) for s, i in trained)
        updating = updated / self.cost.machine.bandwidth
        kept = {n: self._kept(n) for n in plan.parameters}
        held = sum(kept.values())
        values = live_peak(self.steps, self._outputs())
        peak = held + self._bound() + max(values.bytes, self._reduced())
        return Price(prices, outputs, gradients, updating, held, peak, values.name, kept)

    def _kept(self, name: str) -> int:
        """Bytes of a parameter, its gradient and its moments."""
        itemsize = self.itemsizes[name]
        size = self._bytes(self.plan.parameters[name], itemsize)
        if name in self.shards.gradients:
            size += self._bytes(self.shards.gradient(name), itemsize)
            size += self.moments * self._bytes(self.shards.moment(name), itemsize)
        return size

    def _node(self, node: ir.Node) -> NodePrice:
        name = node.name or ""
        rule, view, chosen = (
            self.program.rules.by_node[name],
            self.program.rules.views[name],
            self.plan.nodes[name],
        )
        filling = moving = 0.0
        reads: list[str] = []
        for index, value in enumerate(node.inputs):
            want = chosen.inputs[index] if index < len(chosen.inputs) else None
            source = "" if value is None else value.name or ""
            # Of what is taken in its current layout only the sizes are asked for.
            if source not in self.made or want is None or rule.inputs[index].mode == ANY:
                reads.append("")
                continue
            seconds, version = self._brought(source, want)
            moving += seconds
            spent, filled = self._masked(version, source, want, index, chosen)
            filling += spent
            reads.append(filled)
        shapes = [self._shape(s) for s in chosen.outputs]
        for value in node.outputs:
            self._typed(value)
        sizes = [
            prod(shape) * self.itemsizes[v.name or ""]
            for v, shape in zip(node.outputs, shapes, strict=True)
        ]
        names = [v.name or "" for v in node.outputs]
        facts = kernel(node, self.program.registry)
        seen = call(
            node,
            [None if s is None else self._shape(s) for s in chosen.inputs],
            shapes,
            self.itemsizes[names[0]] if names else 0,
        )
        self.steps.append(
            MemoryStep(
                name,
                tuple(filter(None, reads)),
                makes(facts, reads, names, sizes),
                facts.work(seen),
            )
        )
        for key, out in zip(names, chosen.outputs, strict=True):
            self._define(key, out)
            wanted = self.plan.resharded.get(key)
            if wanted is not None and wanted != out:
                moving += self._hidden(key) * self._brought(key, wanted)[0]
        work = self.cost.node(rule, view, chosen, self.program.rules.costs.get(name))
        return NodePrice(name, work, filling, moving, tuple(shapes), sum(sizes))

    # -- values ----------------------------------------------------------------------------------

    def _typed(self, value: ir.Value) -> None:
        self.itemsizes[value.name or ""] = int(value.dtype.itemsize) if value.dtype else 4

    def _define(self, name: str, sharding: Sharding) -> str:
        """Returns the name of a value's version, the value's own for the first."""
        versions = self.made.setdefault(name, {})
        if sharding not in versions:
            versions[sharding] = f"{name}@{len(versions)}" if versions else name
        return versions[sharding]

    def _brought(self, name: str, want: Sharding) -> tuple[float, str]:
        """Seconds in which a value is brought into a sharding, and the version that it is then."""
        there = self.made[name]
        if want in there:
            return 0.0, there[want]
        itemsize = self.itemsizes[name]
        seconds, nearest = min(
            ((self.cost.reshard(s, want, itemsize), s) for s in there), key=lambda found: found[0]
        )
        # What is gathered for one reader is not there for the next.
        anew = name in self.gathered
        version = f"{name} for {len(self.steps)}" if anew else self._define(name, want)
        source = there[nearest]
        # Reduced where it lies, moved or cut out into memory of its own.
        over = (source,) if nearest.partial and nearest.dims == want.dims else ()
        made = Made(version, self._bytes(want, itemsize), over=over)
        room = self.cost.room(nearest, want, itemsize)
        self.steps.append(MemoryStep(f"{name} brought", (source,), (made,), room))
        return seconds, version

    def _masked(
        self, version: str, name: str, sharding: Sharding, index: int, chosen: NodePlan
    ) -> tuple[float, str]:
        """Seconds to set the padding that a reduction sees, and the version of the operand then."""
        if name in self.outside or not any(
            chosen.rule.kinds[factor] in IDENTITY
            and any(factor in names for names in chosen.rule.inputs[index].dims)
            and not self._even(parts)
            for factor, parts in chosen.factors.items()
        ):
            return 0.0, version
        size = self._bytes(sharding, self.itemsizes[name])
        masked = f"{version} for {len(self.steps)}"
        # A choice by a mask: what is chosen from is spread out first.
        self.steps.append(MemoryStep(f"{name} masked", (version,), (Made(masked, size),), size))
        return self.cost.copying(size), masked

    def _even(self, parts: Iterable[Component]) -> bool:
        mesh, table = self.plan.mesh, self.cost.table
        return all(not c.atoms or table.divisible(c.size, mesh.count(c.atoms)) for c in parts)

    def _shape(self, sharding: Sharding) -> tuple[int, ...]:
        return self.cost.local_shape(sharding)

    def _bytes(self, sharding: Sharding, itemsize: int) -> int:
        return self.cost.elements(sharding) * itemsize

    # -- what stays ------------------------------------------------------------------------------

    def _leaving(self) -> float:
        """Seconds in which outputs are brought to where they leave."""
        return sum(
            self._brought(name, leaving)[0]
            for name, leaving in self.plan.outputs.items()
            if name in self.made
        )

    def _reducing(self) -> float:
        """Seconds in which gradients are reduced, and parameters that replicas share gathered."""
        seconds = 0.0
        meeting: set[int] = set()
        for name, output in self.shards.gradients.items():
            leaves, shard = self.plan.outputs[output], self.shards.moment(name)
            itemsize = self.itemsizes[name]
            reduced = self.cost.reshard(leaves, shard, itemsize, met=True)
            seconds += self._hidden(output) * reduced
            seconds += self.cost.reshard(shard, self.shards.parameter(name), itemsize, met=True)
            meeting.update(leaves.partial)
        # All of them are reduced one after another at the end of a step.
        return seconds + (1 - self.cost.machine.overlap) * self.cost.wait(sorted(meeting))

    def _hidden(self, output: str) -> float:
        """The share of a value's reshard that the backward pass does not hide."""
        return 1 - self.cost.machine.overlap if output in self._gradients else 1

    @cached_property
    def _gradients(self) -> frozenset[str]:
        return frozenset(self.shards.gradients.values())

    def _outputs(self) -> set[str]:
        """The versions in which values leave; they have memory of their own."""
        return {self.made[n][s] for n, s in self.plan.outputs.items() if n in self.made}

    def _bound(self) -> int:
        """Bytes of inputs, and of outputs that are no gradients."""
        plan = self.plan
        kept = [(n, s) for n, s in plan.outputs.items() if n not in self._gradients]
        bound = [*plan.inputs.items(), *kept]
        return sum(self._bytes(s, self.itemsizes[n]) for n, s in bound if n in self.itemsizes)

    def _reduced(self) -> int:
        """Bytes of reduced gradients, which the optimizer has beside those that were partial.

        All of them are there when the norm is known.
        """
        return sum(
            self._bytes(self.shards.moment(name), self.itemsizes[name])
            for name, output in self.shards.gradients.items()
            if self.plan.outputs[output] != self.shards.moment(name)
        )
