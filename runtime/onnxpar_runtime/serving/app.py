"""The web application: OpenAI's endpoints, health and metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from onnxpar_format.host_header import problem_of_host
from onnxpar_runtime.generation.chats import ChatTemplate
from onnxpar_runtime.generation.text import Tokenizer
from onnxpar_runtime.serving.answers import Form, Logprob, Text, Usage
from onnxpar_runtime.serving.asked import Asked, chat_of, completion_of
from onnxpar_runtime.serving.engine import Engine, Ticket
from onnxpar_runtime.serving.fields import Fields, Refusal
from onnxpar_runtime.serving.logprobs import Logprobs

BODY_BYTES = 16 << 20
"""Bytes of a request at most."""
BODY_SECONDS = 30.0
"""How long a client may take to send them."""
_REFUSALS = {
    "cancelled": Refusal("the server is shutting down", 503),
    "error": Refusal("the logits of the model for this prompt are NaN", 500),
}
"""Answers to requests that end without a token."""


@dataclass(frozen=True)
class Model:
    """What is served.

    Attributes:
        name: The name that clients use.
        tokenizer: What makes tokens of texts.
        template: What makes a text of the messages of a chat.
    """

    name: str
    tokenizer: Tokenizer | None
    template: ChatTemplate | None


def application(engine: Engine, model: Model) -> Starlette:
    """Returns the application."""

    async def asked(request: Request, chat: bool) -> Asked:
        fields = Fields(await _body(request))

        def read() -> Asked:
            if chat:
                render = None if model.template is None else model.template.render
                return chat_of(fields, model.name, model.tokenizer, render)
            return completion_of(fields, model.name, model.tokenizer)

        # Long texts take a while, in which others must go on.
        return await run_in_threadpool(read)

    async def answer(request: Request, chat: bool) -> ASGIApp:
        try:
            wanted = await asked(request, chat)
            return _Answer(engine, model, wanted, engine.submit(wanted))
        except Refusal as refusal:
            engine.metrics.refused(refusal.status)
            return _refused(refusal)
        except ClientDisconnect:
            return Response(status_code=499)

    async def completions(request: Request) -> ASGIApp:
        return await answer(request, chat=False)

    async def chats(request: Request) -> ASGIApp:
        return await answer(request, chat=True)

    async def models(_: Request) -> Response:
        entry = {"id": model.name, "object": "model", "created": 0, "owned_by": "onnxpar"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(_: Request) -> Response:
        if engine.ending:
            return JSONResponse({"status": "ending"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(_: Request) -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return PlainTextResponse(engine.metrics.text(), headers={"content-type": kind})

    async def absent(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        return _refused(Refusal(f"{request.method} {request.url.path}: no such endpoint", status))

    return Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chats, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={404: absent, 405: absent},
    )


def only_for_hosts(app: ASGIApp, named: str, bound: str, refused: Callable[[int], None]) -> ASGIApp:
    """Returns an application that refuses requests for the hosts of other machines.

    Args:
        app: The application.
        named: The host that the user named to listen on.
        bound: The address on which the server listens.
        refused: Called with the status of each refusal.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        problem = problem_of_host(named, bound, Headers(scope=scope).get("host"))
        if problem is None:
            await app(scope, receive, send)
        else:
            refused(403)
            await _refused(Refusal(problem, 403))(scope, receive, send)

    return checked


async def _body(request: Request) -> bytes:
    """Returns the body of a request.

    Raises:
        Refusal: It is too long, or takes too long.
    """
    refusal = Refusal(f"body: expected at most {BODY_BYTES} bytes", 413)
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > BODY_BYTES:
        raise refusal
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                found += part
                if len(found) > BODY_BYTES:
                    raise refusal
    except TimeoutError:
        raise Refusal(f"body: expected all of it within {BODY_SECONDS:g} s", 408) from None
    return bytes(found)


def _refused(refusal: Refusal) -> Response:
    headers = {"retry-after": "1"} if refusal.status in (429, 503) else None
    return JSONResponse(refusal.body, refusal.status, headers)


class _Answer:
    """A response: answers that are being made, cancelled when the client goes away."""

    def __init__(self, engine: Engine, model: Model, asked: Asked, tickets: list[Ticket]) -> None:
        self._engine, self._asked, self._tickets = engine, asked, tickets
        self._form = Form(asked.chat, model.name)
        self._texts = [Text(model.tokenizer, asked.stops) for _ in tickets]
        self._logprobs = [Logprobs(asked.chat, model.tokenizer) for _ in tickets]
        self._usage = Usage(sum(len(prompt) for prompt in asked.prompts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answers."""
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            self._engine.cancel(self._tickets)
            # OSError: the client has gone.
            with suppress(asyncio.CancelledError, OSError):
                await sending
            with suppress(asyncio.CancelledError):
                await leaving

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._asked.streams:
            await self._stream(send)
            return
        try:
            answer = JSONResponse(await self._complete())
        except Refusal as refusal:
            self._engine.metrics.refused(refusal.status)
            await _refused(refusal)(scope, receive, send)
        else:
            await answer(scope, receive, send)

    async def _complete(self) -> dict[str, Any]:
        """Returns the object of all answers."""
        choices = []
        for index, ticket in enumerate(self._tickets):
            parts, why = [], ""
            async for text, _, finished in self._parts(index, ticket):
                parts.append(text)
                why = finished or why
            tokens, logprobs = self._texts[index].tokens, self._written(index, slice(None))
            choices.append(self._form.choice(index, "".join(parts), tokens, logprobs, why))
        return self._form.answer(choices, self._usage)

    def _written(self, index: int, which: slice) -> Logprob:
        """Returns the log-probabilities of some tokens of an answer."""
        if self._asked.logprobs is None:
            return None
        text = self._texts[index]
        return self._logprobs[index].json(text.tokens[which], text.likelihoods[which])

    async def _parts(
        self, index: int, ticket: Ticket
    ) -> AsyncIterator[tuple[str, slice, str | None]]:
        """Yields the parts of an answer: text, which tokens, and why it is complete.

        Raises:
            Refusal: The server ends before the answer is complete, or the model fails.
        """
        text = self._texts[index]
        shown = 0
        while True:
            event = await ticket.events.get()
            if event.token is None:
                raise _REFUSALS[event.finished or "error"]
            new = text.add(event.token, event.likelihood, last=event.finished is not None)
            self._usage.new += 1
            why = "stop" if text.stopped else event.finished
            if new or why:
                yield new, slice(shown, len(text.tokens)), why
                shown = len(text.tokens)
            if why:
                if event.finished is None:
                    self._engine.cancel([ticket])
                return

    async def _stream(self, send: Send) -> None:
        """Sends the parts of all answers as they come, as server-sent events."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
        headers.append((b"cache-control", b"no-cache"))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        lock = asyncio.Lock()

        async def write(found: object) -> None:
            text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)
            body = f"data: {text}\n\n".encode()
            async with lock:
                await send({"type": "http.response.body", "body": body, "more_body": True})

        async def one(index: int, ticket: Ticket) -> None:
            if self._asked.chat:
                await write(self._form.part(index, None, [], None, None))
            async for text, which, why in self._parts(index, ticket):
                tokens, logprobs = self._texts[index].tokens[which], self._written(index, which)
                await write(self._form.part(index, text, tokens, logprobs, why))

        parts = asyncio.gather(*(one(n, ticket) for n, ticket in enumerate(self._tickets)))
        try:
            await parts
        except Refusal as refusal:
            await write(refusal.body)
        else:
            if self._asked.usage:
                await write(self._form.counted(self._usage))
            await write("[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
