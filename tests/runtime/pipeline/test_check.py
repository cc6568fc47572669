"""Programs broken by hand are refused, and the message says where and why."""

from collections.abc import Callable
from dataclasses import replace
from operator import methodcaller

import pytest

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.check import check
from onnxpar_runtime.pipeline.schedule import (
    Action,
    Edge,
    Kind,
    Message,
    Payload,
    PlayedSchedule,
    Point,
    Schedule,
    Step,
    Transfer,
)
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.transfers import chain, with_transfers

Rank = list[Step]


def act(kind: str, micro_batch: int, chunk: int = 0) -> Action:
    return Action(Kind(kind), chunk, micro_batch)


def point(at: Point, peer: int, payload: str, source: int, target: int, k: int) -> Transfer:
    return Transfer(at, peer, Message(Payload(payload), source, target, k, ("x",)))


def schedule_with(schedule: Schedule, rank: int, change: Callable[[Rank], object]) -> Schedule:
    actions: Rank = list(schedule.ranks[rank])
    change(actions)
    ranks = [tuple(actions) if at == rank else old for at, old in enumerate(schedule.ranks)]
    return replace(schedule, ranks=tuple(ranks))


def program_with(
    program: PlayedSchedule, rank: int, change: Callable[[Rank], object]
) -> PlayedSchedule:
    steps = list(program.ranks[rank])
    change(steps)
    ranks = [tuple(steps) if at == rank else old for at, old in enumerate(program.ranks)]
    return replace(program, ranks=tuple(ranks))


def remove(step: Step) -> Callable[[Rank], object]:
    return methodcaller("remove", step)


def append(step: Step) -> Callable[[Rank], object]:
    return methodcaller("append", step)


def swap(one: Step, other: Step) -> Callable[[Rank], object]:
    def change(steps: Rank) -> None:
        i, j = steps.index(one), steps.index(other)
        steps[i], steps[j] = steps[j], steps[i]

    return change


def move(step: Step, index: int) -> Callable[[Rank], object]:
    def change(steps: Rank) -> None:
        steps.remove(step)
        steps.insert(index, step)

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("1f1b", remove(act("F", 1)), "forward of micro-batch 1 in chunk 0 is missing"),
        ("1f1b", remove(act("B", 2)), "backward of micro-batch 2 in chunk 0 is missing"),
        ("zb-h1", remove(act("W", 2)), "backward weight of micro-batch 2 in chunk 0 is missing"),
        ("1f1b", append(act("F", 1)), "forward of micro-batch 1 in chunk 0 2 times, expected once"),
        (
            "1f1b",
            append(act("W", 1)),
            "both backward of micro-batch 1 in chunk 0 and backward weight of",
        ),
        (
            "1f1b",
            append(act("F", 3)),
            "forward of micro-batch 3 in chunk 0, but there are 1 chunks and 3 micro-b",
        ),
        (
            "1f1b",
            append(act("F", 0, chunk=1)),
            "forward of micro-batch 0 in chunk 1, but there are 1 chunks",
        ),
        (
            "gpipe",
            swap(act("F", 0), act("B", 0)),
            "backward of micro-batch 0 in chunk 0 is step 0, expected it after forward of"
            " micro-batch 0 in chunk 0, which is step 3",
        ),
        (
            "zb-h1",
            swap(act("I", 0), act("W", 0)),
            "backward weight of micro-batch 0 in chunk 0 is step 2, expected it after"
            " backward input of micro-batch 0 in chunk 0, which is step 5",
        ),
    ],
)
def test_incomplete_schedules(name: str, change: Callable[[Rank], object], message: str) -> None:
    broken = schedule_with(make(name, 3, 3), 1, change)
    with pytest.raises(ScheduleError) as caught:
        with_transfers(broken, chain(broken))
    assert f"rank 1: {message}" in str(caught.value)
    program = with_transfers(make(name, 3, 3), chain(broken))
    with pytest.raises(ScheduleError) as caught:
        check(replace(program, schedule=broken))
    assert f"rank 1: {message}" in str(caught.value)


def test_a_list_for_each_rank() -> None:
    schedule = make("1f1b", 3, 3)
    with pytest.raises(ScheduleError, match="expected the lists of 3 ranks, got 2"):
        with_transfers(replace(schedule, ranks=schedule.ranks[:2]), chain(schedule))


def test_computations_in_a_circle() -> None:
    # Rank 0 differentiates micro-batch 0 before it gives micro-batch 1 forward, for which rank 1
    # waits with the backward.
    first = [act("F", 0), act("B", 0), act("F", 1), act("B", 1)]
    last = [act("F", 0), act("F", 1), act("B", 0), act("B", 1)]
    schedule = Schedule("own", 2, 2, 1, (tuple(first), tuple(last)))
    with pytest.raises(ScheduleError) as caught:
        with_transfers(schedule, chain(schedule))
    assert str(caught.value) == (
        "schedule 'own' deadlocks:"
        " rank 0 waits at step 1, backward of micro-batch 0 in chunk 0, until rank 1 reaches step"
        " 2, backward of micro-batch 0 in chunk 0;"
        " rank 1 waits at step 1, forward of micro-batch 1 in chunk 0, until rank 0 reaches step"
        " 2, forward of micro-batch 1 in chunk 0"
    )


