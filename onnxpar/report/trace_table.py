"""Where the time of a step went, as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar.core.errors import OnnxparError
from onnxpar_format.records import FormatError
from onnxpar_format.trace import Trace, read_trace
from onnxpar_format.trace_times import PARTS, RankTimes, StepTimes, times

_HEADINGS = {
    "communication": "exposed comm.",
    "python": "Python",
    "waited_for": "others wait for it",
}
_LEAST = 5e-6  # seconds that a column shows
_EXPLAINED = (
    "times of a step, means over {steps}; a rank's columns from compute to Python add up to it"
)


class TraceError(OnnxparError):
    """A trace cannot be used."""


@dataclass(frozen=True)
class TraceTable:
    """A trace and its summary.

    Attributes:
        trace: The trace.
        times: Where the time of a step went.
    """

    trace: Trace
    times: StepTimes

    def columns(self) -> list[tuple[str, str]]:
        """Returns the fields of `RankTimes` that any rank has time in, and their headings."""
        # A column in which every rank has nothing says nothing.
        return [
            (field, _HEADINGS.get(field, field))
            for field in ("step", *PARTS, "waited_for")
            if field == "step" or any(getattr(rank, field) >= _LEAST for rank in self.times.ranks)
        ]

    def json(self) -> Mapping[str, Any]:
        """Returns the numbers, in seconds."""
        return {
            "command": self.trace.command,
            "device": self.trace.device,
            "steps": self.times.steps,
            "ranks": [vars(rank) for rank in self.times.ranks],
            "stragglers": list(self.times.stragglers),
            "idle": self.times.idle,
            "clocks": [vars(clock) for clock in self.trace.clocks],
        }

    def lines(self) -> list[str]:
        """Returns the table in milliseconds: its heading, and a line for each rank."""
        return _rows(self.times.ranks, self.columns())

    def remarks(self) -> list[str]:
        """Returns what people should know besides the numbers."""
        found, trace = self.times, self.trace
        steps = f"{found.steps} step" + "s" * (found.steps != 1)
        lines = [_EXPLAINED.format(steps=steps)]
        late = [_straggler(rank, found.ranks[rank]) for rank in found.stragglers]
        lines += late or ["no rank is a straggler"]
        if found.idle is not None:
            lines.append(f"pipeline stages are idle for {found.idle:.1%} of a step")
        if trace.device != "cpu":
            lines.append(
                "the GPU works while the host goes on: times of communication are those of the "
                "GPU, and a program lasts until its results are ready"
            )
        apart = max(clock.uncertainty for clock in trace.clocks)
        lines.append(
            f"clocks of other machines are known to within {1e6 * apart:.0f} µs"
            if apart
            else "all ranks have the clock of one machine"
        )
        return lines


def trace_table(path: str | Path) -> TraceTable:
    """Returns the summary of a trace file.

    Raises:
        TraceError: It cannot be read, is no trace of onnxpar, or has no steps.
    """
    try:
        trace = read_trace(path)
    except FormatError as error:
        raise TraceError(str(error)) from None
    try:
        return TraceTable(trace, times(trace))
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def _rows(ranks: Sequence[RankTimes], shown: Sequence[tuple[str, str]]) -> list[str]:
    """Returns the table, a line for each rank."""
    columns = [("rank", [str(number) for number in range(len(ranks))])]
    for field, heading in shown:
        columns.append((heading, [f"{1000 * getattr(times, field):.2f}" for times in ranks]))
    widths = [max(map(len, (head, *cells))) for head, cells in columns]
    rows = zip(*([head, *cells] for head, cells in columns), strict=True)
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    ]


def _straggler(rank: int, found: RankTimes) -> str:
    return (
        f"straggler: rank {rank}: in each step, the other ranks together wait "
        f"{1000 * found.waited_for:.2f} ms for it, and it waits {1000 * found.waiting:.2f} ms for "
        "them"
    )
