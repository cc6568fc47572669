"""Schedules of up to 8 stages, 16 micro-batches and 4 chunks: valid, as lean and fast as said.

Every one of them with ONNXPAR_FULL=1, else those of some of the numbers.
"""

from collections.abc import Iterator

import pytest

from onnxpar_runtime.errors import ScheduleError
from onnxpar_runtime.pipeline.check import check
from onnxpar_runtime.pipeline.schedule import Kind, PlayedSchedule
from onnxpar_runtime.pipeline.schedule_kinds import SCHEDULES, make
from onnxpar_runtime.pipeline.simulate import Times, simulate
from onnxpar_runtime.pipeline.transfers import chain, with_transfers
from tests.runtime.pipeline.picture import activation_peaks
from tests.tiers import FULL

STAGES = range(1, 9) if FULL else (1, 2, 3, 4, 8)
MICRO_BATCHES = range(1, 17) if FULL else (1, 2, 3, 4, 5, 7, 8, 13, 16)
CHUNKS = range(1, 5) if FULL else (1, 2, 3)
CHUNKED = {"interleaved", "forward"}
# Of a forward and the backward's two parts; exact in binary, so that sums in any order are equal.
TIMES = ((1.0, 1.0, 1.0), (1.0, 0.75, 0.5))


def programs(name: str, stages: int) -> Iterator[PlayedSchedule]:
    for micro_batches in MICRO_BATCHES:
        for chunks in CHUNKS if name in CHUNKED else (1,):
            schedule = make(name, stages, micro_batches, chunks)
            yield with_transfers(schedule, chain(schedule))


def peak(name: str, rank: int, p: int, m: int, v: int) -> int:
    """What the papers say; with several chunks for groups of any size."""
    if name == "gpipe":
        return m
    if name == "forward":
        return 1
    if name == "zb-h1":
        return min(p, m)
    if v == 1:
        return min(p - rank, m)
    group = -(-m // max(1, m // p))
    return min(m * v, (v - 1) * group + 2 * (p - rank - 1) + 1)


def idle(name: str, p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    """The idle time of every rank; with fewer micro-batches than ranks each chunk waits."""
    short = max(0, p - m)
    if name == "forward":
        return f * (p - 1 + (v - 1) * short)
    if name == "zb-h1":
        return (f + i - w) * (p - 1) + w * short
    return (f + i + w) * (p - 1 + (v - 1) * short)


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_can_be_played_within_the_peak_and_the_time_of_the_paper(name: str, stages: int) -> None:
    count = 0
    for program in programs(name, stages):
        count += 1
        schedule = program.schedule
        p, m, v = schedule.stages, schedule.micro_batches, schedule.chunks
        peaks = tuple(peak(name, rank, p, m, v) for rank in range(p))
        assert activation_peaks(schedule) == peaks, schedule
        check(program)
        for f, i, w in TIMES:
            result = simulate(program, Times.equal(p * v, f, i, w))
            work = m * v * (f if name == "forward" else f + i + w)
            assert result.busy == (work,) * p
            lost = idle(name, p, m, v, f, i, w)
            # Times are sums of up to 1,000 float64 terms: some 1,000 roundings of 2^-53, 1e-13.
            assert result.bubbles == pytest.approx((lost / (work + lost),) * p, abs=1e-9), (m, v)
    assert count == len(MICRO_BATCHES) * (len(CHUNKS) if name in CHUNKED else 1)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_over_the_time_of_a_step(name: str) -> None:
    schedule = make(name, 4, 12)
    program = with_transfers(schedule, chain(schedule))
    # Sums of some 30 float64 times: 1e-14.
    assert simulate(program, Times.equal(4)).bubbles == pytest.approx((3 / 15,) * 4, abs=1e-12)


def test_bubble_is_divided_by_the_number_of_chunks() -> None:
    plain, interleaved = (make(name, 4, 12, v) for name, v in (("1f1b", 1), ("interleaved", 3)))
    one, three = (
        simulate(with_transfers(schedule, chain(schedule)), Times.equal(4 * schedule.chunks))
        for schedule in (plain, interleaved)
    )
    # Sums of at most 80 float64 times: 1e-14.
    assert one.bubbles == pytest.approx((3 / (12 + 3),) * 4, abs=1e-12)
    assert three.bubbles == pytest.approx((3 / (12 * 3 + 3),) * 4, abs=1e-12)


def test_zero_bubble_loses_a_third_of_what_1f1b_loses() -> None:
    lost = [
        result.makespan - result.busy[0]
        for result in (
            simulate(with_transfers(make(name, 4, 8), chain(make(name, 4, 8))), Times.equal(4))
            for name in ("1f1b", "zb-h1")
        )
    ]
    assert lost == [9, 3]


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "forward"])
def test_gradients_are_summed_in_the_order_of_micro_batches(name: str) -> None:
    for program in programs(name, 4):
        for actions in program.schedule.ranks:
            for chunk in range(program.schedule.chunks):
                for kinds in (
                    {Kind.BACKWARD, Kind.BACKWARD_INPUT},
                    {Kind.BACKWARD, Kind.BACKWARD_WEIGHT},
                ):
                    summed = [
                        action.micro_batch
                        for action in actions
                        if action.chunk == chunk and action.kind in kinds
                    ]
                    assert summed == list(range(program.schedule.micro_batches))


def test_interleaved_order_of_the_paper() -> None:
    # Figure 4 of Narayanan et al. (SC 2021): 4 ranks, 8 micro-batches, 2 chunks; the first rank.
    first = make("interleaved", 4, 8, 2).ranks[0]
    text = " ".join(f"{a.kind.value}{'ab'[a.chunk]}{a.micro_batch + 1}" for a in first)
    assert text == (
        "Fa1 Fa2 Fa3 Fa4 Fb1 Fb2 Fb3 Fb4 Fa5 Fa6 Fa7 Bb1 Fa8 Bb2 Fb5 Bb3 Fb6 Bb4 Fb7 Ba1 Fb8"
        " Ba2 Ba3 Ba4 Bb5 Bb6 Bb7 Bb8 Ba5 Ba6 Ba7 Ba8"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 2, 1), r"expected a schedule of gpipe, 1f1b, .*, got '2f2b'"),
        (("gpipe", 0, 2, 1), r"'gpipe': stages: expected at least 1, got 0"),
        (("gpipe", 2, 0, 1), r"micro-batches: expected at least 1, got 0"),
        (("interleaved", 2, 2, -1), r"chunks: expected at least 1, got -1"),
        (("1f1b", 2, 2, 2), r"'1f1b': expected one chunk for each stage, got 2.*interleaved"),
    ],
)
def test_impossible_schedules_are_refused(
    arguments: tuple[str, int, int, int], message: str
) -> None:
    with pytest.raises(ScheduleError, match=message):
        make(*arguments)
