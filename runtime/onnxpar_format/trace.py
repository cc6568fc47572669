"""The file with what all ranks did, and when: spans of time on one clock.

It is in Chrome's "Trace Event Format", which Perfetto (ui.perfetto.dev) and chrome://tracing read:
a process for each rank, a thread for each track of the rank. The key `onnxpar` has what that format
lacks.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from onnxpar_format.records import Check, FormatError, Key, failure, from_json, load_json

MAIN, FOREGROUND, BACKGROUND, OPERATORS, THREADS = 0, 1, 2, 3, 10
"""Tracks: the rank's main thread, communication of the foreground and of the background, operators,
and the first of other threads."""
STEP, EVALUATION, PROGRAM, INPUT, RECEIVE, CHECKPOINT, OPTIMIZER, ACTION = (
    "step",
    "evaluation",
    "program",
    "input",
    "receive",
    "checkpoint",
    "optimizer",
    "action",
)
"""Kinds of spans of the main thread. A `receive` waits for a message of another stage; an `action`
is a forward or backward of a micro-batch; an `evaluation` is that of a batch."""
CALL, WAITING, OPERATOR = "call", "waiting", "operator"
"""A collective or a message; the time in it until the last rank arrives; an operator."""
_NAMES = {
    MAIN: "program",
    FOREGROUND: "communication",
    BACKGROUND: "communication in the background",
    OPERATORS: "operators",
}
_VERSION = 1
_LONGEST = 1e15
"""Microseconds: 31 years. Traces with larger times were not recorded."""


@dataclass(frozen=True)
class TraceSpan:
    """What a rank did for a time.

    Attributes:
        rank: The rank.
        track: Where it was: `MAIN`, … or `THREADS` and above.
        kind: Such as `STEP`.
        name: What it was, such as the name of a node.
        start: When it began, in seconds from the beginning of the trace, on the clock of rank 0.
        end: When it ended.
        more: Further facts. A call has `op`, `ranks`, `lane`, `place` (its number among the calls
            of these ranks), `bytes`, `tensors`, and `last`, the rank that arrived last, if known;
            with `device`, its times are those of the GPU.
    """

    rank: int
    track: int
    kind: str
    name: str
    start: float
    end: float
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True)
class Clock:
    """How a rank's clock was set to that of rank 0.

    Attributes:
        offset: Seconds that its clock was ahead, at the beginning.
        uncertainty: Half of the shortest round trip in which that was measured, in seconds; 0 on
            the machine of rank 0, whose processes have one clock.
        drift: Seconds that it gained until the end.
    """

    offset: float = 0.0
    uncertainty: float = 0.0
    drift: float = 0.0


@dataclass(frozen=True)
class Trace:
    """A trace.

    Attributes:
        command: What ran, such as `train`.
        stage_devices: Number of ranks of a pipeline stage.
        clocks: Of each rank.
        spans: Of all ranks, in order of time.
        threads: Names of the tracks from `THREADS` on.
        device: The kind of the ranks' device. On a GPU, times of operators are those at which the
            host handed them over, and the host waits for the results at the end of a program.
    """

    command: str
    stage_devices: int
    clocks: Sequence[Clock]
    spans: Sequence[TraceSpan]
    threads: Sequence[str] = ()
    device: str = "cpu"


def trace_json(trace: Trace) -> str:
    """Returns the text of the file."""
    events: list[dict[str, Any]] = []
    staged = trace.stage_devices < len(trace.clocks)
    for rank in range(len(trace.clocks)):
        stage = f", stage {rank // trace.stage_devices}" if staged else ""
        events.append(_named("process", f"rank {rank}{stage}", rank, 0))
    names = _NAMES | {THREADS + i: name for i, name in enumerate(trace.threads)}
    for rank, track in sorted({(span.rank, span.track) for span in trace.spans}):
        events.append(_named("thread", names[track], rank, track))
        order = {"sort_index": track}
        events.append(
            {"ph": "M", "name": "thread_sort_index", "args": order, "pid": rank, "tid": track}
        )
    events += [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.kind,
            "ts": _microseconds(span.start),
            # Spans that end at the same time still do, so that one within another stays there.
            "dur": round(_microseconds(span.end) - _microseconds(span.start), 3),
            "pid": span.rank,
            "tid": span.track,
            "args": dict(span.more),
        }
        for span in trace.spans
    ]
    own = {
        "version": _VERSION,
        "command": trace.command,
        "stage_devices": trace.stage_devices,
        "device": trace.device,
        "threads": list(trace.threads),
        "clocks": [vars(clock) for clock in trace.clocks],
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "onnxpar": own})


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _named(what: str, name: str, rank: int, track: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "args": {"name": name}, "pid": rank, "tid": track}


def read_trace(path: str | Path) -> Trace:
    """Returns the trace of a file.

    Raises:
        FormatError: It cannot be read, or onnxpar did not write it.
    """
    path = Path(path)
    raw = load_json(path, f"{path.name}: No such file")
    found = from_json(
        _TraceFile, raw, f"{path}: expected a trace that --trace wrote, got another file"
    )
    own = found.onnxpar
    if own.version != _VERSION:
        raise FormatError(f"{path}: expected version {_VERSION} of the trace, got {own.version}")
    spans = []
    for number, event in enumerate(found.events):
        if isinstance(event, dict) and event.get("ph") == "X":
            e = from_json(_Event, event, f"{path}: traceEvents[{number}]")
            for at, rank in (("pid", e.rank), ("args.last", e.more.get("last", 0))):
                if type(rank) is not int or not 0 <= rank < len(own.clocks):
                    ranks = f"a rank below {len(own.clocks)}"
                    raise failure(f"{path}: traceEvents[{number}].{at}", ranks, rank)
            if e.kind == ACTION and type(e.more.get("step")) is not int:
                raise failure(f"{path}: traceEvents[{number}].args", "step, a number", e.more)
            if e.kind == CALL and not isinstance(e.more.get("op"), str):
                raise failure(f"{path}: traceEvents[{number}].args", "op, a text", e.more)
            start, end = e.start * 1e-6, (e.start + e.length) * 1e-6
            spans.append(TraceSpan(e.rank, e.track, e.kind, e.name, start, end, e.more))
    clocks, threads = list(own.clocks), list(own.threads)
    return Trace(own.command, own.stage_devices, clocks, spans, threads, own.device)


@dataclass(frozen=True)
class _Event:
    rank: Annotated[int, Key(("pid",))]
    track: Annotated[int, Key(("tid",))]
    kind: Annotated[str, Key(("cat",))]
    name: str
    start: Annotated[float, Key(("ts",)), Check("a time below 1e15", lambda ts: abs(ts) < _LONGEST)]
    length: Annotated[
        float, Key(("dur",)), Check("0 or more, below 1e15", lambda dur: 0 <= dur < _LONGEST)
    ]
    more: Annotated[Mapping[str, Any], Key(("args",))]


@dataclass(frozen=True)
class _Own:
    version: int
    command: str
    stage_devices: Annotated[int, Check("1 or more", lambda count: count >= 1)]
    device: str
    threads: tuple[str, ...]
    clocks: tuple[Clock, ...]


@dataclass(frozen=True)
class _TraceFile:
    events: Annotated[tuple[Any, ...], Key(("traceEvents",))]
    onnxpar: _Own
