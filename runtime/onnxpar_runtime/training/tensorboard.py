"""Writes the numbers of a run for TensorBoard."""

import time
from pathlib import Path
from typing import Any

from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.training.callbacks import Callback
from onnxpar_runtime.training.results import Evaluated
from onnxpar_runtime.training.step_record import StepRecord

_LEFT_OUT = ("epoch", "step", "run_step")
_FLUSH_S = 10
"""Seconds after which TensorBoard can see a step."""


class TensorBoard(Callback):
    """A callback that writes event files.

    Scalars are named as the keys of `--log`, under `train/`, and `eval/loss`, `eval/accuracy`.

    Args:
        folder: The folder of the files. It is made; files of other runs there are kept.

    Raises:
        LaunchError: The package `tensorboard` is missing.
        InputError: The folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        """Begins a file."""
        try:
            # It takes a sixth of a second, and is not everywhere installed.
            from tensorboard.compat.proto import event_pb2, summary_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ImportError:
            raise LaunchError(
                "--tensorboard: expected the package tensorboard, which is not installed: "
                "pip install 'onnxpar[tensorboard]'"
            ) from None
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        try:
            self._writer: Any = EventFileWriter(str(folder), flush_secs=_FLUSH_S)
        except OSError as error:
            raise InputError(f"{folder}: cannot be written: {error.strerror or error}") from None

    def on_step(self, step: int, record: StepRecord) -> None:
        """Writes the numbers of a step."""
        found = {k: v for k, v in record.numbers.items() if k not in _LEFT_OUT and v is not None}
        self._write(step, {f"train/{key}": value for key, value in found.items()})

    def on_evaluation(self, step: int, result: Evaluated) -> None:
        """Writes loss, accuracy and metrics."""
        found = {"eval/loss": result.loss, "eval/accuracy": result.accuracy}
        found |= {f"eval/{name}": value for name, value in result.metrics.items()}
        self._write(step, {key: value for key, value in found.items() if value is not None})

    def close(self) -> None:
        """Completes the file, also if the run failed."""
        self._writer.close()

    def _write(self, step: int, scalars: dict[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=v) for tag, v in scalars.items()]
        event = self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        self._writer.add_event(event)
