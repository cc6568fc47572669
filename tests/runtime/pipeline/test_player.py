"""Schedules are played: stand-in stages, real messages, on threads of this process."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.errors import RankError
from onnxpar_runtime.pipeline.carriers import Array, Expected, HostCarrier, Leaving
from onnxpar_runtime.pipeline.inbox import Inbox
from onnxpar_runtime.pipeline.player import Place, plan, play
from onnxpar_runtime.pipeline.schedule import Action, Edge, Kind, Message, Payload
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.trace import (
    Span,
    Trace,
    bubble,
    even_bubble,
    median_bubble,
    write_trace,
)
from onnxpar_runtime.pipeline.transfers import chain

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
                play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, inbox)
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
        play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, Inbox(rank))

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
        play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, Inbox(rank))

    error = on_all(2, body)[1]
    assert isinstance(error, RankError)
    assert (
        "rank 1: receive of 'first', of the activations of micro-batch 0 from virtual stage 0 to 1 "
        "on group [0, 1]: expected 56 bytes, got 8"
    ) in str(error)


def test_a_trace_tells_when_ranks_computed(tmp_path: Path) -> None:
    schedule = make("gpipe", 2, 3)
    program = plan("gpipe", 2, 3, 1, chain(schedule))

    def body(rank: Rank) -> Any:
        trace, inbox = Trace(rank), Inbox(rank)
        for _ in range(2):
            work = StandIn(2, rank.index, program.edges)
            play(HostCarrier(rank), Place(rank.index, 0, 1), program, work, inbox, trace)
        inbox.close()
        return trace.gather(), trace.origin

    (traces, first), (nothing, second) = on_all(2, body)
    assert nothing is None and len(traces) == 2
    for rank, steps in enumerate(traces):
        for spans in steps:
            assert tuple(span.action for span in spans) == schedule.ranks[rank]
            times = [t for span in spans for t in (span.start, span.end)]
            assert times == sorted(times) and times[0] >= 0
    # The last forward of rank 0 came before its message was read.
    assert first + traces[0][0][2].end <= second + traces[1][0][2].start
    assert 0 < median_bubble(traces) < 1
    write_trace(tmp_path / "t.json", traces, 1)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 2 * 2 * 6
    assert {(e["pid"], e["tid"]) for e in events} == {(0, 0), (1, 1)}


def test_the_bubble_is_the_time_in_which_nothing_is_computed() -> None:
    program = plan("1f1b", 2, 3, 1, chain(make("1f1b", 2, 3)))
    assert even_bubble(program) == pytest.approx(1 / (3 + 1))
    action = Action(Kind.FORWARD, 0, 0)
    ranks = [[Span(action, 1, 2), Span(action, 3, 5)], [Span(action, 2, 3)]]
    assert bubble(ranks) == pytest.approx(1 - (3 + 1) / (2 * 4))
