"""Runs beam search on one rank: the rows of a batch are the beams of all prompts.

The prompts run once, a row for each. Then their states are copied to the rows of their beams, and
after each step to those of the beams that go on. A shard of the batch has all beams of a prompt, so
no copy leaves a device.
"""

from collections.abc import Collection, Sequence
from time import monotonic_ns

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import BeamSearch
from onnxpar_format.trace import STEP
from onnxpar_runtime.agree import together
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.beams import Beams, Continuation, Hypothesis, needed
from onnxpar_runtime.generation.candidates import candidates
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import Supply, repeated
from onnxpar_runtime.generation.prompts import Sequences
from onnxpar_runtime.generation.roles import Places, feeds_of
from onnxpar_runtime.generation.steps import begin, last_scores

Array = NDArray[np.int64]


class BeamSteps:
    """The beams of the prompts of a batch, on one rank.

    Args:
        decoder: The program.
        prompts: The tokens of each prompt, as many as the shards of the batch divide.
        supply: What another program gives for them.
        how: The settings.
        new: New tokens of a sequence at most.
        eos: Tokens that complete a sequence.
        shards: The number of shards of the batch.
        shard: The rank's shard.

    Raises:
        InputError: The prompts or an input do not fit.
    """

    def __init__(
        self,
        decoder: Decoder,
        prompts: Sequence[Sequence[int]],
        supply: Supply,
        how: BeamSearch,
        new: int,
        eos: Collection[int],
        shards: int,
        shard: int,
    ) -> None:
        """Prepares the batch of the prompts."""
        self._decoder, self._supply, self._how, self._eos = decoder, supply, how, eos
        self._rank, self._new = decoder.loader.rank, new
        self._sequences = Sequences(prompts, left=not decoder.in_place)
        if self._sequences.padded and decoder.roles.mask is None:
            raise InputError(
                "prompts: expected equal lengths, since the model has no attention mask, got "
                f"{sorted({len(p) for p in prompts})}"
            )
        self._capacity = self._sequences.room = self._sequences.total + new - 1
        self._batch = begin(decoder, self._sequences.tokens, self._sequences.total, None, supply)
        decoder.check_length(self._batch.values, self._capacity, self._capacity)
        self._parts: list[tuple[Places, Array]] = list(self._sequences.parts(decoder.roles.width))
        self._prompts = len(prompts)
        self._first = shard * (len(prompts) // shards)
        self._own = len(prompts) // shards

    def search(self, count: int) -> list[list[Hypothesis]]:
        """Returns the best complete sequences of the first `count` prompts; all ranks must call it.

        Raises:
            InputError: Logits are not numbers.
            SymbolValueError: A length violates a constraint on a symbol.
            RankError: Another rank cannot go on.
        """
        beams, width = self._how.beams, 1
        # Of one machine: powers of others may differ in the last bit.
        powers = np.maximum(np.arange(self._new + 1.0), 1) ** self._how.length_penalty
        divisors = self._of_first(powers).tolist()
        searches = [Beams(self._how, self._eos, divisors) for _ in range(self._prompts)]
        for extra in searches[count:]:
            extra.done = True
        for step in range(self._new):
            began = monotonic_ns()
            chosen = self._step(searches, width)
            self._rank.timeline.add(STEP, f"token {step + 1}", began)
            if all(one.done for one in searches):
                break
            rows = np.array(
                [n * width + one.beam for n, found in enumerate(chosen) for one in found]
            )
            tokens = np.array([[one.token] for found in chosen for one in found])
            if step == 0:
                self._widen(tokens)
                width = beams
            else:
                begin_row, size = self._first * beams, self._own * beams
                own = rows[begin_row : begin_row + size] - begin_row
                self._batch.permute(own, self._sequences.total)
            self._sequences.append()
            self._parts = [(self._sequences, tokens)]
        return [one.hypotheses() for one in searches[:count]]

    def _widen(self, tokens: Array) -> None:
        """Makes rows for all beams of the prompts, which have run."""
        beams, decoder = self._how.beams, self._decoder
        supply = repeated(self._supply, beams, decoder.place)
        prompts = self._batch
        self._batch = together(
            self._rank, lambda: begin(decoder, tokens, self._capacity, None, supply)
        )
        rows = np.repeat(np.arange(self._own), beams)
        self._batch.take(prompts, rows, self._sequences.total)
        self._sequences.repeat(beams)

    def _step(self, searches: Sequence[Beams], width: int) -> list[list[Continuation]]:
        """Runs the beams of all prompts, `width` rows for each, and returns those that go on."""
        for places, tokens in self._parts:
            local = self._batch.run(feeds_of(self._decoder.roles, places, tokens))
        share = self._batch.share()
        scores = last_scores(local, self._sequences.last(tokens.shape[1]), share)
        count = needed(self._how, self._eos)
        found = candidates(self._rank, share, scores[:, : len(share.tokens)], count)
        # Logarithms may differ between machines in the last bit.
        normalizer = self._of_first(found.normalizer)
        chosen = []
        for number, one in enumerate(searches):
            if one.done:
                # Rows that count for nothing.
                chosen.append([Continuation(0.0, n % width, 0) for n in range(self._how.beams)])
                continue
            grown = []
            for beam in range(width):
                row = number * width + beam
                if np.isnan(normalizer[row]):
                    raise InputError("logits: expected numbers, got NaN").as_agreed()
                values, best = found.best(row, count)
                values = one.scores[beam] + (values - normalizer[row])
                pairs = zip(values.tolist(), best.tolist(), strict=True)
                grown += [Continuation(value, beam, token) for value, token in pairs]
            grown.sort(key=lambda grown_one: -grown_one.score)
            chosen.append(one.advance(grown))
        # Prompts that have just become complete need rows, too.
        idle = [Continuation(0.0, n % width, 0) for n in range(self._how.beams)]
        return [found_ones or idle for found_ones in chosen]

    def _of_first(self, numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns the numbers of rank 0."""
        if self._rank.world.size == 1:
            return numbers
        return self._rank.all_reduce(numbers if self._rank.index == 0 else np.zeros_like(numbers))
