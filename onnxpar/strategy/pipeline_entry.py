"""The entry `pipeline` of a strategy file, and what an annotated model says of it."""

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from onnxpar.strategy.tensor_entry import expected

Count = Annotated[int, Field(ge=1)]
MOST_MICRO_BATCHES = 1 << 16
"""Far more than any run has: the schedule of a step, which lists them all, must fit into memory."""
MicroBatches = Annotated[int, Field(ge=1, le=MOST_MICRO_BATCHES)]


class ScheduleEntry(BaseModel):
    """How the stages of a pipeline work on a step.

    Attributes:
        micro_batches: Micro-batches of a step, unless the command overrides it; by default the
            number of stages.
        schedule: The order in which stages work on micro-batches. By default, `interleaved` with
            several chunks, and else one is chosen where a training program is split
            (`onnxpar.stages.choose_schedule`).
        chunks: Virtual stages of each stage, in the interleaved schedule: chunk c of stage s is
            virtual stage `c * stages + s`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    micro_batches: MicroBatches | None = None
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] | None = None
    chunks: Count = 1

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.chunks > 1 and self.schedule not in (None, "interleaved"):
            raise expected("'chunks' of 1, or the schedule 'interleaved'", self.chunks)
        if self.schedule == "interleaved" and self.chunks < 2:
            raise expected("'chunks' of at least 2 for the schedule 'interleaved'", self.chunks)
        return self

    @property
    def order(self) -> str:
        """The schedule; without a choice `interleaved` with several chunks, else `1f1b`."""
        return self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")

    @property
    def is_open(self) -> bool:
        """Whether a schedule is still to be chosen."""
        return self.schedule is None and self.chunks == 1


class PipelineEntry(ScheduleEntry):
    """How the model is split into pipeline stages, and their schedule.

    Attributes:
        stages: Number of stages, each with its own mesh.
        assign: The virtual stage of nodes, by pattern; other nodes are assigned by cost.
    """

    stages: Count
    assign: dict[str, Annotated[int, Field(ge=0)]] = {}

    @model_validator(mode="after")
    def _assigned(self) -> Self:
        for pattern, virtual in self.assign.items():
            if virtual >= self.virtual_stages:
                raise expected(
                    f"numbers from 0 to {self.virtual_stages - 1} under 'assign'",
                    {pattern: virtual},
                )
        return self

    @property
    def virtual_stages(self) -> int:
        """Number of virtual stages of all stages."""
        return self.stages * self.chunks
