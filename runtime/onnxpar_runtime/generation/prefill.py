"""Fills the caches of the prompts of a batch, before the run that scores the last token of each.

Long prompts are read in chunks, so that no run needs memory for all of their tokens at once. What
all prompts begin with is read once, in one row, and copied to the others.

A cache that grows takes a chunk of all rows at the same time. A kernel that extends a cache in
place takes several new tokens behind earlier ones in one row only. So each row is then read alone,
as a view of the cache, but for its last token: all rows run this one together.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.prompts import Sequences
from onnxpar_runtime.generation.roles import Places, feeds_of
from onnxpar_runtime.generation.slots import Window, batch_shards, row_states, row_values
from onnxpar_runtime.generation.states import State
from onnxpar_runtime.generation.steps import Batch

CHUNK = 512
"""Tokens of each prompt in a run at most."""
_SHARED = 64
"""Tokens of a common beginning for which a run of its own is worthwhile."""
Part = tuple[Places, NDArray[np.int64]]
Runs = list[Mapping[str, int]]


class Prefill:
    """The prompts of a batch whose states are empty.

    Args:
        decoder: The program.
        batch: The batch.
        prompts: The tokens of each prompt.
        sequences: The prompts, padded.
        chunk: The largest number of tokens of each prompt in a run.
        alike: Whether rows differ in their prompts alone, and in no other input.

    Raises:
        InputError: The prompts do not fit the model.
    """

    def __init__(
        self,
        decoder: Decoder,
        batch: Batch,
        prompts: Sequence[Sequence[int]],
        sequences: Sequences,
        chunk: int,
        *,
        alike: bool,
    ) -> None:
        """Decides what runs before the last run."""
        if chunk < 1:
            raise InputError(f"chunk: expected at least 1 token, got {chunk}")
        self._decoder, self._batch, self._prompts = decoder, batch, prompts
        self._sequences, self._chunk = sequences, chunk
        self._common, self._alone = 0, False
        width, masked = decoder.roles.width, decoder.roles.mask is not None
        states = decoder.carried.values()
        appends = all(state.appends for state in states)
        if width is None and masked and alike and batch.rows is not None:
            try:
                self._shards, _ = batch_shards(decoder)
            except InputError:
                # One row cannot run alone.
                pass
            else:
                if all(state.grows is not None for state in states):
                    # If only some states are extended in place, rows fit neither way.
                    self._common = self._shared() if appends or not decoder.in_place else 0
                self._alone = appends and (bool(self._common) or sequences.total > chunk)
        # Without a mask, a model may take all tokens of a run for the first ones.
        most = chunk if masked and not decoder.in_place else None
        self._parts = [] if self._alone else list(sequences.parts(width, most, self._common))

    def _shared(self) -> int:
        """Returns the number of tokens that all prompts begin with; 0 if there are too few."""
        if len(self._prompts) == 1:
            return 0
        # The last token of each prompt is left to be computed, since its logits are needed.
        common = 0
        for tokens in zip(*(prompt[:-1] for prompt in self._prompts), strict=False):
            if any(token != tokens[0] for token in tokens):
                break
            common += 1
        return common if common >= _SHARED else 0

    def run(self) -> tuple[Sequence[Part], Runs]:
        """Fills the caches; all ranks must call it.

        Returns:
            The runs that remain for all rows, and values of the symbols in those that were made.

        Raises:
            RankError: A rank failed.
        """
        runs: Runs = []
        rows = self._batch.rows
        if rows is None or not (self._common or self._alone):
            return self._parts, runs
        if not self._alone:
            states = row_states(self._decoder, self._shards, 1, 0)
            self._read(states, self._prompts[0], 0, self._common, runs)
            self._batch.lengthen(self._common)
            for row in range(rows.valid):
                padding = self._sequences.total - len(self._prompts[rows.start + row])
                kept = max(self._common - padding, 0)
                for state, source in zip(self._batch.states, states, strict=True):
                    state.copy(row, self._common - kept, source, 0, 0, kept)
        else:
            self._read_rows(runs)
        return self._parts or [(self._sequences, self._sequences.fill())], runs

    def _read_rows(self, runs: Runs) -> None:
        """Fills the caches of the rows one after another; all shards compute each of them."""
        states, rows = self._batch.states, self._batch.rows
        assert rows is not None, "`run` has checked it"
        if self._common:
            first = [state.rows(0, 1) for state in states]
            self._read(first, self._prompts[0], 0, self._common, runs)
            for row in range(1, rows.valid):
                for state in states:
                    state.copy(row, 0, state, 0, 0, self._common)
        spare: list[State] = []
        if self._shards > 1:
            spare = row_states(self._decoder, self._shards, 1, self._batch.length)
        for number, prompt in enumerate(self._prompts):
            row = number - rows.start
            own = 0 <= row < rows.valid
            into = [state.rows(row, 1) for state in states] if own else spare
            self._read(into, prompt, self._common, len(prompt) - 1, runs)

    def _read(
        self, states: Sequence[State], prompt: Sequence[int], first: int, end: int, runs: Runs
    ) -> None:
        """Runs some tokens of a prompt in one row for each shard."""
        decoder = self._decoder
        batch = Batch(decoder, row_values(decoder, self._shards), states, {})
        for begin in range(first, end, self._chunk):
            new = min(begin + self._chunk, end) - begin
            tokens = np.repeat(np.array([prompt[begin : begin + new]]), self._shards, 0)
            total = begin + new
            if decoder.in_place and begin:
                # A first run sees only itself; later the shape of the mask stays the same.
                total = self._batch.length
            window = Window(np.full(self._shards, begin), new, total, not decoder.in_place)
            batch.prepare(feeds_of(decoder.roles, window, tokens))
            batch.execute()
            runs.append(dict(batch.values))
