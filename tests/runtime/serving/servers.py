"""Starts `onnxpar serve` from a test, and ends it."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from tests.runtime.launching import LIMIT, alive, children, start_mpirun

_PLACE = re.compile(r"is served at (http://\S+)/v1")


@dataclass
class Served:
    """A server.

    Attributes:
        client: A client of it.
        ranks: The processes of the ranks.
        process: What started it.
    """

    client: httpx2.Client
    ranks: list[int]
    process: "subprocess.Popen[str]"

    def end(self, pid: int, seconds: float) -> int:
        """Sends a process SIGTERM, waits until all ranks have ended, and returns the exit code."""
        os.kill(pid, signal.SIGTERM)
        begun = time.monotonic()
        code = self.process.wait(seconds)
        # mpirun does not wait for the last of them.
        while any(alive(rank) for rank in self.ranks):
            assert time.monotonic() - begun < seconds
            time.sleep(0.01)
        return code


@contextmanager
def served(ranks: int, directory: Path, *options: str) -> Iterator[Served]:
    """Serves a directory at a free port under mpirun, until the block ends."""
    arguments = ["-m", "onnxpar.cli", "serve", str(directory), "--port", "0", *options]
    process = start_mpirun(ranks, arguments)
    limit = threading.Timer(LIMIT, lambda: os.killpg(process.pid, signal.SIGKILL))
    limit.start()
    try:
        assert process.stderr is not None and process.stdout is not None
        lines, found = [], None
        while found is None and (line := process.stderr.readline()):
            lines.append(line)
            found = _PLACE.search(line)
        assert found is not None, "".join(lines)
        with httpx2.Client(base_url=found[1], timeout=LIMIT) as client:
            yield Served(client, children(process.pid), process)
    finally:
        limit.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
