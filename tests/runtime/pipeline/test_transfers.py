"""Transfers along edges that skip stages: everything comes in time, and nothing blocks."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.check import check
from onnxpar_runtime.pipeline.schedule import (
    Action,
    Edge,
    Payload,
    PlayedSchedule,
    Point,
    Schedule,
    Transfer,
)
from onnxpar_runtime.pipeline.schedule_kinds import SCHEDULES, make
from onnxpar_runtime.pipeline.simulate import Times, simulate
from onnxpar_runtime.pipeline.transfers import chain, with_transfers
from tests.runtime.pipeline.players import Player


@st.composite
def programs(draw: st.DrawFn) -> PlayedSchedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages = draw(st.integers(1, 6))
    chunks = draw(st.integers(1, 3)) if name in ("interleaved", "forward") else 1
    schedule = make(name, stages, draw(st.integers(1, 10)), chunks)
    pairs = [(s, t) for t in range(schedule.virtual_stages) for s in range(t)]
    # Of any shape: no edge need lead from a virtual stage to the next.
    chosen = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    edges = []
    for source, target in chosen:
        values = draw(st.lists(st.sampled_from("abcd"), unique=True, min_size=1))
        cotangents = [value for value in values if draw(st.booleans())]
        edges.append(Edge(source, target, tuple(values), tuple(cotangents)))
    return with_transfers(schedule, edges, draw(st.integers(1, 4)))


@settings(max_examples=150, deadline=None)
@given(programs(), st.integers(0, 2**32), st.booleans())
def test_any_edges_can_be_played_in_any_order(
    program: PlayedSchedule, seed: int, late: bool
) -> None:
    check(program)
    player = Player(program, seed, late)
    assert player.play()
    assert Counter(player.computed) == Counter(
        (rank, action) for rank, _, action in program.schedule.places()
    )
    assert not any(player.held.values()), "something was sent that nobody read"


@settings(max_examples=80, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_check_and_player_agree_about_deadlocks(program: PlayedSchedule, random: object) -> None:
    """Moves one wait or post anywhere else: `check` refuses at least what cannot be played."""
    places = [
        (rank, index)
        for rank, steps in enumerate(program.ranks)
        for index, step in enumerate(steps)
        if isinstance(step, Transfer)
    ]
    if not places:
        return
    rank, index = random.choice(places)  # type: ignore[attr-defined]
    steps = list(program.ranks[rank])
    step = steps.pop(index)
    steps.insert(random.randrange(len(steps) + 1), step)  # type: ignore[attr-defined]
    moved = replace(
        program,
        ranks=tuple(tuple(steps) if at == rank else old for at, old in enumerate(program.ranks)),
    )
    try:
        check(moved)
    except ScheduleError:
        return
    assert Player(moved, 0, late=False).play()
    assert Player(moved, 0, late=True).play()


def shape(program: PlayedSchedule, rank: int) -> str:
    """A rank's list, short: computations as F0, transfers as s/r (posts) and S/R (waits)."""
    letters = {Point.SEND: "s", Point.RECEIVE: "r", Point.WAIT_SEND: "S", Point.WAIT_RECEIVE: "R"}
    return " ".join(
        f"{step.kind.value}{step.micro_batch}"
        if isinstance(step, Action)
        else f"{letters[step.point]}{step.message.payload.value[0]}{step.message.micro_batch}"
        for step in program.ranks[rank]
    )


def test_posts_are_early_and_waits_late() -> None:
    schedule = make("1f1b", 2, 3)
    program = with_transfers(schedule, chain(schedule))
    assert shape(program, 0) == (
        "rc0 F0 sa0 F1 sa1 rc1 Rc0 B0 rc2 Sa0 F2 sa2 Sa1 Rc1 B1 Rc2 B2 Sa2"
    )
    assert shape(program, 1) == (
        "ra0 ra1 Ra0 F0 B0 sc0 ra2 Ra1 F1 B1 sc1 Sc0 Ra2 F2 B2 sc2 Sc1 Sc2"
    )


def test_receives_keep_the_order_of_sends_where_reading_does_not() -> None:
    # Rank 1 reads what virtual stage 0 sends of micro-batch 1 before what stage 2 sends of 0.
    schedule = make("interleaved", 2, 4, 2)
    program = with_transfers(schedule, [*chain(schedule), Edge(0, 3, ("far",), ("far",))])
    read = [
        step.message
        for step in program.ranks[1]
        if isinstance(step, Transfer) and step.point is Point.WAIT_RECEIVE
    ]
    sent = [
        step.message
        for step in program.ranks[0]
        if isinstance(step, Transfer) and step.point is Point.SEND
    ]
    posted = [
        step.message
        for step in program.ranks[1]
        if isinstance(step, Transfer) and step.point is Point.RECEIVE
    ]
    assert sent == posted != read
    assert sorted(map(str, read)) == sorted(map(str, sent))


