"""What the page shows of a trace adds up to the trace, and fits into a page."""

import json
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from onnxpar.report import step_timelines as timelines
from onnxpar.report.trace_data import trace_data
from onnxpar.report.trace_segments import KINDS, rank_segments
from onnxpar.report.trace_table import TraceTable
from onnxpar_format.records import FormatError
from onnxpar_format.trace import (
    ACTION,
    BACKGROUND,
    CALL,
    FOREGROUND,
    INPUT,
    MAIN,
    OPERATOR,
    OPERATORS,
    OPTIMIZER,
    PROGRAM,
    RECEIVE,
    STEP,
    THREADS,
    WAITING,
    Clock,
    Trace,
    TraceSpan,
    read_trace,
    trace_json,
)
from onnxpar_format.trace_times import spans_of_ranks, steps_of_ranks, times

NODE = "/layer0/fc/Add/AllReduce.tp(it's)"
SIZES = {"batch": 8}


def call(rank: int, start: float, end: float, **more: Any) -> TraceSpan:
    facts = {"op": "collective", "ranks": [0, 1], "lane": 0, "place": 0, "bytes": 64, **more}
    track = facts.pop("track", FOREGROUND)
    return TraceSpan(rank, track, CALL, f"AllReduce '{NODE}'", start, end, facts)


def step(rank: int, at: float) -> list[TraceSpan]:
    """A step of 10 s: input, a program with a call, a wait for a stage, a backward, an update."""

    def main(kind: str, name: str, start: float, end: float, **more: Any) -> TraceSpan:
        return TraceSpan(rank, MAIN, kind, name, at + start, at + end, more)

    def operator(name: str, start: float, end: float) -> TraceSpan:
        return TraceSpan(rank, OPERATORS, OPERATOR, name, at + start, at + end, {"op": "Add"})

    return [
        main(STEP, "step", 0, 10),
        main(INPUT, "next batch", 0, 1),
        main(ACTION, "F0", 1, 4, step=0),
        main(PROGRAM, "forward", 1, 4, sizes=SIZES),
        # Its clock places it a little before the program.
        operator("/layer0/fc/MatMul", 0.9, 2),
        operator(NODE, 2, 3.5),
        operator("/layer0/norm", 3.5, 3.75),
        # A node of the body of the one before.
        operator("/layer0/norm/body", 3.55, 3.6),
        call(rank, at + 2.25, at + 3.25),
        TraceSpan(rank, FOREGROUND, WAITING, "waiting", at + 2.25, at + 2.75, {}),
        main(RECEIVE, "waits for rank 1", 4, 5),
        # Counts as waiting for the stage.
        call(rank, at + 4.25, at + 4.5, op="receive"),
        main(ACTION, "B0", 5, 7, step=0),
        main(PROGRAM, "backward", 5, 7, sizes=SIZES),
        main(OPTIMIZER, "update", 7, 9),
        main(PROGRAM, "update", 7.5, 9),
        call(rank, at + 5, at + 8, track=BACKGROUND),
        TraceSpan(rank, BACKGROUND, WAITING, "waiting", at + 5, at + 6, {}),
    ]  # fmt: skip


def trace(steps: int = 3, threads: tuple[str, ...] = ("onnxpar-data",)) -> Trace:
    spans = [
        span
        for rank in (0, 1)
        for number in range(steps)
        for span in step(rank, 10.0 * number + 0.125 * rank)
    ]
    spans.append(TraceSpan(0, THREADS, INPUT, "shard the next batch", 12.0, 12.5, {}))
    spans.sort(key=lambda s: (s.start, -s.end))
    return Trace("train", 1, [Clock()] * 2, spans, threads)


def shown(found: Trace) -> dict[str, Any]:
    return trace_data(TraceTable(found, times(found)))


