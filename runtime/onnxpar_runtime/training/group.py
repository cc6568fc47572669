"""The trainers of all ranks in one process, one thread each, over the `threads` transport."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxpar_runtime.group import Ranks
from onnxpar_runtime.training.results import Evaluation, StepResult
from onnxpar_runtime.training.sources import Batch
from onnxpar_runtime.training.trainer import Trainer

Array = NDArray[Any]


class TrainerGroup(Ranks[Trainer]):
    """The trainers of all ranks of a training directory.

    A method whose result is equal on all ranks returns that of rank 0. The trainers themselves are
    `members`, for what differs between ranks: `group.on_each(lambda trainer: trainer.state(name))`.

    Args:
        directory: The directory.
        device: As `Trainer`.
        ort_options: As `Trainer`.
        custom_ops: As `Trainer`.
        seed: As `Trainer`.
        loss_scale: As `Trainer`.

    Raises:
        OnnxparRuntimeError: As `Trainer`.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        device: str = "cpu",
        ort_options: Mapping[str, str] | None = None,
        custom_ops: Sequence[str | Path] = (),
        seed: int = 0,
        loss_scale: str | None = None,
    ) -> None:
        """Loads the graphs of all ranks."""
        super().__init__(
            directory,
            Trainer,
            device=device,
            ort_options=ort_options,
            custom_ops=custom_ops,
            seed=seed,
            loss_scale=loss_scale,
        )

    def train_step(self, micro_batches: Sequence[Batch], hyper: Mapping[str, float]) -> StepResult:
        """As `Trainer.train_step` on every rank."""
        return self.on_each(lambda trainer: trainer.train_step(micro_batches, hyper))[0]

    def forward_backward(
        self, batch: Batch, *, weight: float = 1.0, accumulate: bool = False
    ) -> float:
        """As `Trainer.forward_backward` on every rank."""
        return self.on_each(
            lambda trainer: trainer.forward_backward(batch, weight=weight, accumulate=accumulate)
        )[0]

    def step(self, hyper: Mapping[str, float]) -> float:
        """As `Trainer.step` on every rank."""
        return self.on_each(lambda trainer: trainer.step(hyper))[0]

    def evaluate(self, batch: Batch, *, outputs: bool = False) -> Evaluation:
        """As `Trainer.evaluate` on every rank."""
        return self.on_each(lambda trainer: trainer.evaluate(batch, outputs=outputs))[0]

    def gather(self, name: str) -> Array:
        """Returns the whole array of a state, as `Trainer.gather` on every rank."""
        array = self.on_each(lambda trainer: trainer.gather(name))[0]
        if array is None:
            raise AssertionError("rank 0 gathered nothing")
        return array

    def load_parameters(self, arrays: Mapping[str, Array]) -> None:
        """As `Trainer.load_parameters` on every rank."""
        self.on_each(lambda trainer: trainer.load_parameters(arrays))

    def load_states(self, arrays: Mapping[str, Array]) -> None:
        """As `Trainer.load_states` on every rank."""
        self.on_each(lambda trainer: trainer.load_states(arrays))

    def reset(self) -> None:
        """As `Trainer.reset` on every rank."""
        self.on_each(Trainer.reset)
