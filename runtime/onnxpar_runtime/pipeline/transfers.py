"""The transfers that a schedule needs, and the places of their four points.

Receives are posted early and waited for late, so that data travel while the rank computes. Between
any two ranks there is one channel in each direction, in which all sends and receives are posted in
the same order. Transports that match by order (NCCL) need this, and transports that match by order
within a tag (MPI) then need no tags.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.order import Unit, in_order, require_complete, where
from onnxpar_runtime.pipeline.schedule import (
    Edge,
    Kind,
    Message,
    Payload,
    Place,
    PlayedSchedule,
    Point,
    Schedule,
    Step,
    Transfer,
)
from onnxpar_runtime.pipeline.timeline import Needs

# A forward and a backward in the steady state of 1F1B.
LOOKAHEAD = 2


def chain(schedule: Schedule, value: str = "x") -> tuple[Edge, ...]:
    """Returns the edges of a pipeline whose virtual stages each send one value to the next."""
    return tuple(
        Edge(stage, stage + 1, (value,), (value,)) for stage in range(schedule.virtual_stages - 1)
    )


def with_transfers(
    schedule: Schedule, edges: Sequence[Edge], lookahead: int = LOOKAHEAD
) -> PlayedSchedule:
    """Returns the schedule with the transfers that the edges need.

    A receive is posted `lookahead` computations before the one that reads the values, or earlier if
    a later receive of its channel is posted earlier; it is waited for directly before that
    computation. A send is posted directly after the computation that makes its values. It is waited
    for `lookahead` computations after the reader has begun in the schedule's own order, or at the
    end. Until then the sender must keep the values. Values between two chunks of one rank need no
    transfer.

    In the order of the schedule with its virtual stages in a chain, a wait comes after every step
    that it waits for, whether receivers take values when they post or when they wait. So any edges
    from earlier virtual stages to later ones can be played.

    Args:
        schedule: The computations.
        edges: The values that virtual stages send to one another; at most one edge from one to
            another.
        lookahead: Number of computations, at least 1, that can hide a transfer. It bounds the
            buffers for receiving and those kept for sending.

    Raises:
        ScheduleError: The schedule is not complete or deadlocks, or an edge is impossible.
    """
    if lookahead < 1:
        raise ScheduleError(f"expected a lookahead of at least 1 computation, got {lookahead}")
    require_complete(schedule)
    starts = in_order(schedule).starts
    found = where(schedule)
    slots = [[_Slot() for _ in range(len(actions) + 1)] for actions in schedule.ranks]
    # For each channel: the places where its messages are made and read, and the messages.
    channels: defaultdict[tuple[int, int], list[tuple[Place, Place, Message]]] = defaultdict(list)
    for message in messages(schedule, edges):
        made, read = (found[key] for key in ends_of(message))
        if made[0] != read[0]:
            channels[made[0], read[0]].append((made, read, message))
    for (source, target), sent in sorted(channels.items()):
        sent.sort(key=lambda item: (item[0], item[2].target))
        post = len(schedule.ranks[target])
        for made, read, message in reversed(sent):
            # Not later than any receive that follows in the channel.
            post = min(post, max(0, read[1] - lookahead))
            begun = bisect_left(starts[source], starts[target][read[1]], made[1] + 1)
            done = min(begun + lookahead, len(starts[source]))
            sender, receiver = slots[source], slots[target]
            sender[made[1] + 1].sends.append(Transfer(Point.SEND, target, message))
            sender[done].wait_sends.append(Transfer(Point.WAIT_SEND, target, message))
            receiver[post].receives.append(Transfer(Point.RECEIVE, source, message))
            receiver[read[1]].wait_receives.append(Transfer(Point.WAIT_RECEIVE, source, message))
    ranks = []
    for actions, of_rank in zip(schedule.ranks, slots, strict=True):
        steps = [
            step
            for action, slot in zip(actions, of_rank, strict=False)
            for step in (*slot.steps(), action)
        ]
        ranks.append((*steps, *of_rank[-1].steps()))
    return PlayedSchedule(schedule, tuple(edges), tuple(ranks))


@dataclass(frozen=True, slots=True)
class _Slot:
    """The transfers before one computation; each list in reverse order."""

    sends: list[Transfer] = field(default_factory=list)
    receives: list[Transfer] = field(default_factory=list)
    wait_sends: list[Transfer] = field(default_factory=list)
    wait_receives: list[Transfer] = field(default_factory=list)

    def steps(self) -> Iterator[Step]:
        """Yields them in order: what is posted before what is waited for."""
        for points in (self.sends, self.receives, self.wait_sends, self.wait_receives):
            yield from reversed(points)


def messages(schedule: Schedule, edges: Sequence[Edge]) -> list[Message]:
    """Returns every message of a step: for each edge and micro-batch, in both directions.

    They include messages between chunks of one rank.

    Raises:
        ScheduleError: An edge does not lead from a virtual stage to a later one, is empty, has a
            name twice or cotangents of other values, or has the same ends as another edge.
    """
    seen: set[tuple[int, int]] = set()
    has_backward = schedule.has_backward
    result = []
    for edge in edges:
        name = f"edge from virtual stage {edge.source} to {edge.target}"
        if not 0 <= edge.source < edge.target < schedule.virtual_stages:
            raise ScheduleError(
                f"{name}: expected an edge from an earlier to a later one of "
                f"{schedule.virtual_stages} virtual stages"
            )
        if (edge.source, edge.target) in seen:
            raise ScheduleError(f"{name}: expected one edge with all values, got two")
        seen.add((edge.source, edge.target))
        if not edge.values and not edge.cotangents:
            raise ScheduleError(f"{name}: expected values or cotangents, got neither")
        if len({*edge.values}) < len(edge.values):
            raise ScheduleError(f"{name}: expected distinct values, got {list(edge.values)}")
        if edge.values and not {*edge.cotangents} <= {*edge.values}:
            raise ScheduleError(
                f"{name}: expected cotangents of {list(edge.values)}, got {list(edge.cotangents)}"
            )
        for micro_batch in range(schedule.micro_batches):
            if edge.values:
                result.append(
                    Message(Payload.ACTIVATION, edge.source, edge.target, micro_batch, edge.values)
                )
            if edge.cotangents and has_backward:
                result.append(
                    Message(
                        Payload.COTANGENT, edge.target, edge.source, micro_batch, edge.cotangents
                    )
                )
    return result


def ends_of(message: Message) -> tuple[Unit, Unit]:
    """Returns the units of computation that make and read the values of a message."""
    kind = Kind.FORWARD if message.payload is Payload.ACTIVATION else Kind.BACKWARD
    return (
        (message.source, message.micro_batch, kind),
        (message.target, message.micro_batch, kind),
    )


def rendezvous(
    program: PlayedSchedule, time_of: Callable[[Message], float], taken: Point = Point.RECEIVE
) -> Needs:
    """Returns the needs of a program's waits: both ranks must have posted the transfer.

    It assumes no buffers: a send is done only when its receiver takes the values.

    Args:
        program: The program; every message has its four points.
        time_of: Returns the time of a message's transfer.
        taken: The point at which the receiver takes the values: `RECEIVE`, or `WAIT_RECEIVE` if it
            needs the shapes before it can post the receive.
    """
    points: defaultdict[Message, dict[Point, Place]] = defaultdict(dict)
    for rank, steps in enumerate(program.ranks):
        for index, step in enumerate(steps):
            if isinstance(step, Transfer):
                points[step.message][step.point] = rank, index
    needs: dict[Place, list[tuple[Place, float]]] = {}
    for message, at in points.items():
        time = time_of(message)
        sent = at[Point.SEND], time
        needs[at[Point.WAIT_RECEIVE]] = [sent, (at[Point.RECEIVE], time)]
        needs[at[Point.WAIT_SEND]] = [sent, (at[taken], time)]
    return needs