# Of 1F1B over 2 ranks: what happens with micro-batch 0's and 1's activations.
SEND = point(Point.SEND, 1, "activation", 0, 1, 0)
RECEIVE = point(Point.RECEIVE, 0, "activation", 0, 1, 0)
WAIT_SEND = point(Point.WAIT_SEND, 1, "activation", 0, 1, 0)
WAIT_RECEIVE = point(Point.WAIT_RECEIVE, 0, "activation", 0, 1, 0)
SEND_1 = point(Point.SEND, 1, "activation", 0, 1, 1)
RECEIVE_1 = point(Point.RECEIVE, 0, "activation", 0, 1, 1)


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (
            0,
            remove(SEND),
            "rank 0: send to rank 1 of the activations of micro-batch 0 from virtual stage 0 to 1"
            " 0 times, expected once",
        ),
        (
            1,
            remove(RECEIVE),
            "rank 1: receive from rank 0 of the activations of micro-batch 0 from virtual stage 0"
            " to 1 0 times, expected once",
        ),
        (
            1,
            append(WAIT_RECEIVE),
            "rank 1: wait receive from rank 0 of the activations of micro-batch 0 from virtual"
            " stage 0 to 1 2 times, expected once",
        ),
        (
            0,
            remove(WAIT_SEND),
            "rank 0: wait send to rank 1 of the activations of micro-batch 0 from virtual stage 0"
            " to 1 0 times",
        ),
        (
            0,
            move(SEND, 0),
            "rank 0: send to rank 1 of the activations of micro-batch 0 from virtual stage 0 to 1"
            " is step 0, expected it after forward of micro-batch 0 in chunk 0, which is step 2",
        ),
        (
            1,
            move(WAIT_RECEIVE, 4),
            "rank 1: forward of micro-batch 0 in chunk 0 is step 2, expected it after wait receive",
        ),
        (
            0,
            append(point(Point.SEND, 1, "activation", 0, 1, 7)),
            "rank 0: no edge needs step 18, send to rank 1 of the activations of micro-batch 7",
        ),
        (
            1,
            swap(RECEIVE, RECEIVE_1),
            "transfer 0 from rank 0 to rank 1 is sent as the activations of micro-batch 0 from"
            " virtual stage 0 to 1, but received as the activations of micro-batch 1",
        ),
        (0, remove(act("F", 2)), "the program does not follow the schedule"),
    ],
)
def test_wrong_transfers(rank: int, change: Callable[[Rank], object], message: str) -> None:
    schedule = make("1f1b", 2, 3)
    broken = program_with(with_transfers(schedule, chain(schedule)), rank, change)
    with pytest.raises(ScheduleError) as caught:
        check(broken)
    assert message in str(caught.value)


def test_waiting_for_a_send_before_its_receiver_can_take_it_deadlocks() -> None:
    # Rank 0 waits until micro-batch 1 is taken, before it takes micro-batch 0's cotangents; rank 1
    # waits until those are taken, before it takes micro-batch 1.
    schedule = make("1f1b", 2, 2)
    program = with_transfers(schedule, chain(schedule))
    activation = point(Point.WAIT_SEND, 1, "activation", 0, 1, 1)
    cotangent = point(Point.WAIT_SEND, 0, "cotangent", 1, 0, 0)
    sent = program.ranks[1].index(point(Point.SEND, 0, "cotangent", 1, 0, 0))
    # Either alone is no harm.
    first = program_with(program, 0, move(activation, program.ranks[0].index(SEND_1) + 1))
    check(first)
    check(program_with(program, 1, move(cotangent, sent + 1)))
    with pytest.raises(ScheduleError) as caught:
        check(program_with(first, 1, move(cotangent, sent + 1)))
    assert str(caught.value) == (
        "schedule '1f1b' deadlocks: rank 0 waits at step 6, wait send to rank 1 of the activations"
        " of micro-batch 1 from virtual stage 0 to 1, until rank 1 reaches step 7, wait receive"
        " from rank 0 of the activations of micro-batch 1 from virtual stage 0 to 1;"
        " rank 1 waits at step 6, wait send to rank 0 of the cotangents of micro-batch 0 from"
        " virtual stage 1 to 0, until rank 0 reaches step 7, wait receive from rank 1 of the"
        " cotangents of micro-batch 0 from virtual stage 1 to 0"
    )


def test_local_values_are_made_before_they_are_read() -> None:
    # The only edge skips stage 1, between two chunks of rank 0: no transfer says when.
    schedule = make("interleaved", 2, 2, 2)
    program = with_transfers(schedule, [Edge(0, 2, ("x",), ())])
    check(program)
    early = swap(act("F", 0, chunk=0), act("F", 0, chunk=1))
    changed = schedule_with(schedule, 0, early)
    broken = replace(program_with(program, 0, early), schedule=changed)
    with pytest.raises(ScheduleError, match="forward of micro-batch 0 in chunk 1 is step 0, expec"):
        check(broken)
