"""The price of a pipeline: the model is partitioned into stages by the times of a plan.

All stages have the same mesh and follow the same plan, so the time of a node does not depend on its
stage. Therefore the stage boundaries are a chain partition over the times of the plan
(`stages.partition_chain`), and the best plan of one stage with the best boundaries is the best of
both together.

A step of m micro-batches over p stages takes m + p - 1 times the forward and backward of one
micro-batch in the slowest stage (GPipe, Huang et al., 2019; 1F1B, Narayanan et al., 2021); with v
chunks per stage and at least p micro-batches, m + (p - 1) / v times. Zero bubble is priced as 1F1B,
although it hides the half of the backward that computes gradients; the runtime's `simulate` shows
that.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from onnxpar.core.machine import Link
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.live_memory import MemoryStep, live_peak
from onnxpar.cost.price import Price
from onnxpar.graph.body_captures import read_by
from onnxpar.graph.metadata_keys import EXPANDED_FROM, GRADIENT_OF
from onnxpar.graph.plan import Plan
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
    def rounds(self) -> float:
        """How many times the time of one micro-batch in a stage a training step takes.

        The idle time is that of the schedule's paper; see `docs/design/0016-pipeline.md`.
        """
        late = max(self.stages - self.micro_batches, 0) * (self.chunks - 1)
        return self.micro_batches + (self.stages - 1 + late) / self.chunks

    def kept(self, stage: int) -> int:
        """Returns for how many forwards of one virtual stage a stage keeps activations, at most.

        The formulas are from the papers of the schedules; see `docs/design/0016-pipeline.md`.
        """
        runs, after = self.micro_batches, self.stages - stage
        if self.schedule == "interleaved":
            largest = -(-runs // max(1, runs // self.stages))
            return min(runs * self.chunks, (self.chunks - 1) * largest + 2 * (after - 1) + 1)
        return min({"gpipe": runs, "1f1b": after, "zb-h1": self.stages}[self.schedule], runs)


@dataclass(frozen=True)
class StagePrice:
    """What one stage costs a device.

    Attributes:
        seconds: Seconds per micro-batch, including receiving and sending.
        moving: Seconds per micro-batch of receiving and sending alone.
        held: Bytes of its parameters, gradients and moments.
        peak: Bytes at the peak, including the activations of all micro-batches that it keeps.
        nodes: Number of nodes of the model.
    """

    seconds: float
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
    """

    model: ir.Model
    plan: Plan
    price: Price
    steps: Sequence[MemoryStep]


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
        self.backward = {n.name or "" for n in graph if GRADIENT_OF in n.metadata_props}
        direct = {node.name or "": _origin(node) for node in graph}
        # A backward node names the node that it differentiates, which may be part of a body.
        self.roots = {name: direct.get(root, root) for name, root in direct.items()}
        data = set(graph.inputs)
        for node in graph:
            if not data.isdisjoint(read_by(node)):
                data.update(node.outputs)
        makers = (value.producer() for value in data)
        varying = {maker.name or "" for maker in makers if maker is not None}
        # What depends on no data, such as a cast of a weight, is computed again in the backward.
        self.keeping = varying - self.backward

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
        for node in price.nodes:
            for virtual in self.placed[node.name]:
                own[virtual] += node.seconds
        moving = self._moving(found, crossing)
        held = self._held()
        stages = []
        for stage in range(split.stages):
            mine = range(stage, split.virtual_stages, split.stages)
            stages.append(
                StagePrice(
                    sum(own[p] + moving[p] for p in mine),
                    sum(moving[p] for p in mine),
                    held[stage],
                    held[stage] + self._activations(mine, split.kept(stage)),
                    sum(1 for virtual in assign.values() if virtual % split.stages == stage),
                )
            )
        return StagedPrice(split, tuple(stages), self._total(stages, held), assign)

    def _placed(self, virtual_by_node: Mapping[ir.Node, int]) -> dict[str, tuple[int, ...]]:
        """The virtual stages that compute each node; nodes of the loss are in the last one.

        A node outside the chain, such as a cast of a weight, is copied to each virtual stage that
        reads it.
        """
        graph = self.chain.nodes[0].graph
        assert isinstance(graph, ir.Graph)
        known = where_needed(graph, virtual_by_node)
        by_name = {node.name or "": stages for node, stages in known.items()}
        last = (self.split.virtual_stages - 1,)
        return {name: by_name.get(root, last) for name, root in self.roots.items()}

    def _total(self, stages: Sequence[StagePrice], held: Sequence[int]) -> float:
        if not self.backward:
            # One run passes through all stages, one after another.
            return sum(stage.seconds for stage in stages)
        split, price = self.split, self.priced.price
        # The optimizer's work is distributed as the states are.
        share = max(held) / max(sum(held), 1)
        once = share * (price.updating + price.outputs + price.gradients)
        return split.rounds * max(stage.seconds for stage in stages) + once

    def _crossing(self) -> dict[str, float]:
        """Seconds to send each value to another stage, and its cotangent back, by name."""
        plan = self.priced.plan
        made = {
            value.name: (value, sharding)
            for node in self.priced.model.graph
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
        readers: dict[str, set[int]] = {}
        for node in self.priced.model.graph:
            stages = {virtual % self.split.stages for virtual in self.placed[node.name or ""]}
            for value in read_by(node):
                readers.setdefault(value.name or "", set()).update(stages)
        found = [0] * self.split.stages
        for name, size in self.priced.price.kept.items():
            for stage in readers.get(name, ()):
                found[stage] += size
        return found

    def _activations(self, mine: Sequence[int], kept: int) -> int:
        """Bytes at the peak of the values of one stage.

        Args:
            mine: Its virtual stages, of which one runs at a time.
            kept: For how many forwards activations are kept, taken equally from all of them.
        """
        weighed = [self._weighed(virtual) for virtual in mine]
        stashes = sum(stash for _, stash in weighed)
        return max(peak - stash for peak, stash in weighed) + kept * stashes // len(weighed)

    @cached_property
    def _steps(self) -> list[list[MemoryStep]]:
        """The steps of each virtual stage."""
        found: list[list[MemoryStep]] = [[] for _ in range(self.split.virtual_stages)]
        waiting: list[MemoryStep] = []
        for step in self.priced.steps:
            # A reshard belongs to the node that follows it.
            waiting.append(step)
            if step.name in self.placed:
                for virtual in self.placed[step.name]:
                    found[virtual] += waiting
                waiting = []
        return found

    def _weighed(self, virtual: int) -> tuple[int, int]:
        """Bytes of a virtual stage at the peak of one micro-batch, and bytes kept for backward."""
        mine = self._steps[virtual]
        forward = [s for s in mine if s.name in self.keeping]
        made = {m.name: m.bytes for s in forward for m in s.makes if not m.view_of}
        wanted = {name for s in mine if s.name in self.backward for name in s.reads}
        stash = sum(size for name, size in made.items() if name in wanted)
        return live_peak(mine), stash


def _origin(node: ir.Node) -> str:
    """Returns the name of the node of the model that a node belongs to, or was made for."""
    props = node.metadata_props
    return props.get(GRADIENT_OF) or props.get(EXPANDED_FROM) or node.name or ""
