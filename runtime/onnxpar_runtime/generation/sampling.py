"""Chooses the next token of each sequence, from logits that may be sharded over the vocabulary.

A rank finds the best tokens of its own shard, and only these travel, in one small all-reduce.
Random choices add noise to the scores and take the best (the Gumbel-max trick, Gumbel 1954): the
noise of a token follows from seed, sequence, step and token alone (Philox, Salmon et al. 2011), so
that no mesh changes it, and each rank makes only the noise of its own shard.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding, coordinates
from onnxpar_format.options import Sampling
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import InputError

Array = NDArray[Any]
_NUCLEUS = 256
"""Tokens of each shard among which the nucleus of `top_p` is first looked for."""
_NOTHING = -np.inf


def check(sampling: Sampling) -> None:
    """Checks the settings.

    Raises:
        InputError: A number is outside its range.
    """
    for name, value, fits, expected in (
        ("temperature", sampling.temperature, sampling.temperature >= 0, "at least 0"),
        ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 1, "at least 1"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
        ("repetition_penalty", sampling.repetition_penalty, sampling.repetition_penalty > 0,
         "more than 0"),
        ("seed", sampling.seed, 0 <= sampling.seed < 1 << 64, "from 0 to 2^64 - 1"),
    ):  # fmt: skip
        if not fits:
            raise InputError(f"{name}: expected {expected}, got {value}")


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


@dataclass(frozen=True)
class Share:
    """What a rank has of the logits of a batch.

    Attributes:
        batch: Number of sequences.
        first: The rank's first sequence.
        rows: How many it has, padding not counted.
        shards: Number of shards of the vocabulary.
        shard: The number of the rank's shard.
        tokens: The tokens of the shard, ascending, padding not counted.
        size: Number of tokens of the vocabulary.
        width: Number of tokens of a shard, padding counted.
        owner: Whether the rank speaks for its shard; other ranks have copies.
    """

    batch: int
    first: int
    rows: int
    shards: int
    shard: int
    tokens: Array
    size: int
    width: int
    owner: bool

    @staticmethod
    def of(sharding: SizedSharding, rank: int) -> "Share":
        """Returns the share of logits [batch, vocabulary]."""
        rows, vocabulary = (SizedSharding(sharding.atoms, (dim,)) for dim in sharding.dims)
        (batch,), (size,) = rows.shape, vocabulary.shape
        block = rows.blocks(rank)[0]
        places = coordinates(rank, sharding.atoms)
        shard, shards = 0, 1
        for _, atoms in vocabulary.dims[0]:
            for atom in atoms:
                shard = shard * sharding.atoms[atom] + places[atom]
                shards *= sharding.atoms[atom]
        return Share(
            batch,
            block.start,
            block.valid,
            shards,
            shard,
            vocabulary.unpadded(vocabulary.take(np.arange(size), rank), rank),
            size,
            vocabulary.local_shape[0],
            rank in sharding.owners(),
        )


class Chooser:
    """Chooses tokens on all ranks alike.

    Args:
        rank: This rank.
        share: Its share of the logits.
        sampling: How to choose.
        prompts: The sequences so far, for the penalty on repetition.
    """

    def __init__(
        self, rank: Rank, share: Share, sampling: Sampling, prompts: list[list[int]]
    ) -> None:
        """Notes which tokens have occurred."""
        self._rank, self._share, self._how = rank, share, sampling
        self._seen: Array | None = None
        if sampling.repetition_penalty != 1:
            self._seen = np.zeros((share.rows, len(share.tokens)), bool)
            for row in range(share.rows):
                self._note(row, np.array(prompts[share.first + row]))

    def _note(self, row: int, tokens: Array) -> None:
        assert self._seen is not None
        held = np.searchsorted(self._share.tokens, tokens)
        here = (held < len(self._share.tokens)) & (
            self._share.tokens[np.minimum(held, len(self._share.tokens) - 1)] == tokens
        )
        self._seen[row, held[here]] = True

    def choose(self, logits: Array, step: int) -> Array:
        """Returns the next token of every sequence, int64 [batch]; every rank must call it.

        Args:
            logits: This rank's shard of the last position's logits, [rows, tokens] or with padding.
            step: The number of the new token.

        Raises:
            InputError: Logits are not numbers.
        """
        share, how = self._share, self._how
        scores = logits[: share.rows, : len(share.tokens)]
        if self._seen is not None:
            scores = scores.astype(np.float32)
            penalty = how.repetition_penalty
            damped = np.where(scores > 0, scores / penalty, scores * penalty)
            scores = np.where(self._seen, damped, scores)
        if how.temperature == 0:
            tokens = self._best(scores)
        elif how.top_k is None and how.top_p == 1:
            tokens = self._best(scores / how.temperature + self._noise(step))
        else:
            tokens = self._nucleus(scores.astype(np.float64) / how.temperature, step)
        if how.temperature > 0 and self._rank.world.size > 1:
            # Only integers must be equal on all ranks: exponentials may differ between machines.
            drawn = tokens if self._rank.index == 0 else np.zeros_like(tokens)
            tokens = self._rank.all_reduce(drawn)
        if self._seen is not None:
            for row in range(share.rows):
                self._note(row, tokens[share.first + row : share.first + row + 1])
        return tokens

    def _noise(self, step: int) -> Array:
        share = self._share
        noise = np.empty((share.rows, len(share.tokens)))
        for row in range(share.rows):
            noise[row] = self._noise_of(share.first + row, step, share.tokens)
        return noise

    def _noise_of(self, sequence: int, step: int, tokens: Array) -> Array:
        """Returns the noise of some tokens of a sequence, which need not be consecutive."""
        if not len(tokens):
            return np.zeros(0)
        low, high = int(tokens.min()), int(tokens.max())
        noise: Array = gumbel(self._how.seed, sequence, step, low, high - low + 1)[tokens - low]
        return noise

    def _best(self, scores: Array) -> Array:
        """Returns the token with the greatest score of each sequence, the lowest of equal ones."""
        share = self._share
        best = scores.argmax(1) if len(share.tokens) else np.zeros(len(scores), np.int64)
        if self._rank.world.size == 1:
            chosen = scores[np.arange(len(scores)), best]
            _check_numbers(chosen)
            return np.asarray(share.tokens[best], np.int64)
        packet = np.zeros((share.shards, share.batch, 2))
        if share.owner and len(share.tokens):
            rows = slice(share.first, share.first + share.rows)
            packet[share.shard, rows, 0] = scores[np.arange(len(scores)), best]
            packet[share.shard, rows, 1] = share.tokens[best]
        elif share.owner:
            packet[share.shard, share.first : share.first + share.rows, 0] = _NOTHING
        packet = self._rank.all_reduce(packet)
        values, tokens = packet[..., 0], packet[..., 1]
        _check_numbers(values)
        winners = np.where(values == values.max(0), tokens, np.inf)
        return np.asarray(winners.min(0), np.int64)

    def _nucleus(self, scores: Array, step: int) -> Array:
        """Draws among the `top_k` best tokens, and of these the likeliest that make `top_p`."""
        how = self._how
        wanted = _NUCLEUS if how.top_k is None else how.top_k
        while True:
            values, tokens, sums, complete = self._candidates(scores, wanted)
            chosen = np.zeros(self._share.batch, np.int64)
            enough = True
            for row in range(self._share.batch):
                kept = self._kept(values[row], tokens[row], sums[row], complete[row])
                if kept is None:
                    enough = False
                    break
                value, token = kept
                noise = self._noise_of(row, step, token)
                chosen[row] = token[np.argmax(value + noise)]
            if enough:
                return chosen
            # All ranks have the same numbers, and so come to the same conclusion.
            wanted = self._share.size

    def _candidates(self, scores: Array, wanted: int) -> tuple[Array, Array, Array, Array]:
        """Returns the best tokens of all shards: scores and tokens [batch, shards x count].

        Also, for each sequence, the sum of the exponentials of all scores less the greatest, and
        the score above which no token is missing.
        """
        share = self._share
        rows = slice(share.first, share.first + share.rows)
        count = min(wanted, len(share.tokens))
        # Shards differ in size by padding.
        packet = np.zeros((share.shards, share.batch, min(wanted, share.width) + 1, 2))
        if share.owner:
            packet[share.shard, rows, :, 0] = _NOTHING
            packet[share.shard, rows, -1, 1] = 0
        if share.owner and count:
            best = np.argpartition(-scores, count - 1, 1)[:, :count]
            values = np.take_along_axis(scores, best, 1)
            packet[share.shard, rows, :count, 0] = values
            packet[share.shard, rows, :count, 1] = share.tokens[best]
            greatest = values.max(1)
            packet[share.shard, rows, -1, 0] = greatest
            packet[share.shard, rows, -1, 1] = np.exp(scores - greatest[:, None]).sum(1)
        if self._rank.world.size > 1:
            packet = self._rank.all_reduce(packet)
        found = packet[:, :, :-1].transpose(1, 0, 2, 3).reshape(share.batch, -1, 2)
        values, tokens = found[..., 0], found[..., 1].astype(np.int64)
        greatest, sums = packet[:, :, -1, 0], packet[:, :, -1, 1]
        _check_numbers(greatest)
        total = (sums * np.exp(greatest - greatest.max(0))).sum(0)
        floor = packet[:, :, :-1, 0].min(2).max(0)
        return values, tokens, total, floor

    def _kept(
        self, values: Array, tokens: Array, total: float, floor: float
    ) -> tuple[Array, Array] | None:
        """Returns the tokens to draw from, with scores; None if some of them may be missing."""
        how = self._how
        order = np.lexsort((tokens, -values))
        values, tokens = values[order], tokens[order]
        real = values > _NOTHING
        values, tokens = values[real], tokens[real]
        if how.top_k is not None:
            values, tokens = values[: how.top_k], tokens[: how.top_k]
            total = float(np.exp(values - values[0]).sum())
        if how.top_p < 1:
            shares = np.cumsum(np.exp(values - values[0])) / total
            count = int(np.searchsorted(shares, how.top_p)) + 1
            # Rounding may leave the sum of all tokens below p.
            missing = how.top_k is None and len(values) < self._share.size
            if missing and (count > len(values) or values[count - 1] < floor):
                return None
            values, tokens = values[:count], tokens[:count]
        return values, tokens


def _check_numbers(scores: Array) -> None:
    if np.isnan(scores).any():
        raise InputError("logits: expected numbers, got NaN")
