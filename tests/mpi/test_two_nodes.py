"""Programs on two nodes of `tools/two-nodes`: their results, and what a lost node or link does.

A node has its own network, host name and shared memory. The group of two ranks on two nodes adds
each element in one place, in the order of the group, so its results equal those on one node to the
bit. Two ranks on each of two nodes add within a node first, and then between nodes.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import mlp
import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from onnxpar.api.shard_model import shard_model
from onnxpar.strategy import Strategy
from onnxpar_runtime.checkpoint.folder import complete_steps
from onnxpar_runtime.launch import mpirun_environment
from tests.children import ROOT, with_tests
from tests.cli import linear
from tests.runtime.launching import LIMIT, Outcome, mpirun, run, slow_data
from tests.training_cases import shard

TOOL = ROOT / "tools" / "two-nodes"
NAME = f"onnxpar{os.getpid()}"
TIMEOUT_S = 4
ENDS_S = 30
"""`launch` waits 8 s for mpirun after a rank of its node has failed, 8 s after it has sent SIGTERM,
and 9 s for what mpirun left, here the daemon of the other node."""
DIGITS = ["--data", "digits", "--batch-size", "100", "--lr", "0.01", "--device", "cpu"]
pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(2 * LIMIT),
]


@contextmanager
def two_nodes(
    *arguments: str, stderr: IO[str] | int = subprocess.PIPE
) -> Iterator["subprocess.Popen[str]"]:
    """Runs `tools/two-nodes`; at the end it has removed its nodes, and no process is on them."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "PRTE_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**mpirun_environment(with_tests(kept)), "PATH": path, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(TOOL), "--name", NAME, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True,
        env={**environment, "ONNXPAR_TIMEOUT": str(TIMEOUT_S)},
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            lose("a")
            lose("b")
        process.communicate(timeout=LIMIT)


def lose(node: str) -> None:
    """Kills all processes on a node at once."""
    listed = subprocess.run(
        ["ip", "netns", "pids", f"{NAME}-{node}"], capture_output=True, text=True, check=False
    )
    for pid in listed.stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def link(state: str) -> None:
    """Sets the link between the nodes `up` or `down`."""
    command = ["ip", "-n", f"{NAME}-a", "link", "set", "eth", state]
    subprocess.run(command, check=True)


@pytest.fixture(scope="module", autouse=True)
def nodes() -> None:
    """Skips what needs two nodes where they cannot be made."""
    with two_nodes("--", "-n", "2", "true") as process:
        out, err = process.communicate(timeout=LIMIT)
    if process.returncode == 2 and "tools/two-nodes: " in err:
        pytest.skip(f"no two nodes here: {err.strip()}")
    assert process.returncode == 0, (out, err)


def test_axes_are_laid_onto_nodes(tmp_path: Path) -> None:
    """Two ranks on each of two nodes, which have the axis over which most is sent."""
    ir.save(mlp.build(image=8, hidden=(16, 12)), tmp_path / "m.onnx")
    directory, inputs, outputs = tmp_path / "out", tmp_path / "in.npz", tmp_path / "out.npz"
    shard_model(tmp_path / "m.onnx", "tp=2,dp=2", directory)
    np.savez(inputs, x=np.ones((6, 1, 8, 8), np.float32))
    command = ["run", str(directory), "--inputs", str(inputs), "--outputs", str(outputs)]
    moved = "dp=2,tp=2: of the "
    for more in ([], ["--keep-placement"]):
        with two_nodes("--slots", "2", "--launch", "--", *more, "--", *command) as process:
            _, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
        # The notice of the run itself sees the names of the machines.
        assert (f"laid onto machines in the order {moved}" in err) is not bool(more), err
        assert ("with the mesh axes in the order dp=2,tp=2, 0% would" in err) is bool(more), err


def apart(ranks: int, *arguments: object) -> Outcome:
    """Runs a command of onnxpar with half of its ranks on each node."""
    start = time.monotonic()
    options = ["--slots", str(ranks // 2), "--", "-n", str(ranks), sys.executable]
    with two_nodes(*options, "-m", "onnxpar.cli", *map(str, arguments)) as process:
        out, err = process.communicate(timeout=LIMIT)
    return Outcome(process.returncode, out, err, time.monotonic() - start)


def together(ranks: int, *arguments: object) -> Outcome:
    """Runs a command of onnxpar on one node."""
    return mpirun(ranks, ["-m", "onnxpar.cli", *map(str, arguments)], {"OMP_NUM_THREADS": "1"})


def losses(log: Path) -> list[float]:
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [entry["loss"] for entry in entries if "loss" in entry]  # the others are evaluations


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "dp=2,tp=2"])
def test_run(tmp_path: Path, mesh: str) -> None:
    ir.save(mlp.build(image=8, hidden=(16, 12)), tmp_path / "m.onnx")
    directory, inputs = tmp_path / "out", tmp_path / "in.npz"
    shard_model(tmp_path / "m.onnx", mesh, directory)
    x = np.random.default_rng(0).standard_normal((6, 1, 8, 8)).astype(np.float32)
    np.savez(inputs, x=x)
    ranks = 4 if "," in mesh else 2
    outcome, outputs = run(ranks, directory, inputs)
    assert outcome.code == 0, outcome.err
    want = dict(np.load(outputs))
    outputs.unlink()
    outcome = apart(ranks, "run", directory, "--inputs", inputs, "--outputs", outputs)
    assert outcome.code == 0, outcome.err
    got = dict(np.load(outputs))
    assert got.keys() == want.keys()
    # Groups of tp are on one node, and groups of dp have two members: each sum has one order.
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)


