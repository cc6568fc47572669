"""`serve`, as the command line and `mpirun python` scripts start it."""

import asyncio
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from onnxpar_format.options import Execution, ServingRun
from onnxpar_runtime.agree import together
from onnxpar_runtime.commands import begin, opened, start, tell, traced
from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.generation.chats import template_of
from onnxpar_runtime.generation.generator import Generator
from onnxpar_runtime.generation.requests import Requests
from onnxpar_runtime.generation.text import Tokenizer, configured
from onnxpar_runtime.interrupts import writing_calls
from onnxpar_runtime.launch import guarded
from onnxpar_runtime.serving.engine import Engine, Pauses
from onnxpar_runtime.serving.metrics import Metrics

_DEFAULT = Execution()
_GRACE_S = 5
"""Seconds in which the last answers are sent."""


def serve(directory: str | Path, what: ServingRun, how: Execution = _DEFAULT) -> int:
    """Serves a decoder over HTTP on rank 0 until SIGTERM or Ctrl-C; the body of one rank.

    At SIGUSR1 a rank writes its last calls, and goes on.

    Args:
        directory: The directory of a decoder with a cache.
        what: Where and how to serve it.
        how: How to run.

    Returns:
        The exit code. Errors have been printed.
    """
    rank = start(how)

    def body() -> int:
        manifest = begin(rank, "serve", directory, how)
        with (
            traced(rank, "serve", manifest, how),
            opened(Generator, rank, manifest, how) as generator,
        ):
            requests = generator.requests(
                start=together(rank, lambda: _start(what)),
                slots=what.slots,
                length=what.max_length,
                chunk=what.chunk,
                cache_memory=what.cache_memory,
                prefixes=what.prefixes,
            )
            tell(rank, requests.notices)
            with ExitStack() as stack:
                ends = {signal.SIGTERM: requests.end, signal.SIGINT: requests.end}
                stack.enter_context(writing_calls(rank, ends))
                name = what.name or Path(directory).resolve().name
                open_server = (lambda: _Server(requests, what, name)) if rank.index == 0 else None
                server = together(rank, lambda: open_server() if open_server else None)
                if server is not None:
                    stack.callback(server.close)
                pauses = Pauses()
                while not requests.ended:
                    if server is None:
                        requests.step()
                    else:
                        server.step()
                    if pause := pauses.after(requests):
                        # Ranks that waited in a collective would keep their cores busy.
                        time.sleep(pause) if server is None else server.rest(pause)
        return 0

    return guarded(rank, body)


def _start(what: ServingRun) -> Sequence[int]:
    """Returns the tokens with which the decoder of an encoder-decoder begins, if they are known."""
    if what.start or what.tokenizer is None:
        return what.start
    return configured(what.tokenizer, "decoder_start_token_id")


class _Server:
    """The web server, in a thread of its own.

    Args:
        requests: The requests of all ranks.
        what: Where and how to serve.
        name: The name of the model.

    Raises:
        InputError: A package is not installed, or the folder of the tokenizer does not fit.
        LaunchError: The port cannot be used.
    """

    def __init__(self, requests: Requests, what: ServingRun, name: str) -> None:
        """Begins to listen."""
        try:
            import uvicorn

            from onnxpar_runtime.serving.app import Model, application, only_for_hosts
            from onnxpar_runtime.serving.connections import bounded_protocol, most_connections
        except ImportError as error:
            raise InputError(
                f"serve: the package {error.name} is not installed (pip install 'onnxpar[serve]')"
            ) from None
        tokenizer = None if what.tokenizer is None else Tokenizer(what.tokenizer)
        template = None if what.tokenizer is None else template_of(what.tokenizer)
        eos = what.eos or (() if tokenizer is None else tokenizer.eos)
        most = requests.slots + what.queue
        metrics = Metrics()
        self._engine = Engine(requests, most, eos, metrics)
        family = socket.AF_INET6 if ":" in what.host else socket.AF_INET
        try:
            self._socket = socket.create_server((what.host, what.port), family=family)
        except OSError as error:
            raise LaunchError(
                f"--host {what.host} --port {what.port}: {error.strerror or error}"
            ) from None
        app = application(self._engine, Model(name, tokenizer, template))
        bound = self._socket.getsockname()[0]
        config = uvicorn.Config(
            only_for_hosts(app, what.host, bound, metrics.refused),
            http=bounded_protocol(most_connections(most), metrics.refused),
            log_config=None,
            log_level="error",  # malformed requests may not fill stderr
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_GRACE_S,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="onnxpar-serve", daemon=True)
        self._thread.start()
        place = f"[{what.host}]" if ":" in what.host else what.host
        port = self._socket.getsockname()[1]
        sys.stderr.write(f"{name} is served at http://{place}:{port}/v1\n")
        sys.stderr.flush()

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._socket]))

    def step(self) -> None:
        """Computes a step and sends what it gives.

        Raises:
            LaunchError: The web server has failed.
        """
        if not self._thread.is_alive():
            raise LaunchError("the web server has ended")
        self._engine.step()

    def rest(self, pause: float) -> None:
        """Waits for a request, but not longer than the other ranks rest."""
        self._engine.rest(pause)

    def close(self) -> None:
        """Sends what is left, and ends."""
        self._engine.close()
        self._server.should_exit = True
        self._thread.join(_GRACE_S + 1)
        self._socket.close()
