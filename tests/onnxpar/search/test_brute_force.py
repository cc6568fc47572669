"""The exact search against trying every strategy of random programs, forward ones and training.

A case is one seed. `ONNXPAR_FUZZ_SEED` shifts the seeds, `ONNXPAR_FULL` runs many more of them.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from math import ceil

import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.sharding import Component, Sharding
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.search import eliminate
from onnxpar.search import value_flow as flow_module
from onnxpar.search.workload import Workload
from tests.onnxpar.search.every_strategy import Case, Setting, random_machine, random_mesh
from tests.onnxpar.search.small_networks import network
from tests.random_programs import program
from tests.tiers import FULL, covering

SEED = int(os.environ.get("ONNXPAR_FUZZ_SEED", "0"))
CASES = 200 if FULL else 20
MOST = 20_000 if FULL else 1500
"""Strategies of the largest program that is tried."""


def forward(seed: int) -> Case:
    """A forward program."""
    draw = random.Random(f"brute force {seed}")
    analysed = analyse(ir.from_proto(program(seed, draw.randint(2, 4))), {})
    mesh = random_mesh(draw)
    return Case.of(Workload.inference(analysed), Setting(random_machine(draw), mesh))


def training(seed: int) -> Case:
    """A program that trains, with all that a step may have; sometimes its inputs are laid out."""
    draw = random.Random(f"training {seed}")
    parallel = OptimizerParallel(draw.choice([0, 0, 1, 2, 3]), threshold=draw.choice([0, 256]))
    made = network(seed, draw.randint(1, 4), parallel)
    mesh = random_mesh(draw)
    machine = random_machine(draw)
    links = tuple(replace(k, overlaps=draw.random() < 0.5) for k in machine.links)
    machine = replace(machine, links=links)
    pins: dict[str, Sharding] = {}
    if draw.random() < 0.3:
        # As a data set is read: each replica its own rows.
        (name, _), *_ = mesh.axes
        for value in made.program.graph.inputs:
            shape = made.program.env.shapes[value.name or ""]
            if shape:
                rows = (Component(shape[0], mesh.axis_atoms(name)),)
                pins[value.name or ""] = Sharding((rows, *((Component(n),) for n in shape[1:])))
    if draw.random() < 0.2:
        name = draw.choice(list(made.gradients))
        shape = made.program.env.shapes[name]
        pins[name] = Sharding(tuple((Component(n),) for n in shape))
    setting = Setting(machine, mesh, parallel, draw.choice([1, 4]), pins)
    return Case.of(made, setting)


@pytest.fixture(autouse=True)
def _everything_weighs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are small; otherwise most would be replicated without any choice."""
    monkeypatch.setattr(flow_module, "WEIGHT", 1)


@pytest.mark.timeout(1200 if FULL else 120)
@pytest.mark.parametrize(
    ("entries", "case_of"), covering([eliminate.EASY_ENTRIES, 16], [forward, training])
)
def test_nothing_is_better_than_what_is_found(
    monkeypatch: pytest.MonkeyPatch, entries: int, case_of: Callable[[int], Case]
) -> None:
    """By elimination alone, and where bounds exclude what small tables do not decide."""
    monkeypatch.setattr(eliminate, "EASY_ENTRIES", entries)
    print(f"seeds from {SEED}")
    draw = random.Random(f"limits {SEED}")
    done = limited = 0
    seed = SEED
    while done < CASES:
        seed += 1
        one = case_of(seed)
        # Where there is little to choose, or more than can be tried.
        if sum(len(f) > 1 for f in one.found) < 2 or one.count > MOST:
            continue
        done += 1
        tried = list(one.everything())
        least = min(seconds for seconds, _ in tried)
        free = one.search()
        label = f"seed {seed}"
        # The same float64 costs, summed in another order: a few hundred units of 2^-53, 1e-13.
        assert free.seconds == pytest.approx(least, rel=1e-9), label
        assert free.bound == pytest.approx(least, rel=1e-9), label
        assert one.search(algorithm="recursive").seconds >= least * (1 - 1e-9), label
        # Bytes may be shares of what replicas hold together; a limit is a whole number of them.
        below = sorted({limit for _, held in tried if (limit := ceil(held)) < free.memory})
        if not below:
            continue
        limited += 1
        limit = draw.choice(below)
        expected = min(seconds for seconds, held in tried if held <= limit)
        bounded = one.search(limit)
        assert bounded.memory <= limit, label
        assert bounded.seconds == pytest.approx(expected, rel=1e-9), label
        assert bounded.bound <= bounded.seconds * (1 + 1e-9), label
    print(f"{done} programs, {limited} under a limit that what is best without it misses")
    assert limited >= CASES // 8
