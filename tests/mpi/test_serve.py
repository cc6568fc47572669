"""`mpirun onnxpar serve`: clients get what each would get alone, and the server ends."""

import json
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from onnxpar.api.shard_model import shard_model
from onnxpar.core.symbols import Symbol
from onnxpar_format.calls import read_calls
from onnxpar_format.options import Sampling
from onnxpar_runtime.generation.generator import Generator
from tests.runtime.generation.decoders import decoder
from tests.runtime.launching import mpirun
from tests.runtime.serving.servers import Served, served

RNG = np.random.default_rng(8)
ASKED = [
    {
        "prompt": RNG.integers(0, 96, RNG.integers(1, 40)).tolist(),
        "max_tokens": int(RNG.integers(1, 24)),
        "temperature": n % 2 * 0.9,
        "seed": n,
        "stream": n % 3 == 0,
        "n": 1 + (n % 7 == 6),
    }
    for n in range(24)
]
LEFT = 8
"""Answers for which each client asks that goes away."""
BAD = [
    ({"prompt": "text"}, 400, "prompt: expected tokens, since there is no tokenizer"),
    ({"prompt": [256]}, 400, "expected elements from -256 to 255"),
    ({"prompt": [1], "max_tokens": 200}, 400, "at most 64 tokens in the cache, got 1 and 200"),
    ({"prompt": [1], "temperature": "x"}, 400, "temperature: expected a number from 0 to 100"),
    ({"prompt": [1], "echo": True}, 400, "echo: not supported, got true"),
    ({"prompt": [1], "colour": 1}, 400, "colour: no such field"),
    ({"prompt": [1], "model": "other"}, 404, "model: expected 'two', got 'other'"),
]


