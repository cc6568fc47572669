"""The loop over epochs and steps, and the evaluation."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isnan

from onnxpar_format.checkpoint import Progress
from onnxpar_runtime.agree import agree
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import (
    InputError,
    LaunchError,
    OnnxparRuntimeError,
    SymbolValueError,
    TrainingError,
)
from onnxpar_runtime.training.batches import Ahead, EvaluationData, Step, TrainingData
from onnxpar_runtime.training.hyper import Hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.log import Reporter, StepRecord
from onnxpar_runtime.training.sources import Stream
from onnxpar_runtime.training.trainer import Trainer

Numbered = tuple[int, int, Step]
"""A step with its epoch and its number in the epoch, both from 1."""

_BEGINNING = Progress()


@dataclass(frozen=True)
class Fitted:
    """How a run ended.

    Attributes:
        epochs: Epochs that were begun.
        steps: Steps of all of them, with those before the run was resumed.
        loss: Loss of the last step that was read.
    """

    epochs: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Evaluated:
    """What an evaluation found.

    Attributes:
        loss: Mean over everything that counts.
        samples: Number of samples.
        correct: Number of labels that the model's largest output hits; None without classes.
        labels: Number of labels that count.
    """

    loss: float
    samples: int
    correct: int | None
    labels: int

    @property
    def accuracy(self) -> float | None:
        """Share of the labels that were hit, None where there are no classes or no labels."""
        return None if self.correct is None or not self.labels else self.correct / self.labels

    @property
    def text(self) -> str:
        """The result for people."""
        line = f"loss is {self.loss:.7g}"
        if self.accuracy is not None:
            line += f", accuracy is {self.accuracy:.2%} ({self.correct} of {self.labels})"
        return line


def total_steps(data: TrainingData, epochs: int | None, steps: int | None) -> int | None:
    """Returns how many steps a run has, None where a stream decides.

    Args:
        data: What it trains on.
        epochs: Epochs; by default one, or as many as `steps` takes.
        steps: Steps of all epochs together after which it ends.

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
    whole = epochs * data.steps_per_epoch
    return whole if steps is None else min(steps, whole)


def fit(
    trainer: Trainer,
    data: TrainingData,
    hyper: Hyperparameters,
    schedule: LearningRateSchedule,
    reporter: Reporter,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    evaluation: EvaluationData | None = None,
    start: Progress = _BEGINNING,
    after_step: Callable[[Progress], None] | None = None,
    log_every: int = 1,
) -> Fitted:
    """Trains. Every rank of the world must call it, with the same arguments.

    Args:
        trainer: Runs the steps.
        data: What to train on.
        hyper: The optimizer's scalars.
        schedule: The learning rate.
        reporter: Whom to tell.
        epochs: As `total_steps`.
        steps: As `total_steps`.
        evaluation: What to evaluate on after each epoch, and after the last step.
        start: How far the run has come already.
        after_step: Is called after each step, with how far the run has come then.
        log_every: Of every so many steps the loss is read, checked and told of; and of the last.

    Raises:
        InputError: The data ends before the first step, or not on all ranks in the same step.
        OnnxparRuntimeError: As `Trainer.train_step`.
    """
    limit = total_steps(data, epochs, steps)
    if epochs is None and steps is None:
        epochs = 1
    reporter.begin(limit, start.step)
    done, last, skipped = start.step, start.epoch, start.skipped
    loss = float("nan") if start.loss is None else start.loss
    together = data.source.name if isinstance(data.source, Stream) else None
    with Ahead(_numbered(trainer, data, epochs, limit, start)) as items:
        begin, samples, reported = time.perf_counter(), 0, done
        while (item := _next(items, trainer.rank, together)) is not None:
            epoch, number, step = item
            if evaluation is not None and epoch != last and last:
                _report_evaluation(trainer, evaluation, reporter, last)
                begin, samples = time.perf_counter(), 0
            done, last = done + 1, epoch
            rate = schedule.at(done)
            try:
                # A step that changed nothing is none to the averages of the optimizer.
                read = done % log_every == 0 or done == limit
                scalars = hyper.at(done - skipped, rate)
                outcome = trainer.train_step(step.micro_batches, scalars, read=read)
            except TrainingError as error:
                failed = TrainingError(f"epoch {epoch}, {error}")
                failed.agreed = error.agreed
                raise failed from None
            samples += step.samples
            skipped += outcome.skipped
            if outcome.skipped:
                reporter.tell(
                    f"epoch: {epoch} step: {number}: gradients overflowed; the step is skipped "
                    "and the loss scale is halved"
                )
            if read:
                loss, end = outcome.loss, time.perf_counter()
                record = StepRecord(
                    epoch, number, loss, rate, samples / (end - begin), outcome.grad_norm
                )
                reporter.step(record, done - reported)
                begin, samples, reported = end, 0, done
            if after_step is not None:
                # JSON has no number for a loss that nobody has read yet.
                known = None if isnan(loss) else loss
                after_step(Progress(done, epoch, number, data.seed, known, rate))
    if evaluation is not None:
        _report_evaluation(trainer, evaluation, reporter, last)
    return Fitted(last, done, loss)


