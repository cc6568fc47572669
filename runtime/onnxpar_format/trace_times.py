"""Where the time of a step went, by rank, from a trace."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from onnxpar_format.calls import WAIT
from onnxpar_format.trace import (
    ACTION,
    BACKGROUND,
    CALL,
    CHECKPOINT,
    EVALUATION,
    FOREGROUND,
    INPUT,
    MAIN,
    PROGRAM,
    RECEIVE,
    STEP,
    WAITING,
    Trace,
    TraceSpan,
)

T = TypeVar("T")
PARTS = {
    "compute": "computation",
    "communication": "exposed communication",
    "waiting": "waiting for other ranks",
    "bubble": "pipeline bubble",
    "input": "input",
    "checkpoint": "checkpoint",
    "python": "Python",
}
"""The parts of a step, fields of `RankTimes` that add up to it, and what people call them."""
STRAGGLES = 0.05
"""A rank is a straggler if its `RankTimes.lateness` is more than this share of a step."""
_PARTS = {PROGRAM: "compute", RECEIVE: "bubble", INPUT: "input", CHECKPOINT: "checkpoint"}


@dataclass(frozen=True)
class RankTimes:
    """Where the time of a rank's step went: means over steps, in seconds.

    All but `step` and `waited_for` add up to `step`.

    Attributes:
        step: From the beginning of a step to its end.
        compute: In programs, without the communication in them.
        communication: Data travels and the rank does not compute: exposed communication.
        waiting: In communication, until the last rank arrives.
        bubble: Waiting for messages of other pipeline stages.
        input: Waiting for the next batch.
        checkpoint: Copying states for a checkpoint.
        python: All the rest.
        waited_for: What other ranks, together, waited for this one.
    """

    step: float
    compute: float
    communication: float
    waiting: float
    bubble: float
    input: float
    checkpoint: float
    python: float
    waited_for: float

    def lateness(self, ranks: int) -> float:
        """Returns how much longer each other rank waits for this one than this one for others."""
        return self.waited_for / max(ranks - 1, 1) - self.waiting


@dataclass(frozen=True)
class StepTimes:
    """Where the time went.

    Attributes:
        steps: Number of steps that were counted: all but the first, which allocates memory.
        ranks: The times of each rank.
        stragglers: Ranks for which others wait long.
        idle: Share of a step in which pipeline stages are idle; None without stages.
    """

    steps: int
    ranks: Sequence[RankTimes]
    stragglers: Sequence[int]
    idle: float | None

    def sentence(self) -> str:
        """Returns for people where the time of a step went: means over the ranks."""
        n = len(self.ranks)
        step = sum(r.step for r in self.ranks) / n
        shares = [
            (sum(getattr(r, part) for r in self.ranks) / n / step, said)
            for part, said in PARTS.items()
        ]
        parts = ", ".join(f"{share:.1%} {said}" for share, said in shares if share >= 0.0005)
        late = "".join(f"; others wait for rank {rank}" for rank in self.stragglers)
        return f"of a step of {1000 * step:.1f} ms: {parts}{late}"


def times(trace: Trace) -> StepTimes:
    """Returns where the time of a step went.

    In a trace without steps, such as that of `eval`, evaluations of batches are the steps.

    Raises:
        ValueError: The trace has no steps.
    """
    count = len(trace.clocks)
    of_rank = spans_of_ranks(trace)
    windows = [counted(own) for own in steps_of_ranks(trace)]
    waited_for = [0.0] * count
    for spans, own in zip(of_rank, windows, strict=True):
        for call, waiting in foreground_calls(spans, own):
            last = call.more.get("last")
            if last is not None and last != call.rank:
                waited_for[last] += waiting
    steps = min(len(own) for own in windows)
    ranks = [
        _times(s, w, waited_for[r]) for r, (s, w) in enumerate(zip(of_rank, windows, strict=True))
    ]
    late = [r for r, t in enumerate(ranks) if t.lateness(count) > STRAGGLES * t.step]
    return StepTimes(steps, ranks, late, _idle(of_rank))


def spans_of_ranks(trace: Trace) -> list[list[TraceSpan]]:
    """Returns the spans of each rank, in order of time."""
    found: list[list[TraceSpan]] = [[] for _ in trace.clocks]
    for span in trace.spans:
        found[span.rank].append(span)
    return found


def steps_of_ranks(trace: Trace) -> list[list[TraceSpan]]:
    """Returns the steps of each rank, or the evaluations of batches in a trace without steps.

    Raises:
        ValueError: A rank has none.
    """
    kind = STEP if any(span.kind == STEP for span in trace.spans) else EVALUATION
    found = [_windows(spans, kind) for spans in spans_of_ranks(trace)]
    if not all(found):
        raise ValueError("the trace has no steps")
    return found


def counted(steps: Sequence[T]) -> Sequence[T]:
    """Returns the steps that are counted: all but the first, which allocates memory."""
    return steps[1:] if len(steps) > 1 else steps


def _windows(spans: Sequence[TraceSpan], kind: str) -> list[TraceSpan]:
    """Returns the spans of a kind, in order, without those within another one."""
    steps: list[TraceSpan] = []
    for span in sorted((s for s in spans if s.kind == kind), key=lambda s: (s.start, -s.end)):
        # The loop's step, with its input, has that of the trainer within it.
        if not steps or span.start >= steps[-1].end:
            steps.append(span)
    return steps


def within(spans: Iterable[TraceSpan], windows: Sequence[TraceSpan]) -> list[TraceSpan]:
    """Returns the spans that begin in a window."""
    starts = [window.start for window in windows]
    found = []
    for span in spans:
        at = bisect_right(starts, span.start) - 1
        if at >= 0 and span.start < windows[at].end:
            found.append(span)
    return found


def foreground_calls(
    spans: Sequence[TraceSpan], windows: Sequence[TraceSpan]
) -> list[tuple[TraceSpan, float]]:
    """Returns the foreground's calls in the windows, and how long each waited for the last rank."""
    own = within((s for s in spans if s.track == FOREGROUND), windows)
    waits = {s.start: s.seconds for s in own if s.kind == WAITING}
    # The last rank may come while the foreground waits for what runs in the background.
    behind = sorted((s for s in spans if s.track == BACKGROUND), key=lambda s: s.end)
    met = [s.end for s in behind if s.kind == WAITING]
    ends = [s.end for s in behind if s.kind == CALL]
    found = []
    for call in own:
        if call.kind != CALL:
            continue
        waited = waits.get(call.start, 0.0)
        if call.more["op"] == WAIT:
            # What it waits for ends with it, and has met before.
            last = bisect_right(ends, call.end) - 1
            at = bisect_right(met, ends[last]) - 1 if last >= 0 else -1
            waited = max(met[at] - call.start, 0.0) if at >= 0 else 0.0
        found.append((call, waited))
    return found


