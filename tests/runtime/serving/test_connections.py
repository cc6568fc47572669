"""Connections on which nothing is asked for end, and there are not too many of them."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from uvicorn.server import ServerState

from onnxpar_runtime.serving import connections

ASK = b"GET / HTTP/1.1\r\nhost: x\r\n"
Client = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def _app(scope: Any, receive: Any, send: Any) -> None:
    """Takes longer to answer than a client may take to ask."""
    await asyncio.sleep(0.7)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


def run(
    monkeypatch: pytest.MonkeyPatch, most: int, body: Callable[[Client], Awaitable[None]]
) -> list[int]:
    """Runs a client and a server; returns the statuses of refusals."""
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    refused: list[int] = []

    async def both() -> None:
        kind: Any = connections.bounded_protocol(most, refused.append)
        config = uvicorn.Config(_app, http=kind, log_config=None, lifespan="off")
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await asyncio.wait_for(body(lambda: asyncio.open_connection("127.0.0.1", port)), 20)

    asyncio.run(both())
    return refused


@pytest.mark.parametrize("sent", [b"", ASK, ASK + b"x-long: "])
def test_a_header_that_does_not_come(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    async def body(connect: Client) -> None:
        reader, writer = await connect()
        writer.write(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"header: expected all of it within 0.5 s" in answer
        writer.close()

    assert run(monkeypatch, 4, body) == [408]


def test_a_header_that_comes_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte may not give it more time; also not after an answer."""

    async def body(connect: Client) -> None:
        reader, writer = await connect()
        writer.write(ASK + b"\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        # Not to the end: a byte that arrives after the refusal resets the connection.
        answer = asyncio.ensure_future(reader.readuntil(b"\r\n"))
        writer.write(b"G")
        for _ in range(200):
            await asyncio.sleep(0.02)
            if answer.done():
                break
            writer.write(b"E")
        assert (await answer).startswith(b"HTTP/1.1 408")
        writer.close()

    assert run(monkeypatch, 4, body) == [408]


def test_one_connection_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(connect: Client) -> None:
        held = [await connect() for _ in range(2)]
        for _, writer in held:
            writer.write(ASK + b"\r\n")
        await asyncio.sleep(0.05)
        reader, writer = await connect()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
        assert b"the server has 2 connections" in answer
        for each, other in held:
            # An answer may take longer than a header.
            assert (await each.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            other.close()
        writer.close()

    assert run(monkeypatch, 2, body) == [503]


def test_the_number_of_connections_leaves_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (1024, 1024))
    assert connections.most_connections(10) == 10 + connections.SPARE
    assert connections.most_connections(10**6) == 1024 - 256
