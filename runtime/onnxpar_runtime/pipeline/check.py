"""Checks, before any rank begins, that a program can be played: otherwise ranks would hang."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.order import require_complete, where
from onnxpar_runtime.pipeline.schedule import Action, PlayedSchedule, Point, Step, Transfer
from onnxpar_runtime.pipeline.timeline import require_end, timeline
from onnxpar_runtime.pipeline.transfers import ends_of, messages, rendezvous


def check(program: PlayedSchedule) -> None:
    """Checks that a program computes everything, transfers all values, and comes to its end.

    It finds deadlocks by playing the program without buffers: a send ends only when its receiver
    waits for it, because the receiver may need the shapes before it can post the receive.

    Raises:
        ScheduleError: A condition does not hold; the message names the rank and the step.
    """
    schedule = program.schedule
    require_complete(schedule)
    name = f"schedule {schedule.name!r}"
    computed = tuple(
        tuple(step for step in steps if isinstance(step, Action)) for steps in program.ranks
    )
    if computed != schedule.ranks:
        raise ScheduleError(f"{name}: the program does not follow the schedule")
    _check_points(name, program)
    _check_channels(name, program)
    needs = rendezvous(program, lambda message: 0.0, Point.WAIT_RECEIVE)
    result = timeline([[0.0] * len(steps) for steps in program.ranks], needs)
    require_end(schedule.name, program.ranks, needs, result)


def _check_points(name: str, program: PlayedSchedule) -> None:
    """Checks that every message has its four points, between its making and its reading."""
    found = where(program.schedule)
    at = [_indices(steps) for steps in program.ranks]
    expected: set[tuple[int, Transfer]] = set()
    for message in messages(program.schedule, program.edges):
        (sender, made), (receiver, read) = (found[unit] for unit in ends_of(message))
        maker, reader = program.schedule.ranks[sender][made], program.schedule.ranks[receiver][read]
        rows: list[tuple[int, list[Step]]]
        if sender == receiver:
            rows = [(sender, [maker, reader])]
        else:
            send, wait_send = (
                Transfer(point, receiver, message) for point in (Point.SEND, Point.WAIT_SEND)
            )
            receive, wait_receive = (
                Transfer(point, sender, message) for point in (Point.RECEIVE, Point.WAIT_RECEIVE)
            )
            rows = [
                (sender, [maker, send, wait_send]),
                (receiver, [receive, wait_receive, reader]),
            ]
        for rank, row in rows:
            for step in row:
                if len(at[rank][step]) != 1:
                    raise ScheduleError(
                        f"{name}, rank {rank}: {step} {len(at[rank][step])} times, expected once"
                    )
            expected.update((rank, step) for step in row if isinstance(step, Transfer))
            for before, after in pairwise(row):
                if at[rank][before] > at[rank][after]:
                    raise ScheduleError(
                        f"{name}, rank {rank}: {after} is step {at[rank][after][0]}, expected "
                        f"it after {before}, which is step {at[rank][before][0]}"
                    )
    for rank, steps in enumerate(program.ranks):
        for index, step in enumerate(steps):
            if isinstance(step, Transfer) and (rank, step) not in expected:
                raise ScheduleError(f"{name}, rank {rank}: no edge needs step {index}, {step}")


def _indices(steps: Sequence[Step]) -> defaultdict[Step, list[int]]:
    """Returns the indices of each step."""
    result: defaultdict[Step, list[int]] = defaultdict(list)
    for index, step in enumerate(steps):
        result[step].append(index)
    return result


def _check_channels(name: str, program: PlayedSchedule) -> None:
    """Checks that messages from one rank to another are received in the order of sending."""
    posts: defaultdict[tuple[int, int, Point], list[Transfer]] = defaultdict(list)
    for rank, steps in enumerate(program.ranks):
        for step in steps:
            if isinstance(step, Transfer):
                posts[rank, step.peer, step.point].append(step)
    for (rank, peer, point), sends in list(posts.items()):
        if point is not Point.SEND:
            continue
        receives = posts[peer, rank, Point.RECEIVE]
        for index, (send, receive) in enumerate(zip(sends, receives, strict=True)):
            if send.message != receive.message:
                raise ScheduleError(
                    f"{name}: transfer {index} from rank {rank} to rank {peer} is sent as"
                    f" {send.message}, but received as {receive.message}"
                )
