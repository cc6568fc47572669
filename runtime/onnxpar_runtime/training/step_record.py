"""The numbers of a step that are reported."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite


@dataclass(frozen=True)
class StepRecord:
    """The numbers of a step that are reported.

    Attributes:
        epoch: Number of the epoch, from 1.
        step: Number of the step in its epoch, from 1.
        run_step: Number of the step in the run, from 1.
        loss: Mean loss of the step's batch, before the parameters were changed.
        lr: Learning rate.
        samples_per_s: Samples of the global batch divided by the seconds since the last record.
        grad_norm: 2-norm of all gradients together, before clipping.
        step_s: Seconds of a step: the mean since the last record, evaluation left out.
        input_s: Of `step_s`, the seconds in which rank 0 waited for the next batch.
        memory_bytes: The largest amount of host memory that the process of rank 0 has used.
        flops_per_s: Operations of the step on all devices together, divided by its seconds; None if
            they are not known (`StepResult.flops`).
        mfu: The part of the devices' peak that this is; None if the peak is not known.
        tokens_per_s: Tokens of the step divided by its seconds; None if no input has tokens
            (`StepResult.tokens`).
        communication_s: Of `step_s`, the seconds in which rank 0 communicated and did not compute:
            data travelled, or it waited for other ranks; None on a GPU.
        optimizer_s: Of `step_s`, the seconds of the optimizer's program, without communication.
        checkpoint_s: Of `step_s`, the seconds in which a checkpoint was copied for writing.
        eta_s: Seconds until the last step, at the pace of the run so far; None if the data decides
            when the run ends.
        grad_norms: 2-norm of the gradients of each group of parameters that was asked for.
    """

    epoch: int
    step: int
    run_step: int
    loss: float
    lr: float
    samples_per_s: float
    grad_norm: float
    step_s: float
    input_s: float
    memory_bytes: int
    flops_per_s: float | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    communication_s: float | None = None
    optimizer_s: float | None = None
    checkpoint_s: float | None = None
    eta_s: float | None = None
    grad_norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, float | None]:
        """All numbers by name; that of a group is `grad_norm/GROUP`."""
        found = {k: v for k, v in vars(self).items() if k != "grad_norms"}
        return found | {f"grad_norm/{name}": norm for name, norm in self.grad_norms.items()}

    @property
    def line(self) -> str:
        """The line for people, with the seven digits of a float32."""
        return f"epoch: {self.epoch} step: {self.step}, loss is {self.loss:.7g}"

    @property
    def json(self) -> str:
        """The line of the log file."""
        return json_line(self.numbers)


def json_line(values: Mapping[str, float | None]) -> str:
    """Returns numbers as a line of the log file. What is not known, None, is left out.

    Numbers that are not finite, which JSON lacks, are null.
    """
    known = {k: v for k, v in values.items() if v is not None}
    return json.dumps(
        {k: v if isinstance(v, int) or isfinite(v) else None for k, v in known.items()}
    )
