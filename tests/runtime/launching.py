"""Starts mpirun from a test, with a time limit that ends every rank."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from onnxpar_runtime.launch import find_mpirun, is_open_mpi, mpirun_environment, own_messages
from tests.children import with_tests

LOGS = {"ONNXPAR_LOG_DIR": str(Path(tempfile.gettempdir(), "onnxpar-tests-failed"))}
"""Where ranks that fail on purpose write their last calls."""
LIMIT = 90
"""Seconds after which mpirun is killed and the test fails: the cores may be busy."""


def slow_data(folder: Path) -> str:
    """Writes a module of data with slow steps to a folder where ranks find it; returns its name."""
    (folder / "slow_data.py").write_text(
        "import time\nimport numpy as np\n"
        "def batches(epoch, seed):\n"
        "    rng = np.random.default_rng([seed, epoch])\n"
        "    for _ in range(20):\n"
        "        time.sleep(0.02)\n"
        "        yield {'x': rng.random((8, 64), np.float32), 'labels': rng.integers(0, 10, 8)}\n"
    )
    return "slow_data:batches"


# As the command line does. Otherwise, a rank traverses all modules again and again, and three times
# when it ends: a quarter of a second.
_COLLECT_RARELY = (
    "import atexit, gc; gc.set_threshold(100_000, 20, 50); atexit.register(gc.freeze)\n"
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of mpirun: exit code, both streams, seconds."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """Both streams."""
        return f"{self.out}\n{self.err}"

    @property
    def messages(self) -> list[str]:
        """The lines of stderr that are onnxpar's own."""
        return own_messages(self.err)


def start_mpirun(
    ranks: int, arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Starts Python with `arguments` on `ranks` ranks, with `environment` added to the test's."""
    if arguments[0] == "-c":
        arguments = ["-c", _COLLECT_RARELY + arguments[1], *arguments[2:]]
    # Unbuffered, ranks write parts of lines, which MPICH's mpirun passes on in any order.
    without = ("OMPI_", "PMIX_", "PYTHONUNBUFFERED")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(without)}
    start = find_mpirun()
    more = ["--oversubscribe"] if is_open_mpi(start) else []
    # Its own session, so that all of mpirun's ranks can be ended with it.
    return subprocess.Popen(
        [start, *more, "-n", str(ranks), sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**mpirun_environment(with_tests(kept)), **LOGS, **(environment or {})},
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """The children of a process."""
    texts = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for text in texts for child in text.split()]


def alive(pid: int) -> bool:
    """Whether a process exists and has not ended.

    A process that has ended stays a zombie until its parent collects it, which may be never.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    # The name, in brackets, may have anything in it.
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def mpirun(
    ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    limit: float = LIMIT,
) -> Outcome:
    """Runs Python with `arguments` on `ranks` ranks; a hang fails the test."""
    start = time.monotonic()
    process = start_mpirun(ranks, arguments, environment)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"mpirun hung for {limit} s; stdout: {out} stderr: {err}")
    return Outcome(process.returncode, out, err, time.monotonic() - start)


def run(ranks: int, directory: Path, inputs: Path, *more: str) -> tuple[Outcome, Path]:
    """Runs `onnxpar run` on `ranks` ranks; returns its outcome and where the outputs go."""
    outputs = inputs.parent / "out.npz"
    arguments = ["run", str(directory), "--inputs", str(inputs), "--outputs", str(outputs), *more]
    return mpirun(ranks, ["-m", "onnxpar.cli", *arguments]), outputs
