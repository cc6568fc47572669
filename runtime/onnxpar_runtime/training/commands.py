"""`train` and `eval`, as the command line and `mpirun python` scripts start them."""

import json
import logging
import sys
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from onnxpar_format.options import EvaluationRun, Execution, TrainingRun
from onnxpar_runtime.agree import together
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.commands import begin, opened, start, traced
from onnxpar_runtime.errors import TrainingError
from onnxpar_runtime.interrupts import reporting_termination
from onnxpar_runtime.launch import guarded
from onnxpar_runtime.stop import Stop
from onnxpar_runtime.training.batches import EvaluationData
from onnxpar_runtime.training.loop import evaluate
from onnxpar_runtime.training.metrics import chosen_metrics
from onnxpar_runtime.training.programs import EVALUATION
from onnxpar_runtime.training.results import Evaluated
from onnxpar_runtime.training.run import (
    carry_out,
    data_to_evaluate,
    load_from_file,
    prepare_ranks,
)
from onnxpar_runtime.training.sources import open_source
from onnxpar_runtime.training.step_trainer import StepTrainer

log = logging.getLogger(__name__)
Array = NDArray[Any]
INTERRUPTED = 130


def train(directory: str | Path, wanted: TrainingRun, how: Execution) -> int:
    """Trains; the body of one rank.

    Rank 0 prints how much of the model is trained and a line for each step, and writes files.

    Args:
        directory: A directory that was made for training.
        wanted: The options.
        how: How to run.

    Returns:
        The exit code. Errors have been printed, except the interrupt (130) of a single rank.
    """
    grace = wanted.checkpoints.grace
    stop = None if grace is None else Stop(grace)

    def body(rank: Rank) -> None:
        manifest = begin(rank, "train", directory, how, wanted.save)
        prepared, checkpoint = prepare_ranks(rank, manifest, wanted)
        with traced(rank, "train", manifest, how) as trace:
            trainer = opened(
                StepTrainer,
                rank,
                manifest,
                how,
                programs=(),
                seed=wanted.seed,
                loss_scale=wanted.loss_scale,
                overlap=not wanted.no_overlap,
                debug_nan=wanted.debug_nan,
            )
            load_from_file(trainer, wanted.parameters)
            carry_out(trainer, wanted, prepared, checkpoint, stop=stop)
            trace.even = trainer.even_bubble()
        trainer.close()

    return _on_rank(how, body, stop)


def evaluation(directory: str | Path, wanted: EvaluationRun, how: Execution) -> int:
    """Evaluates on the test part of a source; the body of one rank. Rank 0 prints the result.

    As JSON it is an object with data, samples, loss, accuracy, correct, labels, metrics and notice.
    Numbers that are not finite, for example because no label counts, are null. Arguments and exit
    code are as in `train`.
    """

    def body(rank: Rank) -> None:
        manifest = begin(rank, "eval", directory, how)

        def prepare() -> EvaluationData:
            labels, specs = manifest.trained().loss.labels, manifest.program(EVALUATION).inputs
            source = open_source(wanted.data, specs, labels, "test")
            metrics = chosen_metrics(wanted.metric, manifest)
            return data_to_evaluate(manifest, rank.index, source, wanted.batch_size, metrics)

        chosen = together(rank, prepare)
        with traced(rank, "eval", manifest, how):
            trainer = opened(
                StepTrainer, rank, manifest, how, programs=(), debug_nan=wanted.debug_nan
            )
            together(rank, lambda: trainer.expect({EVALUATION: chosen.runs}))
            load_from_file(trainer, wanted.parameters)
            result = evaluate(trainer, chosen)
        if rank.index == 0:
            _print_evaluation(wanted, chosen, result)
        trainer.close()
        if result.labels and not isfinite(result.loss):
            raise TrainingError(
                f"the loss is {result.loss:g}: expected a finite one; --debug-nan names the node "
                "where it begins"
            ).as_agreed()

    return _on_rank(how, body)


def _on_rank(how: Execution, body: Callable[[Rank], None], stop: Stop | None = None) -> int:
    """Runs `body` on this process's rank; returns the exit code.

    The interrupt of a single rank is not reported.
    """
    rank = start(how)

    def quiet() -> int:
        try:
            with reporting_termination(rank, stop):
                body(rank)
        except KeyboardInterrupt:
            if rank.world.size > 1:
                raise
            return INTERRUPTED
        finally:
            if stop is not None:
                stop.close()
        return 0

    return guarded(rank, quiet)


def _print_evaluation(wanted: EvaluationRun, chosen: EvaluationData, result: Evaluated) -> None:
    notice = chosen.plan.notice if chosen.plan is not None else ""
    if wanted.as_json:
        report = {
            "data": wanted.data,
            "samples": result.samples,
            "loss": result.loss if isfinite(result.loss) else None,  # JSON has no NaN
            "accuracy": result.accuracy,
            "correct": result.correct,
            "labels": result.labels,
            "metrics": {n: x if isfinite(x) else None for n, x in result.metrics.items()},
            "notice": notice,
        }
        text = json.dumps(report, indent=2)
    else:
        text = f"notice: {notice}\n" if notice else ""
        text += f"{wanted.data}: {result.samples} samples: {result.text}"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
