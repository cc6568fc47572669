"""Calls that a program gets while the training loop runs."""

from pathlib import Path

from onnxpar_runtime.training.results import Evaluated, Fitted
from onnxpar_runtime.training.step_record import StepRecord


class Callback:
    """Gets a call for what happens in a run, on rank 0 only; override the methods that you need.

    The calls come from the thread of the training loop, which waits for them. They must not call
    methods of the trainer that every rank must call: the other ranks would not. An exception ends
    the run, on all ranks.
    """

    def on_step(self, step: int, record: StepRecord) -> None:
        """Called after each step that is reported: every step, or those that `--log-every` selects.

        Args:
            step: Its number in the run, from 1.
            record: Its numbers.
        """

    def on_evaluation(self, step: int, result: Evaluated) -> None:
        """Called after an evaluation.

        Args:
            step: Number of steps of the run that are done.
            result: Loss, accuracy and metrics.
        """

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint has begun; it is written in the background.

        Args:
            step: The step after which it was copied.
            folder: The name that its folder gets when it is complete.
        """

    def on_end(self, result: Fitted) -> None:
        """Called after the last step and the last evaluation; not called if the run fails.

        Args:
            result: How the run ended.
        """
