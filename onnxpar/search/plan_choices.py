"""What a plan of training decides besides shardings, as data: `Configuration`, `Open`.

`onnxpar.search.configurations` chooses among configurations.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from onnxpar.core.name_patterns import prefixes_of
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.stages.assign_stages import assigned
from onnxpar.stages.stage_price import ZERO_BUBBLE, PipelineSplit, StagedPrice
from onnxpar.strategy.divided_weights import divided_nodes
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions
from onnxpar.strategy.schema import Strategy

NO_BUBBLE = "zero bubble"
"""The schedule `ZERO_BUBBLE` in words."""
SCHEDULES = (("1f1b", 1), (ZERO_BUBBLE, 1), ("interleaved", 2), ("interleaved", 4))
"""The schedules that are tried, each with a number of virtual stages of a stage."""
_PLAIN = (
    "one stage",
    "no chunks",
    f"no {NO_BUBBLE}",
    "one micro-batch",
    "no optimizer parallel",
    "no recomputation",
)
"""The plain choices in words, in the order of `Configuration.describe`."""


@dataclass(frozen=True)
class Configuration:
    """What a plan of training decides besides shardings.

    Attributes:
        split: Stages, micro-batches and schedule.
        parallel: Optimizer parallel.
        recompute: What is recomputed.
        part: A description of what is recomputed, if a part of each layer was chosen.
    """

    split: PipelineSplit
    parallel: OptimizerParallel
    recompute: RecomputeOptions = NOTHING
    part: str = ""

    def describe(self) -> str:
        """Returns the configuration in words."""
        return ", ".join(filter(None, self._words)) or "one stage"

    def beside(self, other: "Configuration") -> str:
        """Returns in words in what it differs from another configuration; empty if in nothing."""
        pairs = zip(self._words, other._words, _PLAIN, strict=True)
        return ", ".join(mine or plain for mine, its, plain in pairs if mine != its)

    @property
    def _words(self) -> tuple[str, ...]:
        """Each choice in words; empty if it is the plain one."""
        split = self.split
        return (
            f"{split.stages} stages" if split.stages > 1 else "",
            f"{split.chunks} chunks" if split.chunks > 1 else "",
            NO_BUBBLE if split.schedule == ZERO_BUBBLE else "",
            f"{split.micro_batches} micro-batches" if split.micro_batches > 1 else "",
            self.sharded,
            self.recomputed,
        )

    @property
    def sharded(self) -> str:
        """The level of optimizer parallel in words; empty for level 0."""
        return self.parallel.words

    @property
    def recomputed(self) -> str:
        """What is recomputed, in words; empty for nothing."""
        every = self.recompute.layers
        if self.part:
            return self.part
        if every:
            return (
                f"recompute every {_ordinal(every)} layer" if every > 1 else "recompute all layers"
            )
        return "recompute as given" if self.recompute.nodes else ""


def _ordinal(number: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(number, f"{number}th")


def pipeline_split(
    strategy: Strategy,
    model: ir.Model,
    stages: int,
    micro_batches: int,
    chunks: int = 1,
    schedule: str = "1f1b",
) -> PipelineSplit:
    """Returns how a model is split into stages; what the strategy says about its pipeline is kept.

    Args:
        strategy: The strategy.
        model: The model without loss and backward.
        stages: Number of stages.
        micro_batches: Micro-batches of a step.
        chunks: Virtual stages of each stage, if the strategy says nothing about a pipeline.
        schedule: The schedule, in the same case.
    """
    entry = strategy.pipeline
    if entry is None:
        return PipelineSplit(stages, micro_batches, schedule, chunks)
    fixed = assigned(strategy, model)
    return PipelineSplit(stages, micro_batches, entry.order, entry.chunks, fixed)


@dataclass(frozen=True)
class Open:
    """What a plan of training may decide.

    Attributes:
        stages: The numbers of stages to choose from.
        micro_batches: The number of micro-batches; None to choose one.
        level: The level of optimizer parallel; None to choose one.
        recompute: What is recomputed; None to choose that.
    """

    stages: Sequence[int]
    micro_batches: int | None = None
    level: int | None = None
    recompute: RecomputeOptions | None = None

    @property
    def anything(self) -> bool:
        """Whether there is a choice."""
        given = (self.micro_batches, self.level, self.recompute)
        return len(self.stages) > 1 or None in given

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels of optimizer parallel to choose from.

        Level 1 sends what level 0 sends, and needs less memory.
        """
        return (1, 2, 3) if self.level is None else (self.level,)


def pipeline_data(
    staged: StagedPrice, micro_batches: int | None, forward: ir.Model, schedule: str | None
) -> dict[str, Any]:
    """Returns the section `pipeline` of a strategy file with the same stages.

    Args:
        staged: The stages.
        micro_batches: Micro-batches of a step, if the file gives them.
        forward: The model that is split.
        schedule: The schedule, unless `shard` shall choose one.
    """
    split = staged.split
    data: dict[str, Any] = {"stages": split.stages}
    if schedule is not None:
        data["schedule"] = schedule
    if micro_batches is not None:
        data["micro_batches"] = micro_batches
    if split.chunks > 1:
        data["chunks"] = split.chunks
    nodes = list(forward.graph)
    known = {*(node.name or "" for node in nodes), *divided_nodes(nodes).values()}
    names: dict[int, list[str]] = {virtual: [] for virtual in range(split.virtual_stages)}
    for name, virtual in staged.assign.items():
        names[virtual].append(name)
    patterns = prefixes_of(names, known)
    return data | {"assign": {key: v for v, keys in patterns.items() for key in keys}}
