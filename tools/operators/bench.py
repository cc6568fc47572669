"""Examines many backend cases in worker processes, so that one that dies takes no other with it."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import backend
from .backend import CRASHED, Outcome

# Where this module is found under the name that it was imported by.
TOP = Path(__file__).resolve().parents[__name__.count(".")]


def examine_all(names: Sequence[str], sample: int | None, workers: int = 2) -> list[Outcome]:
    """Examines cases in worker processes; those that onnxruntime does not pass are left out.

    Args:
        names: Cases, by name.
        sample: How many ways to shard a case for each number of ranks; None for all.
        workers: How many processes at a time.
    """
    shares = [names[i::workers] for i in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        done = [outcome for share in pool.map(lambda s: list(_share(s, sample)), shares)
                for outcome in share]  # fmt: skip
    return sorted(done, key=lambda o: o.name)


def _share(names: Sequence[str], sample: int | None) -> Iterator[Outcome]:
    left = list(names)
    while left:
        begun = ""
        command = [sys.executable, "-W", "ignore", "-m", __name__, "--worker", str(sample or 0)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=TOP
        ) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(json.dumps(left))
            worker.stdin.close()
            for line in worker.stdout:
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    continue  # what a library printed
                if "begin" in event:
                    begun = event["begin"]
                    continue
                left.remove(event["done"])
                begun = ""
                if event["outcome"]:
                    yield Outcome(**event["outcome"])
        if begun:
            left.remove(begun)
            how = f"the process ended with {worker.returncode}"
            yield Outcome(begun, (), CRASHED, True, detail=how)
        elif left:
            raise RuntimeError(f"the worker ended with {worker.returncode}, {len(left)} cases left")


if __name__ == "__main__" and sys.argv[1:2] == ["--worker"]:
    backend.main(json.loads(sys.stdin.read()), int(sys.argv[2]) or None)
