"""The line about a run that is drawn on a terminal again and again."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxpar_format.texts import bytes_text, three_digits
from onnxpar_runtime.training.step_record import StepRecord

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

_GAP = "  "
_LEAST_BAR, _MOST_BAR = 6, 30


@dataclass(frozen=True)
class _Part:
    """A part of the line; of parts that do not all fit, those of a low rank are shown."""

    rank: int
    text: str


class LiveLine:
    """Draws the progress of a run in one line, as much of it as a terminal has room for.

    Args:
        steps: The number of steps of the run; None if the data decides when it ends.
        done: How many of them are done.
    """

    def __init__(self, steps: int | None, done: int = 0) -> None:
        """Begins a line."""
        self._steps, self._done = steps, done
        self._record: StepRecord | None = None
        self._at = time.monotonic()

    def show(self, record: StepRecord) -> None:
        """Shows the numbers of a step from now on."""
        self._record, self._done, self._at = record, record.run_step, time.monotonic()

    def text(self, width: int) -> "Text":
        """Returns the line for a terminal of a number of columns."""
        from rich.text import Text

        parts = self._parts()
        taken: set[int] = set()
        used = 0
        for part in sorted(parts, key=lambda one: one.rank):
            needed = len(part.text) + (len(_GAP) if taken else 0)
            if used + needed <= width:
                taken.add(part.rank)
                used += needed
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        bar = self._bar(min(width - used - len(_GAP), _MOST_BAR))
        for part in parts:
            if part.rank in taken or part.rank == 0:
                line.append(_GAP if line else "")
                line.append(part.text)
            if part.rank == 0 and bar:
                line.append(_GAP)
                line.append(bar)
        line.truncate(width, overflow="ellipsis")
        return line

    def _bar(self, width: int) -> "Text":
        """Returns the part of the run that is done, drawn; nothing if there is no room."""
        from rich.text import Text

        if not self._steps or width < _LEAST_BAR:
            return Text()
        full = min(width * self._done // self._steps, width)
        return Text.assemble(("━" * full, "bar.complete"), ("━" * (width - full), "bar.back"))

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["Text"]:
        """Draws the line; rich calls it."""
        yield self.text(options.max_width)

    def _progress(self) -> str:
        return f"step {self._done:,}" + ("" if self._steps is None else f"/{self._steps:,}")

    def _parts(self) -> list[_Part]:
        """Returns all parts, in the order of the line."""
        one = self._record
        if one is None:
            return [_Part(0, self._progress())]
        left = None if one.eta_s is None else max(one.eta_s - (time.monotonic() - self._at), 0.0)
        if one.tokens_per_s is None:
            speed = f"{three_digits(one.samples_per_s)} samples/s"
        else:
            speed = f"{three_digits(one.tokens_per_s)} tokens/s"
        computed, rest = _split(one)
        flops = None if one.flops_per_s is None else _flops(one.flops_per_s)
        mfu = None if one.mfu is None else f"MFU {one.mfu:.1%}"
        texts = [
            (8, f"epoch {one.epoch}"),
            (0, self._progress()),
            (3, None if left is None else f"ETA {_clock(left)}"),
            (1, f"loss {one.loss:.4g}"),
            (9, f"lr {one.lr:.3g}"),
            (2, _seconds(one.step_s)),
            (4, speed),
            # The share of the peak says more than the number, if it is known.
            (5, flops if mfu is None else mfu),
            (10, flops if mfu is not None else None),
            (6, bytes_text(one.memory_bytes)),
            (7, computed),
            (11, rest),
        ]
        return [_Part(rank, text) for rank, text in texts if text]


def _split(one: StepRecord) -> tuple[str | None, str | None]:
    """Returns the share of a step that computes, and the shares of the rest of it."""
    others = [
        ("communication", one.communication_s),
        ("input", one.input_s),
        ("optimizer", one.optimizer_s),
        ("checkpoint", one.checkpoint_s),
    ]
    shares = [(name, seconds / one.step_s) for name, seconds in others if seconds is not None]
    shown = ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.005)
    if one.communication_s is None:
        return None, shown
    return f"computing {max(1 - sum(share for _, share in shares), 0):.0%}", shown


def _flops(number: float) -> str:
    """Returns operations per second, with three digits."""
    for letter, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{three_digits(number / scale)} {letter}FLOP/s"
    return f"{three_digits(number)} FLOP/s"


def _seconds(seconds: float) -> str:
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(1000 * seconds)} ms"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
