"""One rank of a training: runs of many steps, on top of single steps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from onnxpar_format.checkpoint import Progress
from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_format.texts import naming_arguments
from onnxpar_runtime.agree import together
from onnxpar_runtime.errors import LaunchError, OnnxparRuntimeError
from onnxpar_runtime.training.callbacks import Callback
from onnxpar_runtime.training.checkpoints import load_checkpoint, save_checkpoint
from onnxpar_runtime.training.gradient_norms import gradient_norms
from onnxpar_runtime.training.results import Fitted
from onnxpar_runtime.training.run import save, train_with
from onnxpar_runtime.training.step_trainer import StepTrainer

_OF_TRAINER = ("loss_scale", "debug_nan", "no_overlap")
"""Options of the command `train` that are arguments of `Trainer` itself."""
_NESTED = ("settings", "checkpoints")
_naming = naming_arguments(OnnxparRuntimeError)


class Trainer(StepTrainer):
    """One rank of a directory that was made for training; see `StepTrainer` for its arguments.

    `fit` runs the training loop of the command `train`. `train_step`, or `forward_backward` and
    `step`, are for loops of one's own.
    """

    if not TYPE_CHECKING:  # the signature is inherited
        __init__ = _naming(StepTrainer.__init__)

    @_naming
    def fit(
        self,
        data: str | Iterable[Any],
        *,
        callbacks: Sequence[Callback] = (),
        eval_data: str | Iterable[Any] | None = None,
        **options: Any,
    ) -> Fitted:
        """Trains as the command `train` does. Every rank must call it.

        The seed of the model's random numbers is the trainer's own, and signals are the caller's.

            trainer.fit("npz:train.npz", lr=3e-4, batch_size=64, epochs=3, validation=0.1,
                        schedule="cosine", warmup=100, checkpoint="checkpoints", keep_best=True)

        Args:
            data: A source as `--data` takes it, or batches, such as a DataLoader of PyTorch; see
                `onnxpar_runtime.training.sources.stream_of`. All ranks must get the same batches,
                and the same ones again in an epoch that is resumed.
            callbacks: Are told what happens, on rank 0; those of other ranks are ignored.
            eval_data: Likewise for evaluations.
            options: Those of `train` (`onnxpar train --help`), with `_` for `-`; `--eval` is
                `evaluate`. `lr` is needed.

        Raises:
            LaunchError: An unknown option, or one that cannot be satisfied.
            OnnxparRuntimeError: As `train_step`.
        """
        wanted = together(self.rank, lambda: run_of(data, eval_data, options))
        return train_with(
            self,
            wanted,
            callbacks,
            data=None if isinstance(data, str) else data,
            eval_data=None if isinstance(eval_data, str) else eval_data,
        )

    def save(self, path: str | Path) -> None:
        """Writes trained parameters and running statistics, complete, as safetensors.

        Every rank must call it; rank 0 writes.

        Raises:
            InputError: The file cannot be written.
            RankError: Likewise, on another rank.
        """
        save(self, path)

    def checkpoint(
        self, folder: str | Path, progress: Progress | None = None, *, keep: int = 2
    ) -> Path:
        """Writes a checkpoint in a loop of one's own, and waits for it. Every rank must call it.

        Args:
            folder: The folder of checkpoints, the same for all ranks.
            progress: The position in the data and more; step, seed and loss scale are the
                trainer's.
            keep: Number of complete checkpoints to keep.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: It cannot be written, or the folder has one of this step or a later
                one.
            RankError: Likewise, on another rank.
        """
        return save_checkpoint(self, folder, progress, keep=keep)

    def resume(self, checkpoint: str | Path) -> Progress:
        """Continues from a checkpoint in a loop of one's own, on any mesh. Every rank must call it.

        `fit(…, resume=checkpoint)` does so in `fit`.

        Args:
            checkpoint: The checkpoint, or a folder whose last complete one is taken.

        Returns:
            How far the run had come: the next step is `progress.step + 1`.

        Raises:
            CheckpointError: There is none, it is incomplete, or it does not fit the directory.
            RankError: Likewise, on another rank.
        """
        return load_checkpoint(self, checkpoint)

    @_naming
    def gradient_norms(self, groups: Sequence[str]) -> dict[str, float]:
        """Returns the 2-norm of the last step's gradients for each group; see `gradient_norms`.

        Args:
            groups: Names of parameters or patterns, such as `*.attention.*`: a group each.

        Raises:
            InputError: A group has no trained parameter.
            RankError: A rank failed.
        """
        return gradient_norms(self, groups)


def run_of(data: Any, eval_data: Any, options: Mapping[str, Any]) -> TrainingRun:
    """Returns the options of a run.

    Raises:
        LaunchError: There is no such option, or its value has another type.
    """
    kinds = {name: kind for kind in (TrainingRun, Settings, Saving) for name in _names(kind)}
    for name in options:
        if name in _OF_TRAINER:
            raise LaunchError(f"{name}: expected as an argument of Trainer, got it in fit")
        if name not in kinds:
            close = get_close_matches(name, kinds, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise LaunchError(f"fit: expected options of the command train, got {name!r}{hint}")
    if "lr" not in options:
        raise LaunchError("lr: expected a learning rate, got none")
    given: dict[type, dict[str, Any]] = {kind: {} for kind in (TrainingRun, Settings, Saving)}
    for name, value in options.items():
        _check_type(name, value, get_type_hints(kinds[name])[name])
        given[kinds[name]][name] = value
    return TrainingRun(
        data=data if isinstance(data, str) else "data",
        eval_data=eval_data if isinstance(eval_data, str) else None,
        settings=Settings(**given[Settings]),
        checkpoints=Saving(**{n: _path(n, v) for n, v in given[Saving].items()}),
        **{n: _path(n, v) for n, v in given[TrainingRun].items()},
    )


def _names(kind: type) -> list[str]:
    taken = ("data", "eval_data", *_NESTED, *_OF_TRAINER)
    return [field.name for field in fields(kind) if field.name not in taken]


def _check_type(name: str, value: Any, hint: Any) -> None:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    names = {
        kind: "a list" if get_origin(kind) else kind.__name__
        for kind in kinds
        if kind is not type(None)
    }
    if "a list" in names.values():
        fits = not isinstance(value, str)
    else:
        fits = any(isinstance(value, _ACCEPTED.get(kind, kind)) for kind in kinds)
    if not fits:
        raise LaunchError(f"{name}: expected {' or '.join(names.values())}, got {value!r:.80}")


_ACCEPTED: dict[Any, Any] = {int: Integral, float: Real, Path: (str, Path)}
"""NumPy's numbers are neither `int` nor `float`."""


def _path(name: str, value: Any) -> Any:
    return Path(value) if name in _PATHS and isinstance(value, str) else value


_PATHS = ("checkpoint", "log", "parameters", "resume", "save", "tensorboard")
