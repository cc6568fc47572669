"""What a rank did at each moment of its steps, from the spans of a trace, which overlap."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from onnxpar_format.trace import (
    ACTION,
    CHECKPOINT,
    INPUT,
    MAIN,
    OPERATOR,
    OPTIMIZER,
    PROGRAM,
    RECEIVE,
    TraceSpan,
)
from onnxpar_format.trace_times import foreground_calls

COMPUTE, BACKWARD, UPDATE = "compute", "backward", "optimizer"
COMMUNICATION, WAITING, BUBBLE = "communication", "waiting", "bubble"
COMPUTING = (COMPUTE, BACKWARD, UPDATE)
"""Kinds of segments in which a rank computes."""
KINDS = (*COMPUTING, COMMUNICATION, WAITING, BUBBLE, INPUT, CHECKPOINT)
"""All kinds of segments. The rest of a step, in no segment, is Python."""
_LEAVES = {PROGRAM: COMPUTE, RECEIVE: BUBBLE, INPUT: INPUT, CHECKPOINT: CHECKPOINT}
_FORWARD = "F"
_GRADIENT = "/grad/"
"""Part of the names of nodes of the backward pass (`onnxpar.autodiff`)."""


class Segment(NamedTuple):
    """A time in which a rank did one thing.

    Attributes:
        start: When it began, in seconds from the beginning of the trace.
        end: When it ended.
        kind: One of `KINDS`.
        name: The operator, call, program or other span.
        program: The program that ran; empty outside of programs.
        bytes: Of a call; 0 otherwise.
    """

    start: float
    end: float
    kind: str
    name: str
    program: str = ""
    bytes: int = 0

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


Painter = Callable[[Segment | None, Segment], Segment | None]
"""Returns what is seen of a segment over another one, or over nothing; None for what is under."""


def rank_segments(spans: Sequence[TraceSpan], steps: Sequence[TraceSpan]) -> list[list[Segment]]:
    """Returns for each step of a rank what the rank did, in order; segments do not overlap.

    A call hides the operator that makes it, and an operator hides its program. So the times of
    segments add up to those of `onnxpar_format.trace_times.times`.

    Args:
        spans: All spans of the rank, in order of time.
        steps: Its steps, in order.
    """
    found = _painted(_main(spans), _apart(_operators(spans)), _operator_over)
    found = _painted(found, _apart(_calls(spans, steps)), _call_over)
    starts = [step.start for step in steps]
    parts: list[list[Segment]] = [[] for _ in steps]
    for segment in found:
        first = max(bisect_right(starts, segment.start) - 1, 0)
        for number in range(first, len(steps)):
            step = steps[number]
            if step.start >= segment.end:
                break
            start, end = max(segment.start, step.start), min(segment.end, step.end)
            if start < end:
                whole = (start, end) == segment[:2]
                parts[number].append(segment if whole else segment._replace(start=start, end=end))
    return parts


def call_bytes(call: TraceSpan) -> int:
    """Returns the bytes of a call; 0 if the file does not say."""
    size = call.more.get("bytes")
    return size if type(size) is int and size > 0 else 0


def _main(spans: Sequence[TraceSpan]) -> list[Segment]:
    """Returns the programs of a rank, and what else its main thread did."""
    actions = [s for s in spans if s.track == MAIN and s.kind == ACTION]
    updates = [s for s in spans if s.track == MAIN and s.kind == OPTIMIZER]
    found = []
    for span in spans:
        if span.track != MAIN or span.kind not in _LEAVES:
            continue
        kind, program = _LEAVES[span.kind], ""
        if span.kind == PROGRAM:
            program = span.name
            action = _around(actions, span)
            if _around(updates, span) is not None:
                kind = UPDATE
            elif action is not None and not action.name.startswith(_FORWARD):
                kind = BACKWARD
        found.append(Segment(span.start, span.end, kind, span.name, program))
    return list(_apart(found))


def _around(spans: Sequence[TraceSpan], span: TraceSpan) -> TraceSpan | None:
    at = bisect_right(spans, span.start, key=lambda s: s.start) - 1
    return spans[at] if at >= 0 and span.start < spans[at].end else None


def _operators(spans: Sequence[TraceSpan]) -> Iterable[Segment]:
    return (Segment(s.start, s.end, COMPUTE, s.name) for s in spans if s.kind == OPERATOR)


def _calls(spans: Sequence[TraceSpan], steps: Sequence[TraceSpan]) -> Iterable[Segment]:
    for call, waited in foreground_calls(spans, steps):
        size, met = call_bytes(call), call.start + waited
        if waited:
            yield Segment(call.start, met, WAITING, call.name, "", size)
        if met < call.end:
            yield Segment(met, call.end, COMMUNICATION, call.name, "", size)


def _apart(segments: Iterable[Segment]) -> Iterable[Segment]:
    """Returns segments without those that begin in an earlier one, such as nodes of a body."""
    end = float("-inf")
    for segment in sorted(segments, key=lambda s: (s.start, -s.end)):
        if segment.start >= end:
            end = segment.end
            yield segment


def _operator_over(under: Segment | None, over: Segment) -> Segment | None:
    """An operator is seen in its program. onnxruntime's clock may place it a little outside."""
    if under is None or under.kind not in COMPUTING:
        return under
    kind = BACKWARD if under.kind == COMPUTE and _GRADIENT in over.name else under.kind
    return Segment(over.start, over.end, kind, over.name, under.program)


def _call_over(under: Segment | None, over: Segment) -> Segment | None:
    """A call is seen wherever it is, but not in a wait for another stage."""
    if under is None:
        return over
    return under if under.kind == BUBBLE else over._replace(program=under.program)


def _painted(under: Sequence[Segment], over: Iterable[Segment], paint: Painter) -> list[Segment]:
    """Returns two rows of segments as one: what is over hides what is under, as `paint` says."""
    found: list[Segment] = []

    def put(seen: Segment | None, start: float, end: float) -> None:
        if seen is None:
            return
        # What nothing has hidden stays one segment.
        last = found[-1] if found else None
        if last and last.end == start and last[2:] == seen[2:]:
            found[-1] = Segment(last.start, end, *seen[2:])
        else:
            found.append(Segment(start, end, *seen[2:]))

    # What is left of the row below begins at `begin`, in the segment at `place`.
    place, count = 0, len(under)
    begin = under[0].start if under else inf
    for above in over:
        while place < count and under[place].end <= above.start:
            put(under[place], begin, under[place].end)
            place += 1
            begin = under[place].start if place < count else inf
        if begin < above.start:
            put(under[place], begin, above.start)
            begin = above.start
        at = above.start
        while at < above.end:
            if begin > at:
                to = min(begin, above.end)
                put(paint(None, above), at, to)
            else:
                to = min(under[place].end, above.end)
                put(paint(under[place], above), at, to)
                begin = to
                if under[place].end <= to:
                    place += 1
                    begin = under[place].start if place < count else inf
            at = to
    for segment in under[place:]:
        put(segment, max(begin, segment.start), segment.end)
    return found
