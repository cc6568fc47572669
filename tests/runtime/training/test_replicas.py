"""Replicas of states are compared bit for bit; differences are reported by state and ranks."""

from pathlib import Path

import mlp
import numpy as np
import pytest

from onnxpar.strategy import Strategy
from onnxpar_runtime.errors import LaunchError, ReplicaError
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.replicas import ReplicaCheck, check_replicas
from tests.training_cases import batch_of, hyper, shard


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two by two ranks: fc2's weight is split over tp, its moments over all."""
    strategy = Strategy.from_dict(
        {"mesh": {"dp": 2, "tp": 2}, "optimizer_parallel": {"level": 1, "threshold": "1KiB"}}
    )
    out = tmp_path_factory.mktemp("replicas") / "ranks"
    return shard(out, mlp.build(hidden=(24, 12)), strategy, optimizer="adamw")


def test_training_keeps_replicas_equal(ranks: Path) -> None:
    rng = np.random.default_rng(0)
    with TrainerGroup(ranks) as group:
        states = [n for n, s in group.manifest.trained().states.items() if "grad" not in s.kind]
        assert len(states) == 9
        for step in range(1, 4):
            group.train_step([batch_of(ranks, rng, batch=7)], hyper("adamw", step))
            group.on_each(lambda member: check_replicas(member, states, "now"))


def spoil(group: TrainerGroup, rank: int, name: str) -> None:
    """Moves the first element of a rank's part by one unit of rounding."""
    states = group.members[rank].states
    part = states.get(name)
    part.flat[0] = np.nextafter(part.flat[0], np.float32(np.inf))
    states.set(name, part)


def test_what_differs_is_reported_on_all_ranks(ranks: Path) -> None:
    with TrainerGroup(ranks) as group:
        names = sorted(
            n for n, s in group.manifest.trained().states.items() if "grad" not in s.kind
        )
        # Ranks 1 and 3 hold the same columns; of the moments each rank has a part of its own.
        spoil(group, 3, "fc2.weight")
        spoil(group, 2, "onnxpar.moment1.fc2.weight")
        checks = [ReplicaCheck(member, 2, sample=4) for member in group.members]
        for check in checks:
            check.after(1)
        errors = []

        def run(rank: int) -> None:
            try:
                for step in range(2, 7):
                    checks[rank].after(step)
            except ReplicaError as error:
                assert error.agreed and error.exit_code == 1
                errors.append(str(error))

        group.each(run)
        # Four of nine names in step 2, the next in step 4.
        step = 2 * (1 + names.index("fc2.weight") // 4)
        assert errors == 4 * [
            f"step {step}: parameter 'fc2.weight': expected replicas that are equal bit for bit, "
            "but rank 1 and rank 3 differ"
        ]


def test_no_step_to_check_at() -> None:
    with pytest.raises(LaunchError, match="--check-replicas: expected a number >= 1, got 0"):
        ReplicaCheck(None, 0)  # type: ignore[arg-type]  # is not looked at
