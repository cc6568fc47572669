"""`onnxpar verify`: its table, its JSON and its exit codes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from onnxpar.cli import main
from tests.runtime import hand_made

SUM = (
    "g (float[batch, 3] x) => (float[1, 3] y) {"
    "  axes = Constant<value_ints = [0]>()  y = ReduceSum<keepdims: int = 1>(x, axes) }"
)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[str, str]:
    """A directory for two ranks, and their undivided model."""
    directory = hand_made.reduced(tmp_path / "a", 2)
    return str(directory), str(hand_made.undivided(tmp_path / "m.onnx", SUM))


def test_json(paths: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, model = paths
    cases = ["--symbol", "batch=5", "--symbol", "batch=1"]
    assert main(["verify", directory, "--model", model, *cases, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert [c["symbols"] for c in report["cases"]] == [{"batch": 5}, {"batch": 1}]
    for case in report["cases"]:
        assert case["bytes_expected"] == case["bytes_counted"] == 12
        # The tolerance that verify has for float32 by default.
        assert 0 <= case["max_rel"] <= 1e-5
        assert {"max_abs", "worst"} <= set(case)


def test_table(paths: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    directory, model = paths
    assert main(["verify", directory, "--model", model]) == 0
    shown = capsys.readouterr().out
    assert "batch=4" in shown and "batch=3" in shown and "batch=1" in shown


def test_does_not_hold(
    paths: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _ = paths
    model = str(hand_made.undivided(tmp_path / "w.onnx", SUM.replace("ReduceSum", "ReduceMean")))
    assert main(["verify", directory, "--model", model, "--symbol", "batch=4"]) == 1
    assert "difference: output 'y': expected a difference" in capsys.readouterr().out
    assert main(["verify", directory, "--model", model, "--symbol", "batch=4", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    loose = ["--symbol", "batch=4", "--atol", "100"]
    assert main(["verify", directory, "--model", model, *loose]) == 0


def test_given_inputs(paths: tuple[str, str], tmp_path: Path) -> None:
    directory, model = paths
    np.savez(tmp_path / "in.npz", x=np.ones((6, 3), np.float32))
    inputs = ["--inputs", str(tmp_path / "in.npz")]
    assert main(["verify", directory, "--model", model, *inputs]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--symbol", "batch"], "--symbol 'batch': expected name=integer, got 'batch'"),
        (["--symbol", "batch=x"], "expected name=integer, got 'batch=x'"),
        (["--symbol", "batch=1,batch=2"], "'batch' is given twice"),
        (["--symbol", "seq=1"], "expected a symbol of the inputs, one of batch, got 'seq'"),
        (["--symbol", "batch=0"], "symbol 'batch' is 0, which violates its constraint: at least 1"),
        (["--inputs", "none.npz"], "none.npz: no such file"),
        (["--rtol", "inf"], "--rtol: expected a finite number, got inf"),
        (["--prompt-tokens", "5"], "--prompt-tokens: expected --generate N as well, got none"),
    ],
)
def test_users_mistakes(
    paths: tuple[str, str], capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    directory, model = paths
    assert main(["verify", directory, "--model", model, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("onnxpar: error: ") and message in error and error.count("\n") == 1


ENDED = """
import sys, time
import onnxpar.api.runtime.verification as verification
from onnxpar.cli import main

def wait(*_):
    print("here", flush=True)
    time.sleep(60)

verification.compare.verify = wait
main(["verify", *sys.argv[1:]])
"""


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_no_folder_is_left_when_it_is_ended(
    paths: tuple[str, str], tmp_path: Path, number: signal.Signals
) -> None:
    """SIGTERM ended it before any of its own code could run."""
    directory, model = paths
    (tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", ENDED, directory, "--model", model],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    try:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert [path.name[:15] for path in (tmp_path / "tmp").iterdir()] == ["onnxpar-verify-"]
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert not list((tmp_path / "tmp").iterdir())
    finally:
        process.kill()
        process.communicate()