def test_segments_are_what_is_seen_from_above() -> None:
    found = trace(1)
    spans, steps = spans_of_ranks(found), steps_of_ranks(found)
    (own,) = rank_segments(spans[0], steps[0])
    assert [(s.start, s.end, s.kind, s.name) for s in own] == [
        (0, 1, "input", "next batch"),
        (1, 2, "compute", "/layer0/fc/MatMul"),
        (2, 2.25, "compute", NODE),
        (2.25, 2.75, "waiting", f"AllReduce '{NODE}'"),
        (2.75, 3.25, "communication", f"AllReduce '{NODE}'"),
        (3.25, 3.5, "compute", NODE),
        (3.5, 3.75, "compute", "/layer0/norm"),
        (3.75, 4, "compute", "forward"),
        (4, 5, "bubble", "waits for rank 1"),
        (5, 7, "backward", "backward"),
        (7.5, 9, "optimizer", "update"),
    ]
    assert {s.program for s in own if s.kind in ("compute", "waiting")} == {"forward"}


def test_segments_add_up_to_the_times_of_ranks() -> None:
    found = trace()
    for rank, expected in enumerate(times(found).ranks):
        seconds: Counter[str] = Counter()
        own = rank_segments(spans_of_ranks(found)[rank], steps_of_ranks(found)[rank])
        for segment in (s for step in own[1:] for s in step):
            seconds[segment.kind] += segment.seconds / 2  # type: ignore[assignment]
        computing = seconds["compute"] + seconds["backward"] + seconds["optimizer"]
        assert computing == pytest.approx(expected.compute)
        for kind in ("communication", "waiting", "bubble", "input", "checkpoint"):
            assert seconds[kind] == pytest.approx(getattr(expected, kind)), kind


def lanes(step: dict[str, Any]) -> list[list[tuple[int, int, int, int]]]:
    """The segments of a step's lanes: start, end, kind, name."""
    found = []
    for lane in step["lanes"]:
        at, rows, numbers = 0, [], lane["segments"]
        for i in range(0, len(numbers), 4):
            gap, length, kind, name = numbers[i : i + 4]
            assert gap >= 0 and length >= 0
            rows.append((at + gap, at + gap + length, kind, name))
            at = rows[-1][1]
        found.append(rows)
    return found


def test_the_page_gets_typical_steps_first_and_what_runs_beside_a_rank() -> None:
    found = shown(trace())["timelines"]
    assert [(one["number"], one["is"]) for one in found["steps"]] == [
        (1, "first, not counted"),
        (2, "typical"),
        (3, ""),
    ]
    assert found["count"] == 3 and found["first"] == 1
    typical = found["steps"][1]
    # The ranks begin 0.125 s apart, and a step takes them 10 s each.
    assert typical["end"] * found["unit"] == pytest.approx(10.125)
    assert [(lane["rank"], lane["track"]) for lane in typical["lanes"]] == [
        (0, ""), (0, "background"), (0, "onnxpar-data"), (1, ""), (1, "background"),
    ]  # fmt: skip
    own, behind, data, *_ = lanes(typical)
    named = [found["names"][name] for *_, name in own]
    assert named[3] == [f"AllReduce '{NODE}'", 64] and named[1] == ["/layer0/fc/MatMul", None]
    unit = found["unit"]
    # Rank 0 begins the next step while rank 1 is still in this one.
    assert [own[-1][0] * unit, own[-1][1] * unit, KINDS[own[-1][2]]] == [10, 10.125, "input"]
    assert [(a * unit, b * unit, KINDS[k]) for a, b, k, _ in behind] == [
        (5, 6, "waiting"),
        (6, pytest.approx(8), "communication"),
    ]
    assert [(a * unit, b * unit, KINDS[k]) for a, b, k, _ in data] == [(2, 2.5, "input")]


