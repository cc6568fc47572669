"""Chooses the next token of each sequence, from logits that may be sharded over the vocabulary.

A rank finds the best tokens of its own shard, and only these travel, in one small all-reduce.
Random choices add noise to the scores and take the best (the Gumbel-max trick, Gumbel 1954): the
noise of a token follows from seed, sequence, step and token alone (Philox, Salmon et al. 2011), so
that no mesh changes it, and each rank makes only the noise of its own shard.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import Sampling
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.candidates import NOTHING, Candidates, Share, candidates

Array = NDArray[Any]
_NUCLEUS = 256
"""Tokens of each shard among which the nucleus of `top_p` is first looked for."""
NO_TOKEN = -1
"""What a sequence gets whose logits are not numbers."""


def check(sampling: Sampling) -> None:
    """Checks the settings.

    Raises:
        InputError: A number is outside its range.
    """
    for name, value, fits, expected in (
        ("temperature", sampling.temperature, _usable(sampling.temperature),
         "0, or a number from 0.0001 to 10000"),
        ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 1, "at least 1"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
        ("repetition_penalty", sampling.repetition_penalty,
         0.01 <= sampling.repetition_penalty <= 100, "from 0.01 to 100"),
        ("seed", sampling.seed, 0 <= sampling.seed < 1 << 64, "from 0 to 2^64 - 1"),
    ):  # fmt: skip
        if not fits:
            raise InputError(f"{name}: expected {expected}, got {value}")


def _usable(temperature: float) -> bool:
    """Whether logits divided by a temperature are finite, and still differ."""
    return temperature == 0 or 1e-4 <= temperature <= 1e4


def check_logprobs(count: int | None) -> None:
    """Checks for how many of the likeliest tokens log-probabilities are wanted.

    Raises:
        InputError: It is less than 0.
    """
    if count is not None and count < 0:
        raise InputError(f"logprobs: expected at least 0, got {count}")


def gumbel(seed: int, sequence: int, step: int, start: int, count: int) -> Array:
    """Returns the noise of the tokens from `start` on, float64 [count].

    Args:
        seed: The seed.
        sequence: Number of the sequence.
        step: Number of the new token in it.
        start: The first token.
        count: Number of tokens.
    """
    # A block of Philox4x64 has four numbers.
    block, skipped = divmod(start, 4)
    bits = np.random.Philox(key=[seed, sequence], counter=[block, step, 0, 0])
    words = np.asarray(bits.random_raw(count + skipped))[skipped:]
    uniform = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    noise: Array = -np.log(-np.log(uniform))
    return noise


class Draws:
    """How the tokens of one sequence are chosen, and what has been chosen.

    Args:
        sampling: How to choose.
        number: Number of the sequence, which distinguishes its random choices from others'.
        prompt: The tokens of the prompt, for the penalty on repetition.

    Attributes:
        sampling: How to choose.
        number: Number of the sequence.
        step: The number of new tokens so far.
    """

    def __init__(self, sampling: Sampling, number: int, prompt: Sequence[int]) -> None:
        """Has chosen nothing."""
        self.sampling, self.number, self.step = sampling, number, 0
        self._occurred: list[int] | None = None
        self._seen: Array | None = None
        if sampling.repetition_penalty != 1:
            self._occurred = list(prompt)

    def add(self, token: int) -> None:
        """Notes the next token."""
        self.step += 1
        if self._occurred is not None:
            self._occurred.append(token)

    def damped(self, scores: Array, tokens: Array) -> Array:
        """Returns the scores of some tokens, those that occurred damped, float32.

        Args:
            scores: The scores.
            tokens: Their tokens, ascending, the same in each call.
        """
        scores = scores.astype(np.float32)
        if self._occurred is None or not len(tokens):
            return scores
        if self._seen is None:
            self._seen = np.zeros(len(tokens), bool)
        held = np.minimum(np.searchsorted(tokens, self._occurred), len(tokens) - 1)
        self._seen[held[tokens[held] == self._occurred]] = True
        self._occurred = []
        penalty = self.sampling.repetition_penalty
        damped = np.where(scores > 0, scores / penalty, scores * penalty)
        return np.asarray(np.where(self._seen, damped, scores))


class Chooser:
    """Chooses tokens on all ranks alike.

    Args:
        rank: This rank.
        share: Its share of the logits.
        draws: The sequences, one for each row; None for rows that count for nothing.
    """

    def __init__(self, rank: Rank, share: Share, draws: Sequence[Draws | None]) -> None:
        """Sorts the sequences by what has to be done for them."""
        self._rank, self._share, self._draws = rank, share, draws
        self._nuclei: list[int] = []
        self._drawn = False
        for row, one in enumerate(draws):
            how = None if one is None else one.sampling
            if how is not None and how.temperature > 0:
                self._drawn = True
                if how.top_k is not None or how.top_p < 1:
                    self._nuclei.append(row)
        self._numbers = np.arange(share.rows)
        own = draws[share.first : share.first + share.rows]
        self._own = [(row, one) for row, one in enumerate(own) if one is not None]
        self._scaled = [(row, one) for row, one in self._own if one.sampling.temperature > 0]
        self._damped = [(r, one) for r, one in self._own if one.sampling.repetition_penalty != 1]

    def choose(self, logits: Array) -> Array:
        """Returns the next token of every row, int64 [batch]; every rank must call it.

        A row whose logits are not numbers gets `NO_TOKEN`.

        Args:
            logits: This rank's shard of the last position's logits, [rows, tokens] or with padding.
        """
        share = self._share
        scores = logits[: share.rows, : len(share.tokens)]
        if self._damped:
            scores = scores.astype(np.float32)
            for row, one in self._damped:
                scores[row] = one.damped(scores[row], share.tokens)
        tokens = self._drawing(scores) if self._drawn else self._best(scores)
        for token, drawn in zip(tokens.tolist(), self._draws, strict=True):
            if drawn is not None and token != NO_TOKEN:
                drawn.add(token)
        return tokens

    def _drawing(self, scores: Array) -> Array:
        """Returns the next tokens of rows of which some are drawn at random."""
        share = self._share
        wide = scores.astype(np.float64)
        for row, one in self._scaled:
            how = one.sampling
            if how.top_k is not None or how.top_p < 1:
                wide[row] /= how.temperature
            else:
                # The division in the type of the scores.
                wide[row] = scores[row] / how.temperature + _noise(one, share.tokens)
        if len(self._nuclei) < len(self._draws):
            tokens = self._best(wide)
        else:
            tokens = np.zeros(share.batch, np.int64)
        if self._nuclei:
            tokens[self._nuclei] = self._nucleus(wide)
        if self._rank.world.size > 1:
            # Only integers must be equal on all ranks: exponentials may differ between machines.
            tokens = self._rank.all_reduce(
                tokens if self._rank.index == 0 else np.zeros_like(tokens)
            )
        return tokens

    def _best(self, scores: Array) -> Array:
        """Returns the token with the greatest score of each sequence, the lowest of equal ones."""
        share = self._share
        best = scores.argmax(1) if len(share.tokens) else np.zeros(len(scores), np.int64)
        if self._rank.world.size == 1:
            tokens: Array = share.tokens[best]
            wrong = np.isnan(scores[self._numbers, best])
            if wrong.any():
                tokens[wrong] = NO_TOKEN
            return tokens
        packet = np.zeros((share.shards, share.batch, 2))
        if share.owner and len(share.tokens):
            rows = slice(share.first, share.first + share.rows)
            packet[share.shard, rows, 0] = scores[self._numbers, best]
            packet[share.shard, rows, 1] = share.tokens[best]
        elif share.owner:
            packet[share.shard, share.first : share.first + share.rows, 0] = NOTHING
        packet = self._rank.all_reduce(packet)
        values, tokens = packet[..., 0], packet[..., 1]
        # NaN is the greatest of all, and equal to nothing.
        greatest = values.max(0)
        winners = np.where(values == greatest, tokens, np.inf).min(0)
        return np.where(np.isnan(greatest), NO_TOKEN, winners).astype(np.int64)

    def _nucleus(self, scores: Array) -> list[int]:
        """Draws among the `top_k` best tokens, and of these the likeliest that make `top_p`."""
        draws = [(row, one) for row in self._nuclei if (one := self._draws[row]) is not None]
        wanted = max(one.sampling.top_k or _NUCLEUS for _, one in draws)
        while True:
            found = candidates(self._rank, self._share, scores, wanted)
            chosen = []
            for row, one in draws:
                if np.isnan(found.normalizer[row]):
                    chosen.append(NO_TOKEN)
                    continue
                kept = self._kept(one.sampling, found, row)
                if kept is None:
                    break
                value, token = kept
                chosen.append(int(token[np.argmax(value + _noise(one, token))]))
            else:
                return chosen
            # All ranks have the same numbers, and so come to the same conclusion.
            wanted = self._share.size

    def _kept(self, how: Sampling, found: Candidates, row: int) -> tuple[Array, Array] | None:
        """Returns the tokens to draw from, with scores; None if some of them may be missing."""
        values, tokens = found.best(row, how.top_k or self._share.size)
        if how.top_p < 1:
            if how.top_k is None:
                shares = np.cumsum(np.exp(values - found.normalizer[row]))
            else:
                shares = np.cumsum(np.exp(values - values[0]))
                shares /= shares[-1]
            count = int(np.searchsorted(shares, how.top_p)) + 1
            # Rounding may leave the sum of all tokens below p.
            missing = how.top_k is None and len(values) < self._share.size
            if missing and (count > len(values) or values[count - 1] < found.floor[row]):
                return None
            values, tokens = values[:count], tokens[:count]
        return values, tokens


def _noise(draws: Draws, tokens: Array) -> Array:
    """Returns the noise of some tokens of a sequence, which need not be consecutive."""
    if not len(tokens):
        return np.zeros(0)
    low, high = int(tokens.min()), int(tokens.max())
    seed, number, step = draws.sampling.seed, draws.number, draws.step
    noise: Array = gumbel(seed, number, step, low, high - low + 1)[tokens - low]
    return noise
