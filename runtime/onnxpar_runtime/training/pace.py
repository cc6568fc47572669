"""How fast a run is: what is counted between two reports."""

import time
from collections.abc import Mapping

from onnxpar_format.trace import CHECKPOINT, OPTIMIZER, RECEIVE
from onnxpar_runtime.memory import peak_resident
from onnxpar_runtime.tracing.timeline import Timeline
from onnxpar_runtime.training.results import StepResult
from onnxpar_runtime.training.step_record import StepRecord


class Pace:
    """Counts steps and seconds since the last report.

    Args:
        timeline: Counts what this rank does besides computing.
        on_host: Whether the rank computes on the CPU. On a GPU, the host only starts communication.
        devices: Number of devices that run the steps together.
        peak_flops: The most operations per second of a device; None if unknown.
        steps: Number of steps until the end of the run; None if the data decides when it ends.
    """

    def __init__(
        self,
        timeline: Timeline,
        on_host: bool,
        devices: int,
        peak_flops: float | None,
        steps: int | None,
    ) -> None:
        """Begins to count now."""
        self._timeline, self._on_host = timeline, on_host
        self._peak = None if peak_flops is None else peak_flops * devices
        self._start, self._done, self._all = time.perf_counter(), 0, steps
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted: the time since the last report was not that of steps."""
        self._begin = time.perf_counter()
        self._steps, self._samples, self._waited = 0, 0, 0
        self._flops: int | None = 0
        self._tokens: int | None = 0
        self._before = self._counted()

    def _counted(self) -> dict[str, int]:
        """Returns the nanoseconds of what the rank did besides computing, so far."""
        counted = self._timeline.counted
        return {
            "communication": self._timeline.communicated() + counted[RECEIVE],
            "optimizer": counted[OPTIMIZER],
            "checkpoint": counted[CHECKPOINT],
        }

    def waited(self, began: int) -> None:
        """Counts the time since `began` (`time.monotonic_ns`), in which the next batch came."""
        self._waited += time.monotonic_ns() - began

    def add(self, result: StepResult, samples: int) -> None:
        """Counts a step of a number of samples."""
        self._steps += 1
        self._done += 1
        self._samples += samples
        self._flops = _sum(self._flops, result.flops)
        self._tokens = _sum(self._tokens, result.tokens)

    def record(
        self,
        epoch: int,
        number: int,
        done: int,
        result: StepResult,
        rate: float,
        norms: Mapping[str, float],
    ) -> StepRecord:
        """Returns the report of a step that was added last, and begins to count again.

        Args:
            epoch: Number of the epoch.
            number: Number of the step in its epoch.
            done: Number of the step in the run.
            result: The result of the step.
            rate: Its learning rate.
            norms: The norms of groups of gradients.
        """
        now = time.perf_counter()
        seconds = now - self._begin
        spent = {
            kind: (total - self._before[kind]) * 1e-9 / self._steps
            for kind, total in self._counted().items()
        }
        left = None if self._all is None else self._all - self._done
        achieved = None if self._flops is None else self._flops / seconds
        record = StepRecord(
            epoch,
            number,
            done,
            result.loss,
            rate,
            self._samples / seconds,
            result.grad_norm,
            seconds / self._steps,
            self._waited * 1e-9 / self._steps,
            peak_resident(),
            achieved,
            None if achieved is None or self._peak is None else achieved / self._peak,
            None if self._tokens is None else self._tokens / seconds,
            spent["communication"] if self._on_host else None,
            spent["optimizer"],
            spent["checkpoint"],
            None if left is None else left * (now - self._start) / self._done,
            norms,
        )
        self.restart()
        return record


def _sum(before: int | None, more: int | None) -> int | None:
    return None if before is None or more is None else before + more
