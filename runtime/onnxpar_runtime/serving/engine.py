"""Joins the thread of the web server with the steps of the ranks, on rank 0."""

import asyncio
import threading
import time
from collections.abc import Sequence

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.groups import Event
from onnxpar_runtime.generation.requests import Requests
from onnxpar_runtime.serving.asked import Asked
from onnxpar_runtime.serving.fields import Refusal
from onnxpar_runtime.serving.metrics import Metrics

_SHORTEST_S, _LONGEST_S = 0.0005, 0.02
"""Without requests, ranks rest between two steps for the first time, and at most."""


class Ticket:
    """An answer that is being made.

    Args:
        loop: The event loop in which it is awaited.
        prompt: The number of the prompt's tokens.

    Attributes:
        events: What has happened to it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, prompt: int) -> None:
        """Has no token."""
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.loop, self.begun, self.prompt = loop, time.perf_counter(), prompt
        self.number: int | None = None
        self.last: float | None = None

    def __repr__(self) -> str:
        """For logs."""
        return f"Ticket({self.number})"


class Engine:
    """Takes requests from the web server's thread while the main thread computes.

    Args:
        requests: The requests of all ranks.
        most: Requests at most, those that wait included.
        eos: Tokens that complete an answer.
        metrics: What is counted.

    Attributes:
        metrics: What is counted.
        ending: Whether requests are refused because the server ends.
    """

    def __init__(self, requests: Requests, most: int, eos: Sequence[int], metrics: Metrics) -> None:
        """Has no request."""
        self._requests, self._most = requests, most
        self._eos, self.metrics = frozenset(eos), metrics
        metrics.cache_bytes = requests.state_bytes
        self._tickets: dict[int, Ticket] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self.ending = False

    # -- in the web server's thread ----------------------------------------------------------------

    def submit(self, asked: Asked) -> list[Ticket]:
        """Asks for all answers of a request, prompt by prompt.

        Raises:
            Refusal: A request does not fit, there are too many, or the server ends.
        """
        wanted = len(asked.prompts) * asked.choices
        if wanted > self._most:
            raise Refusal(f"expected at most {self._most} answers, got {wanted}")
        loop = asyncio.get_running_loop()
        with self._lock:
            if self.ending:
                raise Refusal("the server is shutting down", 503)
            if len(self._tickets) + wanted > self._most:
                raise Refusal(
                    f"expected at most {self._most} answers at a time; try again later",
                    429,
                    code="rate_limit_exceeded",
                )
            tickets: list[Ticket] = []
            for prompt in asked.prompts:
                room = max(self._requests.room(prompt), 1)
                for number in range(asked.choices):
                    try:
                        found = self._requests.submit(
                            prompt,
                            max_new_tokens=room if asked.new is None else asked.new,
                            sampling=asked.sampling,
                            eos=self._eos,
                            number=number,
                            logprobs=asked.logprobs,
                        )
                    except InputError as error:
                        for made in tickets:
                            self._cancel(made)
                        raise Refusal(str(error)) from None
                    ticket = Ticket(loop, len(prompt))
                    ticket.number = found
                    self._tickets[found] = ticket
                    tickets.append(ticket)
            self.metrics.waiting = len(self._tickets)
        self._wake.set()
        return tickets

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends answers that are not complete; nobody awaits them any more."""
        with self._lock:
            for ticket in tickets:
                self._cancel(ticket)
        self._wake.set()

    def _cancel(self, ticket: Ticket) -> None:
        if ticket.number is not None and ticket.number in self._tickets:
            self._requests.cancel(ticket.number)

    # -- in the main thread ------------------------------------------------------------------------

    def step(self) -> None:
        """Computes a step and hands its events to those who await them."""
        begun = time.perf_counter()
        events = self._requests.step()
        now = time.perf_counter()
        if events:
            self.metrics.step(now - begun)
            self.metrics.cache_bytes = self._requests.state_bytes
            self.metrics.reused_tokens = self._requests.reused
        handed: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event]]] = {}
        with self._lock:
            if self._requests.ended:
                self.ending = True
            for event in events:
                ticket = self._tickets[event.request]
                if event.token is not None:
                    self.metrics.token(now, ticket.begun, ticket.last)
                    ticket.last = now
                if event.finished is not None:
                    del self._tickets[event.request]
                    self.metrics.finished(event.finished, ticket.prompt)
                handed.setdefault(ticket.loop, []).append((ticket, event))
            self.metrics.running = self._requests.running
            self.metrics.waiting = len(self._tickets) - self._requests.running
        for loop, pairs in handed.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_hand, pairs)

    def close(self) -> None:
        """Ends what came while the last step ran."""
        with self._lock:
            self.ending = True
            left = list(self._tickets.values())
            self._tickets.clear()
        for ticket in left:
            pair = ticket, Event(-1, None, "cancelled")
            if not ticket.loop.is_closed():
                ticket.loop.call_soon_threadsafe(_hand, [pair])

    def rest(self, pause: float) -> None:
        """Waits for a request, but not longer than the other ranks rest."""
        self._wake.wait(pause)
        self._wake.clear()


def _hand(pairs: Sequence[tuple[Ticket, Event]]) -> None:
    for ticket, event in pairs:
        ticket.events.put_nowait(event)


class Pauses:
    """How long ranks rest between steps without requests, the same on all ranks."""

    def __init__(self) -> None:
        """Begins with the shortest."""
        self._next = _SHORTEST_S

    def after(self, requests: Requests) -> float:
        """Returns how long to rest after a step, in seconds; 0 if there is work."""
        if requests.running or requests.waiting:
            self._next = _SHORTEST_S
            return 0
        pause = self._next
        self._next = min(2 * pause, _LONGEST_S)
        return pause
