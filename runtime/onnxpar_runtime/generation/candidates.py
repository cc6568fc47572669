"""The best tokens of logits that may be sharded over the vocabulary, and their log-probabilities.

Each rank finds the best tokens of its own shard, its greatest score, and the sum of the
exponentials. One small all-reduce joins these, and never carries the logits. The logarithm of a
probability is the score less the logarithm of the sum of all exponentials; the sum is that of
scores less the greatest, so that it cannot overflow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding, coordinates
from onnxpar_runtime.collectives import Rank

Array = NDArray[Any]
NOTHING = -np.inf
"""The score of what is no token."""


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
    def of(sharding: SizedSharding, rank: int, *, held: bool = True) -> "Share":
        """Returns the share of logits [batch, vocabulary].

        Args:
            sharding: How they are sharded.
            rank: The rank.
            held: Whether its stage has them; otherwise its share is empty.
        """
        rows, vocabulary = (SizedSharding(sharding.atoms, (dim,)) for dim in sharding.dims)
        (batch,), (size,) = rows.shape, vocabulary.shape
        block = rows.blocks(rank)[0]
        places = coordinates(rank, sharding.atoms)
        shard, shards = 0, 1
        for _, atoms in vocabulary.dims[0]:
            for atom in atoms:
                shard = shard * sharding.atoms[atom] + places[atom]
                shards *= sharding.atoms[atom]
        tokens = vocabulary.unpadded(vocabulary.take(np.arange(size), rank), rank)
        return Share(
            batch,
            block.start,
            block.valid if held else 0,
            shards,
            shard,
            tokens if held else tokens[:0],
            size,
            vocabulary.local_shape[0],
            held and rank % prod(sharding.atoms) in sharding.owners(),
        )


@dataclass(frozen=True)
class Candidates:
    """The best tokens of each sequence, equal on all ranks.

    Attributes:
        values: Their scores, float64 [batch, count], in no order; -inf where there is no token.
        tokens: The tokens, int64 [batch, count].
        floor: The score above which no token is missing, [batch].
        normalizer: The logarithm of the sum of the exponentials of all scores, [batch]; NaN if some
            score is no number.
        asked: The scores of tokens that were asked for, [batch].
    """

    values: Array
    tokens: Array
    floor: Array
    normalizer: Array
    asked: Array

    def best(self, row: int, count: int) -> tuple[Array, Array]:
        """Returns the best tokens of a sequence in their order, of equal ones the lowest first.

        Args:
            row: The sequence.
            count: Tokens at most.

        Returns:
            Their scores, and the tokens.
        """
        values, tokens = self.values[row], self.tokens[row]
        order = np.lexsort((tokens, -values))[:count]
        order = order[values[order] > NOTHING]
        return values[order], tokens[order]


def candidates(
    rank: Rank, share: Share, scores: Array, count: int, asked: Array | None = None
) -> Candidates:
    """Returns the best tokens of each sequence; every rank must call it.

    Args:
        rank: This rank.
        share: Its share of the scores.
        scores: The share, [rows, tokens] without padding.
        count: Tokens of each shard at most.
        asked: A token of each sequence whose score is wanted as well, [batch].
    """
    own = slice(share.first, share.first + share.rows)
    held = min(count, len(share.tokens))
    # Shards differ in size by padding.
    width = min(count, share.width)
    packet = np.zeros((share.shards, share.batch, width + 2, 2))
    if share.owner:
        part = packet[share.shard, own]
        part[:, : width + 1, 0] = NOTHING
        if len(share.tokens):
            wide = scores.astype(np.float64)
            for row, line in enumerate(wide):
                best = _best(line, held)
                part[row, :held, 0], part[row, :held, 1] = line[best], share.tokens[best]
            greatest = wide.max(1)
            part[:, width, 0] = greatest
            # Scores that are all -inf add nothing.
            shift = np.where(greatest == NOTHING, 0, greatest)
            part[:, width, 1] = np.exp(wide - shift[:, None]).sum(1)
            if asked is not None:
                mine = asked[own]
                place = np.minimum(np.searchsorted(share.tokens, mine), len(share.tokens) - 1)
                found = share.tokens[place] == mine
                part[found, width + 1, 0] = wide[np.flatnonzero(found), place[found]]
    if rank.world.size > 1:
        packet = rank.all_reduce(packet)
    found = packet[:, :, :width].transpose(1, 0, 2, 3).reshape(share.batch, share.shards * width, 2)
    greatest, sums = packet[:, :, width, 0], packet[:, :, width, 1]
    most = greatest.max(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = (sums * np.exp(greatest - most)).sum(0)
        normalizer = most + np.log(total)
    return Candidates(
        found[..., 0],
        found[..., 1].astype(np.int64),
        packet[:, :, :width, 0].min(2, initial=np.inf).max(0),
        normalizer,
        packet[:, :, width + 1, 0].sum(0),
    )


def _best(scores: Array, count: int) -> Array:
    """Returns the places of the best scores, of equal ones the first."""
    if count >= len(scores):
        return np.arange(len(scores))
    if not count:
        return np.arange(0)
    least = scores[np.argpartition(scores, -count)[-count]]
    better = np.flatnonzero(scores > least)
    equal = np.flatnonzero(scores == least)[: count - len(better)]
    found = np.concatenate([better, equal])
    # A score that is no number is in no order; the sum tells.
    return found if len(found) == count else np.arange(count)


@dataclass(frozen=True)
class Likelihood:
    """How likely a new token was, by the logits as the model gives them.

    Attributes:
        logprob: The logarithm of its probability.
        best: The likeliest tokens and the logarithms of their probabilities, in their order.
    """

    logprob: float
    best: tuple[tuple[int, float], ...]


def likelihoods(
    rank: Rank, share: Share, logits: Array, chosen: Array, wanted: Sequence[int | None]
) -> list[Likelihood | None]:
    """Returns the log-probabilities of new tokens; every rank must call it.

    Args:
        rank: This rank.
        share: Its share of the logits.
        logits: The share, [rows, tokens] or with padding.
        chosen: The new token of each sequence, [batch]; below 0 if there is none.
        wanted: For each sequence the number of likeliest tokens; None if nothing is wanted.

    Returns:
        For each sequence, what was wanted.
    """
    count = max((n for n in wanted if n is not None), default=0)
    scores = logits[: share.rows, : len(share.tokens)]
    found = candidates(rank, share, scores, count, chosen)
    made: list[Likelihood | None] = []
    for row, number in enumerate(wanted):
        if number is None or chosen[row] < 0:
            made.append(None)
            continue
        values, tokens = found.best(row, number)
        values = values - found.normalizer[row]
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        made.append(Likelihood(float(found.asked[row] - found.normalizer[row]), tuple(pairs)))
    return made
