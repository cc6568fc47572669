"""The cost of the plan of a program: each node, its communication, the memory at its peak.

The time of a step is that of its schedule (`onnxpar.cost.timeline`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from operator import add
from typing import NamedTuple

import onnx_ir as ir

from onnxpar.core.machine import Link
from onnxpar.core.rule import ANY
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel, Work
from onnxpar.cost.live_memory import Made, MemoryStep, live_bytes, live_peak, makes
from onnxpar.cost.node_facts import FactsOfNodes
from onnxpar.cost.optimizer_parallel import Shards
from onnxpar.cost.timeline import (
    Gather,
    Member,
    Transfer,
    delayed,
    finished_later,
    gathered_ahead,
    in_buckets,
)
from onnxpar.cost.turns import Events, PairedSteps
from onnxpar.facts.program import Program
from onnxpar.facts.varying_nodes import varying_nodes
from onnxpar.graph.plan import Plan
from onnxpar.graph.shapes import itemsize


class NodePrice(NamedTuple):
    """The cost of one node on a device.

    Attributes:
        name: Its name.
        work: Its arithmetic and memory traffic.
        filling: Seconds to set the padding of its operands.
        moving: Seconds to reshard its operands as it needs them, and its outputs as the user wants
            them.
        local: The local shapes of its results.
        made: Bytes of its results on a device.
    """

    name: str
    work: Work
    filling: float
    moving: float
    local: tuple[tuple[int, ...], ...]
    made: int

    @property
    def seconds(self) -> float:
        """All seconds of the node."""
        return self.computing + self.work.special + self.moving

    @property
    def computing(self) -> float:
        """The seconds without communication."""
        return self.work.seconds + self.filling


@dataclass(frozen=True)
class Price:
    """The cost of a plan on one device.

    Attributes:
        nodes: Each node, in order.
        outputs: Seconds to reshard the outputs of the graph.
        gradients: Seconds to reduce gradients once per step, and to gather updated parameters.
        updating: Seconds in which the optimizer reads and writes the states.
        held: Bytes that are always held: parameters and, if they are trained, their gradients and
            moments.
        peak: Bytes at the peak: in addition to `held`, inputs, outputs, and the larger of the
            values between nodes and the memory of the optimizer.
        kept: For each parameter, its part of `held`.
        adding: Bytes by which the peak is higher if a step has several micro-batches: the
            gradients of one have memory of their own until they have been added up.
        hidden_each: Seconds of communication in a run or a micro-batch that computation hides.
        hidden_once: Those that it hides in the last micro-batch in addition, in which the
            reductions of gradients are started ahead.
    """

    nodes: tuple[NodePrice, ...]
    outputs: float
    gradients: float
    updating: float
    held: int
    peak: int
    kept: Mapping[str, int]
    adding: int
    hidden_each: float = 0.0
    hidden_once: float = 0.0

    @property
    def computing(self) -> float:
        """Seconds of computing."""
        return self.updating + sum(node.computing for node in self.nodes)

    @property
    def communicating(self) -> float:
        """Seconds of communication, hidden or not."""
        once = self.outputs + self.gradients
        return once + sum(node.work.special + node.moving for node in self.nodes)

    @property
    def seconds(self) -> float:
        """Seconds of one run, or of one step."""
        return self.computing + self.communicating - self.hidden

    @property
    def hidden(self) -> float:
        """Seconds of communication that computation hides, in a step of one micro-batch."""
        return self.hidden_each + self.hidden_once

    def highest(self, micro_batches: int) -> int:
        """Returns the bytes at the peak of a step of some micro-batches."""
        return self.peak + (self.adding if micro_batches > 1 else 0)

    def step(self, micro_batches: int) -> float:
        """Returns the seconds of a step of some micro-batches, or of as many runs."""
        once = self.outputs + self.gradients + self.updating - self.hidden_once
        return micro_batches * (self.seconds - once) + once


def price(
    program: Program,
    plan: Plan,
    cost: CostModel,
    shards: Shards | None = None,
    moments: int = 0,
) -> tuple[Price, tuple[MemoryStep, ...]]:
    """Returns the price of a plan, and the steps from which its memory is counted.

    Args:
        program: The program.
        plan: Its plan.
        cost: The cost model.
        shards: The layouts of the states of a training program; None for a forward program.
        moments: How many tensors the optimizer keeps for each trained parameter.
    """
    shards = shards or Shards(plan, {})
    laid = shards.training(program)
    pricing = _Pricing(program, laid.plan, cost, shards, moments, laid.gathered)
    return pricing.run(), tuple(pricing.paired.steps)


@dataclass(frozen=True)
class InTurns:
    """The cost of a step whose micro-batches take turns, on one device.

    Attributes:
        seconds: Seconds of the step.
        peak: Bytes at the peak, as in `Price`.
    """

    seconds: float
    peak: int


def price_in_turns(
    program: Program,
    plan: Plan,
    cost: CostModel,
    shards: Shards,
    moments: int,
    micro_batches: int,
) -> InTurns:
    """Returns the cost of a step in which each two micro-batches take turns.

    Args:
        program: Forward and backward of one of them.
        plan: Its plan.
        cost: The cost model, with the sizes of one of them.
        shards: As in `price`.
        moments: As in `price`.
        micro_batches: Micro-batches of a step, at least 2; the last one of an odd number runs
            alone.
    """
    laid = shards.training(program)
    inputs = {value.name or "" for value in program.graph.inputs}
    varying = varying_nodes(program.graph, inputs, laid.plan, program.registry)
    pricing = _Pricing(program, laid.plan, cost, shards, moments, laid.gathered, varying)
    alone, events = pricing.run(), pricing.events()
    one = events.foreground() if pricing.tight else events
    both, last = events.in_turns(), one.elapsed(once=True)
    pairs, odd = divmod(micro_batches, 2)
    runs = last if odd else both.elapsed(once=True) - both.elapsed()
    seconds = alone.seconds - last + pairs * both.elapsed() + runs
    # Two micro-batches are one run.
    several = micro_batches // 2 + odd > 1
    peak = pricing.peak_in_turns(alone.held) + (alone.adding if several else 0)
    return InTurns(seconds, peak)


@dataclass
class _Pricing:
    program: Program
    plan: Plan
    cost: CostModel
    shards: Shards
    moments: int
    gathered: frozenset[str]
    varying: frozenset[str] | None = None
    made: dict[str, dict[Sharding, str]] = field(default_factory=dict)
    itemsizes: dict[str, int] = field(default_factory=dict)
    paired: PairedSteps = field(default_factory=PairedSteps)
    shared: set[str] = field(default_factory=set)
    shared_nodes: set[int] = field(default_factory=set)
    outside: set[str] = field(default_factory=set)
    computed: list[float] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    gathers: list[Gather] = field(default_factory=list)
    leaving: list[Transfer] = field(default_factory=list)
    reductions: list[Member] = field(default_factory=list)
    updated: list[Member] = field(default_factory=list)
    started: dict[str, int] = field(default_factory=dict)
    copied: int = 0
    moved: int = 0
    tight: bool = False
    places: dict[str, int] = field(default_factory=dict)
    read_at: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.local = FactsOfNodes(self.program, self.cost)

    def run(self) -> Price:
        graph, plan = self.program.graph, self.plan
        for value in (*graph.inputs, *graph.initializers.values()):
            self.itemsizes[value.name or ""] = itemsize(value)
        for name, sharding in (*plan.inputs.items(), *plan.parameters.items()):
            self._define(name, sharding)
            self.outside.add(name)
        if self.varying is not None:
            self.shared.update(plan.parameters)
        prices = tuple(self._node(node) for node in graph)
        outputs, gradients = self._leaving(), self._reducing()
        # A parameter and its moments are read and written, and its gradient is read.
        trained = ((self.shards.moment(n), self.itemsizes[n]) for n in self.shards.gradients)
        updated = (2 * (1 + self.moments) + 1) * sum(self._bytes(s, i) for s, i in trained)
        updating = updated / self.cost.machine.bandwidth
        kept = {n: self._kept(n) for n in plan.parameters}
        held = sum(kept.values())
        self._step(MemoryStep("optimizer", tuple(self.started), (), 0), once=True)
        live = live_bytes(self.paired.steps, self._outputs())
        values = max(live, default=0)
        peak = self._peak(held, min(self._with_background(live), values + self._ahead()))
        # Memory allows less in the background than would pay, so none of it is counted.
        self.tight = peak > self.cost.machine.memory
        peak = self._peak(held, values) if self.tight else peak
        adding = self._peak(held, self._adding(live)) - self._peak(held, values)
        hidden = self._hidden(prices, self.events().foreground() if self.tight else self.events())
        return Price(prices, outputs, gradients, updating, held, peak, kept, adding, *hidden)

    def peak_in_turns(self, held: int) -> int:
        """Returns the bytes at the peak of two micro-batches that take turns.

        Args:
            held: Bytes that are always held.
        """
        outputs = self._outputs()
        steps = tuple(self.paired.in_turns(self.events().turns(), outputs))
        values = live_peak(steps, outputs) + self._ahead(2)
        inputs = sum(self._bytes(s, self.itemsizes[n]) for n, s in self.plan.inputs.items())
        return self._peak(held, values) + inputs

    def _peak(self, held: int, values: int) -> int:
        """Bytes at the peak, with what is held and the peak of the values between nodes."""
        reduced = self._reduced() + sum(self.started.values())
        return held + self._bound() + self.copied + max(values, reduced)

    def _step(self, step: MemoryStep, *, once: bool | None = None) -> None:
        """Adds a step; `once`: if it is there once, whether it comes with the second of a pair."""
        if once is not None:
            self.paired.once[len(self.paired.steps)] = once
        self.paired.steps.append(step)
        self.paired.places.append(len(self.computed))

    def _adding(self, live: Sequence[int]) -> int:
        """Bytes of values at the peak if gradients are values, too, until they are added up.

        Args:
            live: For each step the bytes that it needs if they are not.
        """
        outputs = self._gradients.keys() & self.made.keys()
        left = {self.made[name][self.plan.outputs[name]] for name in outputs}
        own = (
            sum(m.bytes for m in step.makes if m.name in left and not m.view_of)
            for step in self.paired.steps
        )
        return max(map(add, live, own), default=0)

    def _once(self, name: str) -> bool | None:
        return False if name in self.shared else None

    def _hidden(self, prices: Sequence[NodePrice], events: Events) -> tuple[float, float]:
        """Seconds hidden in each micro-batch, and those hidden in the last one in addition."""
        if not self.shards.gradients or not any(k.overlaps for k in self.cost.machine.links):
            # Only training programs have collectives in the background.
            return 0.0, 0.0
        each, last = events.elapsed(), events.elapsed(once=True)
        once = sum(t.seconds for t in events.once())
        return _saved(sum(p.seconds for p in prices), each), _saved(each + once, last)

    def events(self) -> Events:
        """Returns what happens in a run, after it has been priced."""
        return Events(
            self.computed,
            self.transfers,
            self.gathers,
            self.leaving,
            self.reductions,
            self.updated,
            self.shared_nodes,
        )

    def _kept(self, name: str) -> int:
        """Bytes of a parameter, its gradient and its moments."""
        width = self.itemsizes[name]
        size = self._bytes(self.plan.parameters[name], width)
        if name in self.shards.gradients:
            size += self._gradient(name)
            size += self.moments * self._bytes(self.shards.moment(name), width)
        return size

    def _gradient(self, name: str) -> int:
        """Bytes of the gradient of a parameter between runs."""
        return self._bytes(self.shards.gradient(name), self.itemsizes[name])

    def _node(self, node: ir.Node) -> NodePrice:
        name = node.name or ""
        rule, chosen = self.program.rules.by_node[name], self.plan.nodes[name]
        local = self.local.of(node, chosen)
        filling = moving = 0.0
        reads: list[str] = []
        here = len(self.computed)
        for index, (value, want) in enumerate(zip_longest(node.inputs, chosen.inputs)):
            source = "" if value is None else value.name or ""
            versions = self.made.get(source)
            # The node reads only the sizes of an operand that it takes in its current layout.
            if versions is None or want is None or rule.inputs[index].mode == ANY:
                reads.append("")
                continue
            self.read_at.setdefault(source, here)
            version = versions.get(want)
            if version is None:
                seconds, version = self._fetched(source, want)
                moving += seconds
            if local.masked[index] and source not in self.outside:
                spent, version = self._masked(version, source, want)
                filling += spent
            reads.append(version)
        names = [v.name or "" for v in node.outputs]
        for key, width in zip(names, local.itemsizes, strict=True):
            self.itemsizes[key] = width
        if self.varying is not None and name not in self.varying:
            self.shared.update(names)
            self.shared_nodes.add(len(self.computed))
        step = MemoryStep(
            name,
            tuple(filter(None, reads)),
            makes(local.kernel, reads, names, local.sizes),
            local.workspace,
        )
        self._step(step, once=self._once(names[0]) if names else None)
        for key in names:
            if key in self._gradients:
                self._start_ahead(key)
        there = here + 1
        for key, out in zip(names, chosen.outputs, strict=True):
            self.places[self._define(key, out)] = there
            wanted = self.plan.resharded.get(key)
            if wanted is not None and wanted != out:
                seconds = self._brought(key, wanted)[0]
                link = self.cost.link(out, wanted, self.itemsizes[key])
                size = self._bytes(out, self.itemsizes[key])
                handing = self._handing(link)
                self.leaving.append(
                    Transfer(seconds, there, there, _overlaps(link), size, handing=handing)
                )
                moving += seconds
        work = local.work
        self.computed.append(work.seconds + work.special + filling)
        return NodePrice(name, work, filling, moving, local.shapes, sum(local.sizes))

    # -- values ----------------------------------------------------------------------------------

    def _define(self, name: str, sharding: Sharding) -> str:
        """Returns the name of a version of a value; the first has the name of the value."""
        versions = self.made.setdefault(name, {})
        if sharding not in versions:
            versions[sharding] = f"{name}@{len(versions)}" if versions else name
        return versions[sharding]

    def _fetched(self, name: str, want: Sharding) -> tuple[float, str]:
        """Brings a value into a new sharding for the next node; returns as `_brought`."""
        nearest = self._nearest(name, want)
        ready, needed = self.places.get(self.made[name][nearest], 0), len(self.computed)
        seconds, version = self._brought(name, want)
        self.places[version] = needed
        link = self.cost.link(nearest, want, self.itemsizes[name])
        overlaps, handing = _overlaps(link), self._handing(link)
        size = self._bytes(want, self.itemsizes[name])
        if link is not None:
            self.moved = max(self.moved, self._bytes(nearest, self.itemsizes[name]), size)
        if name in self.gathered:
            gather = Gather((name, want), seconds, ready, needed, size, overlaps, handing)
            self.gathers.append(gather)
            return seconds, version
        shared = name in self.shared
        # An operand that is there from the beginning is resharded when it is needed.
        transfer = Transfer(seconds, ready or needed, needed, overlaps, size, shared, handing)
        self.transfers.append(transfer)
        if overlaps and not shared:
            self.paired.sent.add(len(self.paired.steps) - 1)
        return seconds, version

    def _handing(self, link: Link | None) -> float:
        return 0.0 if link is None else self.cost.handing(link)

    def _nearest(self, name: str, want: Sharding) -> Sharding:
        """The version of a value from which it is brought into a sharding."""
        versions, width = self.made[name], self.itemsizes[name]
        if want in versions:
            return want
        return min(versions, key=lambda source: self.cost.reshard(source, want, width))

    def _brought(self, name: str, want: Sharding) -> tuple[float, str]:
        """Seconds to bring a value into a sharding, and the name of the resulting version."""
        versions = self.made[name]
        if want in versions:
            return 0.0, versions[want]
        width, nearest = self.itemsizes[name], self._nearest(name, want)
        seconds = self.cost.reshard(nearest, want, width)
        # A value that is gathered for one reader is dropped before the next one.
        again = name in self.gathered
        version = f"{name} for {len(self.paired.steps)}" if again else self._define(name, want)
        source = versions[nearest]
        # A reduction may overwrite its operand; all other reshards need new memory.
        over = (source,) if nearest.partial and nearest.dims == want.dims else ()
        made = Made(version, self._bytes(want, width), over=over)
        room = self.cost.room(nearest, want, width)
        step = MemoryStep(f"{name} brought", (source,), (made,), room)
        self._step(step, once=self._once(name))
        return seconds, version

    def _masked(self, version: str, name: str, sharding: Sharding) -> tuple[float, str]:
        """Seconds to set the padding that a reduction reads, and the resulting version."""
        size = self._bytes(sharding, self.itemsizes[name])
        masked = f"{version} for {len(self.paired.steps)}"
        # Where selects by a mask, which is as large as the operand.
        step = MemoryStep(f"{name} masked", (version,), (Made(masked, size),), size)
        self._step(step, once=self._once(name))
        return self.cost.copying(size), masked

    def _bytes(self, sharding: Sharding, width: int) -> int:
        return self.cost.elements(sharding) * width

    # -- outputs and states ----------------------------------------------------------------------

    def _leaving(self) -> float:
        """Seconds to reshard the outputs of the graph."""
        return sum(
            self._brought(name, leaving)[0]
            for name, leaving in self.plan.outputs.items()
            if name in self.made
        )

    def _reducing(self) -> float:
        """Seconds to reduce gradients, and to gather parameters that replicas share."""
        seconds, meeting = 0.0, set[int]()
        for name, output in self.shards.gradients.items():
            leaves, shard = self.plan.outputs[output], self.shards.moment(name)
            width, place = self.itemsizes[name], self.places.get(output, 0)
            seconds += self._moved(leaves, shard, width, place, self.reductions)
            first = self.read_at.get(name, 0)
            whole = self.shards.parameter(name)
            seconds += self._moved(shard, whole, width, first, self.updated)
            if _overlaps(self.cost.link(shard, whole, width)):
                # The gather goes on behind the next forward pass, and reads a copy.
                self.copied += self._bytes(shard, width)
            meeting.update(leaves.partial)
        end = len(self.computed)
        calls = (*in_buckets(self.reductions, end), *finished_later(self.updated))
        # They come one after another at the end of a step, so ranks wait once.
        return seconds + sum(c.seconds for c in calls) + self.cost.wait(sorted(meeting))

    def _moved(
        self, source: Sharding, target: Sharding, width: int, ready: int, calls: list[Member]
    ) -> float:
        """Adds a reduction or a gather to those that may share a call.

        Returns:
            Its seconds, if it sends nothing.
        """
        seconds = self.cost.reshard(source, target, width, met=True)
        link = self.cost.link(source, target, width)
        if link is None:
            return seconds
        start = self.cost.starting(source, target, width)
        size = max(self._bytes(sharding, width) for sharding in (source, target))
        kind = source.partial, source.dims == target.dims, width
        calls.append(Member(kind, seconds, start, ready, size, link))
        return 0.0

    @cached_property
    def _gradients(self) -> Mapping[str, str]:
        """The parameter of each gradient."""
        return {output: name for name, output in self.shards.gradients.items()}

    def _start_ahead(self, output: str) -> None:
        """Counts the result of a gradient's reduce-scatter from its node to the optimizer.

        Other reductions replace the gradient. Between ranks that share memory, nothing starts.
        """
        name = self._gradients[output]
        leaves, shard = self.plan.outputs[output], self.shards.moment(name)
        link = self.cost.link(leaves, shard, self.itemsizes[name])
        if _overlaps(link) and leaves.dims != shard.dims:
            key, size = f"{output} started", self._bytes(shard, self.itemsizes[name])
            self.started[key] = size
            self._step(MemoryStep(key, (), (Made(key, size),)), once=True)

    def _with_background(self, live: Sequence[int]) -> int:
        """Bytes of values at the peak if every collective starts as soon as it can.

        Args:
            live: For each step the bytes of values and work in the foreground.
        """
        end = len(self.computed)
        change = [0] * (end + 2)
        kept = [
            Transfer(0.0, g.needed, other.needed, True, g.size)
            for g, other in pairwise(self.gathers)
            if g.shard == other.shard
        ]
        early = *self.transfers, *gathered_ahead(self.gathers), *delayed(self.leaving, end), *kept
        for transfer in early:
            if transfer.ready < transfer.needed:
                change[transfer.ready] += transfer.size
                change[transfer.needed + 1] -= transfer.size
        more = list(accumulate(change))
        places = self.paired.places
        return max((size + more[p] for size, p in zip(live, places, strict=True)), default=0)

    def _ahead(self, micro_batches: int = 1) -> int:
        """Bytes by which the schedule raises the peak at most (`onnxpar.schedule.background`).

        The largest operand or result of a collective for each micro-batch of a run; and a parameter
        that is kept from the forward to the backward pass.
        """
        if not self.shards.gradients:
            return 0
        sizes = [gather.size for gather in self.gathers]
        pairs = pairwise(self.gathers)
        kept = max(sizes) if any(g.shard == other.shard for g, other in pairs) else 0
        # Two micro-batches have what is sent in memory already.
        moved = 0 if micro_batches > 1 and self.paired.sent else self.moved
        largest = max([moved, *sizes, *(t.size for t in self.leaving)])
        return micro_batches * largest + kept

    def _outputs(self) -> set[str]:
        """The versions that are outputs of the graph; they have memory of their own."""
        return {self.made[n][s] for n, s in self.plan.outputs.items() if n in self.made}

    def _bound(self) -> int:
        """Bytes of inputs, and of outputs that are not gradients."""
        plan = self.plan
        kept = [(n, s) for n, s in plan.outputs.items() if n not in self._gradients]
        bound = [*plan.inputs.items(), *kept]
        return sum(self._bytes(s, self.itemsizes[n]) for n, s in bound if n in self.itemsizes)

    def _reduced(self) -> int:
        """Bytes of reduced gradients, which the optimizer keeps beside the partial ones.

        It needs all of them at once, since it waits for the norm.
        """
        return sum(
            self._bytes(self.shards.moment(name), self.itemsizes[name])
            for name, output in self.shards.gradients.items()
            if self.plan.outputs[output] != self.shards.moment(name)
        )


def _saved(before: float, after: float) -> float:
    """Seconds saved; 0 if rounding explains the difference of two long sums."""
    return before - after if before - after > 1e-9 * before else 0.0


def _overlaps(link: Link | None) -> bool:
    return link is not None and link.overlaps