def _numbered(
    trainer: Trainer,
    data: TrainingData,
    epochs: int | None,
    limit: int | None,
    start: Progress,
) -> Iterator[Numbered]:
    """Returns the steps of the run that are left, cut for this rank."""
    done, epoch, skip = start.step, max(start.epoch - 1, 0), start.epoch_step
    while (epochs is None or epoch < epochs) and (limit is None or done < limit):
        epoch += 1
        before = done - skip
        for number, step in enumerate(data.epoch(epoch, skip), skip + 1):
            cut = tuple(trainer.prepare(batch) for batch in step.micro_batches)
            yield epoch, number, Step(cut, step.samples)
            done += 1
            if done == limit:
                return
        skip = 0
        if done == before:
            raise InputError(f"{data.source.name}: epoch {epoch} has no batches")


def _next(items: Iterator[Numbered], rank: Rank, together: str | None) -> Numbered | None:
    """Returns the next step, None after the last.

    Args:
        items: The steps.
        rank: This rank.
        together: Name of the stream of which the ranks must agree that there is one, since the
            user's own function says so on each rank by itself; the others would wait for a rank
            that has ended. None where nothing has to be agreed on.
    """
    if together is None:
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
        ended = InputError(f"{together}: some ranks ran out of batches before others")
        raise ended.as_agreed() from None
    return item


def evaluate(trainer: Trainer, data: EvaluationData) -> Evaluated:
    """Returns loss and accuracy over all of the data. Every rank of the world must call it.

    The mean is over what counts in the loss (labels that are not ignored), not over batches.

    Raises:
        InputError: There is no data, or it does not end on all ranks in the same batch.
        OnnxparRuntimeError: As `Trainer.evaluate`.
    """
    weighted, samples, labels = 0.0, 0, 0
    correct: int | None = None
    together = data.source.name if isinstance(data.source, Stream) else None
    numbered = ((1, number, step) for number, step in enumerate(data.steps(), 1))
    with Ahead(numbered) as items:
        while (item := _next(items, trainer.rank, together)) is not None:
            step = item[2]
            (batch,) = step.micro_batches
            result = trainer.evaluate(batch)
            count = result["count"]
            # A batch of ignored labels has no mean.
            weighted += result["loss"] * count if count else 0.0
            labels += count
            samples += step.samples
            if result["correct"] is not None:
                correct = (correct or 0) + result["correct"]
    if not samples:
        raise InputError(f"{data.source.name}: expected data to evaluate on, got none")
    return Evaluated(weighted / labels if labels else float("nan"), samples, correct, labels)


def _report_evaluation(
    trainer: Trainer, data: EvaluationData, reporter: Reporter, epoch: int
) -> None:
    result = evaluate(trainer, data)
    reporter.tell(f"epoch: {epoch} evaluated on {result.samples} samples: {result.text}")
