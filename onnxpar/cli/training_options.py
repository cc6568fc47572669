"""The training options of `shard` and `plan`."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any

from onnxpar.autodiff.append_loss import LossKind, parse_loss
from onnxpar.autodiff.mixed_precision import COMPUTE_TYPES, parse_compute
from onnxpar.autodiff.optimizer import OptimizerKind, parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli.options import flag
from onnxpar_format.option import Option


@dataclass(frozen=True)
class TrainingOptions:
    """The training options of `shard` and `plan`."""

    loss: Annotated[
        str | None,
        Option(
            "What training minimises: softmax_cross_entropy, mse, mae or bce of the first "
            "output (or of another, as in mse:NAME), or output:NAME for a scalar output of the "
            "model.",
            "LOSS",
            values=(*(k for k in LossKind if k != LossKind.OUTPUT), "output:"),
        ),
    ] = None
    label_input: Annotated[
        str | None,
        Option("Model input with the labels. Default: a new input named labels.", "NAME"),
    ] = None
    ignore_index: Annotated[
        int | None, Option("Label that does not count in softmax_cross_entropy.", "LABEL")
    ] = None
    optimizer: Annotated[
        str | None,
        Option(
            "sgd, momentum, adam, adamw or lamb. `shard --train` needs it; `plan` uses "
            "adamw by default.",
            "NAME",
            values=tuple(OptimizerKind),
        ),
    ] = None
    trainable: Annotated[
        Sequence[str],
        Option(
            "Also train these tensors, even if they look like constants or --freeze matches "
            "them; may be repeated.",
            "GLOB",
        ),
    ] = ()
    freeze: Annotated[
        Sequence[str], Option("Do not train these parameters; may be repeated.", "GLOB")
    ] = ()
    tie: Annotated[
        Sequence[str],
        Option(
            "Tie B to A: train two tensors with equal elements (possibly transposed) as "
            "one; may be repeated.",
            "A=B",
        ),
    ] = ()
    compute: Annotated[
        str | None,
        Option(
            "float16 or bfloat16: compute the products of a float32 model in this type; "
            "parameters stay float32. bfloat16 runs on CUDA only. With auto, `plan` chooses "
            "between float32 and bfloat16.",
            "TYPE",
            values=tuple(COMPUTE_TYPES),
        ),
    ] = None
    optimizer_parallel: Annotated[
        int | None,
        Option(
            "Shard over the replicas of a parameter: 0 nothing, 1 moments, 2 also "
            "gradients, 3 also parameters. Default: the strategy's level, else 0; plan chooses.",
            "LEVEL",
            minimum=0,
            maximum=3,
            values=("0", "1", "2", "3"),
        ),
    ] = None

    def given(self) -> dict[str, Any]:
        """Returns the options that were given, by name."""
        values = {f: getattr(self, f.name) for f in fields(self)}
        return {flag(f.name): value for f, value in values.items() if value != f.default}

    def spec(self, loss: str, optimizer: str) -> TrainingSpec:
        """Returns what is trained and how.

        Args:
            loss: The loss.
            optimizer: The optimizer if the option was not given.

        Raises:
            OnnxparError: An option is malformed.
        """
        return TrainingSpec(
            parse_loss(loss, label_input=self.label_input, ignore_index=self.ignore_index),
            parse_optimizer(self.optimizer or optimizer),
            tuple(self.trainable),
            tuple(self.freeze),
            compute=None if self.compute is None else parse_compute(self.compute),
            ties=tuple(self.tie),
        )
