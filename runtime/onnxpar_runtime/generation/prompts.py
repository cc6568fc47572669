"""Sequences of different lengths side by side: tokens, masks and positions of each step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.errors import InputError

Array = NDArray[Any]


@dataclass(frozen=True)
class Columns:
    """The first columns of sequences that are padded on the left.

    Attributes:
        padding: Columns of padding of each sequence.
        total: The number of columns.
    """

    padding: Array
    total: int

    @property
    def padded(self) -> bool:
        """Whether the sequences differ in length."""
        return bool(self.padding.any())

    def mask(self) -> Array:
        """Returns which columns count, bool [batch, total]."""
        return np.asarray(np.arange(self.total) >= self.padding[:, None])

    def positions(self, new: int) -> Array:
        """Returns the places of the last `new` columns in their sequences, [batch, new]."""
        column = np.arange(self.total - new, self.total)
        return np.asarray(np.maximum(column - self.padding[:, None], 0))


class Sequences:
    """The sequences of a batch, padded to one length.

    A cache that grows by a whole column for all sequences needs padding on the left, so that all
    end in the same place. A cache in which each sequence has its own length needs it on the right.

    Args:
        prompts: The tokens of each prompt.
        left: Whether padding is on the left.

    Attributes:
        lengths: The number of tokens of each sequence, padding not counted.
        total: The number of columns so far, padding included.
        padded: Whether the sequences differ in length.
        room: With padding on the right, the columns of the mask once the prompts are in the cache:
            the length of the cache, so that the mask keeps its shape.

    Raises:
        InputError: There is no prompt, or one is empty.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], *, left: bool) -> None:
        """Pads the prompts."""
        if not prompts:
            raise InputError("prompts: expected at least one, got none")
        for index, prompt in enumerate(prompts):
            if not len(prompt):
                raise InputError(f"prompt {index}: expected at least one token, got none")
        self._left = left
        self.lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        self.total = self.room = int(self.lengths.max())
        self._filled = False
        self._padding = self.total - self.lengths
        self.padded = bool(self._padding.any())
        self.tokens = np.zeros((len(prompts), self.total), np.int64)
        for row, prompt in enumerate(prompts):
            self.tokens[row, self._columns(row)] = prompt

    def _columns(self, row: int) -> slice:
        length = int(self.lengths[row])
        return slice(self.total - length, None) if self._left else slice(0, length)

    def mask(self) -> Array:
        """Returns which columns count, bool [batch, total]."""
        if self._left and not self.padded:
            return np.ones((len(self.lengths), self.total), bool)
        if self._left:
            return Columns(self._padding, self.total).mask()
        columns = self.room if self._filled else self.total
        return np.asarray(np.arange(columns) < self.lengths[:, None])

    def positions(self, new: int) -> Array:
        """Returns the places of the last `new` columns in their sequences, [batch, new]."""
        if new == 1:
            return np.asarray(self.lengths[:, None] - 1)
        if self._left:
            return Columns(self._padding, self.total).positions(new)
        return np.broadcast_to(np.arange(new), (len(self.lengths), new))

    def last(self, new: int) -> Array:
        """Returns, among the last `new` columns, the one with each sequence's last token."""
        if self._left or new == 1:
            return np.full(len(self.lengths), new - 1)
        return self.lengths - 1

    def parts(
        self, width: int | None, chunk: int | None = None, first: int = 0
    ) -> Iterator[tuple["Sequences | Columns", Array]]:
        """Yields the prompts, a number of columns at a time: their places, and their tokens.

        Args:
            width: The number of columns in each run; None if it is open.
            chunk: If it is open, the largest number; None for no limit.
            first: The first column; the cache has those before it.

        Raises:
            InputError: They do not end in one place.
        """
        if width is not None:
            if not self._left and self.padded:
                raise InputError(
                    f"prompts: expected equal lengths, since a run takes {width} of their tokens "
                    f"at a time, got {sorted(set(self.lengths.tolist()))}"
                )
            if self.total % width:
                raise InputError(
                    f"prompts: expected a multiple of {width} tokens, which a run takes at a time, "
                    f"got {self.total}"
                )
        most = width or chunk or self.total
        if first == 0 and most >= self.total:
            yield self, self.tokens
            return
        for begin in range(first, self.total, most):
            end = min(begin + most, self.total)
            yield Columns(self._padding, end), self.tokens[:, begin:end]

    def fill(self) -> Array:
        """Returns the last token of each prompt, [batch, 1]; the cache has all others."""
        self._filled = True
        return self.tokens[np.arange(len(self.lengths)), self.lengths - 1][:, None]

    def repeat(self, count: int) -> None:
        """Makes equal sequences, side by side, of each one."""
        self.lengths, self._padding = (
            np.repeat(array, count) for array in (self.lengths, self._padding)
        )

    def append(self) -> None:
        """Makes every sequence longer by one token."""
        self.lengths += 1
        self.total += 1
        self._filled = True
