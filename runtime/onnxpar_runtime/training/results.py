"""What a trainer's steps and evaluations return."""

from dataclasses import dataclass
from typing import Any, TypedDict

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class StepResult:
    """What a step returns, equal on all ranks.

    Attributes:
        loss: Mean loss of all that the step's micro-batches hold; not a number if nobody asked.
        grad_norm: 2-norm of all gradients together, before clipping; likewise.
        skipped: Whether nothing was changed, since gradients were not finite: the loss scale was
            too large.
    """

    loss: float
    grad_norm: float
    skipped: bool = False


class Evaluation(TypedDict):
    """What an evaluation returns, equal on all ranks but for the outputs.

    Attributes:
        loss: Mean loss of the batch.
        count: What the mean is over.
        correct: Number of labels that the largest output hits; None where there are no classes.
        outputs: On rank 0 the global outputs of the model if they were asked for, else None.
    """

    loss: float
    count: int
    correct: int | None
    outputs: dict[str, Array] | None
