"""What a training run does with checkpoints: where it begins, and when it writes one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from onnxpar_format.checkpoint import Progress
from onnxpar_format.options import Saving
from onnxpar_runtime.agree import together
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.restore import check_run, load_states
from onnxpar_runtime.checkpoint.writer import Checkpointer
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.training.batches import TrainingData
from onnxpar_runtime.training.hyper import Hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.trainer import Trainer

Told = Callable[[Progress], None]


_EVERY, _KEEP = 100, 2


def check_saving(wanted: Saving) -> None:
    """Raises LaunchError for a number that is not positive, or of checkpoints that go nowhere."""
    for name, number in (("every", wanted.every), ("keep", wanted.keep)):
        if number is not None and wanted.checkpoint is None:
            raise LaunchError(f"--{name}: expected with --checkpoint FOLDER")
        if number is not None and number < 1:
            raise LaunchError(f"--{name}: expected a number >= 1, got {number}")


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
    load_states(trainer.rank, trainer.manifest, checkpoint, trainer.states.set)
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
    trainer: Trainer, wanted: Saving, run: dict[str, Any], start: Progress
) -> Iterator[Told | None]:
    """Gives what is to be called after each step; after the last one a checkpoint is written too.

    Every rank must call it. On leaving, what has been begun is whole.

    Raises:
        CheckpointError: The folder cannot be used, or a checkpoint cannot be written.
        RankError: Likewise, on another rank.
    """
    if wanted.checkpoint is None:
        yield None
        return
    last = start
    with Checkpointer(
        trainer.rank,
        trainer.manifest,
        wanted.checkpoint,
        trainer.states,
        run,
        keep=wanted.keep or _KEEP,
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
            if progress.step % (wanted.every or _EVERY) == 0:
                writer.save(progress)

        yield after
        writer.save(last)
