"""`mpirun -n N onnxpar train`: the losses of one device, and an end within seconds."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from onnxpar_runtime.interrupts import MESSAGE
from tests.cli import linear
from tests.runtime.hand_trained import regression
from tests.runtime.launching import LIMIT, Outcome, alive, children, mpirun, start_mpirun

DIGITS = ["--data", "digits", "--batch-size", "100", "--lr", "0.5", "--device", "cpu"]


def train(ranks: int, directory: Path, *more: str) -> Outcome:
    return mpirun(ranks, ["-m", "onnxpar.cli", "train", str(directory), *more])


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_equals_one_device(tmp_path: Path, ranks: int) -> None:
    directory = linear.shard(tmp_path, ranks)
    log, saved = tmp_path / "log", tmp_path / "w"
    more = ["--epochs", "2", "--seed", "3", "--log", str(log), "--save", str(saved)]
    outcome = train(ranks, directory, *DIGITS, *more, "--accumulate", "2", "--eval")
    assert outcome.code == 0, outcome.err
    losses, w = linear.trained(0.5, 100, 2, 3)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    # float32 against float64, as on one device.
    # Lines of evaluations have none.
    trained = [line["loss"] for line in lines if "loss" in line]
    np.testing.assert_allclose(trained, losses, rtol=2e-6)
    np.testing.assert_allclose(load_file(saved)["w"], w, rtol=0, atol=2e-6)
    loss, _, accuracy = linear.loss_of(w, *linear.digits(test=True))
    evaluated = [line for line in outcome.out.splitlines() if "evaluated" in line]
    assert len(evaluated) == 2 and f"accuracy is {accuracy:.2%}" in evaluated[1]
    assert float(evaluated[1].split("loss is ")[1].split(",")[0]) == pytest.approx(loss, rel=2e-6)
    # Only one rank prints.
    assert outcome.out.count("epoch: 1 step: 3,") == 1


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    directory = regression(tmp_path / "a")
    outcome = train(2, directory, *DIGITS)
    assert outcome.code == 2
    (message,) = outcome.messages
    assert (
        "expected an integer or floating input [batch] for the labels (further dims must be 1), got"
        in message
    )
    assert "Traceback" not in outcome.err


def test_what_is_evaluated_on_is_checked_before_a_rank_waits(tmp_path: Path) -> None:
    """And is printed once, by rank 0."""
    directory, (x, classes) = linear.shard(tmp_path, 2), linear.digits(test=True)
    x = x.astype(np.float32)
    np.savez(tmp_path / "a.npz", x=x, labels=classes)
    np.savez(tmp_path / "b.npz", x=x, labels=classes + 1)
    data = ["--data", f"npz:{tmp_path / 'a.npz'}", "--batch-size", "100", "--lr", "0.5"]
    outcome = train(2, directory, *data, "--eval")
    assert outcome.code == 0, outcome.err
    assert outcome.out.count("notice: --eval evaluates on the training data") == 1
    wrong = f"npz:{tmp_path / 'b.npz'}"
    outcome = train(2, directory, *data, "--eval-data", wrong)
    assert outcome.code == 2 and "step" not in outcome.out
    (message,) = outcome.messages
    assert message.startswith(
        f"onnxpar: error: --eval-data {wrong}: input 'labels': expected elements from 0 to 9"
    )


def test_the_threads_of_one_rank_are_refused(tmp_path: Path) -> None:
    outcome = train(2, regression(tmp_path / "a"), *DIGITS, "--transport", "threads")
    assert outcome.code == 2
    assert "--transport threads: expected one rank" in outcome.messages[0]


def module(folder: Path, body: str) -> dict[str, str]:
    """Writes a module of data beside the directory, and returns where Python finds it."""
    (folder / "stream_of_mine.py").write_text(
        "import numpy as np\nimport os, time\n"
        "GOOD = {'x': np.ones((4, 3)), 'labels': np.ones((4, 2))}\n" + body
    )
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        # As `test_trainer.py` has it.
        pytest.param(
            "def f():\n    yield GOOD\n    yield {**GOOD, 'labels': np.full((4, 2), np.nan)}\n",
            1,
            "onnxpar: error: epoch 1, step 2: the loss is nan",
            marks=pytest.mark.full,
        ),
        (
            "def f():\n    rank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"
            "    yield from [GOOD] * (2 + rank)\n",
            2,
            "onnxpar: error: --data stream_of_mine:f: some ranks ran out of batches before others",
        ),
        (
            "class Left(BaseException): pass\ndef f():\n    yield GOOD\n"
            "    if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
            "        raise Left('of mine')\n"
            "    while True:\n        yield GOOD\n",
            1,
            "r1 | Left: of mine",
        ),
        (
            "def f():\n    yield GOOD\n"
            "    if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
            "        os._exit(7)\n"
            "    while True:\n        yield GOOD\n",
            7,
            "onnxpar: error: stopped by mpirun (interrupted, or another rank died)",
        ),
    ],
)
def test_a_run_that_cannot_go_on_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int, message: str
) -> None:
    for name, value in module(tmp_path, body).items():
        monkeypatch.setenv(name, value)
    outcome = train(2, regression(tmp_path / "a"), "--data", "stream_of_mine:f", "--lr", "0.1")
    assert outcome.code == code, outcome.err
    (reported,) = outcome.messages
    assert reported.startswith(message)
    assert "Traceback" not in outcome.err and outcome.seconds < LIMIT / 2


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "import sys\ndef f():\n    yield GOOD\n"
            "    if os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
            "        sys.exit('a mistake of mine')\n"
            "    yield GOOD\n",
            "onnxpar: error: r1 | --data stream_of_mine:f: this code failed:",
        ),
        pytest.param(
            "def f():\n    yield GOOD\n    raise ValueError('a mistake of mine')\n",
            "onnxpar: error: --data stream_of_mine:f: this code failed:",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "def f(batch_size):\n    yield GOOD\n    np.zeros(batch_size + 'a mistake of mine')\n",
            "onnxpar: error: --data stream_of_mine:f: this code failed:",
            marks=pytest.mark.full,
        ),
        (
            "raise ValueError('a mistake of mine')\n",
            "onnxpar: error: --data stream_of_mine:f: this code failed:",
        ),
    ],
)
def test_a_users_code_that_fails_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    for name, value in module(tmp_path, body).items():
        monkeypatch.setenv(name, value)
    outcome = train(2, regression(tmp_path / "a"), "--data", "stream_of_mine:f", "--lr", "0.1")
    assert outcome.code == 1, outcome.err
    assert outcome.messages == [message]
    shown = outcome.err[outcome.err.index(message) :]
    assert outcome.err.count("Traceback") == 1
    assert shown.count("a mistake of mine") >= 1 and 'stream_of_mine.py", line ' in shown
    assert "onnxpar_runtime" not in shown and "MPI_ABORT" not in outcome.err


STUCK = "def f():\n    yield GOOD\n    yield GOOD\n    time.sleep(1000)\n"
SLOW = "def f():\n    while True:\n        time.sleep(0.2)\n        yield GOOD\n"


def memory(pid: int) -> set[Path]:
    """The files of shared memory that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("body", "whom"),
    [
        *(pytest.param(body, "mpirun", marks=pytest.mark.full) for body in (SLOW, STUCK)),
        (SLOW, "rank"),
    ],
)
def test_an_interrupt_ends_all_ranks(tmp_path: Path, body: str, whom: str) -> None:
    directory = regression(tmp_path / "a")
    arguments = ["-m", "onnxpar.cli", "train", str(directory), "--data", "stream_of_mine:f"]
    process = start_mpirun(2, [*arguments, "--lr", "0.1"], module(tmp_path, body))
    ranks: list[int] = []
    shared: set[Path] = set()
    try:
        assert process.stdout is not None
        while "step: 2," not in (line := process.stdout.readline()):
            assert line, process.communicate()[1]
        ranks = children(process.pid)
        assert len(ranks) == 2
        shared = {path for rank in ranks for path in memory(rank)}
        start = time.monotonic()
        os.kill(process.pid if whom == "mpirun" else ranks[1], signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT)
        seconds = time.monotonic() - start
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert seconds < 5
    assert process.returncode != 0
    lines = [line.strip(" \0") for line in errors.splitlines() if "interrupted" in line]
    assert lines == [MESSAGE.strip() if whom == "mpirun" else "r1 | interrupted"]
    # mpirun has ended; the process that adopts its ranks needs a moment to collect them.
    while any(alive(rank) for rank in ranks) and time.monotonic() < start + 5:
        time.sleep(0.05)
    assert not any(alive(rank) for rank in ranks)
    assert not [path for path in shared if path.exists()]
