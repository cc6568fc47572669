"""A pipeline schedule as data: the actions of every rank, in order.

A pipeline of `stages` ranks holds `chunks` parts of the model on each rank. Part `chunk` of `rank`
is *virtual stage* `chunk * stages + rank`: the model runs through the virtual stages in ascending
order, hence around the ranks `chunks` times (Narayanan et al., "Efficient large-scale language
model training on GPU clusters using Megatron-LM", SC 2021, section 2.2). With one chunk a virtual
stage is a stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """The kind of computation of one micro-batch by one virtual stage.

    A virtual stage's backward is one computation (`BACKWARD`), or split as in Qi et al., "Zero
    bubble pipeline parallelism" (ICLR 2024): `BACKWARD_INPUT` computes the cotangents of the
    stage's inputs, for which the stage before waits, and `BACKWARD_WEIGHT`, any time later, the
    gradients of the parameters.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    # Members are singletons; that of Enum is written in Python, and hashes the name.
    __hash__ = object.__hash__

    def __str__(self) -> str:
        """Returns the kind as messages write it."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True, slots=True)
class Action:
    """A computation on one rank: `kind` of one micro-batch by one of the rank's chunks."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        """Returns the action as messages write it."""
        return f"{self.kind} of micro-batch {self.micro_batch} in chunk {self.chunk}"


class Payload(Enum):
    """The contents of a message: results of a forward, or cotangents of such results."""

    ACTIVATION = "activation"
    COTANGENT = "cotangent"

    __hash__ = object.__hash__


class Point(Enum):
    """One of the four points of a transfer, two on each rank.

    `SEND` and `RECEIVE` post a nonblocking operation and return at once; `WAIT_SEND` returns when
    the sent buffers may be reused, `WAIT_RECEIVE` when the values have arrived.
    """

    SEND = "send"
    RECEIVE = "receive"
    WAIT_SEND = "wait send"
    WAIT_RECEIVE = "wait receive"


@dataclass(frozen=True, slots=True)
class Message:
    """The values that one virtual stage sends to another for one micro-batch.

    Attributes:
        payload: Activations go from a virtual stage to a later one, cotangents to an earlier one.
        source: The virtual stage that sends.
        target: The virtual stage that receives.
        micro_batch: The micro-batch.
        values: Names of the values sent, or of the values whose cotangents are sent; in this order.
    """

    payload: Payload
    source: int
    target: int
    micro_batch: int
    values: tuple[str, ...]

    def __str__(self) -> str:
        """Returns the message as error messages write it."""
        return (
            f"the {self.payload.value}s of micro-batch {self.micro_batch}"
            f" from virtual stage {self.source} to {self.target}"
        )


@dataclass(frozen=True, slots=True)
class Transfer:
    """A point of the transfer of `message`, on a rank that exchanges it with rank `peer`."""

    point: Point
    peer: int
    message: Message

    def __str__(self) -> str:
        """Returns the transfer as messages write it."""
        side = "to" if self.point in (Point.SEND, Point.WAIT_SEND) else "from"
        return f"{self.point.value} {side} rank {self.peer} of {self.message}"


Step = Action | Transfer


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that a virtual stage sends to a later one, for each micro-batch.

    A value that several virtual stages read has an edge to each of them.

    Attributes:
        source: The virtual stage that computes the values.
        target: The virtual stage that reads them.
        values: Names of the values; may be empty, if `target` only sends back a cotangent that
            passes through it unchanged (as that of a sum), for a value read by stages between.
        cotangents: Those of `values` whose cotangents `target` sends back; may be empty. Without
            values, the names of the cotangents that it sends back.
    """

    source: int
    target: int
    values: tuple[str, ...]
    cotangents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The computations of every rank of a pipeline, in order.

    Attributes:
        name: The schedule's name, as in `schedule_kinds.SCHEDULES`.
        stages: Number of ranks of the pipeline, p.
        micro_batches: Number of micro-batches, m.
        chunks: Number of virtual stages on each rank, v.
        ranks: For each rank its computations.
    """

    name: str
    stages: int
    micro_batches: int
    chunks: int
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def virtual_stages(self) -> int:
        """The number of virtual stages, p·v."""
        return self.stages * self.chunks

    @property
    def has_backward(self) -> bool:
        """Whether the schedule has backwards; False for a schedule for evaluation."""
        return any(action.kind is not Kind.FORWARD for rank in self.ranks for action in rank)

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Returns the virtual stage that is chunk `chunk` of rank `rank`."""
        return chunk * self.stages + rank

    def places(self) -> Iterator[tuple[int, int, Action]]:
        """Yields rank, index in the rank's list and action of every computation."""
        for rank, actions in enumerate(self.ranks):
            for index, action in enumerate(actions):
                yield rank, index, action


@dataclass(frozen=True, slots=True)
class PlayedSchedule:
    """A schedule with its transfers, which the ranks of a pipeline play.

    Attributes:
        schedule: The computations alone.
        edges: The values that the virtual stages send to one another.
        ranks: For each rank its computations and the points of its transfers, in order.
    """

    schedule: Schedule
    edges: tuple[Edge, ...]
    ranks: tuple[tuple[Step, ...], ...]


# The place of a step: its rank, and its index in the rank's list.
Place = tuple[int, int]
