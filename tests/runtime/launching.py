"""Starts mpirun from a test, with a time limit that ends every rank."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from onnxpar_runtime.launch import find_mpirun, mpirun_environment

LIMIT = 90
"""Seconds after which mpirun is killed and the test fails: the cores may be busy."""


@dataclass(frozen=True)
class Outcome:
    """What mpirun left: exit code, both streams, seconds."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def messages(self) -> list[str]:
        """The lines of stderr that are onnxpar's own."""
        # prterun ends what it says of an abort with a zero byte, which a message may follow.
        lines = (line.lstrip("\0") for line in self.err.splitlines())
        own = ("onnxpar: ", "r0 |", "r1 |", "r2 |", "r3 |")
        return [line for line in lines if line.startswith(own)]


def mpirun(ranks: int, arguments: Sequence[str]) -> Outcome:
    """Runs Python with `arguments` on `ranks` ranks; a hang fails the test."""
    command = [find_mpirun(), "--oversubscribe", "-n", str(ranks), sys.executable, *arguments]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
    start = time.monotonic()
    # A session of its own, so that all of mpirun's ranks can be ended with it.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=mpirun_environment(environment),
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"mpirun hung for {LIMIT} s; stdout: {out} stderr: {err}")
    return Outcome(process.returncode, out, err, time.monotonic() - start)


def run(ranks: int, directory: Path, inputs: Path, *more: str) -> tuple[Outcome, Path]:
    """Runs `onnxpar run` on `ranks` ranks; returns its outcome and where the outputs go."""
    outputs = inputs.parent / "out.npz"
    arguments = ["run", str(directory), "--inputs", str(inputs), "--outputs", str(outputs), *more]
    return mpirun(ranks, ["-m", "onnxpar.cli", *arguments]), outputs
