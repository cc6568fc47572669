#!/usr/bin/env python3
"""Sends requests of the package `openai` to `onnxpar serve`, and checks each answer.

    python -m venv /tmp/openai && /tmp/openai/bin/pip install openai
    tools/bench/serve.py --python /tmp/openai/bin/python
    tools/bench/serve.py --python /tmp/openai/bin/python --strategy pp=2 --cache growing

The client is the package `openai`, in an environment of its own. In each round it sends 200
requests, 32 at a time, with and without streaming, greedy or drawn with a seed: of ten, eight are
to be answered, one is left after two tokens, and one cannot be served. The model is a small Llama
of models/decoder.py, over two ranks. The exit code is 1 unless

- each answer has the tokens that its prompt gets alone, on one device;
- each request that cannot be served is refused with its status;
- the ranks hold at most 5 % more memory after the last round than after the first;
- all ranks have ended 10 seconds after SIGTERM.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.api.shard_model import shard_model
from onnxpar_format.options import Sampling
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

HERE = Path(__file__).resolve().parent
LENGTH, VOCABULARY, NAME = 96, 512, "served"
MORE, END_S, CLIENT_S = 1.05, 10.0, 600
BAD: tuple[tuple[dict[str, Any], int], ...] = (
    ({"prompt": [VOCABULARY]}, 400),
    ({"max_tokens": 2 * LENGTH}, 400),
    ({"temperature": -1}, 400),
    ({"model": "other"}, 404),
    ({"echo": True}, 400),
)
_PLACE = re.compile(r"is served at (http://\S+)/v1")


@dataclass(frozen=True)
class Sent:
    """A request of the client.

    Attributes:
        body: Its fields, but for `stream`.
        stream: Whether the answer comes token by token.
        leave: Tokens after which the client goes away; None if it waits for all.
        status: The status with which it is refused; None if it can be served.
    """

    body: dict[str, Any]
    stream: bool
    leave: int | None = None
    status: int | None = None


def requests(count: int, seed: int) -> list[Sent]:
    """Returns requests of all kinds."""
    rng, found = np.random.default_rng(seed), []
    for number in range(count):
        body = {
            "model": NAME,
            "prompt": rng.integers(0, VOCABULARY, rng.integers(1, 48)).tolist(),
            "max_tokens": int(rng.integers(1, 40)),
            "temperature": 0.9 * (number % 2),
            "seed": number,
        }
        stream = bool(rng.integers(0, 2))
        if number % 10 == 8:
            found.append(Sent(body | {"max_tokens": 40}, True, leave=2))
        elif number % 10 == 9:
            wrong, status = BAD[number // 10 % len(BAD)]
            found.append(Sent(body | wrong, stream, status=status))
        else:
            found.append(Sent(body, stream))
    return found


def alone(directory: Path, sent: list[Sent]) -> list[list[int] | None]:
    """Returns the tokens of each request in a run of its own; None if it cannot be served."""
    with Generator(directory) as generator:
        return [
            generator.generate(
                [one.body["prompt"]],
                max_new_tokens=one.body["max_tokens"],
                sampling=Sampling(temperature=one.body["temperature"], seed=one.body["seed"]),
            )[0]
            if one.status is None
            else None
            for one in sent
        ]


def wrong(sent: Sent, want: list[int] | None, got: dict[str, Any]) -> str | None:
    """Returns what is wrong with what a client got; None if nothing is."""
    if want is None or got["status"] is not None:
        if got["status"] == sent.status:
            return None
        return f"expected the status {sent.status or 200}, got {got['status'] or 200}"
    tokens = got["tokens"]
    expected = want if sent.leave is None else want[: len(tokens)]
    return None if tokens == expected else f"expected the tokens {expected}, got {tokens}"


def resident(pid: int) -> int:
    """Returns the bytes of a process that are in memory."""
    text = Path(f"/proc/{pid}/status").read_text()
    (line,) = (line for line in text.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def ranks_of(pid: int) -> list[int]:
    """Returns the processes of ranks that a process has started, directly or through others."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        name = Path(f"/proc/{child}/cmdline").read_bytes()
        found += [int(child)] if b"serve\0" in name else ranks_of(int(child))
    return found