def _times(
    spans: Sequence[TraceSpan], windows: Sequence[TraceSpan], waited_for: float
) -> RankTimes:
    parts = dict.fromkeys(("compute", "bubble", "input", "checkpoint"), 0.0)
    # Spans of these kinds follow one another on the main thread.
    main = sorted(
        within((s for s in spans if s.track == MAIN and s.kind in _PARTS), windows),
        key=lambda s: s.start,
    )
    for span in main:
        parts[_PARTS[span.kind]] += span.seconds
    starts = [span.start for span in main]
    communication = waiting = 0.0
    for call, waited in foreground_calls(spans, windows):
        at = bisect_right(starts, call.start) - 1
        around = main[at].kind if at >= 0 and call.start < main[at].end else None
        if around == RECEIVE:
            continue  # the whole span is waiting for another stage
        if around is not None:
            parts[_PARTS[around]] -= call.seconds
        communication += call.seconds - waited
        waiting += waited
    step = sum(window.seconds for window in windows)
    known = sum(parts.values()) + communication + waiting
    n = len(windows)
    return RankTimes(
        step=step / n,
        compute=parts["compute"] / n,
        communication=communication / n,
        waiting=waiting / n,
        bubble=parts["bubble"] / n,
        input=parts["input"] / n,
        checkpoint=parts["checkpoint"] / n,
        python=(step - known) / n,
        waited_for=waited_for / n,
    )


def _idle(of_rank: Sequence[Sequence[TraceSpan]]) -> float | None:
    """Returns the median over steps of the share in which stages are idle; None without stages."""
    steps: list[defaultdict[int, list[TraceSpan]]] = []
    for spans in of_rank:
        own: defaultdict[int, list[TraceSpan]] = defaultdict(list)
        for span in spans:
            if span.kind == ACTION:
                own[span.more["step"]].append(span)
        steps.append(own)
    numbers = sorted(set.intersection(*(set(own) for own in steps)))
    if not numbers:
        return None
    return median(bubble([own[number] for own in steps]) for number in (numbers[1:] or numbers))


def bubble(ranks: Sequence[Sequence[TraceSpan]]) -> float:
    """Returns the share of a step's time in which ranks are idle, over all ranks.

    The time goes from the first beginning to the last end on any rank. With equal times of all
    stages, the share is (p - 1) / (m + p - 1) for GPipe and 1F1B of m micro-batches on p stages.

    Args:
        ranks: For each rank the computations of one step.
    """
    spans = [span for rank in ranks for span in rank]
    length = max(s.end for s in spans) - min(s.start for s in spans)
    return 1.0 - sum(s.seconds for s in spans) / (length * len(ranks))
