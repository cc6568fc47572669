"""`onnxpar diagnose` names the rank with a fault that was put in on purpose."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from onnxpar.cli import main
from onnxpar.report.diagnosis import Diagnosis, diagnose
from tests.cli import linear
from tests.mpi.test_train import DIGITS
from tests.runtime.launching import Outcome, children, mpirun, start_mpirun
from tests.tiers import FULL

# Each step runs three AllReduces. From step 4 on, one rank has a fault.
PROGRAM = """
import os, signal, sys
import numpy as np, onnx.parser, onnxruntime
from onnxpar_format.calls import calls_file
from onnxpar_runtime.errors import RankError
from onnxpar_runtime.interrupts import reporting_termination
from onnxpar_runtime.launch import guarded, init
from onnxpar_runtime.tensors import to_ort

folder, kind, faulty = sys.argv[1], sys.argv[2], int(sys.argv[3])
HEADER = '<ir_version: 10, opset_import: ["": 21, "onnxpar": 1]>'
NODES = '''[first] a, ta = onnxpar.AllReduce (x)
[second] b, tb = onnxpar.AllReduce <reduction="max"> (a, ta)
[third] y, t = onnxpar.AllReduce <reduction="%s"> (b, tb)'''

def session(rank, skips):
    nodes = NODES % ("max" if kind == "skipped-alike" else "min")
    if skips:
        first, _, third = nodes.splitlines()
        nodes = first + third.replace("(b, tb)", "(a, ta)")
    text = HEADER + "g (float[n] x) => (float[n] y) {" + nodes + "}"
    options = onnxruntime.SessionOptions()
    rank.register(options)
    model = onnx.parser.parse_model(text).SerializeToString()
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

rank = init("mpi", "cpu")

def body():
    rank.calls_file(calls_file(folder, rank.index))
    whole, less = session(rank, False), session(rank, True)
    with reporting_termination(rank):
        for step in range(12):
            fault = rank.index == faulty and step == 4
            if fault and kind == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault and kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault and kind == "raises":
                raise ValueError("on purpose")
            size = 5 if fault and kind == "size" else 3
            runs = less if fault and kind.startswith("skipped") else whole
            try:
                runs.run(None, {"x": np.ones(size, np.float32)})
            except Exception as error:
                raise RankError(rank.index, str(error)) from error
    return 0

sys.exit(guarded(rank, body))
"""
CASES = [
    (3, "skipped", 2),
    (2, "size", 1),
    (3, "stopped", 1),
    (2, "skipped", 0),
    (4, "stopped", 0),
    (4, "size", 3),
    (2, "stopped", 0),
    (3, "skipped-alike", 1),
    (3, "killed", 2),
    (2, "raises", 1),
]
# A rank that is stopped is in `test_a_training_that_hangs`, too.
COUNT = len(CASES) if FULL else 2
WAYS = [{}, {"ONNXPAR_SHARED_MEMORY": "0"}]


def planted(folder: Path, ranks: int, kind: str, faulty: int, way: dict[str, str]) -> Outcome:
    arguments = ["-c", PROGRAM, str(folder), kind, str(faulty)]
    return mpirun(ranks, arguments, {"ONNXPAR_TIMEOUT": "2"} | way)


@pytest.mark.parametrize(("ranks", "kind", "faulty"), CASES[:COUNT], ids=str)
def test_the_faulty_rank_is_named(tmp_path: Path, ranks: int, kind: str, faulty: int) -> None:
    way = WAYS[(ranks + faulty) % 2]
    outcome = planted(tmp_path / "calls", ranks, kind, faulty, way)
    assert outcome.code != 0
    found: Diagnosis = diagnose(tmp_path / "calls")
    said = "\n".join(found.findings)
    assert list(found.ranks) == [faulty], (said, found.last, outcome.err)
    expected = {
        "stopped": f"rank {faulty} is behind: it never reached AllReduce 'first'",
        "skipped": f"rank {faulty} skipped AllReduce 'second', and goes on with AllReduce 'third'",
        "size": f"rank {faulty} calls AllReduce 'first' with other tensors: 20 bytes",
        "skipped-alike": f"rank {faulty} skipped AllReduce 'second'",
        "killed": f"rank {faulty} ",
        "raises": f"rank {faulty} failed: ValueError: on purpose",
    }[kind]
    assert expected in said, said
    assert len(found.last) == ranks
    if kind != "killed":
        assert f"onnxpar diagnose {tmp_path / 'calls'}" in outcome.err


def test_a_training_that_hangs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank is stopped from outside; a signal asks the other for its calls, before the limit."""
    directory = linear.shard(tmp_path, 2)
    options = ["train", str(directory), *DIGITS, "--epochs", "100000", "--print-every", "0"]
    logs = {"ONNXPAR_LOG_DIR": str(tmp_path / "logs"), "ONNXPAR_TIMEOUT": "60"}
    job = start_mpirun(2, ["-m", "onnxpar.cli", *options, "--log", str(tmp_path / "l")], logs)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "l").exists() or not (tmp_path / "l").stat().st_size:
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.05)
        ranks = {}
        for process in children(job.pid):
            environment = Path(f"/proc/{process}/environ").read_bytes()
            if found := re.search(rb"OMPI_COMM_WORLD_RANK=(\d)", environment):
                ranks[int(found[1])] = process
        os.kill(ranks[1], signal.SIGSTOP)
        time.sleep(0.5)
        os.kill(ranks[0], signal.SIGUSR1)
        folder = None
        while folder is None and time.monotonic() < deadline:
            folder = next((tmp_path / "logs").glob("*/rank0000.calls.json"), None)
            time.sleep(0.05)
        assert folder is not None and job.poll() is None
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.communicate()
    capsys.readouterr()
    assert main(["diagnose", str(folder.parent)]) == 0
    shown = capsys.readouterr().out
    assert "rank 1 is behind: it never reached" in shown
    assert "rank 1: wrote no calls" in shown


def test_folders_without_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "expected files such as rank0000.calls.json" in capsys.readouterr().err
    (tmp_path / "rank0000.calls.json").write_text("{}")
    assert main(["diagnose", str(tmp_path)]) == 2
    assert "expected the last calls of a rank, got other contents" in capsys.readouterr().err
