"""The spans of one rank."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Timeline:
    """What one rank does, once a recording has begun.

    Attributes:
        recording: Whether spans are kept.
        profiles: Where onnxruntime writes the times of operators; None if they are not wanted.
        profiled: The sessions that have them, with the names of their graphs.
        spans: The spans that have ended.
        played: Number of schedules of pipelines that were begun.
    """

    def __init__(self) -> None:
        """Keeps nothing yet."""
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
        """Records what the body of the `with` statement does, if a recording has begun."""
        return self._span(kind, name, more) if self.recording else _NOTHING

    @contextmanager
    def _span(self, kind: str, name: str, more: Mapping[str, Any]) -> Iterator[None]:
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.add(kind, name, start, **more)

    def add(self, kind: str, name: str, start: int, **more: Any) -> None:
        """Records what this thread has done since a time (`time.monotonic_ns`), if recording."""
        if self.recording:
            thread = threading.current_thread()
            own = "" if thread.ident == self._main else thread.name
            self.spans.append(Timed(kind, name, start, time.monotonic_ns(), own, more))
