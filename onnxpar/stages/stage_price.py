"""The price of a pipeline: the model is partitioned into stages by the times of a plan.

All stages have the same mesh and follow the same plan, so the time of a node does not depend on its
stage. Therefore the stage boundaries are a chain partition over the times of the plan
(`stages.partition_chain`), and the best plan of one stage with the best boundaries is the best of
both together.

A step of m micro-batches over p stages takes m + p - 1 times the forward and backward of one
micro-batch in the slowest stage (GPipe, Huang et al., 2019; 1F1B, Narayanan et al., 2021); with v
chunks per stage and at least p micro-batches, m + (p - 1) / v times. With zero bubble (ZB-H1, Qi et
al., 2024), stages compute gradients of weights while they would wait.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from onnxpar.core.machine import Link
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.live_memory import Made, MemoryStep, live_peak
from onnxpar.cost.price import Price
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.metadata_keys import EXPANDED_FROM, GRADIENT_OF, RECOMPUTED_FROM
from onnxpar.graph.plan import Plan
from onnxpar.ops.collective.barrier import is_barrier
from onnxpar.stages.partition_chain import Chain, Costs, partition_chain, where_needed
from onnxpar.stages.transfers import transfer


@dataclass(frozen=True)
class PipelineSplit:
    """How a model is split into stages.

    Attributes:
        stages: Number of stages.
        micro_batches: Number of micro-batches in a step.
        schedule: Name of the schedule.
        chunks: Number of virtual stages of each stage.
        assign: Virtual stages that the user assigned, by node name.
    """

    stages: int
    micro_batches: int
    schedule: str = "1f1b"
    chunks: int = 1
    assign: Mapping[str, int] = field(default_factory=dict)

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages of all stages."""
        return self.stages * self.chunks

    @property
    def joined(self) -> bool:
        """Whether the forward and backward of the last virtual stage are one program.

        They are in the schedules in which each backward there comes directly after its forward.
        """
        return self.schedule in ("1f1b", ZERO_BUBBLE)

    def step(self, seconds: float, late: float) -> float:
        """Returns the seconds of a training step without the update.

        The idle time is that of the schedule's paper; see `docs/design/0016-pipeline.md`.

        Args:
            seconds: Seconds of one micro-batch in a stage.
            late: Seconds of these for which no other stage waits: those of gradients of weights, at
                most those of the forward and those of the rest of the backward.
        """
        few = max(self.stages - self.micro_batches, 0)
        rounds = self.micro_batches + (self.stages - 1 + few * (self.chunks - 1)) / self.chunks
        if self.schedule != ZERO_BUBBLE:
            late = 0.0
        return rounds * seconds - (2 * (self.stages - 1) - few) * late

    def kept(self, stage: int) -> int:
        """Returns for how many forwards of one virtual stage a stage keeps activations, at most.

        The formulas are from the papers of the schedules; see `docs/design/0016-pipeline.md`.
        """
        runs, after = self.micro_batches, self.stages - stage
        if self.schedule == "interleaved":
            largest = -(-runs // max(1, runs // self.stages))
            return min(runs * self.chunks, (self.chunks - 1) * largest + 2 * (after - 1) + 1)
        return min({"gpipe": runs, "1f1b": after, ZERO_BUBBLE: self.stages}[self.schedule], runs)

    def stash(self, stage: int, complete: float, late: float) -> float:
        """Returns the bytes of activations that a stage keeps, in all its virtual stages.

        Args:
            stage: The stage.
            complete: Bytes that one micro-batch leaves for its backward.
            late: Bytes of one micro-batch of which only gradients of weights are left to compute.
        """
        kept, few = self.kept(stage), 0
        if self.schedule == ZERO_BUBBLE:
            few = max(kept - (self.stages - stage), 0)
        return ((kept - few) * complete + few * late) / self.chunks


ZERO_BUBBLE = "zb-h1"
"""The schedule that computes gradients of weights when nothing else can be computed."""


@dataclass(frozen=True)
class StagePrice:
    """What one stage costs a device.

    Attributes:
        seconds: Seconds per micro-batch, including receiving and sending.
        late: Seconds of these for which no other stage waits (see `PipelineSplit.step`).
        moving: Seconds per micro-batch of receiving and sending alone.
        held: Bytes of its parameters, gradients and moments.
        peak: Bytes at the peak, including the activations of all micro-batches that it keeps.
        nodes: Number of nodes of the model.
    """

    seconds: float
    late: float
    moving: float
    held: int
    peak: int
    nodes: int


@dataclass(frozen=True)
class StagedPrice:
    """What a pipeline costs.

    Attributes:
        split: How the model is split.
        stages: The price of each stage.
        seconds: Seconds per step, with all micro-batches.
        assign: The virtual stage of each node of the chain, by name.
    """

    split: PipelineSplit
    stages: tuple[StagePrice, ...]
    seconds: float
    assign: Mapping[str, int]

    @property
    def peak(self) -> int:
        """Bytes at the peak of the fullest stage."""
        return max(stage.peak for stage in self.stages)

    @property
    def held(self) -> int:
        """Bytes held all the time by the stage that holds most."""
        return max(stage.held for stage in self.stages)


@dataclass(frozen=True)
class Priced:
    """A program with a plan on the mesh of one stage, priced.

    Attributes:
        model: The model that is planned; in training, with its loss and backward.
        plan: The plan.
        price: What it costs without stages.
        steps: Its steps, in order.
        late: Names of the backward nodes for which no other stage waits.
    """

    model: ir.Model
    plan: Plan
    price: Price
    steps: Sequence[MemoryStep]
    late: frozenset[str] = frozenset()


def price_stages(
    priced: Priced, chain: Chain, cost: CostModel, link: Link, split: PipelineSplit
) -> StagedPrice:
    """Partitions a model into stages by the times of a plan, and prices the pipeline.

    Args:
        priced: The program, planned.
        chain: The nodes of the model that are partitioned.
        cost: The cost model.
        link: The link between a device and its counterpart in the next stage.
        split: How many stages there are, and the schedule.

    Raises:
        StrategyError: There are more virtual stages than nodes.
    """
    return _Staging(priced, chain, cost, link, split).run()


class _Staging:
    def __init__(
        self, priced: Priced, chain: Chain, cost: CostModel, link: Link, split: PipelineSplit
    ) -> None:
        self.priced, self.chain, self.cost, self.link = priced, chain, cost, link
        self.split = split
        graph = priced.model.graph
        # What depends on no data, such as a cast of a weight, is computed again in the backward.
        self.backward, self.keeping = set[str](), set[str]()
        direct: dict[str, str] = {}
        data = set(graph.inputs)
        for node in graph:
            name = node.name or ""
            direct[name] = _origin(node)
            backward = GRADIENT_OF in node.metadata_props
            if backward:
                self.backward.add(name)
            if not data.isdisjoint(read_by(node)):
                data.update(node.outputs)
                if not backward:
                    self.keeping.add(name)
        # A backward node names a node that it differentiates or repeats, perhaps part of a body.
        self.roots = {name: direct.get(root, root) for name, root in direct.items()}

    def run(self) -> StagedPrice:
        split, price = self.split, self.priced.price
        seconds: dict[str, float] = {}
        for node in price.nodes:
            root = self.roots[node.name]
            seconds[root] = seconds.get(root, 0.0) + node.seconds
        crossing = self._crossing()
        costs = Costs(seconds, crossing)
        found = partition_chain(
            self.chain, split.virtual_stages, split.assign, costs, stages=split.stages
        )
        assign = {node.name or "": virtual for node, virtual in found.items()}
        self.placed = self._placed(found)
        own = [0.0] * split.virtual_stages
        late, backward = list(own), list(own)
        for node in price.nodes:
            for virtual in self.placed[node.name]:
                own[virtual] += node.seconds
                if node.name in self.priced.late:
                    late[virtual] += node.seconds
                elif node.name in self.backward:
                    backward[virtual] += node.seconds
        moving = self._moving(found, crossing)
        held = self._held()
        stages = []
        for stage in range(split.stages):
            mine = range(stage, split.virtual_stages, split.stages)
            waiting, rest, every = (sum(each[p] for p in mine) for each in (late, backward, own))
            stages.append(
                StagePrice(
                    sum(own[p] + moving[p] for p in mine),
                    min(waiting, rest, every - waiting - rest),
                    sum(moving[p] for p in mine),
                    held[stage],
                    held[stage] + self._activations(stage, mine),
                    sum(1 for virtual in assign.values() if virtual % split.stages == stage),
                )
            )
        return StagedPrice(split, tuple(stages), self._total(stages, held), assign)

    def _placed(self, virtual_by_node: Mapping[ir.Node, int]) -> dict[str, tuple[int, ...]]:
        """The virtual stages that compute each node; nodes of the loss are in the last one.

        A node outside the chain, such as a cast of a weight, is copied to each virtual stage that
        reads it, and so is the Barrier of a kept value. What is recomputed is recomputed where it
        was computed: another stage that reads it has received it.
        """
        graph = self.chain.nodes[0].graph
        assert isinstance(graph, ir.Graph)
        known = where_needed(graph, virtual_by_node)
        by_name = {node.name or "": stages for node, stages in known.items()}
        last = (self.split.virtual_stages - 1,)
        placed = {name: by_name.get(root, last) for name, root in self.roots.items()}
        for node in reversed(self.priced.model.graph):
            if is_barrier(node):
                uses = node.outputs[0].uses()
                readers = {at for use in uses for at in placed[use.node.name or ""]}
                placed[node.name or ""] = tuple(sorted(readers))
        return placed

    def _total(self, stages: Sequence[StagePrice], held: Sequence[int]) -> float:
        if not self.backward:
            # One run passes through all stages, one after another.
            return sum(stage.seconds for stage in stages)
        split, price = self.split, self.priced.price
        # The optimizer's work is distributed as the states are.
        share = max(held) / max(sum(held), 1)
        once = share * (price.updating + price.outputs + price.gradients)
        slowest = max(stages, key=lambda stage: stage.seconds)
        return split.step(slowest.seconds, slowest.late) + once

    def _crossing(self) -> dict[str, float]:
        """Seconds to send each value to another stage, and its cotangent back, by name."""
        plan = self.priced.plan
        forward = (n for n in self.priced.model.graph if (n.name or "") not in self.backward)
        made = {
            value.name: (value, sharding)
            for node in forward
            for value, sharding in zip(
                node.outputs, plan.nodes[node.name or ""].outputs, strict=True
            )
        }
        ways = 2 if self.backward else 1
        found = {}
        # Values of equal layers are sent alike.
        known: dict[tuple[Sharding, tuple[Sharding, ...], int], float] = {}
        for name in (v.name or "" for node in self.chain.nodes for v in node.outputs):
            seconds = self.link.latency
            if name in made and made[name][0].dtype is not None:
                value, sharding = made[name]
                width = int(value.dtype.itemsize) if value.dtype is not None else 0
                wants = self._forward_wants(value)
                key = sharding, tuple(wants), width
                if key not in known:
                    sent = transfer(self.cost, self.link, sharding, {0: wants}, width)
                    known[key] = sent.seconds
                seconds = known[key]
            found[name] = ways * seconds
        return found

    def _forward_wants(self, value: ir.Value) -> list[Sharding]:
        """The shardings in which forward nodes read a value."""
        wants: dict[Sharding, None] = {}
        for use in value.uses():
            name = use.node.name or ""
            plan = self.priced.plan.nodes.get(name)
            if plan is None or name in self.backward or use.idx >= len(plan.inputs):
                continue
            want = plan.inputs[use.idx]
            if want is not None:
                wants[want] = None
        return list(wants)

    def _moving(
        self, virtual_by_node: Mapping[ir.Node, int], crossing: Mapping[str, float]
    ) -> list[float]:
        """Seconds per micro-batch in which each virtual stage receives and sends."""
        found = [0.0] * self.split.virtual_stages
        for node, virtual in virtual_by_node.items():
            for value in self.chain.reads[node]:
                maker = value.producer()
                assert maker is not None
                if virtual_by_node[maker] != virtual:
                    found[virtual] += crossing[value.name or ""]
                    found[virtual_by_node[maker]] += crossing[value.name or ""]
        return found

    def _held(self) -> list[int]:
        """Bytes that each stage holds all the time for the parameters that it reads."""
        kept, count = self.priced.price.kept, self.split.stages
        readers: dict[str, set[int]] = {name: set() for name in kept}
        for node in self.priced.model.graph:
            for value in read_by(node):
                if (name := value.name or "") in readers:
                    readers[name].update(v % count for v in self.placed[node.name or ""])
        found = [0] * count
        for name, size in kept.items():
            for stage in readers[name]:
                found[stage] += size
        return found

    def _activations(self, stage: int, mine: Sequence[int]) -> int:
        """Bytes at the peak of the values of one stage, as in `stage_memory.fullest_stage`.

        Activations are kept for forwards taken equally from all of its virtual stages.

        Args:
            stage: The stage.
            mine: Its virtual stages, of which one runs at a time.
        """
        weighed = [self._weighed(virtual) for virtual in mine]
        most = max(running for running, _, _ in weighed)
        complete, late = (sum(each[i] for each in weighed) for i in (1, 2))
        return most + int(self.split.stash(stage, complete, late))

    @cached_property
    def _steps(self) -> list[list[tuple[str, MemoryStep]]]:
        """The steps of each virtual stage, each with the node to which it belongs."""
        found: list[list[tuple[str, MemoryStep]]] = [[] for _ in range(self.split.virtual_stages)]
        waiting: list[MemoryStep] = []
        for step in self.priced.steps:
            # A reshard belongs to the node that follows it.
            waiting.append(step)
            if step.name in self.placed:
                for virtual in self.placed[step.name]:
                    found[virtual] += [(step.name, each) for each in waiting]
                waiting = []
        return found

    @cached_property
    def _left(self) -> dict[str, Made]:
        """All results of the forward that a backward may read."""
        steps = (step for mine in self._steps for name, step in mine if name in self.keeping)
        return {made.name: made for step in steps for made in step.makes}

    @cached_property
    def _all(self) -> dict[str, Made]:
        """All results."""
        return {made.name: made for step in self.priced.steps for made in step.makes}

    def _weighed(self, virtual: int) -> tuple[int, int, int]:
        """Bytes of a virtual stage at its peak, and bytes kept for its backward.

        The bytes at the peak are those of one run of its forward or backward, or of both in one
        program, without what is kept. The last number is the bytes kept for gradients of weights,
        if only these are left.
        """
        if self.split.joined and virtual == self.split.virtual_stages - 1:
            return self._weighed_joined(virtual)
        mine, late = self._steps[virtual], self.priced.late
        forward = [s for name, s in mine if name not in self.backward]
        backward = [s for name, s in mine if name not in self.keeping]
        left = _read(self._left, (s for name, s in mine if name in self.backward))
        made = {value.name: value for step in forward for value in step.makes}
        own = sum(value.bytes for name, value in left.items() if name in made)
        running, waits = self._run(forward, left) - own, 0
        if late and self.split.schedule == ZERO_BUBBLE:
            weights = [s for name, s in mine if name in late]
            backward = [s for name, s in mine if name not in self.keeping and name not in late]
            between = {value.name: value for step in backward for value in step.makes}
            running = max(running, self._run(weights, {}))
            waits = _bytes(_read(self._left | between, weights))
            running = max(running, self._run(backward, _read(between, weights)))
        elif backward:
            running = max(running, self._run(backward, {}))
        return running, _bytes(left), waits

    def _weighed_joined(self, virtual: int) -> tuple[int, int, int]:
        """As `_weighed`, of a virtual stage whose forward and backward are one program."""
        mine = self._steps[virtual]
        late = self.priced.late if self.split.schedule == ZERO_BUBBLE else frozenset[str]()
        weights = [step for name, step in mine if name in late]
        both = [step for name, step in mine if name not in late]
        made = {value.name: value for step in both for value in step.makes}
        read = _read(self._left, (step for _, step in mine))
        received = [value.bytes for name, value in read.items() if name not in made]
        running = max(self._run(both, _read(made, weights)), self._run(weights, {}))
        return running, sum(received), _bytes(_read(self._left | made, weights))

    def _run(self, steps: Sequence[MemoryStep], kept: Collection[str]) -> int:
        """Bytes at the peak of a run of some steps that leaves values to others."""
        return live_peak([*steps, MemoryStep("kept", tuple(kept), ())]) + self._received(steps)

    def _received(self, steps: Sequence[MemoryStep]) -> int:
        """Bytes that a run of some steps receives, and that are not kept for the backward."""
        made = {value.name for step in steps for value in step.makes}
        runs_forward = not any(step.name in self.backward for step in steps)
        wanted = {name for step in steps for name in step.reads} - made
        known = (self._all[name] for name in wanted if name in self._all)
        return sum(v.bytes for v in known if runs_forward or v.name not in self._left)


def _read(made: Mapping[str, Made], readers: Iterable[MemoryStep]) -> dict[str, Made]:
    """The values of `made` that some steps read, themselves or as views, by name."""
    wanted = {name for step in readers for name in step.reads} & made.keys()
    owners = {}
    for name in wanted:
        while (owner := made[name].view_of) in made:
            name = owner
        if not made[name].view_of:
            owners[name] = made[name]
    return owners


def _bytes(values: Mapping[str, Made]) -> int:
    return sum(value.bytes for value in values.values())


def _origin(node: ir.Node) -> str:
    """Returns the name of the node of the model that a node belongs to, or was made for."""
    props = node.metadata_props
    for key in (RECOMPUTED_FROM, GRADIENT_OF, EXPANDED_FROM):
        if origin := props.get(key):
            return origin
    return node.name or ""
