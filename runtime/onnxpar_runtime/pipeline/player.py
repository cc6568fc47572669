"""Plays a schedule on one rank: computations in its order, and messages meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from onnxpar_format.trace import ACTION, RECEIVE
from onnxpar_runtime.pipeline.carriers import Carrier, Expected, Leaving
from onnxpar_runtime.pipeline.check import check
from onnxpar_runtime.pipeline.inbox import Inbox, Ticket
from onnxpar_runtime.pipeline.schedule import Action, Edge, Message, PlayedSchedule, Point, Transfer
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.transfers import with_transfers
from onnxpar_runtime.tracing.timeline import Timeline


class Work(Protocol):
    """The computations of a rank's virtual stages."""

    def compute(self, action: Action) -> None:
        """Carries out a computation."""

    def leaving(self, message: Message) -> Sequence[Leaving]:
        """Returns the values of a message, once."""

    def expected(self, message: Message) -> Sequence[Expected]:
        """Returns the values that a message to this rank has."""

    def arrived(self, message: Message, values: Sequence[Any]) -> None:
        """Takes the received values of a message; nothing else refers to them."""


@dataclass(frozen=True)
class Place:
    """The place of a rank in a pipeline.

    Attributes:
        stage: Its stage.
        position: Its place on the mesh of its stage.
        size: Number of ranks of a stage.
    """

    stage: int
    position: int
    size: int

    def counterpart(self, stage: int) -> int:
        """Returns the global rank at the same place of another stage."""
        return stage * self.size + self.position


@lru_cache(maxsize=64)
def plan(
    name: str, stages: int, micro_batches: int, chunks: int, edges: tuple[Edge, ...]
) -> PlayedSchedule:
    """Returns a schedule with its transfers, after checking that it comes to its end.

    Args:
        name: Name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Virtual stages of each stage.
        edges: The values that virtual stages send to one another.

    Raises:
        ScheduleError: There is no such schedule, or it cannot be played.
    """
    program = with_transfers(make(name, stages, micro_batches, chunks), edges)
    check(program)
    return program


def play(
    carrier: Carrier,
    place: Place,
    program: PlayedSchedule,
    work: Work,
    inbox: Inbox,
    timeline: Timeline,
) -> None:
    """Plays a rank's steps of a program. Every rank of the pipeline must call it.

    Args:
        carrier: Sends and receives the rank's values.
        place: The rank's place in the pipeline.
        program: The steps of all ranks.
        work: The rank's computations.
        inbox: The rank's posted receives, kept from one call to the next.
        timeline: Records when computations began and ended, and how long the rank waited.

    Raises:
        RankError: Another rank failed, or nothing arrived from it within the time limit.
        OnnxparRuntimeError: As `work` raises.
    """
    posted: dict[Message, Ticket[list[Any]]] = {}
    timeline.played += 1
    for step in program.ranks[place.stage]:
        if isinstance(step, Action):
            facts = {"step": timeline.played, "chunk": step.chunk, "micro_batch": step.micro_batch}
            with timeline.span(ACTION, f"{step.kind.value}{step.micro_batch}", **facts):
                work.compute(step)
            continue
        peer = place.counterpart(step.peer)
        match step.point:
            case Point.SEND:
                for one in work.leaving(step.message):
                    what = f"send of {one.name!r}, of {step.message}"
                    carrier.send(one.value, one.with_shape, peer, what)
            case Point.RECEIVE:
                posted[step.message] = _post(carrier, peer, step, work, inbox)
            case Point.WAIT_RECEIVE:
                with timeline.span(RECEIVE, f"waits for {step.message} of rank {peer}"):
                    received = inbox.wait(peer, posted.pop(step.message))
                work.arrived(step.message, [carrier.take(value) for value in received])
            case Point.WAIT_SEND:
                pass  # what is sent has been copied


def _post(
    carrier: Carrier, peer: int, step: Transfer, work: Work, inbox: Inbox
) -> Ticket[list[Any]]:
    what = f"of {step.message}"
    wanted = [
        carrier.post(entry, peer, f"receive of {entry.name!r}, {what}")
        for entry in work.expected(step.message)
    ]

    def receive(background: bool) -> list[Any]:
        return [of_one(background) for of_one in wanted]

    return inbox.post(peer, receive, f"receive {what}", background=carrier.background(peer))