def test_short_segments_are_joined_until_a_step_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [TraceSpan(0, MAIN, STEP, "step", 0.0, 8.0), TraceSpan(0, MAIN, PROGRAM, "p", 0.0, 8.0)]
    for n in range(4000):
        # Every tenth has a collective.
        spans.append(TraceSpan(0, OPERATORS, OPERATOR, f"n{n}", n / 500, (n + 1) / 500))
        if n % 10 == 0:
            spans.append(call(0, n / 500, (n + 1) / 500))
    found = Trace("train", 1, [Clock()], sorted(spans, key=lambda s: (s.start, -s.end)))
    (whole,) = shown(found)["timelines"]["steps"]
    assert whole["finest"] == 0 and len(lanes(whole)[0]) == 4000
    monkeypatch.setattr(timelines, "MOST_OF_STEP", 500)
    (thin,) = shown(found)["timelines"]["steps"]
    (rows,) = lanes(thin)
    assert 200 < len(rows) <= 500
    # Each stands for as many as it says, in places without gaps; all are mostly computing.
    assert sum(-name if name < 0 else 1 for *_, name in rows) == 4000
    assert all(a[1] == b[0] for a, b in pairwise(rows)) and rows[0][0] == 0
    assert {KINDS[kind] for *_, kind, _ in rows} == {"compute"}
    short = [end - start for start, end, _, name in rows if name < 0]
    assert max(short) <= 2 * thin["finest"]


def test_a_page_has_room_for_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    one = sum(map(len, lanes(shown(trace(9))["timelines"]["steps"][0])))
    # One of them has one more, of a thread.
    monkeypatch.setattr(timelines, "MOST", 4 * one + 1)
    found = shown(trace(9))["timelines"]
    assert found["count"] == 9 and len(found["steps"]) == 4
    assert found["steps"][found["first"]]["is"] == "typical"
    monkeypatch.undo()
    found = shown(trace(40))["timelines"]
    assert found["count"] == 40 and len(found["steps"]) == timelines.MOST_STEPS


def test_what_a_step_of_a_rank_took() -> None:
    spans = list(trace().spans)
    # Evaluations between steps do not count.
    for span in [s for s in spans if s.start >= 20]:
        spans.remove(span)
        spans.append(replace(span, start=span.start + 5, end=span.end + 5))
    spans.append(TraceSpan(0, MAIN, PROGRAM, "evaluate", 21, 24, {"sizes": {"batch": 3}}))
    spans.append(call(0, 22, 23))
    spans.sort(key=lambda s: (s.start, -s.end))
    found = shown(replace(trace(), spans=spans))["measured"]
    assert found["sizes"] == SIZES and not found["other_sizes"]
    assert found["programs"] == [["forward", 1, 2.0], ["backward", 1, 2.0], ["update", 1, 1.5]]
    # The call of the program, which waits 0.5 of 1 s, and that in the background: 1 of 3 s.
    assert found["calls"] == [
        ["collective", NODE, 2, 64, 2.5, 1.5],
        ["receive", NODE, 1, 64, 0.25, 0],
    ]
    assert [row for row in found["operators"] if row[0] == "forward"] == [
        ["forward", "/layer0/fc/MatMul", 1.0],
        ["forward", NODE, 0.5],
        ["forward", "/layer0/norm", 0.25],
        ["forward", "forward", 0.25],
    ]


@pytest.mark.parametrize("sizes", [None, 3, ["batch"], {"batch": "8"}, {"batch": True}])
def test_a_trace_with_other_facts_has_no_sizes(sizes: object) -> None:
    found = trace(1)
    for span in found.spans:
        if span.kind == PROGRAM:
            object.__setattr__(span, "more", {"sizes": sizes})
        elif span.kind == CALL:
            object.__setattr__(span, "more", {**span.more, "bytes": "many"})
    measured = shown(found)["measured"]
    assert measured["sizes"] == {} and {row[3] for row in measured["calls"]} == {0}


@pytest.mark.parametrize(
    "changed", [{"ts": 1e308}, {"ts": -1e15}, {"dur": 1e308}, {"ts": float("nan")}, {"dur": -1.0}]
)
def test_times_that_no_run_has(tmp_path: Path, changed: dict[str, float]) -> None:
    document = json.loads(trace_json(trace(1)))
    next(event for event in document["traceEvents"] if event["ph"] == "X").update(changed)
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(FormatError, match="below 1e15"):
        read_trace(tmp_path / "t.json")


def test_a_step_without_a_length() -> None:
    found = Trace("train", 1, [Clock()], [TraceSpan(0, MAIN, STEP, "step", 1.0, 1.0)])
    assert shown(found)["timelines"]["steps"][0]["end"] == 1