MESHES = {
    "dp": Strategy.from_dict({"mesh": {"dp": 2}}),
    "pipeline": Strategy.from_dict({"devices": 2, "pipeline": {"stages": 2, "schedule": "zb-h1"}}),
    "pipeline and dp": Strategy.from_dict({"mesh": {"dp": 2}, "pipeline": {"stages": 2}}),
}


@pytest.mark.parametrize("name", MESHES)
def test_train_and_continue_from_a_checkpoint(tmp_path: Path, name: str) -> None:
    """Losses, checkpoints and trained parameters are those of one node, to the bit."""
    directory = shard(
        tmp_path / "made", mlp.build(image=8, hidden=(10, 7)), MESHES[name], optimizer="adamw"
    )
    ranks = 4 if " and " in name else 2
    found = {}
    for way in together, apart:
        folder = tmp_path / way.__name__
        folder.mkdir()
        log, saved, points = folder / "log", folder / "w", folder / "ck"
        more = ["--seed", "3", "--log", log, "--checkpoint", points, "--every", "4"]
        outcome = way(ranks, "train", directory, *DIGITS, *more, "--steps", 6)
        assert outcome.code == 0, outcome.err
        assert complete_steps(points) == [4, 6]
        more += ["--resume", points, "--save", saved, "--eval"]
        outcome = way(ranks, "train", directory, *DIGITS, *more, "--steps", 10)
        assert outcome.code == 0, outcome.err
        assert len(losses(log)) == 10
        (evaluated,) = [line for line in outcome.out.splitlines() if "evaluated" in line]
        found[way] = (
            losses(log),
            evaluated.partition(" in ")[0],
            {p.relative_to(points): p.read_bytes() for p in points.rglob("*.safetensors")},
            {key: value.tobytes() for key, value in load_file(saved).items()},
        )
    assert found[apart] == found[together]


@contextmanager
def supervised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *again: str
) -> Iterator[tuple["subprocess.Popen[str]", Callable[[], str]]]:
    """A training by `onnxpar launch` on two nodes, after its first checkpoint; and its stderr.

    `again` are options of `launch` that say how often it restarts. At the end it must have
    restarted (more than once, if the link was not up yet), and have all losses of a training
    without a failure, except for rounding if it continued on fewer ranks.
    """
    directory, ck, errors = linear.shard(folder, 2), folder / "ck", folder / "errors"
    slow_data(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    train = ["train", str(directory), "--data", "slow_data:batches", "--lr", "0.05", "--epochs"]
    train += ["5", "--seed", "5", "--device", "cpu", "--print-every", "0", "--log"]
    outcome = mpirun(2, ["-m", "onnxpar.cli", *train, str(folder / "one")])
    assert outcome.code == 0, outcome.err
    command = ["--launch", "--", *again, "--", *train, str(folder / "two")]
    command += ["--checkpoint", str(ck), "--every", "1"]
    with errors.open("w") as stream, two_nodes(*command, stderr=stream) as process:
        wait_for(process, lambda: bool(complete_steps(ck)), errors)
        yield process, errors.read_text
        process.communicate(timeout=LIMIT)
    assert process.returncode == 0, errors.read_text()
    assert "(restart 1 of " in errors.read_text()
    # On other numbers of ranks float32 sums have another order: the tolerance of a step.
    rounding = 1e-5 if "--fallback" in again else 0
    want = losses(folder / "one")
    assert losses(folder / "two") == pytest.approx(want, rel=rounding, abs=0) and len(want) == 100


def wait_for(process: "subprocess.Popen[str]", happened: Callable[[], bool], errors: Path) -> float:
    """Waits until something has happened, while the process runs; returns the seconds."""
    start = time.monotonic()
    while not happened():
        assert process.poll() is None, errors.read_text()
        assert time.monotonic() - start < LIMIT, errors.read_text()
        time.sleep(0.02)
    return time.monotonic() - start


def test_a_node_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(tmp_path, monkeypatch, "--retries", "3") as (process, told):
        lose("b")
        seconds = wait_for(process, lambda: "onnxpar: launch: " in told(), tmp_path / "errors")
    assert seconds < ENDS_S
    assert "it lost the machine of rank 1" in told()


def test_the_link_goes_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with supervised(tmp_path, monkeypatch, "--retries", "3") as (process, told):
        link("down")
        seconds = wait_for(process, lambda: "onnxpar: launch: " in told(), tmp_path / "errors")
        link("up")
    assert TIMEOUT_S <= seconds < TIMEOUT_S + ENDS_S
    assert f"waited {TIMEOUT_S} s for rank 1 (ONNXPAR_TIMEOUT)" in told()


def test_a_node_that_is_lost_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun would start its daemon there, although no rank needs the node any more."""
    fewer = linear.shard(tmp_path, 1)
    with supervised(tmp_path, monkeypatch, "--fallback", str(fewer)) as (_, told):
        link("down")
        lose("b")
    assert f"without machines that do not answer: {NAME}-b" in told()
