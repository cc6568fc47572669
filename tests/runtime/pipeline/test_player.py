"""Schedules are played: stand-in stages, real messages, on threads of this process."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_format.trace import ACTION, MAIN, RECEIVE, STEP, Trace, TraceSpan, read_trace
from onnxpar_format.trace_times import bubble, times
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.errors import RankError
from onnxpar_runtime.pipeline.carriers import Array, Expected, HostCarrier, Leaving
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.player import Place, plan, play
from onnxpar_runtime.pipeline.schedule import Action, Edge, Kind, Message, Payload
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.simulate import even_bubble
from onnxpar_runtime.pipeline.transfers import chain
from onnxpar_runtime.tracing.recording import Recording, write_trace

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]


def shape_of(message: Message) -> tuple[int, ...]:
    """Returns a shape of its own for each message; some are empty, or have no dims."""
    return ((), (0, 2), (3, message.micro_batch + 1), (50_000,))[message.micro_batch % 4]


def contents_of(message: Message) -> Array:
    mark = 1e4 * message.source + 1e2 * message.target + message.micro_batch
    return np.full(shape_of(message), mark + (message.payload is Payload.COTANGENT) / 2)


@dataclass
class StandIn:
    """A rank's stages: they check that what they read is there, and note what they did."""

    stages: int
    stage: int
    edges: Sequence[Edge]
    fails: Action | None = None
    done: list[Action] = field(default_factory=list)
    read: set[tuple[Payload, int, int, int]] = field(default_factory=set)

    def compute(self, action: Action) -> None:
        if action == self.fails:
            raise RuntimeError("it broke")
        here = action.chunk * self.stages + self.stage
        forward = action.kind is Kind.FORWARD
        payload = Payload.ACTIVATION if forward else Payload.COTANGENT
        for edge in self.edges if action.kind is not Kind.BACKWARD_WEIGHT else ():
            source, target = (edge.source, edge.target) if forward else (edge.target, edge.source)
            if target == here and (source - target) % self.stages:
                assert (payload, source, target, action.micro_batch) in self.read
        self.done.append(action)

    def leaving(self, message: Message) -> Sequence[Leaving]:
        # The second array's shape goes with it.
        array = contents_of(message)
        return [Leaving("first", array, False), Leaving("second", np.asarray(array + 1), True)]

    def expected(self, message: Message) -> Sequence[Expected]:
        kind = np.dtype(np.float64)
        return [Expected("first", kind, shape_of(message)), Expected("second", kind, None)]

    def arrived(self, message: Message, arrays: Sequence[Array]) -> None:
        first, second = arrays
        np.testing.assert_array_equal(first, contents_of(message))
        np.testing.assert_array_equal(second, contents_of(message) + 1, strict=True)
        self.read.add((message.payload, message.source, message.target, message.micro_batch))


def on_all(stages: int, body: Callable[[Rank], Any]) -> list[Any]:
    """Returns what `body` returns on each rank; the first that fails ends the others."""
    with World.threads(stages) as world, ThreadPoolExecutor(stages) as pool:

        def guarded(rank: int) -> Any:
            try:
                return body(world.rank(rank))
            except BaseException as error:
                world.abort(rank, str(error))
                raise

        futures = [pool.submit(guarded, rank) for rank in range(stages)]
        return [future.exception(60) or future.result() for future in futures]


