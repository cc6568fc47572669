"""How fast a run is: what is counted between two reports."""

import time

from onnxpar_runtime.memory import peak_resident
from onnxpar_runtime.training.log import StepRecord
from onnxpar_runtime.training.results import StepResult


class Pace:
    """Counts steps and seconds since the last report.

    Args:
        devices: Number of devices that run the steps together.
        peak_flops: Operations per second of which a device is capable; None if unknown.
    """

    def __init__(self, devices: int, peak_flops: float | None) -> None:
        """Begins to count now."""
        self._peak = None if peak_flops is None else peak_flops * devices
        self.restart()

    def restart(self) -> None:
        """Forgets what was counted: the time since the last report was not that of steps."""
        self._begin = time.perf_counter()
        self._steps, self._samples, self._waited = 0, 0, 0
        self._flops: int | None = 0

    def waited(self, began: int) -> None:
        """Counts the time since `began` (`time.monotonic_ns`), in which the next batch came."""
        self._waited += time.monotonic_ns() - began

    def add(self, result: StepResult, samples: int) -> None:
        """Counts a step of a number of samples."""
        self._steps += 1
        self._samples += samples
        known = self._flops, result.flops
        self._flops = None if known[0] is None or known[1] is None else known[0] + known[1]

    def record(self, epoch: int, number: int, result: StepResult, rate: float) -> StepRecord:
        """Returns the report of a step that was added last, and begins to count again.

        Args:
            epoch: Number of the epoch.
            number: Number of the step in its epoch.
            result: The result of the step.
            rate: Its learning rate.
        """
        seconds = time.perf_counter() - self._begin
        achieved = None if self._flops is None else self._flops / seconds
        record = StepRecord(
            epoch,
            number,
            result.loss,
            rate,
            self._samples / seconds,
            result.grad_norm,
            seconds / self._steps,
            self._waited * 1e-9 / self._steps,
            peak_resident(),
            achieved,
            None if achieved is None or self._peak is None else achieved / self._peak,
        )
        self.restart()
        return record
