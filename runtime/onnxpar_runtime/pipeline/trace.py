"""When computations of a pipeline began and ended, and what share of the time a rank had none."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from onnxpar_runtime.pipeline.schedule import Action


@dataclass(frozen=True)
class Span:
    """A computation.

    Attributes:
        action: What was computed.
        start: When it began, in seconds of the host's monotonic clock.
        end: When it ended.
    """

    action: Action
    start: float
    end: float


class Trace:
    """The computations of one rank, in their order.

    Attributes:
        spans: What was noted so far.
    """

    def __init__(self) -> None:
        """Has noted nothing yet."""
        self.spans: list[Span] = []

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Notes a computation, which the body of the `with` statement carries out."""
        start = time.monotonic()
        yield
        self.spans.append(Span(action, start, time.monotonic()))


def bubble(ranks: Sequence[Sequence[Span]]) -> float:
    """Returns the share of the time of a step in which ranks compute nothing, of all together.

    The time goes from the first beginning to the last end on any rank: with equal times of all
    stages it is (p - 1) / (m + p - 1) for GPipe and 1F1B of m micro-batches on p stages.

    Args:
        ranks: For each rank the computations of one step.
    """
    spans = [span for rank in ranks for span in rank]
    length = max(s.end for s in spans) - min(s.start for s in spans)
    return 1.0 - sum(s.end - s.start for s in spans) / (length * len(ranks))