@pytest.mark.parametrize(
    ("name", "chunks", "receives", "sends"),
    [("gpipe", 1, 3, 3), ("1f1b", 1, 3, 3), ("zb-h1", 1, 3, 3), ("interleaved", 2, 4, 12)],
)
def test_few_buffers_lie_ready_or_are_kept(
    name: str, chunks: int, receives: int, sends: int
) -> None:
    # Posts are two computations ahead; only where a channel's messages are read in another order
    # than they are sent must some be posted earlier.
    for stages in (2, 3, 5, 8):
        schedule = make(name, stages, 2 * stages - 1, chunks)
        program = with_transfers(schedule, chain(schedule))
        for rank in range(stages):
            counts = dict.fromkeys(Point, 0)
            for step in program.ranks[rank]:
                if isinstance(step, Transfer):
                    counts[step.point] += 1
                    assert counts[Point.RECEIVE] - counts[Point.WAIT_RECEIVE] <= receives
                    assert counts[Point.SEND] - counts[Point.WAIT_SEND] <= sends


def test_chunks_of_one_rank_need_no_transfer() -> None:
    schedule = make("interleaved", 1, 3, 3)
    program = with_transfers(schedule, chain(schedule))
    assert program.ranks == schedule.ranks
    check(program)


def test_values_without_cotangents_come_back_as_nothing() -> None:
    schedule = make("1f1b", 3, 2)
    program = with_transfers(schedule, [Edge(0, 2, ("mask", "x"), ("x",)), Edge(1, 2, ("n",), ())])
    sent = [
        (step.message.payload, step.message.source, step.message.target, step.message.values)
        for steps in program.ranks
        for step in steps
        if isinstance(step, Transfer) and step.point is Point.SEND and step.message.micro_batch == 1
    ]
    assert sent == [
        (Payload.ACTIVATION, 0, 2, ("mask", "x")),
        (Payload.ACTIVATION, 1, 2, ("n",)),
        (Payload.COTANGENT, 2, 0, ("x",)),
    ]


def without_waiting_for_sends(schedule: Schedule, latency: float) -> float:
    """The makespan where receives are posted from the beginning and nobody waits for sends."""
    ends: dict[tuple[int, int, str], float] = {}
    clocks, at = [0.0] * schedule.stages, [0] * schedule.stages
    while sum(at) < sum(map(len, schedule.ranks)):
        for rank, actions in enumerate(schedule.ranks):
            while at[rank] < len(actions):
                action = actions[at[rank]]
                stage = schedule.virtual_stage(rank, action.chunk)
                kind = action.kind.value.replace("I", "B")
                before = {"F": stage - 1, "B": stage + 1, "W": -1}[kind]
                start = clocks[rank]
                if 0 <= before < schedule.virtual_stages:
                    key = before, action.micro_batch, kind
                    if key not in ends:
                        break
                    start = max(start, ends[key] + (latency if schedule.stages > 1 else 0))
                duration = 2.0 if action.kind.value == "B" else 1.0
                clocks[rank] = ends[stage, action.micro_batch, kind] = start + duration
                at[rank] += 1
    return max(clocks)


@pytest.mark.parametrize("latency", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_waiting_costs_nothing_that_travelling_does_not(name: str, latency: float) -> None:
    for stages in (1, 2, 4, 5):
        for micro_batches in (1, 3, 4, 8, 9):
            for chunks in (1, 2, 3) if name == "interleaved" else (1,):
                schedule = make(name, stages, micro_batches, chunks)
                program = with_transfers(schedule, chain(schedule))
                times = Times.equal(schedule.virtual_stages, transfer=latency)
                # Sums of at most 100 float64 times of size 1, in two orders: 1e-14.
                assert simulate(program, times).makespan == pytest.approx(
                    without_waiting_for_sends(schedule, latency), abs=1e-12
                ), schedule.ranks


@pytest.mark.parametrize(
    ("edge", "message"),
    [
        (Edge(1, 1, ("x",), ()), "1 to 1: expected an edge from an earlier to a later one of 3"),
        (Edge(2, 0, ("x",), ()), "2 to 0: expected an edge from an earlier to a later one"),
        (Edge(1, 3, ("x",), ()), "1 to 3: expected an edge from an earlier to a later one"),
        (Edge(0, 2, (), ()), r"0 to 2: expected values or cotangents, got neither"),
        (Edge(0, 2, ("x", "x"), ()), r"expected distinct values, got \['x', 'x'\]"),
        (Edge(0, 2, ("x",), ("y",)), r"expected cotangents of \['x'\], got \['y'\]"),
        (Edge(0, 1, ("y",), ()), "0 to 1: expected one edge with all values, got two"),
    ],
)
def test_impossible_edges_are_refused(edge: Edge, message: str) -> None:
    schedule = make("1f1b", 3, 2)
    with pytest.raises(ScheduleError, match=message):
        with_transfers(schedule, [*chain(schedule), edge])


def test_something_lies_between_posts_and_waits() -> None:
    with pytest.raises(ScheduleError, match="lookahead of at least 1 computation, got 0"):
        with_transfers(make("1f1b", 2, 2), [], lookahead=0)
