"""What a step of a run took, by program, call and operator, to be compared with a prediction."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from onnxpar.report.trace_segments import COMPUTING, Segment, call_bytes
from onnxpar_format.calls import COLLECTIVE, RECV, SEND
from onnxpar_format.trace import CALL, OPERATOR, PROGRAM, WAITING, Trace, TraceSpan
from onnxpar_format.trace_times import counted, spans_of_ranks, within

Json = dict[str, Any]


def measured_times(
    trace: Trace, steps: Sequence[Sequence[TraceSpan]], seen: Sequence[Sequence[list[Segment]]]
) -> Json:
    """Returns means over the ranks and over the steps that are counted: what a step of a rank has.

    Keys: `sizes`, the sizes of symbols in most runs of programs, empty if the trace does not have
    them; `other_sizes`, whether some runs have others; `programs`, `[name, runs, seconds]`, without
    communication; `calls`, `[kind, node, runs, bytes of a run, seconds, seconds of waiting]` of
    collectives and messages, whether hidden or not, where a kind is one of
    `onnxpar_format.calls.KINDS` and the seconds are those after the last rank arrived; and
    `operators`, `[program, node, seconds]`, empty if the trace has no operators.

    Args:
        trace: The trace.
        steps: The steps of each rank, in order.
        seen: For each rank and step its segments, as `trace_segments.rank_segments`.
    """
    windows = [counted(own) for own in steps]
    share = [1 / (len(own) * len(steps)) for own in windows]
    programs, operators = _computed(trace, seen, share)
    runs: defaultdict[str, float] = defaultdict(float)
    sizes: Counter[tuple[tuple[str, int], ...]] = Counter()
    calls: dict[tuple[str, str], list[float]] = {}
    waits = {(s.rank, s.track, s.start): s.end for s in trace.spans if s.kind == WAITING}
    for spans, own in zip(spans_of_ranks(trace), windows, strict=True):
        # Between steps there may be evaluations.
        for span in within(spans, own):
            part = share[span.rank]
            if span.kind == PROGRAM:
                runs[span.name] += part
                if noted := _sizes(span.more.get("sizes")):
                    sizes[noted] += 1
            elif span.kind == CALL and span.more["op"] in (COLLECTIVE, SEND, RECV):
                met = min(waits.get((span.rank, span.track, span.start), span.start), span.end)
                found = calls.setdefault((span.more["op"], _node(span.name)), [0.0, 0, 0.0, 0.0])
                found[0] += part
                found[1] = max(found[1], call_bytes(span))
                found[2] += part * (span.end - met)
                found[3] += part * (met - span.start)
    (common, _), *others = sizes.most_common() or [((), 0)]
    return {
        "sizes": dict(common),
        "other_sizes": bool(others),
        "programs": [[name, runs[name], seconds] for name, seconds in programs.items()],
        "calls": [[*key, *numbers] for key, numbers in calls.items()],
        "operators": [[*key, seconds] for key, seconds in operators.items()],
    }


def _computed(
    trace: Trace, seen: Sequence[Sequence[list[Segment]]], share: Sequence[float]
) -> tuple[Mapping[str, float], Mapping[tuple[str, str], float]]:
    """Returns the seconds of programs, and those of operators, by program and name."""
    known = any(span.kind == OPERATOR for span in trace.spans)
    programs: defaultdict[str, float] = defaultdict(float)
    operators: defaultdict[tuple[str, str], float] = defaultdict(float)
    for rank, own in enumerate(seen):
        for segment in (segment for step in counted(own) for segment in step):
            if segment.kind in COMPUTING and segment.program:
                seconds = share[rank] * segment.seconds
                programs[segment.program] += seconds
                if known:
                    operators[segment.program, segment.name] += seconds
    return programs, operators


def _node(name: str) -> str:
    """Returns the node of a call: `AllReduce '/layer0/…'` is named by what it is, then its node."""
    _, *inside = name.split("'", 1)
    return inside[0].rpartition("'")[0] if inside else name


def _sizes(found: object) -> tuple[tuple[str, int], ...]:
    """Returns the sizes that a run has noted; none of a file that has something else there."""
    if not isinstance(found, dict):
        return ()
    return tuple(sorted((name, size) for name, size in found.items() if type(size) is int))
