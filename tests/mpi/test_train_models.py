"""`mpirun -n N onnxpar train` on models that onnxpar shards: the losses equal one process's."""

import json
from pathlib import Path

import numpy as np
import pytest
import two_layer
from safetensors.numpy import load_file

from onnxpar.cli import main
from onnxpar.strategy import Strategy
from tests import training_cases as cases
from tests.runtime.launching import mpirun
from tests.tiers import FULL

EPOCHS, STEPS, BATCH = 5, 4, 16


def losses(log: Path) -> list[float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["epoch"], line["step"]) for line in lines] == [
        (epoch, step) for epoch in range(1, EPOCHS + 1) for step in range(1, STEPS + 1)
    ]
    return [line["loss"] for line in lines]


def arguments(tmp_path: Path, name: str) -> list[str]:
    return [
        "train", str(tmp_path / name),
        "--data", f"npz:{tmp_path / 'data.npz'}", "--batch-size", str(BATCH),
        "--epochs", str(EPOCHS), "--lr", "0.1", "--momentum", "0.1", "--device", "cpu",
        "--log", str(tmp_path / f"{name}.jsonl"), "--save", str(tmp_path / f"{name}.weights"),
    ]  # fmt: skip


def shared(level: int, **mesh: int) -> Strategy:
    """A strategy whose replicas share states."""
    parallel = {"level": level, "threshold": 0}
    return Strategy.from_dict({"mesh": mesh, "optimizer_parallel": parallel})


RUNS: dict[str, tuple[int, str | Strategy]] = {
    "tp=2": (2, "tp=2"),
    "dp=8": (8, "dp=8"),
    "dp=2,tp=2, level 3": (4, shared(3, dp=2, tp=2)),
    "dp=4, level 1": (4, shared(1, dp=4)),
    "dp=3, level 2": (3, shared(2, dp=3)),
}


@pytest.mark.parametrize("name", RUNS if FULL else ["dp=2,tp=2, level 3"])
def test_the_tutorial_of_two_layers(tmp_path: Path, name: str) -> None:
    """MSE and momentum 0.1, 5 epochs of 4 steps of 16 samples: on 8 data ranks 2 for each."""
    ranks, strategy = RUNS[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((STEPS * BATCH, 32), np.float32)
    labels = np.tanh(x @ rng.standard_normal((32, 16), np.float32) / 4)
    np.savez(tmp_path / "data.npz", x=x, labels=labels)
    for out, how, devices in (("ranks", strategy, None), ("one", "replicate", 1)):
        cases.shard(
            tmp_path / out, two_layer.build(), how, loss="mse", optimizer="momentum",
            devices=devices,
        )  # fmt: skip
    assert main(arguments(tmp_path, "one")) == 0
    several = ["-m", "onnxpar.cli", *arguments(tmp_path, "ranks"), "--check-replicas", "3"]
    outcome = mpirun(ranks, several)
    assert outcome.code == 0, outcome.err
    expected, got = losses(tmp_path / "one.jsonl"), losses(tmp_path / "ranks.jsonl")
    # The project's tolerance of a step, over twenty of them with one linear update each.
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert expected[-1] < expected[0] / 2
    weights, joined = load_file(tmp_path / "one.weights"), load_file(tmp_path / "ranks.weights")
    assert set(weights) == set(joined) == {"matmul1.weight", "matmul2.weight"}
    for key, array in weights.items():
        # Twenty updates, each off by at most some units of rounding of a gradient below 1.
        np.testing.assert_allclose(joined[key], array, rtol=0, atol=1e-6)
