"""What the server counts, in the text format of Prometheus."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_EACH_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)


class _Histogram:
    """Counts of values up to limits."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits, self._counts = limits, [0] * (len(limits) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._counts[bisect_left(self._limits, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for limit, count in zip((*self._limits, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self._sum:.6f}"
        yield f"{name}_count {total}"


class Metrics:
    """The counts of a server.

    Attributes:
        running: Requests with a slot.
        waiting: Requests without one.
        cache_bytes: The bytes of the caches of a rank.
        reused_tokens: Prompt tokens whose cache was taken over from an earlier prompt.
    """

    def __init__(self) -> None:
        """Counts nothing yet."""
        self.running = self.waiting = self.cache_bytes = self.reused_tokens = 0
        self._finished: Counter[str] = Counter({"stop": 0, "length": 0, "cancelled": 0, "error": 0})
        self._refused: Counter[int] = Counter()
        self._prompt_tokens = self._new_tokens = 0
        self._steps, self._step_s = 0, 0.0
        self._first, self._each = _Histogram(_FIRST_S), _Histogram(_EACH_S)
        self._lock = threading.Lock()

    def step(self, seconds: float) -> None:
        """Counts a step with events."""
        with self._lock:
            self._steps += 1
            self._step_s += seconds

    def token(self, now: float, begun: float, last: float | None) -> None:
        """Counts a token of a request that began and got its last token at these times."""
        with self._lock:
            self._new_tokens += 1
            if last is None:
                self._first.add(now - begun)
            else:
                self._each.add(now - last)

    def finished(self, why: str, prompt: int) -> None:
        """Counts a request that is complete, with the tokens of its prompt."""
        with self._lock:
            self._finished[why] += 1
            self._prompt_tokens += prompt

    def refused(self, status: int) -> None:
        """Counts a request that got an error."""
        with self._lock:
            self._refused[status] += 1

    def text(self) -> str:
        """Returns all counts."""
        with self._lock:
            return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for name, what, value in (
            ("requests_running", "Requests that have a slot.", self.running),
            ("requests_waiting", "Requests that wait for a slot.", self.waiting),
            ("cache_bytes", "Bytes of the cache of rank 0.", self.cache_bytes),
        ):
            yield from (f"# HELP onnxpar_{name} {what}", f"# TYPE onnxpar_{name} gauge")
            yield f"onnxpar_{name} {value}"
        totals: tuple[tuple[str, str, float], ...] = (
            ("prompt_tokens_total", "Prompt tokens of complete requests.", self._prompt_tokens),
            (
                "reused_prompt_tokens_total",
                "Prompt tokens whose cache was taken over from an earlier prompt.",
                self.reused_tokens,
            ),
            ("new_tokens_total", "New tokens.", self._new_tokens),
            ("steps_total", "Steps that computed tokens.", self._steps),
            (
                "step_seconds_total",
                "Seconds of steps that computed tokens.",
                round(self._step_s, 6),
            ),
        )
        for name, what, total in totals:
            yield from (f"# HELP onnxpar_{name} {what}", f"# TYPE onnxpar_{name} counter")
            yield f"onnxpar_{name} {total}"
        for name, what, label, counts in (
            ("requests_total", "Complete requests.", "finished", self._finished),
            ("refused_total", "Requests that got an error.", "status", self._refused),
        ):
            yield from (f"# HELP onnxpar_{name} {what}", f"# TYPE onnxpar_{name} counter")
            for key, count in counts.items():
                yield f'onnxpar_{name}{{{label}="{key}"}} {count}'
        for name, what, histogram in (
            ("first_token_seconds", "Time to the first token.", self._first),
            ("token_seconds", "Time between tokens of a request.", self._each),
        ):
            yield from (f"# HELP onnxpar_{name} {what}", f"# TYPE onnxpar_{name} histogram")
            yield from histogram.lines(f"onnxpar_{name}")
