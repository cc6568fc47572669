"""The results of steps, evaluations and runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from signal import Signals
from typing import Any, TypedDict

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class StepResult:
    """The result of a step, equal on all ranks.

    Attributes:
        loss: Mean loss over all micro-batches of the step; not a number if it was not read.
        grad_norm: 2-norm of all gradients together, before clipping; likewise.
        skipped: Whether nothing was changed, because gradients were not finite: the loss scale was
            too large.
        flops: Operations in forward and backward on all devices together; None if they are not
            known, see `Training.flops`.
        tokens: Tokens in all micro-batches; None if no input has tokens, see `Amounts.of`.
    """

    loss: float
    grad_norm: float
    skipped: bool = False
    flops: int | None = None
    tokens: int | None = None


class Evaluation(TypedDict):
    """The result of an evaluation, equal on all ranks except for the outputs.

    Attributes:
        loss: Mean loss of the batch.
        count: Number of terms of the mean.
        correct: Number of labels that were predicted correctly; None without classes.
        outputs: On rank 0 the global outputs of the model if requested, else None.
    """

    loss: float
    count: int
    correct: int | None
    outputs: dict[str, Array] | None


@dataclass(frozen=True)
class Fitted:
    """How a run ended.

    Attributes:
        epochs: Number of epochs that were begun.
        steps: Number of steps of all epochs, including those before the run was resumed.
        loss: Loss of the last step whose loss was read.
        best_step: The step after which an evaluation had the smallest loss; 0 without evaluations.
        stopped: The signal that ended the run before its last step; None if there was none.
    """

    epochs: int
    steps: int
    loss: float
    best_step: int = 0
    stopped: Signals | None = None


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation.

    Attributes:
        loss: Mean loss over the labels that count.
        samples: Number of samples.
        correct: Number of labels that were predicted correctly; None without classes.
        labels: Number of labels that count.
        metrics: On rank 0 the results of metrics, by name.
    """

    loss: float
    samples: int
    correct: int | None
    labels: int
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """Share of correct labels; None without classes or labels."""
        return None if self.correct is None or not self.labels else self.correct / self.labels

    @property
    def text(self) -> str:
        """The result for people."""
        line = f"loss is {self.loss:.7g}"
        if self.accuracy is not None:
            line += f", accuracy is {self.accuracy:.2%} ({self.correct} of {self.labels})"
        return line + "".join(f", {name} is {x:.7g}" for name, x in self.metrics.items())
