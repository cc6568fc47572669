"""Steps of a trace as timelines, for the page: what each rank did when."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

from onnxpar.report.trace_segments import COMMUNICATION, KINDS, WAITING, Segment, call_bytes
from onnxpar_format.trace import BACKGROUND, CALL, INPUT, THREADS, Trace, TraceSpan

Lane = tuple[int, str, Sequence[Segment]]
"""A rank, a track (empty for the rank itself) and what is seen there."""

Json = dict[str, Any]
MOST_OF_STEP, MOST, MOST_STEPS = 20_000, 80_000, 32
"""The most segments of a step, and of all steps together; one takes about 12 bytes of a page. And
the most steps, among which a reader chooses."""
_FINEST = 17
"""Where a step has too many, those below its length divided by this power of two are joined."""
_UNIT = 1e-7
_TYPICAL, _SLOWEST, _FASTEST, _FIRST = "typical", "slowest", "fastest", "first, not counted"


def step_timelines(
    trace: Trace, steps: Sequence[Sequence[TraceSpan]], seen: Sequence[Sequence[list[Segment]]]
) -> Json:
    """Returns a typical step, the slowest, the fastest, and as many others as a page has room for.

    Keys: `unit`, the seconds of a unit of time; `kinds`, names of kinds; `names`, pairs of a name
    and bytes, or None; `count`, how many steps the trace has; and `steps`. A step has its `number`
    from 1, what it `is` (such as "typical"), its length `end`, the `finest` length that is drawn,
    and `lanes`: `rank`, `track` ("" for what the rank itself did, or the name of a thread) and
    `segments`, four numbers for each: units since the end of the one before, units of length, place
    in `kinds`, and place in `names`; or, for short ones that were joined, minus their number. Their
    kind is that in which most of their time went.

    Args:
        trace: The trace.
        steps: The steps of each rank, in order.
        seen: For each rank and step its segments, as `trace_segments.rank_segments`.
    """
    windows = [
        (min(step.start for step in together), max(step.end for step in together))
        for together in zip(*steps, strict=False)
    ]
    said, others = _said(windows), _others(trace)
    order = (_TYPICAL, _SLOWEST, _FASTEST, _FIRST, "")
    numbers = sorted(range(len(windows)), key=lambda n: (order.index(said.get(n, "")), n))
    names: dict[tuple[str, int], int] = {}
    drawn: dict[int, Json] = {}
    left = MOST
    for number in numbers[:MOST_STEPS]:
        begin, end = windows[number]
        # While one rank is in this step, another may be in the one before or after it.
        near = slice(max(number - 1, 0), number + 2)
        lanes: list[Lane] = [
            (rank, "", _clipped((s for step in own[near] for s in step), begin, end))
            for rank, own in enumerate(seen)
        ]
        for (rank, track), segments in others.items():
            if clipped := _clipped(segments, begin, end):
                lanes.append((rank, track, clipped))
        lanes.sort(key=lambda lane: lane[:2])
        finest, thinned = _thinned([segments for *_, segments in lanes], end - begin)
        left -= sum(map(len, thinned))
        if drawn and left < 0:
            break
        drawn[number] = {
            "number": number + 1,
            "is": said.get(number, ""),
            "end": max(_units(end - begin), 1),
            "finest": finest,
            "lanes": [
                {"rank": rank, "track": track, "segments": list(_flat(segments, begin, names))}
                for (rank, track, _), segments in zip(lanes, thinned, strict=True)
            ],
        }
    return {
        "unit": _UNIT,
        "kinds": KINDS,
        "count": len(windows),
        "first": sorted(drawn).index(numbers[0]),
        "steps": [drawn[number] for number in sorted(drawn)],
        "names": [[name, size or None] for name, size in names],
    }


def _said(windows: Sequence[tuple[float, float]]) -> Mapping[int, str]:
    """Returns what some steps are, by number; the first one is not compared with others."""
    lengths = {n: end - start for n, (start, end) in enumerate(windows)}
    some = {n: length for n, length in lengths.items() if n} or lengths
    typical = median_low(some.values())
    return {
        0: _FIRST,
        max(some, key=some.__getitem__): _SLOWEST,
        min(some, key=some.__getitem__): _FASTEST,
        next(n for n, length in some.items() if length == typical): _TYPICAL,
    }


def _others(trace: Trace) -> Mapping[tuple[int, str], list[Segment]]:
    """Returns what ran beside the main thread, by rank and track."""
    names = {BACKGROUND: "background"}
    names |= {THREADS + place: name for place, name in enumerate(trace.threads)}
    waits = {(s.rank, s.track, s.start): s.end for s in trace.spans if s.kind == WAITING}
    found: dict[tuple[int, str], list[Segment]] = {}
    for span in trace.spans:
        if span.track not in names or span.kind not in (CALL, INPUT):
            continue
        own = found.setdefault((span.rank, names[span.track]), [])
        size, met = call_bytes(span), span.start
        if span.kind == CALL:
            met = min(waits.get((span.rank, span.track, span.start), met), span.end)
        if met > span.start:
            own.append(Segment(span.start, met, WAITING, span.name, "", size))
        if span.end > met:
            kind = COMMUNICATION if span.kind == CALL else INPUT
            own.append(Segment(met, span.end, kind, span.name, "", size))
    return found


def _thinned(
    lanes: Sequence[Sequence[Segment]], length: float
) -> tuple[int, Sequence[Sequence[Segment]]]:
    """Returns in units the length below which segments are joined, 0 for none, and the lanes."""
    finest, found = 0.0, lanes
    for power in range(_FINEST, 0, -1):
        if sum(map(len, found)) <= MOST_OF_STEP:
            break
        finest = length / 2**power
        found = [list(_joined(segments, finest)) for segments in lanes]
    return _units(finest), found


def _joined(segments: Iterable[Segment], finest: float) -> Iterator[Segment]:
    """Returns segments; short ones that follow one another become one, named by their number."""
    group: list[Segment] = []
    for segment in segments:
        short = segment.seconds < finest
        if group:
            follows = segment.start - group[-1].end < finest
            if not (short and follows and group[-1].end - group[0].start < finest):
                yield _one(group)
                group = []
        if short:
            group.append(segment)
        else:
            yield segment
    if group:
        yield _one(group)


def _one(group: Sequence[Segment]) -> Segment:
    """Returns what stands for short segments, of the kind that most of their time has."""
    if len(group) == 1:
        return group[0]
    seconds: defaultdict[str, float] = defaultdict(float)
    for segment in group:
        seconds[segment.kind] += segment.seconds
    kind = max(seconds, key=seconds.__getitem__)
    return Segment(group[0].start, group[-1].end, kind, "", "", -len(group))


def _flat(
    segments: Iterable[Segment], begin: float, names: dict[tuple[str, int], int]
) -> Iterator[int]:
    """Returns the four numbers of each segment, and collects their names."""
    at = 0
    for s in segments:
        start, end = _units(s.start - begin), _units(s.end - begin)
        place = s.bytes if s.bytes < 0 else names.setdefault((s.name, s.bytes), len(names))
        yield from (start - at, end - start, KINDS.index(s.kind), place)
        at = end


def _units(seconds: float) -> int:
    return round(seconds / _UNIT)


def _clipped(segments: Iterable[Segment], begin: float, end: float) -> list[Segment]:
    return [
        s._replace(start=max(s.start, begin), end=min(s.end, end))
        for s in segments
        if s.start < end and s.end > begin
    ]
