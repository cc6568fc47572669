"""`onnxpar view`: serves the graph of the rank that was asked for."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from onnxpar.cli import main
from tests.runtime import hand_made

ATTACKS = [
    (b"GET /data/.hidden HTTP/1.1\r\n\r\n", 404),
    (b"GET /data/sub/x HTTP/1.1\r\n\r\n", 404),
    (b"GET /data/../a/manifest.json HTTP/1.1\r\n\r\n", 404),
    (b"GET /data/out HTTP/1.1\r\n\r\n", 404),
    (b"GET /server.py HTTP/1.1\r\n\r\n", 404),
    (b"GET /data/rank0001.model.onnx%00 HTTP/1.1\r\n\r\n", 404),
    (b"GET /\x00 HTTP/1.1\r\n\r\n", 404),
    (b"GET //[ HTTP/1.1\r\n\r\n", 404),
    (b"GET / HTTP/9.99\r\n\r\n", 505),
    (b"\r\n\r\n", 400),
    (b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\n", 501),
    (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5_000 + b"\r\n", 431),
    (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
    (b"GET /data/rank0001.model.onnx HTTP/1.1\r\nHost: localhost.evil.example:80\r\n\r\n", 403),
]


def asked(port: int, request: bytes) -> bytes:
    """What is answered to a request."""
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        # The server leaves without reading what is too long.
        with suppress(ConnectionError):
            client.sendall(request)
        with suppress(ConnectionError):
            while part := client.recv(1 << 16):
                found += part
    return found


def test_serves_what_the_manifest_names_until_interrupted(tmp_path: Path) -> None:
    """A full stderr delays neither answers nor the end."""
    directory = hand_made.data_parallel(tmp_path / "a")
    (directory / "sub").mkdir()
    for name in (".hidden", "sub/x", "../out"):
        (directory / name).write_text("secret")
    (directory / "out").symlink_to(tmp_path / "out")
    reader, full = os.pipe()
    os.set_blocking(full, False)
    with suppress(BlockingIOError):
        while True:
            os.write(full, b"x" * 4096)
    os.set_blocking(full, True)
    command = ["view", str(directory), "--rank", "1", "--no-browser", "--json"]
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "onnxpar.cli", *command],
        stdout=subprocess.PIPE,
        stderr=full,
        text=True,
    )
    limit = threading.Timer(30, process.kill)
    limit.start()
    try:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        graph = directory / "rank0001.model.onnx"
        assert found["file"] == str(graph)
        with urllib.request.urlopen(found["url"], timeout=10) as answer:
            page = answer.read().decode()
        assert '<meta name="file" content="/data/rank0001.model.onnx">' in page
        port = int(found["url"].rpartition(":")[2])
        for request, status in ATTACKS:
            answer = asked(port, request)
            assert answer.split()[1:2] == [str(status).encode()], (request[:80], answer[:200])
            assert b"secret" not in answer
        refusal = asked(port, b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n")
        assert b"expected localhost, 127.0.0.1 or [::1], got" in refusal
        for host in (b"localhost", b"127.0.0.1:9", b"[::1]:80", b"LOCALHOST"):
            request = b"GET /data/rank0001.model.onnx HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
            assert asked(port, request).endswith(b"\r\n\r\n" + graph.read_bytes())
        assert asked(port, b"GET /index.js HTTP/1.1\r\n\r\n").split()[1] == b"200"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
    finally:
        limit.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        os.close(full)
        os.close(reader)


def test_a_port_that_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["view", str(directory), "--no-browser", "--port", str(port)]) == 2
    assert f"--host localhost --port {port}: Address already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rank", "2"], "expected a rank from 0 to 1, got 2"),
        (["--program", "train"], "no program 'train'; it has model"),
    ],
)
def test_users_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    assert main(["view", str(directory), "--no-browser", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "{", "[]", '{"programs": {"model": {}}}'])
def test_no_readable_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    if text is not None:
        (tmp_path / "manifest.json").write_text(text)
    assert main(["view", str(tmp_path), "--no-browser"]) == 2
    assert "manifest.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["view"], ["run", "--inputs", "i.npz", "--outputs", "o.npz"]]
)
def test_a_missing_directory_is_named_one_way(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    target = str(tmp_path / "none")
    assert main([arguments[0], target, *arguments[1:]]) == 2
    assert f"onnxpar: error: {target}: no such directory" in capfd.readouterr().err


def test_rank_that_was_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = hand_made.data_parallel(tmp_path / "a")
    (directory / "rank0001.model.onnx").unlink()
    assert main(["view", str(directory), "--rank", "1", "--no-browser"]) == 2
    assert "the graph of rank 1 was not written" in capsys.readouterr().err
