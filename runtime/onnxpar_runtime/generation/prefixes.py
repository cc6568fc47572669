"""Caches of the beginnings of prompts, which later prompts that begin alike take over.

A prompt is kept in blocks of a number of tokens. What a decoder keeps of a token depends on this
token and on those before it, so a block belongs to all tokens up to its end. Blocks that have not
been used for longest are forgotten first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.states import State
from onnxpar_runtime.generation.steps import Batch

BLOCK = 64
"""Tokens of a block: as many as a growing state has memory for at least."""


class Prefixes:
    """Blocks of prompts on one rank, in memory of its device. All ranks keep the same ones.

    Args:
        decoder: The program.
        make: Returns empty states of one row and a number of tokens.
        tokens: Tokens at most that are kept; 0 keeps none.

    Attributes:
        reused: The number of prompt tokens that did not have to be computed so far.
    """

    def __init__(
        self, decoder: Decoder, make: Callable[[int, int], list[State]], tokens: int
    ) -> None:
        """Keeps nothing yet."""
        self._make = make
        self._most = tokens // BLOCK
        width = decoder.roles.width
        whole = all(state.grows is not None for state in decoder.carried.values())
        if not whole or (width is not None and BLOCK % width):
            # A state of all tokens together says nothing of the first ones.
            self._most = 0
        self._blocks: OrderedDict[tuple[int, ...], list[State]] = OrderedDict()
        self.reused = 0

    def take(self, prompt: Sequence[int], batch: Batch) -> int:
        """Copies the kept blocks of a prompt to a batch of one row, whose states are empty.

        At least one token is left to be computed, since its logits are needed.

        Returns:
            The number of tokens that the batch then has in its states.
        """
        found = []
        for end in self._ends(len(prompt) - 1):
            key = tuple(prompt[:end])
            if key not in self._blocks:
                break
            found.append(self._blocks[key])
        self._use(len(found) * BLOCK, prompt)
        length = len(found) * BLOCK
        if found:
            batch.lengthen(length)
        for number, block in enumerate(found):
            for state, kept in zip(batch.states, block, strict=True):
                state.copy(0, number * BLOCK, kept, 0, 0, BLOCK)
        self.reused += length
        return length

    def keep(self, prompt: Sequence[int], batch: Batch) -> None:
        """Keeps a prompt that a batch of one row has in its states."""
        for end in self._ends(min(len(prompt), self._most * BLOCK)):
            key = tuple(prompt[:end])
            if key not in self._blocks:
                block = self._make(1, BLOCK)
                for state, kept in zip(batch.states, block, strict=True):
                    if not kept.in_place:
                        kept.lengthen(BLOCK)
                    kept.copy(0, 0, state, 0, end - BLOCK, BLOCK)
                self._blocks[key] = block
        self._use(min(len(prompt), self._most * BLOCK), prompt)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def _use(self, length: int, prompt: Sequence[int]) -> None:
        """Notes that the blocks of a prompt, up to a length, have been used."""
        # The first blocks of a prompt are needed for its others, and so are forgotten last.
        for end in reversed(self._ends(length)):
            self._blocks.move_to_end(tuple(prompt[:end]))

    def _ends(self, length: int) -> range:
        """Returns the ends of the blocks within a length."""
        return range(BLOCK, length + 1 if self._most else 0, BLOCK)

    @property
    def bytes(self) -> int:
        """The bytes of what is kept on this rank."""
        return sum(state.bytes for block in self._blocks.values() for state in block)