@pytest.mark.parametrize("concurrent", [True, False], ids=["beside", "when waited for"])
@pytest.mark.parametrize(("name", "chunks"), SCHEDULES)
def test_all_is_computed_in_order(
    name: str, chunks: int, concurrent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages in the background, and received by the rank's own thread; values skip stages."""
    monkeypatch.setattr(Rank, "concurrent", concurrent)
    stages = 3
    for count in (1, 2, 5):
        schedule = make(name, stages, count, chunks)
        last = schedule.virtual_stages - 1
        edges = chain(schedule)
        if last > 1:
            edges = (*edges, Edge(0, last, ("skip",), ("skip",)))
        program = plan(name, stages, count, chunks, edges)

        def body(rank: Rank, program: Any = program, edges: Any = edges) -> list[Action]:
            inbox = Inbox(rank)
            for _ in range(2):
                work = StandIn(stages, rank.index, edges)
                play(
                    HostCarrier(rank), Place(rank.index, 0, 1), program, work, inbox, rank.timeline
                )
            inbox.close()
            return work.done

        done = on_all(stages, body)
        assert done == [list(actions) for actions in schedule.ranks], done


def test_a_stage_that_fails_ends_all() -> None:
    schedule = make("1f1b", 3, 4)
    edges = chain(schedule)
    program = plan("1f1b", 3, 4, 1, edges)
    fails = Action(Kind.BACKWARD, 0, 1)

    def body(rank: Rank) -> None:
        work = StandIn(3, rank.index, edges, fails if rank.index == 2 else None)
        play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, Inbox(rank), rank.timeline)

    first, second, last = on_all(3, body)
    assert str(last) == "it broke"
    for error in (first, second):
        assert isinstance(error, RankError) and "first failure: rank 2: it broke" in str(error)


def test_a_value_of_another_size_is_named() -> None:
    edges = chain(make("gpipe", 2, 3))
    program = plan("gpipe", 2, 3, 1, edges)

    class Wrong(StandIn):
        def expected(self, message: Message) -> Sequence[Expected]:
            first, second = super().expected(message)
            return [Expected("first", first.dtype, (7,)), second]

    def body(rank: Rank) -> None:
        work = (Wrong if rank.index else StandIn)(2, rank.index, edges)
        play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, Inbox(rank), rank.timeline)

    error = on_all(2, body)[1]
    assert isinstance(error, RankError)
    assert (
        "rank 1: receive of 'first', of the activations of micro-batch 0 from virtual stage 0 to 1 "
        "on group [0, 1]: expected 56 bytes, got 8"
    ) in str(error)


def test_a_trace_tells_when_ranks_computed(tmp_path: Path) -> None:
    schedule = make("1f1b", 2, 3)
    program = plan("1f1b", 2, 3, 1, chain(schedule))

    def body(rank: Rank) -> Trace | None:
        recording, inbox = Recording(rank), Inbox(rank)
        for number in range(2):
            work = StandIn(2, rank.index, program.edges)
            with rank.timeline.span(STEP, f"step {number + 1}"):
                play(
                    HostCarrier(rank), Place(rank.index, 0, 1), program, work, inbox, rank.timeline
                )
        inbox.close()
        trace = recording.finish("train", 1)
        write_trace(rank, tmp_path / "t.json", trace)
        return trace

    made, nothing = on_all(2, body)
    assert nothing is None
    trace = read_trace(tmp_path / "t.json")
    assert len(trace.spans) == len(made.spans) and trace.clocks == made.clocks
    for rank in range(2):
        spans = [s for s in trace.spans if s.rank == rank and s.track == MAIN]
        actions = [s for s in spans if s.kind == ACTION]
        order = [f"{a.kind.value}{a.micro_batch}" for a in schedule.ranks[rank]]
        assert [s.name for s in actions] == 2 * order
        assert [s.more["step"] for s in actions] == [1] * 6 + [2] * 6
        # Rank 0 reads three cotangents in each step, rank 1 three activations.
        assert sum(s.kind == RECEIVE for s in spans) == 2 * 3
        ends = [t for s in actions for t in (s.start, s.end)]
        assert ends == sorted(ends) and ends[0] >= 0
    # The last forward of rank 0 came before its message was read.
    first, second = (
        next(s for s in trace.spans if s.rank == rank and s.name == "F2") for rank in range(2)
    )
    assert first.end <= second.start
    found = times(trace)
    assert found.idle is not None and 0 < found.idle < 1
    assert all(rank.bubble > 0 for rank in found.ranks)


def test_the_bubble_is_the_time_in_which_nothing_is_computed() -> None:
    program = plan("1f1b", 2, 3, 1, chain(make("1f1b", 2, 3)))
    assert even_bubble(program) == pytest.approx(1 / (3 + 1))
    one, two, other = (TraceSpan(0, MAIN, ACTION, "F0", *ends) for ends in ((1, 2), (3, 5), (2, 3)))
    ranks = [[one, two], [other]]
    assert bubble(ranks) == pytest.approx(1 - (3 + 1) / (2 * 4))
