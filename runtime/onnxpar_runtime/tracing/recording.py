"""Records what all ranks do, and brings it to rank 0."""

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar_format.calls import COLLECTIVE
from onnxpar_format.new_file import new_file
from onnxpar_format.trace import (
    CALL,
    MAIN,
    OPERATOR,
    OPERATORS,
    THREADS,
    WAITING,
    Clock,
    Trace,
    TraceSpan,
    trace_json,
)
from onnxpar_runtime.agree import together
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.temporary import temporary_folder
from onnxpar_runtime.tracing.calls import logged
from onnxpar_runtime.tracing.clocks import Offset, clock_offsets
from onnxpar_runtime.tracing.operators import operator_times

_TAG = 0x5055
Row = tuple[str, int, str, int, int, Mapping[str, Any]]
"""Kind, track, name, start, end (nanoseconds of the rank's clock), more."""


class Recording:
    """A recording of all ranks. Every rank must make it, at the same time.

    Args:
        rank: This rank.
        operators: Also record operators; only of sessions that are made from now on.

    Attributes:
        rank: This rank.

    Raises:
        RankError: A rank failed.
    """

    def __init__(self, rank: Rank, *, operators: bool = False) -> None:
        """Compares the clocks, and begins."""
        self.rank = rank
        self._open = ExitStack()
        folder = temporary_folder("onnxpar-trace-")
        self._folder = self._open.enter_context(folder) if operators else None
        self._offsets = clock_offsets(rank)
        rank.keep_calls(True)
        rank.timeline.begin(self._folder)

    def finish(self, command: str, stage_devices: int) -> Trace | None:
        """Ends it; returns the trace on rank 0, None elsewhere. Every rank must call it.

        Args:
            command: What ran.
            stage_devices: Number of ranks of a stage.

        Raises:
            RankError: A rank failed.
        """
        rank, timeline = self.rank, self.rank.timeline
        timeline.end()
        threads: dict[str, int] = {}
        rows: list[Row] = []

        def track(thread: str) -> int:
            return threads.setdefault(thread, THREADS + len(threads))

        for s in timeline.spans:
            place = track(s.thread) if s.thread else MAIN
            rows.append((s.kind, place, s.name, s.start, s.end, s.more))
        rows += logged(rank, track)
        rank.keep_calls(False)
        for _, session in timeline.profiled:
            rows += [(OPERATOR, OPERATORS, *run) for run in operator_times(session)]
        self._open.close()
        placement = rank.placement
        device = "cpu" if placement is None else placement.device.value
        gathered = _gather(rank, {"rows": rows, "threads": list(threads)})
        later = clock_offsets(rank)
        if gathered is None:
            return None
        clocks = [_clock(a, b) for a, b in zip(self._offsets, later, strict=True)]
        names = list(dict.fromkeys(name for part in gathered for name in part["threads"]))
        spans = [
            span
            for index, part in enumerate(gathered)
            for span in _spans(index, part, names, self._offsets[index], later[index])
        ]
        first = min((span.start for span in spans), default=0.0)
        spans = [_moved(span, first) for span in spans]
        spans += _name_last(spans)
        spans.sort(key=lambda span: (span.start, -span.end))
        return Trace(command, stage_devices, clocks, spans, names, device)


def write_trace(rank: Rank, path: str | Path, trace: Trace | None) -> None:
    """Writes a trace, on rank 0. Every rank must call it.

    Raises:
        InputError: It cannot be written.
        RankError: Likewise, on another rank.
    """

    def write() -> None:
        if trace is not None:
            with new_file(path, InputError) as file:
                file.write_text(trace_json(trace), encoding="utf-8")

    together(rank, write)


def _gather(rank: Rank, own: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Returns what every rank gives, on rank 0."""
    data = np.frombuffer(zlib.compress(json.dumps(own).encode(), 1), np.uint8)
    sizes = np.zeros(rank.world.size, np.int64)
    sizes[rank.index] = data.size
    sizes = rank.all_reduce(sizes)
    if rank.index:
        rank.send(data, 0, _TAG, "a trace")
        return None
    parts = [data]
    for other in range(1, rank.world.size):
        parts.append(np.empty(int(sizes[other]), np.uint8))
        rank.recv(parts[-1], other, _TAG, "a trace")
    return [json.loads(zlib.decompress(part.tobytes())) for part in parts]


def _clock(first: Offset, last: Offset) -> Clock:
    uncertainty = max(first.uncertainty, last.uncertainty)
    return Clock(first.ahead * 1e-9, uncertainty * 1e-9, (last.ahead - first.ahead) * 1e-9)


def _spans(
    rank: int, part: Mapping[str, Any], names: Sequence[str], first: Offset, last: Offset
) -> list[TraceSpan]:
    """Returns a rank's spans on the clock of rank 0, in seconds."""
    slope = (last.ahead - first.ahead) / max(last.at - first.at, 1)
    tracks = {THREADS + i: THREADS + names.index(name) for i, name in enumerate(part["threads"])}

    def common(t: int) -> float:
        ahead = first.ahead + slope * (t - first.ahead - first.at)
        return (t - ahead) * 1e-9

    return [
        TraceSpan(rank, tracks.get(track, track), kind, name, common(start), common(end), more)
        for kind, track, name, start, end, more in part["rows"]
    ]


def _moved(span: TraceSpan, by: float) -> TraceSpan:
    return replace(span, start=span.start - by, end=span.end - by, more=dict(span.more))


def _name_last(spans: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Writes into each call, and each wait for it, which of its ranks came last.

    Returns:
        The waits of calls on GPUs: until the last of its ranks began the call.
    """
    found = []
    members: defaultdict[tuple[Any, ...], list[TraceSpan]] = defaultdict(list)
    waits = {(s.rank, s.track, s.start): s for s in spans if s.kind == WAITING}
    for span in spans:
        more = span.more
        if span.kind == CALL and more["op"] == COLLECTIVE:
            # Calls on GPUs and on hosts are counted apart.
            place = more["lane"], more["place"], more.get("device")
            members[(*more["ranks"], "|", *place)].append(span)
    for calls in members.values():
        if len(calls) < len(calls[0].more["ranks"]):
            continue  # began before the recording on some rank
        latest = max(calls, key=lambda call: call.start)
        for call in calls:
            wait = waits.get((call.rank, call.track, call.start))
            if call.more.get("device") and call is not latest:
                met = min(latest.start, call.end)
                wait = TraceSpan(call.rank, call.track, WAITING, "waiting", call.start, met, {})
                found.append(wait)
            for span in (call,) if wait is None else (call, wait):
                assert isinstance(span.more, dict)
                span.more["last"] = latest.rank
    return found
