"""Resuming a training run from a checkpoint, and writing checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from onnxpar_format.checkpoint import Progress
from onnxpar_format.options import Saving
from onnxpar_runtime.agree import together
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.folder import step_name
from onnxpar_runtime.checkpoint.restore import check_run, load_states, open_checkpoint
from onnxpar_runtime.checkpoint.writer import Checkpointer
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.training.batches import TrainingData
from onnxpar_runtime.training.hyper import Hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.step_trainer import StepTrainer

AfterStep = Callable[[Progress], None]
"""Is called after each step, with the progress of the run."""


@dataclass(frozen=True)
class Writing:
    """What a run calls to write checkpoints.

    Attributes:
        after_step: Is called after each step.
        after_best: Is called after the evaluation with the smallest loss so far.
    """

    after_step: AfterStep | None = None
    after_best: Callable[[], None] | None = None


_EVERY, _KEEP = 100, 2


def check_saving(wanted: Saving) -> None:
    """Raises LaunchError for a number that is not positive, or one without a folder to write to."""
    if wanted.keep_best and wanted.checkpoint is None:
        raise LaunchError("--keep-best: expected --checkpoint FOLDER as well, got none")
    numbers = (("every", wanted.every), ("keep", wanted.keep), ("grace", wanted.grace))
    for name, number in numbers:
        if number is not None and wanted.checkpoint is None:
            raise LaunchError(f"--{name}: expected --checkpoint FOLDER as well, got none")
        if number is not None and not 1 <= number < inf:
            raise LaunchError(f"--{name}: expected a number >= 1, got {number:g}")


def described(
    name: str, data: TrainingData, hyper: Hyperparameters, schedule: LearningRateSchedule
) -> dict[str, Any]:
    """Returns the options of a run as a checkpoint stores them.

    Args:
        name: The text of `--data`.
        data: The data that it names.
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
        # A constant rate does not depend on the length of the run.
        "total_steps": None if schedule.kind == "constant" else schedule.total,
        **{k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()},
    }


def save_checkpoint(
    trainer: StepTrainer, folder: str | Path, progress: Progress | None = None, *, keep: int = _KEEP
) -> Path:
    """Writes a checkpoint in a loop of one's own, and waits for it. Every rank must call it.

    Args:
        trainer: This rank's trainer.
        folder: The folder of checkpoints, the same for all ranks.
        progress: The position in the data and more; step, seed and loss scale are the trainer's.
        keep: Number of complete checkpoints to keep.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: It cannot be written, or the folder has one of this step or a later one.
        RankError: Likewise, on another rank.
    """
    done, seed = trainer.steps, int(trainer.counters["seed"])
    given = replace(progress or Progress(), step=done, seed=seed)
    with Checkpointer(
        trainer.rank, trainer.manifest, folder, trainer.states, {}, keep=keep, begun=done - 1
    ) as writer:
        writer.save(_with_scale(trainer, given))
    return Path(folder) / step_name(done)


def load_checkpoint(trainer: StepTrainer, checkpoint: str | Path | Checkpoint) -> Progress:
    """Brings a trainer to the state in which a checkpoint was written. Every rank must call it.

    Args:
        trainer: This rank's trainer.
        checkpoint: The checkpoint, or a folder whose last complete one is taken; or one that
            `open_checkpoint` returned.

    Returns:
        How far the run had come.

    Raises:
        CheckpointError: There is none, it is incomplete, or it does not fit the directory.
        RankError: Likewise, on another rank.
    """
    rank, manifest = trainer.rank, trainer.manifest
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(rank, manifest, checkpoint)
    load_states(rank, manifest, checkpoint, trainer.states.set)
    progress = checkpoint.progress
    trainer.counters |= {"step": progress.step, "micro_batch": 0}
    trainer.loss_scale.resume(progress.loss_scale, progress.good, progress.skipped)
    return progress


def _with_scale(trainer: StepTrainer, progress: Progress) -> Progress:
    scale = trainer.loss_scale
    return replace(progress, loss_scale=scale.scale, good=scale.good, skipped=scale.skipped)


def resume(trainer: StepTrainer, checkpoint: Checkpoint, run: dict[str, Any]) -> list[str]:
    """Loads a checkpoint into a trainer, whose run has these options. Every rank must call it.

    Returns:
        Lines for people: the progress of the run, and the options that differ from before.

    Raises:
        CheckpointError: The run would take other samples, or a file cannot be read.
        RankError: Likewise, on another rank.
    """
    notices = together(trainer.rank, lambda: check_run(checkpoint, run))
    progress = load_checkpoint(trainer, checkpoint)
    if progress.step or not progress.earlier:
        where = f"epoch {progress.epoch}, step {progress.epoch_step}"
        done = f"resumed from {checkpoint.directory}: {progress.step} steps are done, {where}"
    else:
        done = f"begun with {checkpoint.directory}: the optimizer has done {progress.earlier} steps"
    return [done, *notices]


@contextmanager
def saving(
    trainer: StepTrainer,
    wanted: Saving,
    run: dict[str, Any],
    start: Progress,
    begun: Callable[[int, Path], None],
) -> Iterator[Writing]:
    """Yields functions to call. At the end of the block, a checkpoint is written.

    Every rank must call it. At the end, every checkpoint that was begun is complete.

    Args:
        trainer: This rank's trainer.
        wanted: The options.
        run: The options of the run, as `described`.
        start: The progress of the run so far.
        begun: Is called when a checkpoint is begun, with the step and the folder.

    Raises:
        CheckpointError: The folder cannot be used, or a checkpoint cannot be written.
        RankError: Likewise, on another rank.
    """
    if wanted.checkpoint is None:
        yield Writing()
        return
    last, root = start, Path(wanted.checkpoint)
    with Checkpointer(
        trainer.rank,
        trainer.manifest,
        wanted.checkpoint,
        trainer.states,
        run,
        keep=wanted.keep or _KEEP,
        begun=start.step,
    ) as writer:
        if wanted.keep_best and start.best_loss is not None:
            writer.best = start.best_step

        def save(progress: Progress) -> None:
            if writer.save(progress):
                begun(progress.step, root / step_name(progress.step))

        def after(progress: Progress) -> None:
            nonlocal last
            progress = _with_scale(trainer, progress)
            last = progress
            writer.check()
            if progress.step % (wanted.every or _EVERY) == 0:
                save(progress)

        def best() -> None:
            writer.best = last.step
            save(last)

        yield Writing(after, best if wanted.keep_best else None)
        save(last)
