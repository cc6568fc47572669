"""onnxpar's side of tools/bench/step.py: one rank, under mpirun where there are several."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from started_script import expect_driver
from step_cases import MICRO_BATCHES, WEIGHT_DECAY, Batch, Job, Spent, micro_batches, serve

from onnxpar_format.options import Settings
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.options import parse_pairs
from onnxpar_runtime.tracing.recording import Recording, write_trace
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.programs import EVALUATION, TRAINING
from onnxpar_runtime.training.runner import OneStage
from onnxpar_runtime.training.trainer import Trainer


def timed(spent: Spent, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that notes what it takes."""

    @wraps(method)
    def call(*positional: Any, **named: Any) -> Any:
        with spent.on(part):
            return method(*positional, **named)

    return call


@contextmanager
def stepper(job: Job, rank: Rank) -> Iterator[Callable[[int, Batch], float]]:
    """What does a step, and gives its loss."""
    options = {"intra_op_num_threads": str(job.threads), **parse_pairs(job.options)}
    settings = Settings(weight_decay=WEIGHT_DECAY[job.optimizer])
    hyper = hyperparameters(job.optimizer, settings)
    recording = Recording(rank, operators=True) if job.profile else None

    def parts(batch: Batch) -> list[Batch]:
        return micro_batches(batch, MICRO_BATCHES) if job.way == "pp" else [batch]

    with Trainer(job.files, rank=rank, ort_options=options, overlap=job.overlap) as trainer:
        sizes = trainer.prepare(parts(job.case.batches()[0])[0]).feeds.values
        # As the command `train` does, which knows the sizes of its samples.
        trainer.expect({EVALUATION if job.way == "forward" else TRAINING: [sizes]})

        def step(number: int, batch: Batch) -> float:
            if job.way == "forward":
                return trainer.evaluate(batch)["loss"]
            return trainer.train_step(parts(batch), hyper.at(number, job.rate)).loss

        yield step
        if recording is not None:
            trace = recording.finish("train", trainer.manifest.stage_devices)
            write_trace(rank, Path(job.scratch) / "trace.json", trace)


def main(text: str) -> int:
    """Serves a job; returns the exit code."""
    job = Job.read(text)
    transport = job.transport if job.ranks > 1 else "threads"
    rank = init(transport, job.device)

    def body() -> int:
        spent = Spent()
        for part in ("forward_backward", "update"):
            setattr(OneStage, part, timed(spent, part, getattr(OneStage, part)))
        with stepper(job, rank) as step:
            serve(job, rank.index, step, spent, rank.settle if job.link else None)
        return 0

    return guarded(rank, body)


if __name__ == "__main__":
    expect_driver("tools/bench/step.py")
    sys.exit(main(sys.argv[1]))
