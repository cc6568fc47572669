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
    """A part of the line.

    Attributes:
        rank: Of parts that do not all fit, those of a low rank are shown.
        width: Columns that are kept for it, so that parts stay in their places.
        text: The text.
    """

    rank: int
    width: int
    text: str

    @property
    def padded(self) -> str:
        """The text with the columns that are kept for it."""
        return self.text.ljust(self.width)


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
            needed = len(part.padded) + (len(_GAP) if taken else 0)
            if used + needed <= width:
                taken.add(part.rank)
                used += needed
        line = Text(no_wrap=True, overflow="ellipsis", end="")
        bar = self._bar(min(width - used - len(_GAP), _MOST_BAR))
        for part in parts:
            if part.rank in taken or part.rank == 0:
                line.append(_GAP if line else "")
                line.append(part.padded)
            if part.rank == 0 and bar:
                line.append(_GAP)
                line.append(bar)
        line.rstrip()
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
        if self._steps is None:
            return f"step {self._done:,}"
        most = f"{self._steps:,}"
        return f"{f'{self._done:,}'.rjust(len(most))}/{most}"

    def _parts(self) -> list[_Part]:
        """Returns all parts, in the order of the line."""
        one = self._record
        if one is None:
            return [_Part(0, 0, self._progress())]
        left = None if one.eta_s is None else max(one.eta_s - (time.monotonic() - self._at), 0.0)
        if one.tokens_per_s is None:
            speed = f"{three_digits(one.samples_per_s)} samples/s"
        else:
            speed = f"{three_digits(one.tokens_per_s)} tokens/s"
        computed, rest = _split(one)
        flops = None if one.flops_per_s is None else _flops(one.flops_per_s)
        mfu = None if one.mfu is None else f"MFU {one.mfu:.1%}"
        texts = [
            (8, 0, f"epoch {one.epoch}"),
            (0, 0, self._progress()),
            (3, 8, None if left is None else f"ETA {_clock(left)}"),
            (1, 11, f"loss {_loss(one.loss)}"),
            (9, 0, f"lr {one.lr:.3g}"),
            (2, 7, _seconds(one.step_s)),
            (7, 14, speed),
            # The share of the peak says more than the number, if it is known.
            (4, 12, flops) if mfu is None else (4, 9, mfu),
            (10, 12, None if mfu is None else flops),
            (5, 8, bytes_text(one.memory_bytes)),
            (6, 11, computed),
            (11, 0, rest),
        ]
        return [_Part(rank, width, text) for rank, width, text in texts if text]


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
    return f"compute {max(1 - sum(share for _, share in shares), 0):.0%}", shown


def _loss(loss: float) -> str:
    """Returns a loss in six characters, such as `2.3026` or `1.2e-5`, or more if it is large."""
    if 0 < abs(loss) < 1e-3:
        return f"{loss:.1e}".replace("e-0", "e-")
    return f"{loss:.4f}"[:6].rstrip(".") if abs(loss) < 1e5 else f"{loss:.0f}"


def _flops(number: float) -> str:
    """Returns operations per second, with three digits."""
    for letter, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{three_digits(number / scale)} {letter}FLOP/s"
    return f"{three_digits(number)} FLOP/s"


def _seconds(seconds: float) -> str:
    return f"{three_digits(seconds)} s" if seconds >= 1 else f"{three_digits(1000 * seconds)} ms"


def _clock(seconds: float) -> str:
    """Returns a duration in four characters, such as `45s`, `9m30`, `12m`, `1h02` or `3d04`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60:02}"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}" if hours < 24 else f"{hours // 24}d{hours % 24:02}"
