"""Carries values from one stage's rank to another's: from host memory, or from GPU to GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_format.dtypes import onnx_code
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.cuda import Queue
from onnxpar_runtime.errors import RankError, first_line

Array = NDArray[Any]
_TAG = 0x5049
_MOST_DIMS = 32


class Leaving(NamedTuple):
    """A value that is sent.

    Attributes:
        name: Its name.
        value: The value, in the form that the carrier takes.
        with_shape: Whether its shape is sent first, because the receiver does not know it.
    """

    name: str
    value: Any
    with_shape: bool


@dataclass(frozen=True)
class Expected:
    """A value that is received.

    Attributes:
        name: Its name.
        dtype: Its type.
        shape: Its shape; None if the sender sends it first.
    """

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...] | None


Receive = Callable[[bool], Any]
"""Receives a value, for `Carrier.take`; the argument is `background` of `Rank.recv`. It raises
RankError if another rank failed, or sent something of another size."""


class Carrier(Protocol):
    """Sends and receives values. Those from one rank to another arrive in the order of sending."""

    def send(self, value: Any, with_shape: bool, peer: int, what: str) -> None:
        """Sends a value, without waiting for the receiver; the value may be freed afterwards.

        Args:
            value: The value.
            with_shape: Whether its shape is sent first, because the receiver does not know it.
            peer: The receiver's global rank.
            what: What it is, for messages.

        Raises:
            RankError: Another rank failed.
        """

    def post(self, expected: Expected, peer: int, what: str) -> Receive:
        """Returns a function that receives a value, once, on this thread or on the peer's thread.

        Args:
            expected: The value.
            peer: The sender's global rank.
            what: What it is, for messages.

        Raises:
            RankError: The device is out of memory for it.
        """

    def background(self, peer: int) -> bool:
        """Whether to receive in the background what a rank sends; it is always the same.

        Args:
            peer: The sender's global rank.
        """

    def take(self, received: Any) -> Any:
        """Returns a received value in a form for the rank's later computations."""


class HostCarrier:
    """Carries arrays, C-contiguous; a `Carrier`.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: Rank) -> None:
        """Carries nothing yet."""
        self._rank = rank
        self._background: dict[int, bool] = {}

    def send(self, value: Array, with_shape: bool, peer: int, what: str) -> None:
        """As `Carrier`."""
        if with_shape:
            _send_shape(self._rank, value.shape, peer, what)
        self._rank.send(value, peer, _TAG, what)

    def post(self, expected: Expected, peer: int, what: str) -> Receive:
        """As `Carrier`."""
        return partial(self._receive, expected, peer, what)

    def _receive(self, expected: Expected, peer: int, what: str, background: bool) -> Array:
        shape = expected.shape
        if shape is None:
            shape = _receive_shape(self._rank, peer, what, background)
        array = np.empty(shape, expected.dtype)
        self._rank.recv(array, peer, _TAG, what, background=background)
        return array

    def background(self, peer: int) -> bool:
        """As `Carrier`: if a message would not arrive otherwise before it is waited for."""
        if peer not in self._background:
            self._background[peer] = self._rank.concurrent and not self._rank.prompt(peer)
        return self._background[peer]

    def take(self, received: Array) -> Array:
        """As `Carrier`."""
        return received


@dataclass(frozen=True)
class _Eventual:
    """A value whose memory is not ready yet, to be written or to be read.

    Attributes:
        value: The OrtValue.
        event: The event after which it is ready.
    """

    value: Any
    event: Any


class DeviceCarrier:
    """Carries OrtValues on the rank's GPU, by its transport for GPUs.

    Only shapes go through the host. Memory for a value may be reused while enqueued work still
    reads its last contents. So a receive, on a stream for each peer, waits for the work that was
    enqueued when its memory was allocated, and work that reads the value waits for its arrival. The
    process waits for neither. Memory is allocated when a receive is posted, so that it does not
    wait for later work; if the shape is unknown, when the shape has arrived.

    Args:
        rank: The rank; it has the GPU.
        queue: The streams of the GPU.
    """

    def __init__(self, rank: Rank, queue: Queue) -> None:
        """Carries nothing yet."""
        self._rank, self._queue = rank, queue
        self._streams: dict[int, Any] = {}

    def send(self, value: Any, with_shape: bool, peer: int, what: str) -> None:
        """As `Carrier`."""
        if with_shape:
            _send_shape(self._rank, value.shape(), peer, what)
        size, stream = value.tensor_size_in_bytes(), self._queue.stream
        self._rank.send_device(value.data_ptr(), size, peer, _TAG, what, stream)

    def post(self, expected: Expected, peer: int, what: str) -> Receive:
        """As `Carrier`."""
        shape, dtype = expected.shape, expected.dtype
        known = None if shape is None else self._space(shape, dtype, what)
        return partial(self._receive, expected.dtype, known, peer, what)

    def _space(self, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> _Eventual:
        """Returns memory for a value, with the event after which it may be written."""
        queue = self._queue
        try:
            value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
                shape, onnx_code(dtype), "cuda", queue.index
            )
        except Exception as error:
            # onnxruntime has no common base class for what it raises.
            raise RankError(
                self._rank.index,
                f"{what}: GPU {queue.index} is out of memory for {dtype} of shape {list(shape)}: "
                f"{first_line(error)}",
            ) from error
        return _Eventual(value, queue.mark(queue.stream))

    def _receive(
        self,
        dtype: np.dtype[Any],
        known: _Eventual | None,
        peer: int,
        what: str,
        background: bool,
    ) -> _Eventual:
        space = known
        if space is None:
            shape = _receive_shape(self._rank, peer, what, background)
            space = self._space(shape, dtype, what)
        # One thread at a time receives from a peer.
        stream = self._streams.get(peer) or self._streams.setdefault(peer, self._queue.beside())
        self._queue.hold(stream, space.event)
        value = space.value
        self._rank.recv_device(
            value.data_ptr(),
            value.tensor_size_in_bytes(),
            peer,
            _TAG,
            what,
            stream,
            background=background,
        )
        return _Eventual(value, self._queue.mark(stream))

    def background(self, peer: int) -> bool:
        """As `Carrier`: the receive must be on its stream before the value is sent."""
        return self._rank.concurrent

    def take(self, received: _Eventual) -> Any:
        """As `Carrier`."""
        self._queue.hold(self._queue.stream, received.event)
        return received.value


def _send_shape(rank: Rank, shape: Sequence[int], peer: int, what: str) -> None:
    head = np.zeros(1 + _MOST_DIMS, np.int64)
    head[: 1 + len(shape)] = len(shape), *shape
    rank.send(head, peer, _TAG, what)


def _receive_shape(rank: Rank, peer: int, what: str, background: bool) -> tuple[int, ...]:
    head = np.empty(1 + _MOST_DIMS, np.int64)
    rank.recv(head, peer, _TAG, what, background=background)
    return tuple(int(n) for n in head[1 : 1 + head[0]])
