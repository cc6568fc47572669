"""`mpirun train`, `eval` and `run` of a model in pipeline stages, compared with one device."""

import json
import os
import signal
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from onnxpar.api.shard_model import shard_model
from onnxpar.cli import main
from onnxpar.strategy import Strategy
from onnxpar_runtime.manifest import Manifest
from tests.runtime.launching import LIMIT, children, mpirun, run, start_mpirun
from tests.tiers import FULL
from tests.training_cases import shard

DIGITS = ["--data", "digits", "--batch-size", "100", "--lr", "0.01", "--device", "cpu"]
MESHES: dict[str, dict[str, Any]] = {
    "pp=2": {"devices": 2, "pipeline": {"stages": 2}},
    "pp=4": {"devices": 4, "pipeline": {"stages": 4}},
    "dp=2": {"mesh": {"dp": 2}},
    "pp=2,dp=2": {"mesh": {"dp": 2}, "pipeline": {"stages": 2, "schedule": "zb-h1"}},
}


def model() -> ir.Model:
    """Images of 8x8 and layers of 10 and 7, which the mesh does not divide evenly."""
    return mlp.build(image=8, hidden=(10, 7))


def made(folder: Path, name: str) -> Path:
    """The directory that trains the model on a mesh of this name."""
    strategy = Strategy.from_dict(MESHES[name]) if name in MESHES else "dp"
    return shard(
        folder / name, model(), strategy, optimizer="adamw", devices=None if name in MESHES else 1
    )


def ranks_of(directory: Path) -> int:
    return Manifest.load(directory).devices


def start(directory: Path, *arguments: str) -> str:
    """What a command of a directory prints, on its ranks; one rank runs in this process."""
    if (ranks := ranks_of(directory)) == 1:
        with redirect_stdout(StringIO()) as printed:
            assert main([*arguments]) == 0
        return printed.getvalue()
    outcome = mpirun(ranks, ["-m", "onnxpar.cli", *arguments])
    assert outcome.code == 0, outcome.err
    return outcome.out


def train(directory: Path, *more: str) -> None:
    start(directory, "train", str(directory), *DIGITS, *more)


def losses(log: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return {number: line["loss"] for number, line in enumerate(lines, 1)}


@pytest.mark.parametrize("name", ["pp=2", "pp=2,dp=2"] if FULL else ["pp=2"])
def test_trains_and_evaluates_as_one_device(tmp_path: Path, name: str) -> None:
    """The last of 15 batches has 37 images. Each has two micro-batches, the pipeline's default."""
    outputs, found = {}, {}
    for directory in (made(tmp_path, "one"), made(tmp_path, name)):
        log, saved = tmp_path / "log", tmp_path / f"{directory.name}.weights"
        more = ["--epochs", "1", "--seed", "3", "--log", str(log), "--save", str(saved)]
        more += ["--accumulate", "2"] if directory.name == "one" else []
        train(directory, *more)
        found[directory.name] = losses(log)
        log.unlink()
        arguments = ["eval", str(directory), "--data", "digits", "--device", "cpu", "--json"]
        arguments += ["--parameters", str(saved)]
        outputs[directory.name] = json.loads(start(directory, *arguments))
    one = list(found["one"].values())
    assert len(one) == 15 and one[-1] < one[0]
    # Float32 sums in another order: the tolerance of a step, also after fifteen of them.
    np.testing.assert_allclose(list(found[name].values()), one, rtol=1e-5)
    assert outputs[name]["accuracy"] == outputs["one"]["accuracy"]
    assert outputs[name]["loss"] == pytest.approx(outputs["one"]["loss"], rel=1e-5)


def test_runs_and_gathers_on_the_first_rank(tmp_path: Path) -> None:
    """The last stage computes the output."""
    path, rng = tmp_path / "m.onnx", np.random.default_rng(0)
    ir.save(model(), path)
    stages = "pp=2,dp=2" if FULL else "pp=2"
    for name in ("one", stages):
        strategy = Strategy.from_dict(MESHES[name]) if name in MESHES else "dp"
        shard_model(path, strategy, tmp_path / name, devices=None if name in MESHES else 1)
    inputs = tmp_path / "in.npz"
    np.savez(inputs, x=rng.standard_normal((5, 1, 8, 8), np.float32))
    arrays = []
    for name in ("one", stages):
        outcome, out = run(ranks_of(tmp_path / name), tmp_path / name, inputs)
        assert outcome.code == 0, outcome.err
        arrays.append(np.load(out)["logits"])
    # The tolerance of a float32 forward pass.
    np.testing.assert_allclose(arrays[1], arrays[0], atol=1e-5 * np.abs(arrays[0]).max())


@pytest.mark.parametrize("name", ["pp=2", "pp=2,dp=2"] if FULL else ["pp=2"])
def test_the_death_of_a_rank_ends_all(tmp_path: Path, name: str) -> None:
    directory = made(tmp_path, name)
    log = tmp_path / "log"
    arguments = ["-m", "onnxpar.cli", "train", str(directory), *DIGITS, "--epochs", "1000"]
    with start_mpirun(ranks_of(directory), [*arguments, "--log", str(log)]) as process:
        try:
            end = time.monotonic() + LIMIT
            while not log.exists() or not log.read_text():
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            os.kill(children(process.pid)[-1], signal.SIGKILL)
            killed = time.monotonic()
            process.communicate(timeout=LIMIT)
            assert process.returncode != 0 and time.monotonic() - killed < LIMIT / 2
        finally:
            process.kill()


@pytest.mark.parametrize("name", ["pp=2", "pp=4", "dp=2"] if FULL else ["dp=2"])
def test_resumes_from_a_checkpoint_of_two_stages(tmp_path: Path, name: str) -> None:
    """Two stages give the same bits, other meshes the same losses."""
    two, saved = made(tmp_path, "pp=2"), tmp_path / "all"
    log, folder = tmp_path / "log", tmp_path / "ck"
    common = ["--seed", "3", "--accumulate", "3"]
    train(two, *common, "--epochs", "2", "--log", str(log), "--save", str(saved),
          "--checkpoint", str(folder), "--every", "10", "--keep", "9")  # fmt: skip
    expected = losses(log)
    other, again = two if name == "pp=2" else made(tmp_path, name), tmp_path / "again"
    log2 = tmp_path / "log2"
    (step,) = folder.glob("*0010")
    train(other, *common, "--epochs", "2", "--log", str(log2), "--save", str(again),
          "--resume", str(step))  # fmt: skip
    found = list(losses(log2).values())
    assert len(found) == 20
    rest = [expected[number] for number in range(11, 31)]
    if name == "pp=2":
        assert found == rest
    else:
        # Other ranks sum in another order: the tolerance of a step.
        np.testing.assert_allclose(found, rest, rtol=1e-5)
    weights, same = load_file(saved), load_file(again)
    for key, array in weights.items():
        if name == "pp=2":
            np.testing.assert_array_equal(same[key], array)
