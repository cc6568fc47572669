"""The loop over epochs and steps, and the evaluation."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isnan
from typing import Any

import numpy as np

from onnxpar_format.checkpoint import Progress
from onnxpar_format.trace import INPUT, STEP
from onnxpar_runtime.agree import agree, together
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.devices import Device
from onnxpar_runtime.errors import (
    InputError,
    LaunchError,
    OnnxparRuntimeError,
    SymbolValueError,
    TrainingError,
)
from onnxpar_runtime.stop import Stop
from onnxpar_runtime.training.batches import Ahead, EvaluationData, Step, TrainingData
from onnxpar_runtime.training.checkpoints import Writing
from onnxpar_runtime.training.counts import Prepared
from onnxpar_runtime.training.gradient_norms import gradient_norms
from onnxpar_runtime.training.hyper import Hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.log import Reporter
from onnxpar_runtime.training.metrics import Sums
from onnxpar_runtime.training.pace import Pace
from onnxpar_runtime.training.results import Evaluated, Fitted
from onnxpar_runtime.training.same_on_ranks import check_same_batch
from onnxpar_runtime.training.sources import Batch, Shard, Stream
from onnxpar_runtime.training.step_trainer import StepTrainer

Numbered = tuple[int, int, Step]
"""A step with its epoch and its number in the epoch, both from 1."""

_BEGINNING = Progress()


def total_steps(data: TrainingData, epochs: int | None, steps: int | None) -> int | None:
    """Returns the number of steps of a run; None if a stream decides.

    Args:
        data: The training data.
        epochs: Number of epochs; by default one, or as many as `steps` needs.
        steps: Number of steps over all epochs after which the run ends.

    Raises:
        LaunchError: A number that is not positive.
    """
    for option, number in (("--epochs", epochs), ("--steps", steps)):
        if number is not None and number < 1:
            raise LaunchError(f"{option}: expected a number >= 1, got {number}")
    if data.steps_per_epoch is None:
        return steps
    if epochs is None:
        return data.steps_per_epoch if steps is None else steps
    total = epochs * data.steps_per_epoch
    return total if steps is None else min(steps, total)


def fit(
    trainer: StepTrainer,
    data: TrainingData,
    hyper: Hyperparameters,
    schedule: LearningRateSchedule,
    reporter: Reporter,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    evaluation: EvaluationData | None = None,
    evaluate_every: int | None = None,
    patience: int | None = None,
    start: Progress = _BEGINNING,
    writing: Writing | None = None,
    log_every: int = 1,
    grad_norms: Sequence[str] = (),
    peak_flops: float | None = None,
    stop: Stop | None = None,
) -> Fitted:
    """Trains. Every rank of the world must call it, with the same arguments.

    Args:
        trainer: Runs the steps.
        data: The training data.
        hyper: The optimizer's scalars.
        schedule: The learning rate.
        reporter: Prints and logs the steps.
        epochs: As `total_steps`.
        steps: As `total_steps`.
        evaluation: Data for an evaluation after each epoch, and after the last step.
        evaluate_every: Evaluates after each step that this divides, not after each epoch.
        patience: Ends the run when so many evaluations have no smaller loss than the best.
        start: The progress of the run so far.
        writing: Is told of steps and of the best evaluation.
        log_every: The loss of each step that this divides, and of the last step, is read, checked
            and reported.
        grad_norms: Groups of parameters whose gradients' norms are reported, see `gradient_norms`.
        peak_flops: The most operations per second of a device, for the utilisation in the reports.
        stop: Ends the run after a step in which a rank was asked to stop.

    Raises:
        InputError: The data ends before the first step, or not on all ranks in the same step.
        OnnxparRuntimeError: As `StepTrainer.train_step`.
    """
    limit = total_steps(data, epochs, steps)
    if epochs is None and steps is None:
        epochs = 1
    reporter.begin(limit, start.step)
    done, last, skipped, progress = start.step, start.epoch, start.skipped, start
    writing = writing or Writing()
    loss = float("nan") if start.loss is None else start.loss
    stream = data.source.name if isinstance(data.source, Stream) else None
    timeline = trainer.rank.timeline

    def evaluated(data: EvaluationData, where: str = "") -> Progress:
        """Evaluates; returns the progress with the best loss."""
        result = evaluate(trainer, data)
        reporter.evaluated(last, result, where)
        after = progress.evaluated(result.loss)
        if not after.worse and writing.after_best is not None:
            writing.after_best()
        return after

    with Ahead(_numbered(trainer, data, epochs, limit, start)) as items:
        left = None if limit is None else limit - done
        on_host = trainer.device is Device.CPU
        pace = Pace(timeline, on_host, trainer.manifest.devices, peak_flops, left)
        began = time.monotonic_ns()
        while (item := _next(items, trainer.rank, stream)) is not None:
            epoch, number, step = item
            if data.shard is not None:
                _check_parts(trainer.rank, data.shard, step, f"{data.source.name}: step {number}")
            if step.digest is not None:
                check_same_batch(trainer.rank, step.digest, f"{data.source.name}: step {number}")
            timeline.add(INPUT, "next batch", began)
            pace.waited(began)
            due = epoch != last if evaluate_every is None else done % evaluate_every == 0
            if evaluation is not None and due and last:
                where = "" if evaluate_every is None else f"after {done} steps, "
                progress = evaluated(evaluation, where)
                if patience is not None and progress.worse >= patience:
                    reporter.tell(
                        f"stopped after step {done}: the best loss is {progress.best_loss:.7g}, "
                        f"after step {progress.best_step}; {progress.worse} evaluations since then"
                    )
                    return Fitted(last, done, loss, progress.best_step)
                pace.restart()
                began = time.monotonic_ns()
            done, last = done + 1, epoch
            rate = schedule.at(done)
            try:
                read = done % log_every == 0 or done == limit
                # The optimizer's averages do not count steps that changed nothing.
                scalars = hyper.at(start.earlier + done - skipped, rate)
                outcome = trainer.train_step(step.micro_batches, scalars, read=read)
            except TrainingError as error:
                failed = TrainingError(f"epoch {epoch}, {error}")
                failed.agreed = error.agreed
                raise failed from None
            pace.add(outcome, step.samples)
            skipped += outcome.skipped
            if outcome.skipped:
                reporter.tell(
                    f"epoch: {epoch} step: {number}: gradients overflowed; the step is skipped "
                    "and the loss scale is halved"
                )
            if read:
                loss = outcome.loss
                norms = gradient_norms(trainer, grad_norms) if grad_norms else {}
                reporter.step(pace.record(epoch, number, done, outcome, rate, norms))
            # JSON has no number for a loss that has not been read yet.
            known = None if isnan(loss) else loss
            progress = replace(
                progress, step=done, epoch=epoch, epoch_step=number, seed=data.seed, loss=known,
                lr=rate,
            )  # fmt: skip
            if writing.after_step is not None:
                writing.after_step(progress)
            timeline.add(STEP, f"step {done}", began)
            if stop is not None and done != limit and (asked := stop.agreed(trainer.rank)):
                return Fitted(last, done, loss, progress.best_step, asked)
            began = time.monotonic_ns()
    if evaluation is not None:
        progress = evaluated(evaluation)
    return Fitted(last, done, loss, progress.best_step)


def _numbered(
    trainer: StepTrainer,
    data: TrainingData,
    epochs: int | None,
    limit: int | None,
    start: Progress,
) -> Iterator[Numbered]:
    """Returns the remaining steps of the run, sharded for this rank."""
    done, epoch, skip = start.step, max(start.epoch - 1, 0), start.epoch_step
    while (epochs is None or epoch < epochs) and (limit is None or done < limit):
        epoch += 1
        before = done - skip
        for number, step in enumerate(data.epoch(epoch, skip), skip + 1):
            with trainer.rank.timeline.span(INPUT, "shard the next batch"):
                prepared = tuple(trainer.prepare(batch) for batch in step.micro_batches)
            if data.shard is not None:
                prepared = tuple(_of_parts(micro, data.shard, step.samples) for micro in prepared)
            yield epoch, number, Step(prepared, step.samples, step.digest)
            done += 1
            if done == limit:
                return
        skip = 0
        if done == before:
            raise InputError(f"{data.source.name}: epoch {epoch} has no batches")


def _of_parts(micro: Prepared, shard: Shard, samples: int) -> Prepared:
    """Returns a micro-batch whose error also says of which sizes this rank made a part."""
    if micro.error is None:
        return micro
    text = f"{micro.error}; {shard.explained(samples)}"
    return replace(micro, error=type(micro.error)(text))


def _next(items: Iterator[Numbered], rank: Rank, stream: str | None) -> Numbered | None:
    """Returns the next step, None after the last.

    Args:
        items: The steps.
        rank: This rank.
        stream: Name of the stream. The user's function ends it on each rank separately, so the
            ranks must agree that there is a next step; otherwise some would wait for a rank that
            has ended. None for samples, which end on all ranks together.
    """
    if stream is None:
        return next(items, None)
    error: OnnxparRuntimeError | None = None
    item = None
    try:
        item = next(items, None)
    except OnnxparRuntimeError as caught:
        error = caught
    try:
        agree(rank, error, {"more": int(item is not None)}, ("more",))
    except SymbolValueError as differs:
        if differs is error:
            raise
        ended = InputError(f"{stream}: some ranks ran out of batches before others")
        raise ended.as_agreed() from None
    return item


def _check_parts(rank: Rank, shard: Shard, step: Step, where: str) -> None:
    """Raises InputError on all ranks unless all data ranks have made as many rows."""
    own = np.array([step.samples, -step.samples], np.int64)
    most, least = (abs(int(n)) // shard.count for n in rank.all_reduce(own, op="max"))
    if most != least:
        raise InputError(
            f"{where}: expected as many rows from each of {shard.count} data ranks, got from "
            f"{least} to {most}"
        ).as_agreed()


def evaluate(trainer: StepTrainer, data: EvaluationData) -> Evaluated:
    """Returns loss, accuracy and metrics over all of the data. Every rank must call it.

    The mean is over the labels that count (those that are not ignored), not over batches.

    Raises:
        InputError: There is no data, or it does not end on all ranks in the same batch.
        OnnxparRuntimeError: As `StepTrainer.evaluate`; or a metric of the user's failed.
    """
    weighted, samples, labels = 0.0, 0, 0
    correct: int | None = None
    stream = data.source.name if isinstance(data.source, Stream) else None
    rank, metrics = trainer.rank, data.metrics
    # Only rank 0 has the outputs.
    sums = together(rank, lambda: metrics.begin() if rank.index == 0 else None)
    numbered = ((1, number, step) for number, step in enumerate(data.steps(), 1))
    with Ahead(numbered) as items:
        while (item := _next(items, rank, stream)) is not None:
            _, number, step = item
            if step.digest is not None:
                check_same_batch(rank, step.digest, f"{data.source.name}: batch {number}")
            (batch,) = step.micro_batches
            result = trainer.evaluate(batch, outputs=bool(metrics.of_outputs))
            if metrics.of_outputs:
                together(rank, partial(_add, sums, result["outputs"], batch))
            count = result["count"]
            # A batch whose labels are all ignored has no mean.
            weighted += result["loss"] * count if count else 0.0
            labels += count
            samples += step.samples
            if result["correct"] is not None:
                correct = (correct or 0) + result["correct"]
    if not samples:
        raise InputError(f"{data.source.name}: expected data to evaluate on, got none")
    loss = weighted / labels if labels else float("nan")
    results = together(rank, lambda: {} if sums is None else sums.results(loss))
    return Evaluated(loss, samples, correct, labels, results)


def _add(sums: Sums | None, outputs: Mapping[str, Any] | None, batch: Batch) -> None:
    """Adds a batch to the metrics on rank 0, which has the outputs."""
    if sums is not None and outputs is not None:
        sums.update(outputs, batch)
