"""A run of training: from its options to the loop, for the command line and for programs."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any, cast

from numpy.typing import NDArray

from onnxpar_format.checkpoint import Progress
from onnxpar_format.manifest import FROM_FILES
from onnxpar_format.option_ranges import check_numbers
from onnxpar_format.options import TrainingRun
from onnxpar_runtime.agree import together
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.folder import step_name
from onnxpar_runtime.checkpoint.restore import open_checkpoint
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import LaunchError, StoppedError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.stop import Stop
from onnxpar_runtime.tensor_file import Entry, read_tensors, write_tensors
from onnxpar_runtime.training.batches import (
    BatchDim,
    EvaluationData,
    TrainingData,
    evaluation_data,
    training_data,
)
from onnxpar_runtime.training.callbacks import Callback
from onnxpar_runtime.training.checkpoints import Writing, check_saving, described, resume, saving
from onnxpar_runtime.training.gradient_norms import check_groups
from onnxpar_runtime.training.hyper import Hyperparameters, hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.log import Reporter, what_is_trained
from onnxpar_runtime.training.loop import fit, total_steps
from onnxpar_runtime.training.metrics import Metrics, chosen_metrics
from onnxpar_runtime.training.programs import (
    EVALUATION,
    OPTIMIZER,
    PAIRED,
    TRAINING,
    hyperparameters_read,
)
from onnxpar_runtime.training.replicas import ReplicaCheck
from onnxpar_runtime.training.results import Fitted
from onnxpar_runtime.training.same_on_ranks import check_same_options
from onnxpar_runtime.training.sources import (
    Samples,
    Source,
    Stream,
    check_samples,
    open_source,
    places,
    shard_of,
    stream_of,
)
from onnxpar_runtime.training.step_trainer import StepTrainer
from onnxpar_runtime.training.tensorboard import TensorBoard

log = logging.getLogger(__name__)
Array = NDArray[Any]
_OF_EVALUATIONS = ("eval_batch_size", "eval_every", "eval_steps", "patience", "metric")


@dataclass(frozen=True)
class PreparedRun:
    """The inputs of a run, checked before anything is computed."""

    data: TrainingData
    evaluation: EvaluationData | None
    hyper: Hyperparameters
    schedule: LearningRateSchedule
    run: dict[str, Any]

    @property
    def runs(self) -> dict[str, Sequence[Mapping[str, int]]]:
        """The programs of the run, and the values of symbols with which they run, if known."""
        evaluated = self.evaluation
        more = {} if evaluated is None else {EVALUATION: evaluated.runs}
        return {TRAINING: self.data.runs, OPTIMIZER: (), **more}


def train_with(
    trainer: StepTrainer,
    wanted: TrainingRun,
    callbacks: Sequence[Callback] = (),
    *,
    data: Iterable[Any] | None = None,
    eval_data: Iterable[Any] | None = None,
) -> Fitted:
    """Trains as the command `train` does, with an existing trainer, which stays open.

    Every rank must call it.

    The seed of the model's random numbers is the trainer's own, and signals are the caller's.

    Args:
        trainer: This rank's trainer.
        wanted: The options.
        callbacks: Are told what happens, on rank 0; those of other ranks are ignored.
        data: Batches, such as a DataLoader of PyTorch, in place of the source that `wanted.data`
            names; see `onnxpar_runtime.training.sources.stream_of`. All ranks must get the same
            batches, and the same ones again in an epoch that is resumed.
        eval_data: Likewise for evaluations, in place of `wanted.eval_data`.

    Raises:
        OnnxparRuntimeError: An option cannot be satisfied; or as `StepTrainer.train_step`.
    """
    if wanted.checkpoints.grace is not None:
        raise LaunchError(
            "--grace: expected the command `train`, which handles signals; here the caller does"
        ).as_agreed()
    prepared, checkpoint = prepare_ranks(trainer.rank, trainer.manifest, wanted, data, eval_data)
    load_from_file(trainer, wanted.parameters)
    return carry_out(trainer, wanted, prepared, checkpoint, callbacks)


def load_from_file(trainer: StepTrainer, parameters: str | Path | None) -> None:
    """Loads parameters from a file, if one is given. Every rank must call it."""
    if parameters is not None:
        trainer.load_parameters(together(trainer.rank, lambda: read_tensors(parameters)))


def prepare_ranks(
    rank: Rank,
    manifest: Manifest,
    wanted: TrainingRun,
    batches: Iterable[Any] | None = None,
    eval_batches: Iterable[Any] | None = None,
) -> tuple[PreparedRun, Checkpoint | None]:
    """Returns the checked inputs of a run, and the checkpoint from which it continues.

    Every rank must call it.

    Args:
        rank: This rank.
        manifest: A directory that was made for training.
        wanted: The options.
        batches: As `data` of `train_with`.
        eval_batches: As `eval_data` of `train_with`.

    Raises:
        OnnxparRuntimeError: An option cannot be satisfied, or differs between ranks.
    """
    check_same_options(rank, wanted)
    prepared = together(rank, lambda: _prepare(manifest, wanted, rank.index, batches, eval_batches))
    return prepared, _checkpoint_of(rank, manifest, wanted)


def _prepare(
    manifest: Manifest,
    wanted: TrainingRun,
    rank: int,
    batches: Iterable[Any] | None,
    eval_batches: Iterable[Any] | None,
) -> PreparedRun:
    """Returns the checked inputs of a run.

    The arguments are those of `prepare_ranks`, with the number of the rank.

    Raises:
        OnnxparRuntimeError: An option cannot be satisfied.
    """
    try:
        check_numbers(wanted)
    except ValueError as error:
        raise LaunchError(str(error)) from None
    check_saving(wanted.checkpoints)
    if wanted.peak_flops is not None and not 0 < wanted.peak_flops < inf:
        raise LaunchError(f"--peak-flops: expected a number > 0, got {wanted.peak_flops:g}")
    training = manifest.trained()
    specs = manifest.program(TRAINING).inputs
    source, held_out = _sources(wanted, manifest, batches, eval_batches)
    data = training_data(
        source,
        specs,
        BatchDim.of(manifest, specs),
        batch=wanted.batch_size,
        accumulate=_micro_batches(manifest, wanted.accumulate),
        seed=wanted.seed,
        own=places(specs, manifest.atoms, rank, training.loss, source),
        shard=shard_of(specs, manifest.atoms, rank, training.loss, source),
    )
    data = replace(data, runs=_checked_runs(manifest, TRAINING, data))
    hyper = hyperparameters(
        training.optimizer, wanted.settings, set(hyperparameters_read(manifest))
    )
    total = total_steps(data, wanted.epochs, wanted.steps)
    evaluated = None if held_out is None else _held_out(manifest, rank, wanted, held_out)
    schedule = LearningRateSchedule(wanted.lr, wanted.schedule, wanted.warmup, total)
    run = described(wanted.data, data, hyper, schedule) | {"validation": wanted.validation}
    return PreparedRun(data, evaluated, hyper, schedule, run)


def _sources(
    wanted: TrainingRun,
    manifest: Manifest,
    batches: Iterable[Any] | None,
    eval_batches: Iterable[Any] | None,
) -> tuple[Source, Source | None]:
    """Returns the sources to train and to evaluate on."""
    elsewhere = wanted.eval_data is not None or eval_batches is not None
    evaluates = wanted.evaluate or elsewhere or wanted.validation is not None
    asked = {name: getattr(wanted, name) for name in _OF_EVALUATIONS}
    for option, value in {**asked, "keep_best": wanted.checkpoints.keep_best}.items():
        if value and not evaluates:
            raise LaunchError(
                f"--{option.replace('_', '-')}: expected --eval, --eval-data or --validation as "
                "well, got none"
            )
    labels = manifest.trained().loss.labels

    def opened_as(program: str, given: Iterable[Any] | None, text: str, *more: str) -> Source:
        specs = manifest.program(program).inputs
        if given is not None:
            kind = "data" if given is batches else "eval_data"
            return stream_of(f"{kind} {type(given).__name__}", given, specs)
        return open_source(text, specs, labels, *more)

    source = opened_as(TRAINING, batches, wanted.data)
    if wanted.validation is not None:
        if wanted.evaluate or elsewhere or isinstance(source, Stream):
            raise LaunchError(
                "--validation: expected samples (npz, parquet or tokens), and neither --eval nor "
                f"--eval-data, got {source.name}"
            )
        return source.validation(wanted.validation, wanted.seed)
    if not evaluates:
        return source, None
    if wanted.eval_data is None:
        given = batches if eval_batches is None else eval_batches
        return source, opened_as(EVALUATION, given, wanted.data, "test")
    found = opened_as(EVALUATION, eval_batches, wanted.eval_data, "test", "--eval-data")
    return source, found


def _micro_batches(manifest: Manifest, wanted: int | None) -> int:
    """Returns the number of micro-batches in a step."""
    if wanted is not None:
        return wanted
    if manifest.pipeline is not None:
        return manifest.pipeline.micro_batches
    return max(manifest.trained().micro_batches, 2 if PAIRED in manifest.programs else 1)


def _checkpoint_of(rank: Rank, manifest: Manifest, wanted: TrainingRun) -> Checkpoint | None:
    """Returns the checkpoint that the run is to continue from."""
    if wanted.resume is None:
        return None
    if wanted.parameters is not None:
        raise LaunchError(
            "--resume and --parameters: use only one, because a checkpoint contains the parameters"
        ).as_agreed()
    return open_checkpoint(rank, manifest, wanted.resume)


def carry_out(
    trainer: StepTrainer,
    wanted: TrainingRun,
    prepared: PreparedRun,
    checkpoint: Checkpoint | None,
    callbacks: Sequence[Callback] = (),
    stop: Stop | None = None,
) -> Fitted:
    """Carries out a prepared run, from a checkpoint if there is one. Every rank must call it."""
    rank = trainer.rank
    together(rank, lambda: check_groups(trainer, wanted.grad_norm))
    together(rank, lambda: trainer.expect(prepared.runs, prepared.data.accumulate))
    start, lines = Progress(), []
    if checkpoint is not None:
        start, lines = checkpoint.progress, resume(trainer, checkpoint, prepared.run)
    with ExitStack() as opened_here:
        board = together(rank, lambda: _tensorboard(rank, wanted))
        if board is not None:
            opened_here.callback(board.close)
            callbacks = (*callbacks, board)
        reporter = opened_here.enter_context(
            together(rank, lambda: _reporter(rank, wanted, start.step, callbacks))
        )
        with saving(
            trainer, wanted.checkpoints, prepared.run, start, reporter.checkpoint
        ) as writing:
            done = _fit(trainer, wanted, prepared, reporter, start, lines, writing, stop)
        if wanted.checkpoints.keep_best and done.best_step:
            assert wanted.checkpoints.checkpoint is not None, "checked: --keep-best needs it"
            best = wanted.checkpoints.checkpoint / step_name(done.best_step)
            reporter.tell(f"the best checkpoint is {best}")
        reporter.end(done)
    if done.stopped is not None:
        folder = wanted.checkpoints.checkpoint
        assert folder is not None, "checked: --grace needs --checkpoint"
        raise StoppedError(
            f"{done.stopped.name}: stopped after step {done.steps}, with a last checkpoint in "
            f"{folder / step_name(done.steps)}; continue with --resume {folder}"
        ).as_agreed()
    return done


def _tensorboard(rank: Rank, wanted: TrainingRun) -> TensorBoard | None:
    if rank.index or wanted.tensorboard is None:
        return None
    return TensorBoard(wanted.tensorboard)


def _fit(
    trainer: StepTrainer,
    wanted: TrainingRun,
    prepared: PreparedRun,
    reporter: Reporter,
    start: Progress,
    lines: Sequence[str],
    writing: Writing,
    stop: Stop | None,
) -> Fitted:
    """Trains, from a start about which `lines` inform, and writes the parameters."""
    for line in what_is_trained(trainer.training):
        reporter.tell(line)
    for notice in _notices(wanted, prepared):
        reporter.tell(f"notice: {notice}")
    for line in lines:
        reporter.tell(line)
    begin = time.perf_counter()
    done = fit(
        trainer,
        prepared.data,
        prepared.hyper,
        prepared.schedule,
        reporter,
        epochs=wanted.epochs,
        steps=wanted.steps,
        evaluation=prepared.evaluation,
        evaluate_every=wanted.eval_every,
        start=start,
        patience=wanted.patience,
        writing=_checked(trainer, wanted.check_replicas, writing),
        log_every=wanted.log_every,
        grad_norms=wanted.grad_norm,
        peak_flops=wanted.peak_flops,
        stop=stop,
    )
    log.info("%d steps in %.3f s", done.steps - start.step, time.perf_counter() - begin)
    if wanted.save is not None and done.stopped is None:
        save(trainer, wanted.save)
        reporter.tell(f"wrote {wanted.save}")
    return done


def _notices(wanted: TrainingRun, prepared: PreparedRun) -> Iterator[str]:
    """Returns notices about the data."""
    held_out, name = prepared.evaluation, prepared.data.source.name
    for plan in (prepared.data.plan, held_out and held_out.plan):
        if plan and plan.notice:
            yield plan.notice
    if held_out is not None and wanted.validation is not None:
        source, training = held_out.source, prepared.data.source
        assert isinstance(source, Samples) and isinstance(training, Samples)
        yield (
            f"{source.count} of {source.count + training.count} samples are held out for "
            f"validation, chosen by --seed {wanted.seed}"
        )
    elif held_out is not None and held_out.source.name == name and not held_out.source.parted:
        yield (
            f"--eval evaluates on the training data: {wanted.data} has no test split; name "
            "other data with --eval-data"
        )


def _checked(trainer: StepTrainer, every: int | None, then: Writing) -> Writing:
    """Returns what to call: after each step a check of replicas, if wanted, then that of `then`."""
    if every is None:
        return then
    check = ReplicaCheck(trainer, every)

    def after_step(progress: Progress) -> None:
        check.after(progress.step)
        if then.after_step is not None:
            then.after_step(progress)

    return replace(then, after_step=after_step)


def _reporter(
    rank: Rank, wanted: TrainingRun, done: int, callbacks: Sequence[Callback]
) -> Reporter:
    return Reporter(
        rank.index == 0,
        log=wanted.log,
        keep=done,
        every=wanted.print_every,
        callbacks=callbacks,
    )


def save(trainer: StepTrainer, path: str | Path) -> None:
    """Writes trained parameters and running statistics, unsharded, one after another.

    Every rank must call it.
    """
    tensors = [states[0].tensor for states in trainer.training.by_tensor.values()]
    tensors = [tensor for tensor in tensors if tensor.kind in FROM_FILES]
    entries = [Entry(t.parameter, t.dtype, t.shape) for t in tensors]
    gathered = (trainer.gather(tensor.name) for tensor in tensors)

    def write() -> None:
        try:
            if trainer.rank.index == 0:
                write_tensors(path, entries, cast(Iterator[Array], gathered))
        finally:
            # After an error too: the other ranks wait until their shards have been taken.
            for _ in gathered:
                pass

    together(trainer.rank, write)


def _held_out(manifest: Manifest, rank: int, wanted: TrainingRun, source: Source) -> EvaluationData:
    """Returns the data for the evaluations of a run."""
    batch = wanted.eval_batch_size
    metrics = chosen_metrics(wanted.metric, manifest)
    found = data_to_evaluate(manifest, rank, source, batch, metrics, wanted.seed, wanted.eval_steps)
    # A stream's function makes batches of the size of the run, unless another is given.
    return found if found.plan or batch else replace(found, batch=wanted.batch_size)


def data_to_evaluate(
    manifest: Manifest,
    rank: int,
    source: Source,
    batch: int | None,
    metrics: Metrics,
    seed: int = 0,
    limit: int | None = None,
) -> EvaluationData:
    """Returns what a rank evaluates on; arguments as `evaluation_data`."""
    program = manifest.program(EVALUATION)
    specs, loss = program.inputs, manifest.trained().loss
    found = evaluation_data(
        source,
        specs,
        BatchDim.of(manifest, specs),
        batch=batch,
        seed=seed,
        own=places(specs, manifest.atoms, rank, loss, source),
        limit=limit,
        metrics=metrics,
        shard=shard_of(specs, manifest.atoms, rank, loss, source),
    )
    return replace(found, runs=_checked_runs(manifest, EVALUATION, found))


def _checked_runs(
    manifest: Manifest, program: str, data: EvaluationData
) -> Sequence[Mapping[str, int]]:
    """Checks samples for a program before the first step, as `check_samples`.

    Otherwise a mistake would only be found at its batch, perhaps after the first epoch.
    """
    if isinstance(data.source, Samples) and data.plan is not None:
        sizes = {*data.plan.full, *data.plan.last}
        return check_samples(manifest, manifest.program(program), data.source, sizes)
    return ()
