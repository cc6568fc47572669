"""Where the time of a step of onnxpar goes, by rank and by operator; for tools/bench/step.py."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from step_cases import Job, Side
from step_sides import PreparedModels, start

from onnxpar_format.trace import OPERATOR, Trace, read_trace
from onnxpar_format.trace_times import (
    RankTimes,
    counted,
    spans_of_ranks,
    steps_of_ranks,
    times,
    within,
)

PROFILED = 10  # steps under the profiler
SHOWN = 16  # operators of a profile
PRODUCTS = frozenset(
    ("Gemm", "MatMul", "FusedMatMul", "FusedGemm", "Conv", "FusedConv", "ConvTranspose")
)
"""Operators that spend their time in matrix products."""
COMMUNICATING = frozenset(
    (
        *("AllReduce", "AllGather", "ReduceScatter", "AllToAll", "Broadcast", "Permute"),
        *("Start", "Wait", "StartAhead", "FinishLater", "Bucket"),
    )
)


@dataclass(frozen=True)
class Profile:
    """The steps of a side under the profiler, in seconds of one step.

    Attributes:
        ranks: Where the time of each rank went.
        products: Time in matrix products, of each rank.
        operators: Time and calls of each operator, a mean over the ranks, without collectives.
    """

    ranks: tuple[RankTimes, ...]
    products: tuple[float, ...]
    operators: dict[str, tuple[float, float]]

    def lines(self, title: str) -> Iterable[str]:
        """The profile for people."""
        yield f"{title}, under the profiler:"
        for rank, (t, products) in enumerate(zip(self.ranks, self.products, strict=True)):
            exposed, idle = t.communication + t.waiting, t.bubble
            yield (
                f"  rank {rank}: step {1e3 * t.step:.2f} ms, products {products / t.step:.1%}, "
                f"other computation {(t.compute - products) / t.step:.1%}, exposed communication "
                f"{exposed / t.step:.1%}, idle {idle / t.step:.1%}, Python {t.python / t.step:.1%}"
            )
        total = sum(seconds for seconds, _ in self.operators.values())
        for operator, (seconds, calls) in list(self.operators.items())[:SHOWN]:
            yield (
                f"    {operator:32s} {1e3 * seconds:9.3f} ms {calls:6.1f} calls "
                f"{seconds / total:6.1%}"
            )

    def data(self) -> dict[str, object]:
        """The profile for a JSON file."""
        return asdict(self)


def profile_of(trace: Trace) -> Profile:
    """Adds up the spans of a trace that has operators."""
    found = times(trace)
    operators: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    products = []
    share = 1 / (found.steps * len(found.ranks))
    for spans, windows in zip(spans_of_ranks(trace), steps_of_ranks(trace), strict=True):
        own = within((s for s in spans if s.kind == OPERATOR), counted(windows))
        products.append(sum(s.seconds for s in own if s.more["op"] in PRODUCTS) / found.steps)
        for span in own:
            if span.more["op"] not in COMMUNICATING:
                seconds, calls = operators[span.more["op"]]
                operators[span.more["op"]] = seconds + span.seconds * share, calls + share
    ordered = dict(sorted(operators.items(), key=lambda item: -item[1][0]))
    return Profile(tuple(found.ranks), tuple(products), ordered)


def profile(side: Side, job: Job, prepared: PreparedModels) -> Profile:
    """Runs a side of onnxpar under the profiler."""
    files = str(prepared.files(side, job.model, job.optimizer))
    with start(side, replace(job, files=files, profile=True), prepared.folder) as running:
        running.connect()
        running.steps(PROFILED)
    return profile_of(read_trace(running.scratch / "trace.json"))
