"""Plays a schedule on one rank: computations in its order, messages beside them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.pipeline.check import check
from onnxpar_runtime.pipeline.inbox import Inbox, Ticket
from onnxpar_runtime.pipeline.schedule import Action, Edge, Message, Point, Program, Transfer
from onnxpar_runtime.pipeline.schedules import make
from onnxpar_runtime.pipeline.trace import Trace
from onnxpar_runtime.pipeline.transfers import with_transfers

Array = NDArray[Any]
_TAG = 0x5049
_MOST_DIMS = 32


@dataclass(frozen=True)
class Expected:
    """An array that a message has.

    Attributes:
        dtype: Its type.
        shape: Its shape; None where the message says it.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None


class Work(Protocol):
    """What a rank's virtual stages compute."""

    def compute(self, action: Action) -> None:
        """Carries out a computation."""

    def leaving(self, message: Message) -> Sequence[tuple[Array, bool]]:
        """Returns the arrays of a message, C-contiguous, and whether shapes go with them.

        They are asked for once.
        """

    def expected(self, message: Message) -> Sequence[Expected]:
        """Returns what a message to this rank has."""

    def arrived(self, message: Message, arrays: Sequence[Array]) -> None:
        """Takes the arrays of a message. They are the receiver's own."""


@dataclass(frozen=True)
class Place:
    """Where a rank is in a pipeline.

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
) -> Program:
    """Returns a schedule with its transfers, which is known to come to its end.

    Args:
        name: Name of the schedule.
        stages: Number of stages.
        micro_batches: Number of micro-batches.
        chunks: Virtual stages of each stage.
        edges: What virtual stages give to one another.

    Raises:
        ScheduleError: There is no such schedule, or it cannot be played.
    """
    program = with_transfers(make(name, stages, micro_batches, chunks), edges)
    check(program)
    return program


def play(
    rank: Rank, place: Place, program: Program, work: Work, inbox: Inbox, trace: Trace | None = None
) -> None:
    """Plays a rank's part of a program. Every rank of the pipeline must call it.

    Args:
        rank: The rank.
        place: Where it is in the pipeline.
        program: What all ranks play.
        work: What it computes.
        inbox: The rank's, kept from one call to the next.
        trace: Notes when computations began and ended, if given.

    Raises:
        RankError: Another rank failed, or nothing came from it for too long.
        OnnxparRuntimeError: What `work` raises.
    """
    posted: dict[Message, Ticket[list[Array]]] = {}
    if trace is not None:
        trace.begin()
    for step in program.ranks[place.stage]:
        if isinstance(step, Action):
            if trace is None:
                work.compute(step)
            else:
                with trace.of(step):
                    work.compute(step)
            continue
        peer = place.counterpart(step.peer)
        match step.point:
            case Point.SEND:
                _send(rank, peer, step, work.leaving(step.message))
            case Point.RECEIVE:
                posted[step.message] = _post(rank, peer, step, work, inbox)
            case Point.WAIT_RECEIVE:
                arrays = inbox.wait(peer, posted.pop(step.message))
                work.arrived(step.message, arrays)
            case Point.WAIT_SEND:
                pass  # what is sent has been copied


def _send(rank: Rank, peer: int, step: Transfer, arrays: Sequence[tuple[Array, bool]]) -> None:
    what = f"send of {step.message}"
    for array, with_shape in arrays:
        if with_shape:
            head = np.zeros(1 + _MOST_DIMS, np.int64)
            head[: 1 + array.ndim] = array.ndim, *array.shape
            rank.send(head, peer, _TAG, what)
        rank.send(array, peer, _TAG, what)


def _post(rank: Rank, peer: int, step: Transfer, work: Work, inbox: Inbox) -> Ticket[list[Array]]:
    wanted = work.expected(step.message)
    what = f"receive of {step.message}"

    def receive() -> list[Array]:
        arrays = []
        for entry in wanted:
            shape = entry.shape
            if shape is None:
                head = np.empty(1 + _MOST_DIMS, np.int64)
                rank.recv(head, peer, _TAG, what, background=inbox.background)
                shape = tuple(int(n) for n in head[1 : 1 + head[0]])
            array = np.empty(shape, entry.dtype)
            rank.recv(array, peer, _TAG, what, background=inbox.background)
            arrays.append(array)
        return arrays

    return inbox.post(peer, receive, what)
