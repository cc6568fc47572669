"""Records when computations of a pipeline began and ended, and computes the share of idle time.

Traces are written in the format of Chrome's trace viewer ("Trace Event Format"), which Perfetto and
chrome://tracing read: a process for each stage, a thread for each rank.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.new_file import new_file
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.pipeline.schedule import Action, Kind, PlayedSchedule
from onnxpar_runtime.pipeline.simulate import Times, simulate

_KINDS = tuple(Kind)
_TAG = 0x5054


@dataclass(frozen=True)
class Span:
    """A computation.

    Attributes:
        action: What was computed.
        start: When it began, in seconds from the beginning of the trace.
        end: When it ended.
    """

    action: Action
    start: float
    end: float


Steps = list[list[Span]]
"""The computations of each step, in their order."""


class Trace:
    """The computations of one rank.

    Args:
        rank: The rank. Every rank of the world must make its trace at the same time, which becomes
            the common origin of the times.

    Attributes:
        steps: The steps recorded so far.
        origin: This rank's origin, as `time.monotonic` counts; ranks leave the wait in which they
            agree on it some microseconds apart.
    """

    def __init__(self, rank: Rank) -> None:
        """Waits for the other ranks."""
        self.steps: Steps = []
        self._rank = rank
        rank.all_reduce(np.zeros(1))
        self.origin = time.monotonic()

    def begin(self) -> None:
        """Begins a step."""
        self.steps.append([])

    @contextmanager
    def of(self, action: Action) -> Iterator[None]:
        """Records a computation, which the body of the `with` statement carries out."""
        start = time.monotonic()
        yield
        end = time.monotonic()
        self.steps[-1].append(Span(action, start - self.origin, end - self.origin))

    def gather(self) -> list[Steps] | None:
        """Returns the traces of all ranks on rank 0, None elsewhere. Every rank must call it.

        Raises:
            RankError: A rank failed.
        """
        rank, world = self._rank, self._rank.world
        own = _encode(self.steps)
        counts = np.zeros(world.size, np.int64)
        counts[rank.index] = len(own)
        counts = rank.all_reduce(counts)
        if rank.index:
            rank.send(own, 0, _TAG, "a trace")
            return None
        traces = [self.steps]
        for other in range(1, world.size):
            rows = np.empty((int(counts[other]), own.shape[1]))
            rank.recv(rows, other, _TAG, "a trace")
            traces.append(_decode(rows, len(self.steps)))
        return traces


def bubble(ranks: Sequence[Sequence[Span]]) -> float:
    """Returns the share of a step's time in which ranks are idle, over all ranks.

    The time goes from the first beginning to the last end on any rank. With equal times of all
    stages, the share is (p - 1) / (m + p - 1) for GPipe and 1F1B of m micro-batches on p stages.

    Args:
        ranks: For each rank the computations of one step.
    """
    spans = [span for rank in ranks for span in rank]
    length = max(s.end for s in spans) - min(s.start for s in spans)
    return 1.0 - sum(s.end - s.start for s in spans) / (length * len(ranks))


def even_bubble(program: PlayedSchedule) -> float:
    """Returns the bubble if all stages take the same time, and transfers take none.

    A backward takes twice as long as a forward, half of it for the parameters' gradients.
    """
    simulation = simulate(program, Times.equal(program.schedule.virtual_stages))
    return float(np.mean(simulation.bubbles))


def median_bubble(traces: Sequence[Steps]) -> float:
    """Returns the median of `bubble` over all steps but the first, which allocates memory."""
    count = len(traces[0])
    first = min(1, count - 1)
    return median(bubble([trace[step] for trace in traces]) for step in range(first, count))


def write_trace(path: str | Path, traces: Sequence[Steps], size: int) -> None:
    """Writes the traces of all ranks.

    Args:
        path: The file.
        traces: The trace of each rank.
        size: Number of ranks of a stage.

    Raises:
        InputError: It cannot be written.
    """
    events: list[dict[str, Any]] = []
    for rank, steps in enumerate(traces):
        place = {"pid": rank // size, "tid": rank}
        for kind, name in (("process", f"stage {rank // size}"), ("thread", f"rank {rank}")):
            events.append({"ph": "M", "name": f"{kind}_name", "args": {"name": name}, **place})
        events += [
            {
                "ph": "X",
                "name": f"{span.action.kind.value}{span.action.micro_batch}",
                "cat": str(span.action.kind),
                "ts": span.start * 1e6,
                "dur": (span.end - span.start) * 1e6,
                "args": {
                    "step": number,
                    "chunk": span.action.chunk,
                    "micro_batch": span.action.micro_batch,
                },
                **place,
            }
            for number, spans in enumerate(steps, 1)
            for span in spans
        ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    with new_file(path, InputError) as file:
        file.write_text(text, encoding="utf-8")


def _encode(steps: Steps) -> NDArray[np.float64]:
    rows = [
        (step, _KINDS.index(s.action.kind), s.action.chunk, s.action.micro_batch, s.start, s.end)
        for step, spans in enumerate(steps)
        for s in spans
    ]
    return np.array(rows, np.float64).reshape(-1, 6)


def _decode(rows: NDArray[np.float64], count: int) -> Steps:
    steps: Steps = [[] for _ in range(count)]
    for step, kind, chunk, micro_batch, start, end in rows:
        action = Action(_KINDS[int(kind)], int(chunk), int(micro_batch))
        steps[int(step)].append(Span(action, float(start), float(end)))
    return steps
