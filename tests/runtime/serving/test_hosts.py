"""A server of the local machine answers no web page that has made its name mean 127.0.0.1."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("starlette")

from onnxpar_format.host_header import problem_of_host
from onnxpar_runtime.serving import app

LOCAL = ("localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", None)
FOREIGN = ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example",
           "", ":8000", "[::1", "localhost:80@evil", "192.0.2.1", "localhost, evil")  # fmt: skip


@pytest.mark.parametrize("bound", ["127.0.0.1", "127.0.1.1", "::1"])
def test_a_local_server(bound: str) -> None:
    assert not [h for h in LOCAL if problem_of_host(bound, bound, h) is not None]
    assert not [h for h in FOREIGN if problem_of_host(bound, bound, h) is None]
    # The machine's own name often means 127.0.1.1.
    assert problem_of_host("Desk", bound, "desk:8000") is None


@pytest.mark.parametrize("bound", ["0.0.0.0", "::", "192.0.2.1"])
def test_a_server_for_others_has_any_name(bound: str) -> None:
    assert problem_of_host(bound, bound, "evil.example") is None


@pytest.mark.parametrize(("host", "status"), [(b"localhost:80", 200), (b"evil.example", 403)])
def test_what_is_answered(host: bytes, status: int) -> None:
    sent: list[Any] = []
    refused: list[int] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", host)]}
    checked = app.only_for_hosts(inner, "127.0.0.1", "127.0.0.1", refused.append)
    asyncio.run(checked(scope, lambda: asyncio.sleep(0), send))  # type: ignore[arg-type]
    assert sent[0]["status"] == status
    assert refused == [403][: status == 403]
    assert status == 200 or b"Host: expected localhost" in sent[1]["body"]
