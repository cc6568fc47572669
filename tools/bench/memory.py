#!/usr/bin/env python
"""Compares the predicted memory of a rank with the measured one: bytes alive at the same time.

    tools/bench/memory.py MODEL.onnx --strategy dp=2 --strategy tp=2 --symbol batch=8
    tools/bench/memory.py MODEL.onnx --strategy dp=2,tp=2 --loss softmax_cross_entropy --check

For each strategy the model is sharded and all ranks run in this process, one thread each, with
inputs of random numbers: the forward program, or with --loss two training steps. Columns: what
`onnxpar plan` predicts from the plan alone, what follows from the rank's program node by node, and
what the fullest rank held, by `peak_bytes` of its session or trainer. With --check the exit code is
1 if the plan's prediction differs by more than 15 %.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from onnxpar.api.plan_strategy import read_workload
from onnxpar.api.shard_model import Summary, shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.partition.program_memory import program_memory, total_bytes
from onnxpar.search.workload import Workload
from onnxpar.strategy import load_strategy, resolve
from onnxpar.strategy.machine_file import load_machine
from onnxpar_format.entries import ProgramEntry
from onnxpar_format.options import Settings
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.session import Session
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.programs import OPTIMIZER, TRAINING
from onnxpar_runtime.training.sources import Batch
from onnxpar_runtime.training.trainer import Trainer
from onnxpar_runtime.verify.random_feeds import random_feeds

WITHIN = 0.15
STEPS = 2
"""The second has the outputs of the first beside it, as all later ones have."""


@dataclass(frozen=True)
class Row:
    """One strategy.

    Attributes:
        strategy: The strategy.
        planned: Bytes of a device, from the plan.
        program: Bytes of a device, from the programs that were made of it.
        measured: Bytes of each rank.
    """

    strategy: str
    planned: int
    program: int
    measured: tuple[int, ...]

    @property
    def error(self) -> float:
        """How far the plan's prediction is off, as a share of the fullest rank's bytes."""
        return self.planned / max(self.measured) - 1


def row(
    model: Path,
    workload: Workload,
    strategy: str,
    training: TrainingSpec | None,
    sizes: Mapping[str, int],
) -> Row:
    """Shards, predicts and measures."""
    chosen = load_strategy(strategy, None)
    seeds = resolve(chosen, workload.program)
    price = workload.price(workload.plan(seeds), load_machine("cpu"), sizes)
    with TemporaryDirectory() as folder:
        summary = shard_model(model, chosen, Path(folder) / "out", training=training)
        measured = measure(summary.out, training is not None, sizes)
    run = [program_memory(p, sizes) for p in _programs(summary)]
    return Row(strategy, price.peak, total_bytes(run), measured)


def _programs(summary: Summary) -> list[PartitionedModel]:
    if summary.training is None:
        return [summary.partitioned]
    return [p for p in summary.training.programs if p.program in (TRAINING, OPTIMIZER)]


def measure(directory: Path, trains: bool, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the most bytes that each rank of a directory held at once."""
    rng = np.random.default_rng(0)
    if not trains:
        with Ranks(directory, Session, measured=True) as group:
            inputs = group.manifest.program("model")
            feeds = random_feeds(inputs, sizes, dict.fromkeys(_names(inputs), 1), rng)
            for _ in range(STEPS):
                group.on_each(lambda member: member.run_global(feeds))
            return tuple(m.peak_bytes() for m in group.members)
    programs = (TRAINING, OPTIMIZER)
    with Ranks(directory, Trainer, programs=programs, measured=True) as trainers:
        inputs = trainers.manifest.program(TRAINING)
        batch = random_feeds(inputs, sizes, dict.fromkeys(_names(inputs), 1), rng)
        reads = trainers.manifest.program(OPTIMIZER).system_inputs
        names = {s.hyperparameter for s in reads if s.hyperparameter is not None}
        hyper = hyperparameters(trainers.manifest.trained().optimizer, Settings(), names)
        for step in range(1, STEPS + 1):
            rates = hyper.at(step, 1e-4)
            trainers.each(partial(_step, trainers.members, batch, rates))
        return tuple(m.peak_bytes() for m in trainers.members)


def _step(trainers: Sequence[Trainer], batch: Batch, rates: Mapping[str, float], rank: int) -> None:
    trainers[rank].train_step([batch], rates)


def _names(program: ProgramEntry) -> list[str]:
    return [spec.name for spec in program.inputs]


def main() -> int:
    """Measures what is asked for, prints a line for each strategy."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--strategy", action="append", required=True)
    parser.add_argument("--symbol", action="append", default=[], metavar="NAME=SIZE")
    parser.add_argument("--loss")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    sizes = {name: int(size) for name, size in (text.split("=") for text in given.symbol)}
    training = None
    if given.loss:
        training = TrainingSpec(parse_loss(given.loss), parse_optimizer(given.optimizer))
    workload = read_workload(given.model, {}, training)
    rows = [row(given.model, workload, s, training, sizes) for s in given.strategy]
    if given.json:
        print(json.dumps([asdict(r) for r in rows], indent=1))
    else:
        print(f"{'strategy':<12}{'planned':>14}{'workload':>14}{'measured':>14}{'error':>9}")
        for r in rows:
            top = max(r.measured)
            print(f"{r.strategy:<12}{r.planned:>14,}{r.program:>14,}{top:>14,}{r.error:>9.1%}")
    return int(given.check and any(abs(r.error) > WITHIN for r in rows))


if __name__ == "__main__":
    sys.exit(main())
