"""The body of a request: a long one, and a client that does not send all of it."""

import asyncio

import pytest

pytest.importorskip("starlette")

from starlette.requests import Request

from onnxpar_runtime.serving import app
from onnxpar_runtime.serving.fields import Refusal


def refused(length: int) -> Refusal:
    """What is answered to a client that announces a length, and sends one byte."""
    parts = [{"type": "http.request", "body": b"{", "more_body": True}]

    async def receive() -> dict[str, object]:
        if parts:
            return parts.pop()
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    header = (b"content-length", str(length).encode())
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [header]}
    with pytest.raises(Refusal) as found:
        asyncio.run(app._body(Request(scope, receive)))
    return found.value


def test_a_body_that_is_announced_too_long_is_not_waited_for() -> None:
    assert refused(10**14).status == 413


def test_a_client_that_sends_nothing_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_SECONDS", 0.05)
    assert refused(100).status == 408
