"""Training with collectives in buckets has the bits of training with a call for each tensor."""

from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
import transformer
from numpy.typing import NDArray

from onnxpar.stages import partition_training
from onnxpar.strategy import Strategy
from onnxpar_runtime import Trainer, TrainerGroup
from tests.tiers import FULL
from tests.training_cases import batch_of, hyper, shard

MESHES = {"dp=2": {"dp": 2}, "dp=2,tp=2": {"dp": 2, "tp": 2}}


def directory(folder: Path, mesh: str, level: int) -> Path:
    """A directory for training of a small transformer."""
    content = {"mesh": MESHES[mesh], "optimizer_parallel": {"level": level, "threshold": 1024}}
    model = transformer.build(
        layers=2 if FULL else 1, d_model=32, heads=4, vocab=40, max_positions=16
    )
    return shard(folder, model, Strategy.from_dict(content), optimizer="adamw")


def calls(folder: Path) -> Counter[str]:
    """The collectives in rank 0's graph of the optimizer."""
    path = folder / "rank0000.optimizer_model.onnx"
    nodes = onnx.load(path, load_external_data=False).graph.node
    return Counter(
        node.op_type for node in nodes if any(p.key == "bytes" for p in node.metadata_props)
    )


def trained(folder: Path) -> dict[str, NDArray[np.generic]]:
    """All states after three steps, one of them of two micro-batches."""

    def train(member: Trainer) -> dict[str, NDArray[np.generic]]:
        rng = np.random.default_rng(0)
        for step, micro_batches in enumerate((1, 2, 1), 1):
            batch = batch_of(folder, rng, batch=4, seq=8)
            member.train_step([batch] * micro_batches, hyper("adamw", step))
        return {name: member.gather(name) for name in sorted(member.training.states)}

    with TrainerGroup(folder) as group:
        first, *_ = group.on_each(train)
    return first


@pytest.mark.parametrize(
    ("mesh", "level"),
    [*product(MESHES, range(4))] if FULL else [("dp=2", 3)],
)
def test_the_bits_of_a_call_for_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str, level: int
) -> None:
    together = directory(tmp_path / "together", mesh, level)
    monkeypatch.setattr(partition_training, "group_collectives", lambda program, *_: program)
    apart = directory(tmp_path / "apart", mesh, level)
    few, many = calls(together), calls(apart)
    assert few["Bucket"] >= 1 and "Bucket" not in many
    assert few.total() <= many.total() // 2, (few, many)
    want = trained(apart)
    for name, array in trained(together).items():
        np.testing.assert_array_equal(array, want[name], err_msg=name)
