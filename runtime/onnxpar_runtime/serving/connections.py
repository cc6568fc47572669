"""What a client may do before it has asked for anything: the number and the time of connections.

uvicorn waits for the header of a request without end, and accepts any number of connections.
"""

import asyncio
import json
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from onnxpar_runtime.serving.fields import Refusal

HEADER_SECONDS = 10.0
"""How long a client may take to send the header of a request."""
SPARE = 128
"""Connections beside those of the requests that the server takes: health, metrics, refusals."""
_OTHER_FILES = 256
"""Descriptors that are left for the rest of the process."""


def most_connections(requests: int) -> int:
    """Returns how many connections may be open, for a number of requests at a time."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = requests + SPARE
    return most if files == resource.RLIM_INFINITY else max(1, min(most, files - _OTHER_FILES))


def bounded_protocol(most: int, refused: Callable[[int], None]) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol of a connection, with bounds.

    Args:
        most: Connections that may be open at a time; a further one gets status 503.
        refused: Called with the status of each refusal.
    """

    class _Bounded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > most:
                self._refuse(Refusal(f"the server has {most} connections, and takes no more", 503))
            else:
                self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if not self._waits():
                self._cancel()
            elif self._timer is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel()
            super().connection_lost(exc)

        def _waits(self) -> bool:
            """Whether no request is being answered."""
            return self.cycle is None or self.cycle.response_complete

        def _wait(self) -> None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._late)

        def _cancel(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _late(self) -> None:
            if self._waits() and not self.transport.is_closing():
                text = f"header: expected all of it within {HEADER_SECONDS:g} s"
                self._refuse(Refusal(text, 408))

        def _refuse(self, refusal: Refusal) -> None:
            refused(refusal.status)
            self.transport.write(_answer(refusal.status, refusal.body))
            self.transport.close()

    return _Bounded


def _answer(status: int, body: Any) -> bytes:
    text = json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(text)}",
        "connection: close",
        *(["retry-after: 1"] if status == HTTPStatus.SERVICE_UNAVAILABLE else ()),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + text
