"""Ranks agree, in one small reduction, on whether all of them can go on.

Otherwise a rank with a bad input would raise an error while the others wait in a collective.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.errors import OnnxparRuntimeError, RankError, SymbolValueError

T = TypeVar("T")
_MESSAGE_BYTES = 4096
_PATIENCE_S = 2.0
_ABSENT = np.iinfo(np.int64).min


class Reducer(Protocol):
    """A rank: its index, the number of ranks, and a reduction on the host."""

    @property
    def index(self) -> int:
        """This rank's number."""

    @property
    def world(self) -> Any:
        """The set of ranks; its `size` is their number."""

    def all_reduce(
        self, array: NDArray[Any], group: Sequence[int] | None = None, op: str = "sum"
    ) -> NDArray[Any]:
        """Returns the element-wise reduction of every rank's array."""


def agree(
    rank: Reducer,
    error: OnnxparRuntimeError | None,
    values: Mapping[str, int] | None = None,
    names: Sequence[str] = (),
    sizes: Sequence[int] | None = None,
) -> None:
    """Returns on every rank, or raises on every rank. Every rank of the world must call it.

    Args:
        rank: This rank.
        error: Why this rank cannot go on, or None.
        values: Values by name that must be equal on all ranks that have them.
        names: The names to compare, the same on all ranks.
        sizes: Sizes of several batches, which must be equal on all ranks; None on all ranks if
            there are no batches.

    Raises:
        OnnxparRuntimeError: `error` itself if every rank has one, with `agreed` set.
        RankError: Some rank has an error; the lowest such rank's message is raised by all.
        SymbolValueError: A value or the sizes differ between ranks.
    """
    size: int = rank.world.size
    if size == 1:
        if error is not None:
            raise error.as_agreed()
        return
    vector = np.full(2 + 2 * len(names) + 2 * (sizes is not None), _ABSENT, np.int64)
    # The lowest failing rank sends the largest number, so that one maximum finds it.
    vector[0] = size - rank.index if error is not None else 0
    vector[1] = error is None
    for slot, name in enumerate(names):
        if values is not None and name in values:
            vector[2 + 2 * slot : 4 + 2 * slot] = values[name], -values[name]
    if sizes is not None:
        number = _digest(sizes)
        vector[-2:] = number, -number
    result = rank.all_reduce(vector, op="max")
    if result[0] > 0:
        if not result[1] and error is not None:
            raise error.as_agreed()
        _raise_of(rank, size - int(result[0]), error)
    for slot, name in enumerate(names):
        high, low = int(result[2 + 2 * slot]), -int(result[3 + 2 * slot])
        if high != _ABSENT and high != low:
            raise SymbolValueError(
                f"symbol {name!r}: expected one value on all ranks, got values from {low} to {high}"
            ).as_agreed()
    if sizes is not None and result[-2] != -result[-1]:
        raise SymbolValueError(
            "expected the same number and sizes of batches on all ranks, got "
            f"{list(sizes)} on this rank"
        ).as_agreed()


def _digest(sizes: Sequence[int]) -> int:
    """Returns a hash of a sequence: a polynomial modulo the prime 2^61 - 1."""
    number = len(sizes)
    for size in sizes:
        number = (number * 1_000_003 + size) % ((1 << 61) - 1)
    return number


def _raise_of(rank: Reducer, failed: int, error: OnnxparRuntimeError | None) -> None:
    """Raises the error of rank `failed` on every rank, with a second reduction for the message."""
    packet = np.zeros(1 + _MESSAGE_BYTES, np.int64)
    if rank.index == failed and error is not None:
        text = str(error).encode()[:_MESSAGE_BYTES]
        packet[0] = error.exit_code
        packet[1 : 1 + len(text)] = np.frombuffer(text, np.uint8)
    packet = rank.all_reduce(packet, op="max")
    message = packet[1:].astype(np.uint8).tobytes().rstrip(b"\0").decode(errors="replace")
    raise RankError(failed, message, exit_code=int(packet[0])).as_agreed()


def together(rank: Reducer, action: Callable[[], T]) -> T:
    """Returns what `action` returns on this rank, once it has succeeded on every rank.

    Raises:
        OnnxparRuntimeError: As `agree`; any other exception passes through at once.
    """
    error: OnnxparRuntimeError | None = None
    result: T | None = None
    try:
        result = action()
    except OnnxparRuntimeError as caught:
        error = caught
    agree(rank, error)
    return result  # type: ignore[return-value]  # None only where T has it: no error was raised


def together_for_long(rank: Reducer, action: Callable[[], T]) -> T:
    """Does the same as `together` for an action that may take longer than a collective may wait.

    The action runs in its own thread. Meanwhile, at least once in `_PATIENCE_S`, a reduction finds
    whether all ranks are done.

    Raises:
        OnnxparRuntimeError: As `agree`; any other exception passes through.
    """
    result: Future[T] = Future()

    def work() -> None:
        try:
            result.set_result(action())
        except BaseException as error:  # raised below
            result.set_exception(error)

    # A daemon: when another rank fails, this one must end without waiting for it.
    threading.Thread(target=work, name="onnxpar-work", daemon=True).start()
    while True:
        wait([result], _PATIENCE_S)
        pending = np.array([not result.done()], np.int64)
        if not rank.all_reduce(pending, op="max")[0]:
            return together(rank, result.result)
