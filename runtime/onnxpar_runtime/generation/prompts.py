"""Sequences of different lengths side by side: tokens, masks and positions of each step."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.errors import InputError

Array = NDArray[Any]


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
        self.total = int(self.lengths.max())
        self._padding = self.total - self.lengths
        self.tokens = np.zeros((len(prompts), self.total), np.int64)
        for row, prompt in enumerate(prompts):
            self.tokens[row, self._columns(row)] = prompt

    def _columns(self, row: int) -> slice:
        length = int(self.lengths[row])
        return slice(self.total - length, None) if self._left else slice(0, length)

    @property
    def padded(self) -> bool:
        """Whether the sequences differ in length."""
        return bool(self._padding.any())

    def mask(self) -> Array:
        """Returns which columns count, bool [batch, total]."""
        column = np.arange(self.total)
        if self._left:
            return np.asarray(column >= self._padding[:, None])
        return np.asarray(column < self.lengths[:, None])

    def positions(self, new: int) -> Array:
        """Returns the places of the last `new` columns in their sequences, [batch, new]."""
        if self._left:
            column = np.arange(self.total - new, self.total)
            return np.asarray(np.maximum(column - self._padding[:, None], 0))
        if new == 1:
            return np.asarray(self.lengths[:, None] - 1)
        return np.broadcast_to(np.arange(new), (len(self.lengths), new))

    def last(self, new: int) -> Array:
        """Returns, among the last `new` columns, the one with each sequence's last token."""
        if self._left or new == 1:
            return np.full(len(self.lengths), new - 1)
        return self.lengths - 1

    def append(self) -> None:
        """Makes every sequence longer by one token."""
        self.lengths += 1
        self.total += 1