# `test_generate.py` has stages under mpirun, and `test_requests.py` requests of stages.
@pytest.fixture(scope="module", params=["tp=2", pytest.param("pp=2", marks=pytest.mark.full)])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder over two ranks, whose cache is extended in place."""
    folder = tmp_path_factory.mktemp("served")
    out: Path = shard_model(decoder("in_place", folder), request.param, folder / "two").out
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[int]]]:
    """The tokens of each request on one device, without a server."""
    folder = tmp_path_factory.mktemp("alone")
    out = shard_model(decoder("in_place", folder), "replicate", folder / "one", devices=1).out
    with Generator(out) as m:
        return [
            m.generate(
                [one["prompt"]] * one["n"],
                max_new_tokens=one["max_tokens"],
                sampling=Sampling(temperature=one["temperature"], seed=one["seed"]),
            )
            for one in ASKED
        ]


def choices(server: Served, asked: dict[str, Any]) -> list[list[int]]:
    """The tokens of each answer to a request."""
    body = {"model": "two", **asked}
    if not body.get("stream"):
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        count = sum(len(choice["token_ids"]) for choice in found["choices"])
        assert found["usage"]["completion_tokens"] == count
        assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
        texts = [choice["text"] for choice in found["choices"]]
        tokens = [choice["token_ids"] for choice in found["choices"]]
    else:
        texts, tokens = [""] * body.get("n", 1), [list[int]() for _ in range(body.get("n", 1))]
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            parts = [line[6:] for line in answer.iter_lines() if line]
        assert parts[-1] == "[DONE]"
        for part in map(json.loads, parts[:-1]):
            (choice,) = part["choices"]
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["token_ids"]
    assert texts == [" ".join(map(str, one)) for one in tokens]
    return tokens


def leave(server: Served) -> None:
    """Asks for many answers, more than can be made at once, and goes away after two tokens."""
    body = {"model": "two", "prompt": [7], "max_tokens": 60, "n": LEFT, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as answer:
        for number, _ in enumerate(answer.iter_lines()):
            if number == 2:
                return


def metric(server: Served, name: str) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.split()[0] == name)


def same(found: Sequence[object], want: Sequence[object]) -> None:
    for number, (got, expected) in enumerate(zip(found, want, strict=True)):
        assert got == expected, number


def test_clients_get_what_each_would_get_alone(
    directory: Path, alone: list[list[list[int]]], tmp_path: Path
) -> None:
    """12 clients at once, 4 slots; some go away, some ask for what cannot be."""
    options = ["--slots", "4", "--max-length", "64", "--chunk", "16", "--log-dir", str(tmp_path)]
    with served(2, directory, *options) as server:
        with ThreadPoolExecutor(12) as pool:
            left = [pool.submit(leave, server) for _ in range(4)]
            found = [pool.submit(choices, server, asked) for asked in ASKED]
            for body, status, message in BAD:
                answer = server.client.post("/v1/completions", json={"model": "two", **body})
                assert answer.status_code == status and message in answer.json()["error"]["message"]
            same([future.result() for future in found], alone)
            for future in left:
                future.result()
        answer = server.client.post("/v1/completions", content=b" " * ((16 << 20) + 1))
        assert answer.status_code == 413 and "at most 16777216 bytes" in answer.text
        for method, path, status in (("GET", "/v1/completions", 405), ("POST", "/nowhere", 404)):
            answer = server.client.request(method, path)
            assert answer.status_code == status
            assert answer.json()["error"]["message"] == f"{method} {path}: no such endpoint"
        health = server.client.get("/health")
        assert health.status_code == 200 and health.json() == {"status": "ok"}
        assert server.client.get("/v1/models").json()["data"][0]["id"] == "two"
        # A short answer may be complete before the server notices that nobody waits for it.
        answers = sum(asked["n"] for asked in ASKED) + 4 * LEFT
        cancelled = metric(server, 'onnxpar_requests_total{finished="cancelled"}')
        assert 4 <= cancelled <= 4 * LEFT
        complete = metric(server, 'onnxpar_requests_total{finished="length"}')
        assert complete == answers - cancelled
        assert metric(server, 'onnxpar_refused_total{status="400"}') == len(BAD) - 1
        assert metric(server, "onnxpar_requests_running") == 0
        # At SIGUSR1 to mpirun, all ranks write their last calls, and the server goes on.
        server.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 10
        while len(list(tmp_path.glob("*.calls.json"))) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert server.client.get("/health").status_code == 200
        server.end(server.process.pid, 10)
    assert [calls.reason for calls in read_calls(tmp_path)] == ["asked by SIGUSR1"] * 2


def test_more_requests_than_slots_and_queue_are_refused(directory: Path) -> None:
    """While rank 1 is stopped, no answer can be complete."""
    options = ["--slots", "1", "--queue", "1", "--max-length", "64"]
    with served(2, directory, *options) as server, ThreadPoolExecutor(1) as pool:
        os.kill(server.ranks[1], signal.SIGSTOP)
        long = {"prompt": [7], "max_tokens": 60}
        first = pool.submit(choices, server, {**long, "stream": True})
        while not metric(server, "onnxpar_requests_waiting"):
            time.sleep(0.01)
        body = {"model": "two", **long, "n": 2}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        answer = server.client.post("/v1/completions", json={**body, "n": 3})
        assert answer.status_code == 400 and "at most 2 answers" in answer.text
        os.kill(server.ranks[1], signal.SIGCONT)
        assert len(first.result()[0]) == 60
        assert len(choices(server, {"prompt": [7], "max_tokens": 3})[0]) == 3


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_that_is_ended_ends_all(rank: int, directory: Path) -> None:
    """A client that still waits gets an error in the form that it knows."""
    options = ["--slots", "1", "--max-length", "64"]
    with served(2, directory, *options) as server, ThreadPoolExecutor(1) as pool:
        long = {"model": "two", "prompt": [7], "max_tokens": 60, "n": 64}
        waits = pool.submit(server.client.post, "/v1/completions", json=long)
        while not metric(server, "onnxpar_requests_running"):
            pass
        assert server.end(server.ranks[rank], 10) == 0
        answer = waits.result()
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "the server is shutting down"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--max-length", "300"],
            "at most 256 positions (the constraint on symbol 'total'), got 300",
        ),
        (
            ["--max-length", "64", "--host", "no.such.host.invalid"],
            "--host no.such.host.invalid --port 0:",
        ),
        pytest.param(
            ["--max-length", "64", "--tokenizer", "nowhere"],
            "--tokenizer nowhere: expected a folder with tokenizer.json",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_server_that_cannot_begin_ends_all_ranks(
    options: list[str], message: str, tmp_path: Path
) -> None:
    model, symbols = decoder("in_place", tmp_path), {"total": Symbol(max=256)}
    out = shard_model(model, "tp=2", tmp_path / "two", symbols=symbols).out
    outcome = mpirun(2, ["-m", "onnxpar.cli", "serve", str(out), "--port", "0", *options])
    assert outcome.code == 2 and message in outcome.err and outcome.out == ""