def alive(pid: int) -> bool:
    """Returns whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def client(python: str, place: str, sent: list[Sent], at_once: int) -> list[dict[str, Any]]:
    """Returns what the client got for each request: `status` or `tokens`."""
    job = {"place": place, "at_once": at_once, "requests": [asdict(one) for one in sent]}
    done = subprocess.run(
        [python, str(HERE / "serve_client.py"), "job"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        timeout=CLIENT_S,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def export(path: Path, cache: str) -> None:
    """Writes a small Llama."""
    sizes = {"vocab_size": VOCABULARY, "initializer_range": 0.2}
    settings = [text for name, value in sizes.items() for text in ("--set", f"{name}={value}")]
    script = HERE.parents[1] / "models" / "decoder.py"
    given = [sys.executable, "-W", "ignore", str(script), "llama", "-o", str(path)]
    subprocess.run([*given, "--cache", cache, *settings], check=True, stdout=subprocess.DEVNULL)


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Serves, sends all requests, prints what came of them, and returns what is wrong."""
    export(folder / "model.onnx", options.cache)
    one = shard_model(folder / "model.onnx", "replicate", folder / "one", devices=1).out
    summary = shard_model(folder / "model.onnx", options.strategy, folder / NAME)
    devices = int(summary.report["devices"])
    sent = requests(options.requests, options.seed)
    want = alone(one, sent)
    command = [
        find_mpirun(), "--oversubscribe", "-n", str(devices), sys.executable, "-m", "onnxpar.cli",
        "serve", str(summary.out), "--port", "0", "--max-length", str(LENGTH), "--queue", "1000",
    ]  # fmt: skip
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=mpirun_environment(), start_new_session=True
    )
    try:
        assert server.stderr is not None
        place = next((m[1] for line in server.stderr if (m := _PLACE.search(line))), None)
        if place is None:
            return ["the server did not start"]
        ranks, problems, held = ranks_of(server.pid), list[str](), list[int]()
        for number in range(options.rounds):
            begun = time.perf_counter()
            got = client(options.python, place, sent, options.at_once)
            seconds = time.perf_counter() - begun
            found = [wrong(*three) for three in zip(sent, want, got, strict=True)]
            problems += [f"request {n}: {text}" for n, text in enumerate(found) if text]
            held.append(max(map(resident, ranks)))
            left = sum(one.leave is not None for one in sent)
            refused = sum(one["status"] is not None for one in got)
            print(
                f"round {number}: {len(got) - left - refused} answered, {left} left, {refused} "
                f"refused in {seconds:.1f} s; a rank holds at most {held[-1] / 2**20:.0f} MiB"
            )
        if held[-1] > MORE * held[0]:
            problems.append(f"memory: {held[0]} bytes after the first round, {held[-1]} at last")
        begun = time.perf_counter()
        server.send_signal(signal.SIGTERM)
        while any(map(alive, ranks)) and time.perf_counter() - begun < 2 * END_S:
            time.sleep(0.01)
        seconds = time.perf_counter() - begun
        print(f"ended {seconds:.1f} s after SIGTERM")
        if seconds > END_S:
            problems.append(f"{seconds:.1f} s after SIGTERM, ranks still ran")
        return problems
    finally:
        if server.poll() is None:
            time.sleep(1)
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def main() -> int:
    """Runs the test; returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--python", required=True, help="a Python that has the package openai")
    parser.add_argument("--strategy", default="tp=2", help="how to shard (default: tp=2)")
    parser.add_argument(
        "--cache", choices=("shared", "growing"), default="shared", help="the kind of cache"
    )
    parser.add_argument("--requests", type=int, default=200, help="requests in a round")
    parser.add_argument("--at-once", type=int, default=32, help="requests at the same time")
    parser.add_argument("--rounds", type=int, default=3, help="rounds")
    parser.add_argument("--seed", type=int, default=0, help="seed of the requests")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="onnxpar-serve-") as folder:
        problems = measure(options, Path(folder))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
