"""The spans of one rank."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar_format.trace import CHECKPOINT, OPTIMIZER, RECEIVE

_NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Timed:
    """A span in this process.

    Attributes:
        kind: As `onnxpar_format.trace.TraceSpan`.
        name: As there.
        start: By `time.monotonic_ns`.
        end: Likewise.
        thread: Name of the thread; empty for the thread that began the recording.
        more: As there.
    """

    kind: str
    name: str
    start: int
    end: int
    thread: str
    more: Mapping[str, Any]


COUNTED = (RECEIVE, OPTIMIZER, CHECKPOINT)
"""Kinds of spans whose time is always counted. Only the main thread has them, one after another."""


class Timeline:
    """What one rank does.

    Args:
        communicated: Returns the nanoseconds for which the rank's foreground has communicated so
            far, apart from receives.

    Attributes:
        communicated: As above.
        counted: For each of `COUNTED`, the nanoseconds of its spans so far, communication left out.
        recording: Whether spans are kept.
        profiles: Where onnxruntime writes the times of operators; None if they are not wanted.
        profiled: The sessions that have them, with the names of their graphs.
        spans: The spans that have ended.
        played: Number of schedules of pipelines that were begun.
    """

    def __init__(self, communicated: Callable[[], int]) -> None:
        """Keeps no spans yet."""
        self.communicated = communicated
        self.counted = dict.fromkeys(COUNTED, 0)
        self.recording = False
        self.profiles: Path | None = None
        self.profiled: list[tuple[str, Any]] = []
        self.spans: list[Timed] = []
        self.played = 0
        self._main = 0

    def begin(self, profiles: Path | None = None) -> None:
        """Keeps spans from now on; those of this thread are the rank's main ones.

        Args:
            profiles: As the attribute.
        """
        self.recording, self.profiles = True, profiles
        self.spans, self.profiled, self.played = [], [], 0
        self._main = threading.get_ident()

    def end(self) -> None:
        """Keeps no more."""
        self.recording = False

    def span(self, kind: str, name: str, **more: Any) -> AbstractContextManager[None]:
        """Counts what the body of the `with` statement does, and records it if recording."""
        counts = self.recording or kind in self.counted
        return self._span(kind, name, more) if counts else _NOTHING

    @contextmanager
    def _span(self, kind: str, name: str, more: Mapping[str, Any]) -> Iterator[None]:
        start, before = time.monotonic_ns(), self.communicated()
        try:
            yield
        finally:
            if kind in self.counted:
                spent = time.monotonic_ns() - start
                self.counted[kind] += max(spent - (self.communicated() - before), 0)
            self.add(kind, name, start, **more)

    def add(self, kind: str, name: str, start: int, **more: Any) -> None:
        """Records what this thread has done since a time (`time.monotonic_ns`), if recording."""
        if self.recording:
            thread = threading.current_thread()
            own = "" if thread.ident == self._main else thread.name
            self.spans.append(Timed(kind, name, start, time.monotonic_ns(), own, more))
