"""Receives that are posted early: messages arrive while the rank computes."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import RankError

T = TypeVar("T")


class Ticket(Generic[T]):
    """A receive that was posted.

    Args:
        receive: Receives it.
        what: What it is, for messages.
        background: Whether another thread receives it.
    """

    def __init__(self, receive: Callable[[bool], T], what: str, *, background: bool) -> None:
        """Has received nothing yet."""
        self.what = what
        self.background = background
        self.done = threading.Event() if background else None
        self._receive = receive
        self._result: T | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Receives; `result` raises its error."""
        try:
            self._result = self._receive(self.background)
        except BaseException as error:  # raised in the thread that waits
            self._error = error
        if self.done is not None:
            self.done.set()

    def result(self) -> T:
        """Returns what was received, or raises the error of receiving it."""
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # `run` has set it


class Inbox:
    """The receives that a rank has posted.

    Messages of one peer are received in the order in which they were posted: by a thread of the
    peer, or when they are waited for. The messages of a peer are all received in the same way.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: Rank) -> None:
        """Starts nothing yet."""
        self._rank = rank
        self._posted: dict[int, deque[Ticket[Any]]] = {}
        self._queues: dict[int, queue.SimpleQueue[Ticket[Any] | None]] = {}

    def post(
        self, peer: int, receive: Callable[[bool], T], what: str, *, background: bool
    ) -> Ticket[T]:
        """Returns the ticket of a message from a peer.

        Args:
            peer: The sender's global rank.
            receive: Receives the message, given `background`.
            what: What it is, for messages.
            background: Whether to receive in a thread of the peer, at once; the rank must be
                `concurrent`. Otherwise it is received when it is waited for.
        """
        ticket = Ticket(receive, what, background=background)
        if not background:
            self._posted.setdefault(peer, deque()).append(ticket)
            return ticket
        if peer not in self._queues:
            waiting: queue.SimpleQueue[Ticket[Any] | None] = queue.SimpleQueue()
            self._queues[peer] = waiting
            # A peer that never sends must not keep the process alive.
            name = f"onnxpar-receive-{self._rank.index}-{peer}"
            threading.Thread(target=_work, args=(waiting,), name=name, daemon=True).start()
        self._queues[peer].put(ticket)
        return ticket

    def wait(self, peer: int, ticket: Ticket[T]) -> T:
        """Returns a message once it has been received.

        Raises:
            RankError: A rank failed, or nothing arrived within the world's time limit, which ends
                all ranks.
        """
        if ticket.done is None:
            posted = self._posted[peer]
            while ticket in posted:
                posted.popleft().run()
            return ticket.result()
        world = self._rank.world
        if not ticket.done.wait(world.timeout_s or None):
            message = (
                f"{ticket.what}: waited {world.timeout_s:.0f} s for rank {peer} (ONNXPAR_TIMEOUT)"
            )
            world.abort(self._rank.index, message)
            raise RankError(self._rank.index, message)
        return ticket.result()

    def close(self) -> None:
        """Ends the threads, once they have received what was posted."""
        for waiting in self._queues.values():
            waiting.put(None)
        self._queues.clear()


def _work(waiting: "queue.SimpleQueue[Ticket[Any] | None]") -> None:
    while (ticket := waiting.get()) is not None:
        ticket.run()
