"""What a training run does with checkpoints: where it begins, and when it writes one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from onnxpar_runtime.agree import together
from onnxpar_runtime.checkpoint.contents import Checkpoint, Progress
from onnxpar_runtime.checkpoint.restore import check_run, load_states
from onnxpar_runtime.checkpoint.writer import Checkpointer
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.training.batches import TrainingData
from onnxpar_runtime.training.hyper import Hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.trainer import Trainer

Told = Callable[[Progress], None]


@dataclass(frozen=True)
class Saving:
    """When checkpoints are written, and where.

    Attributes:
        folder: The folder of checkpoints.
        every: After how many steps one is written; one more after the last step.
        keep: How many whole ones are kept.

    Raises:
        LaunchError: A number that is not positive.
    """

    folder: Path
    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        """Refuses numbers that are not positive."""
        for option, number in (("--every", self.every), ("--keep", self.keep)):
            if number < 1:
                raise LaunchError(f"{option}: expected a number >= 1, got {number}")


def described(
    name: str, data: TrainingData, hyper: Hyperparameters, schedule: LearningRateSchedule
) -> dict[str, Any]:
    """Returns what a run is to do, as a checkpoint tells it.

    Args:
        name: The text of `--data`.
        data: What it opened.
        hyper: The optimizer's scalars.
        schedule: The learning rate.
    """
    settings = asdict(hyper.settings)
    return {
        "seed": data.seed,
        "batch_size": data.batch,
        "steps_per_epoch": data.steps_per_epoch,
        "data": name,
        "accumulate": data.accumulate,
        "lr": schedule.rate,
        "schedule": schedule.kind,
        "warmup": schedule.warmup,
        # A constant rate is the same however long the run is.
        "total_steps": None if schedule.kind == "constant" else schedule.total,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
    }


def resume(trainer: Trainer, checkpoint: Checkpoint, run: dict[str, Any]) -> list[str]:
    """Puts a trainer where a checkpoint was written. Every rank must call it.

    Returns:
        What people should know: where it is, and what is otherwise than it was.

    Raises:
        CheckpointError: The run would take other samples, or a file cannot be read.
        RankError: Likewise, on another rank.
    """
    notices = together(trainer.rank, lambda: check_run(checkpoint, run))
    load_states(trainer.rank, trainer.manifest, checkpoint, trainer.put_state)
    progress = checkpoint.progress
    trainer.counters |= {"step": progress.step, "micro_batch": 0}
    trainer.loss_scale.resume(progress.loss_scale, progress.good, progress.skipped)
    where = f"epoch {progress.epoch}, step {progress.epoch_step}"
    return [
        f"resumed from {checkpoint.directory}: {progress.step} steps are done, {where}",
        *notices,
    ]


@contextmanager
def saving(
    trainer: Trainer, wanted: Saving | None, run: dict[str, Any], start: Progress
) -> Iterator[Told | None]:
    """Gives what is to be called after each step; after the last one a checkpoint is written too.

    Every rank must call it. On leaving, what has been begun is whole.

    Raises:
        CheckpointError: The folder cannot be used, or a checkpoint cannot be written.
        RankError: Likewise, on another rank.
    """
    if wanted is None:
        yield None
        return
    last = start
    with Checkpointer(
        trainer.rank,
        trainer.manifest,
        wanted.folder,
        trainer,
        run,
        keep=wanted.keep,
        begun=start.step,
    ) as writer:

        def after(progress: Progress) -> None:
            nonlocal last
            scale = trainer.loss_scale
            progress = replace(
                progress, loss_scale=scale.scale, good=scale.good, skipped=scale.skipped
            )
            last = progress
            writer.check()
            if progress.step % wanted.every == 0:
                writer.save(progress)

        yield after
        writer.save(last)
