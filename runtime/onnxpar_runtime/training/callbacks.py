"""What a program is told while the training loop runs."""

from pathlib import Path

from onnxpar_runtime.training.results import Evaluated, Fitted
from onnxpar_runtime.training.step_record import StepRecord


class Callback:
    """Is told what happens in a run, on rank 0 only; derive from it what you need.

    The calls come from the thread of the training loop, which waits for them. They must not call
    methods of the trainer that every rank must call: the other ranks would not. An exception ends
    the run, on all ranks.
    """

    def on_step(self, step: int, record: StepRecord) -> None:
        """A step that is reported is done: every one, or as `--log-every` says.

        Args:
            step: Its number in the run, from 1.
            record: Its numbers.
        """

    def on_evaluation(self, step: int, result: Evaluated) -> None:
        """An evaluation is done.

        Args:
            step: Number of steps of the run that are done.
            result: Loss and accuracy.
        """

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint was begun, which is written in the background.

        Args:
            step: The step after which it was copied.
            folder: The folder that it gets once it is complete.
        """

    def on_end(self, result: Fitted) -> None:
        """The last step and the last evaluation are done. Not called if the run fails.

        Args:
            result: How the run ended.
        """
