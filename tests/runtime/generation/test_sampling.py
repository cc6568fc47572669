"""How tokens are chosen, against a direct computation over the whole vocabulary."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.options import Sampling
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.generation.candidates import Share, likelihoods
from onnxpar_runtime.generation.sampling import NO_TOKEN, Chooser, Draws, gumbel
from tests.tiers import covering

Array = NDArray[Any]
T = TypeVar("T")
ROWS, SIZE, STEPS = 3, 701, 12
LOGITS = np.random.default_rng(0).normal(0, 3, (STEPS, ROWS, SIZE)).astype(np.float32)
PROMPTS = [[1, 2, 3], [700], [5, 5, 9]]
WAYS = [
    Sampling(),
    Sampling(repetition_penalty=1.7),
    Sampling(temperature=0.7, seed=1),
    Sampling(temperature=1.3, top_k=7, seed=2),
    Sampling(temperature=0.9, top_p=0.6, seed=3),
    Sampling(temperature=40.0, top_p=0.99, seed=4),
    Sampling(temperature=2.0, top_k=50, top_p=0.8, repetition_penalty=1.2, seed=5),
    Sampling(temperature=1.0, top_k=5000, seed=6),
]


def chosen(sharding: SizedSharding, sampling: Sampling) -> list[list[int]]:
    """The tokens of all steps, equal on all ranks."""
    size = int(np.prod(sharding.atoms))

    def run(rank: Any) -> list[list[int]]:
        draws = [Draws(sampling, row, prompt) for row, prompt in enumerate(PROMPTS)]
        chooser = Chooser(rank, Share.of(sharding, rank.index), draws)
        return [chooser.choose(sharding.take(logits, rank.index)).tolist() for logits in LOGITS]

    found = on_ranks(size, run)
    assert all(one == found[0] for one in found)
    return found[0]


def on_ranks(size: int, run: Callable[[Rank], T]) -> list[T]:
    """What a function returns on each of some ranks."""
    world = World.threads(size)
    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda r: run(world.rank(r)), range(size)))
    finally:
        world.close()


def direct(sampling: Sampling) -> list[list[int]]:
    """The same by sorting all probabilities of a sequence."""
    seen = [set(prompt) for prompt in PROMPTS]
    found = []
    for step, logits in enumerate(LOGITS):
        row_tokens = []
        for row, scores in enumerate(logits.astype(np.float64)):
            penalty = sampling.repetition_penalty
            for token in seen[row]:
                scores[token] *= 1 / penalty if scores[token] > 0 else penalty
            if sampling.temperature == 0:
                token = int(scores.argmax())
            else:
                scores /= sampling.temperature
                order = np.argsort(-scores, kind="stable")[: sampling.top_k]
                shares = np.exp(scores[order] - scores.max())
                before = np.cumsum(shares / shares.sum()) - shares / shares.sum()
                kept = order[before < sampling.top_p]
                noise = gumbel(sampling.seed, row, step, 0, SIZE)
                token = int(kept[np.argmax(scores[kept] + noise[kept])])
            seen[row].add(token)
            row_tokens.append(token)
        found.append(row_tokens)
    return found


@pytest.mark.parametrize(
    ("sampling", "dims"),
    covering(WAYS, [((), ()), ((), (0,)), ((), (0, 1)), ((0,), (1,)), ((1, 0), ())]),
    ids=str,
)
def test_tokens_of_any_sharding_are_those_of_a_direct_computation(
    dims: tuple[tuple[int, ...], tuple[int, ...]], sampling: Sampling
) -> None:
    """701 tokens and 3 rows are divided evenly by nothing; 40 degrees need all tokens."""
    sharding = SizedSharding((2, 2), (((ROWS, dims[0]),), ((SIZE, dims[1]),)))
    assert chosen(sharding, sampling) == direct(sampling)


def test_rows_of_one_batch_are_chosen_as_if_alone() -> None:
    """Each with its own settings and seed, beside rows that nobody asked for."""
    ways = [Sampling(), *WAYS[1:5]]
    draws = [Draws(how, 0, PROMPTS[n % 3]) for n, how in enumerate(ways)]
    sharding = SizedSharding((1,), (((len(ways) + 1, ()),), ((SIZE, ()),)))
    world = World.threads(1)
    try:
        rank = world.rank(0)
        mixed = Chooser(rank, Share.of(sharding, 0), [*draws[:2], None, *draws[2:]])
        rows = [0, 1, 0, 2, 0, 1]
        found = [mixed.choose(logits[rows]) for logits in LOGITS]
        for row, how in enumerate(ways):
            one = SizedSharding((1,), (((1, ()),), ((SIZE, ()),)))
            alone = Chooser(rank, Share.of(one, 0), [Draws(how, 0, PROMPTS[row % 3])])
            place = row + (row >= 2)
            want = [alone.choose(logits[rows[place] : rows[place] + 1])[0] for logits in LOGITS]
            assert [tokens[place] for tokens in found] == want
    finally:
        world.close()


@pytest.mark.parametrize("atoms", [(1, 1), (2, 2)])
def test_rows_without_numbers_get_no_token(atoms: tuple[int, int]) -> None:
    """The other rows get what they get alone."""
    ways = [WAYS[0], WAYS[2], WAYS[3], WAYS[4], WAYS[0]]
    logits = np.repeat(LOGITS[0, :1], len(ways), 0)
    broken = logits.copy()
    broken[1:4, 450] = np.nan
    broken[4] = np.nan
    sharding = SizedSharding(atoms, (((len(ways), ()),), ((SIZE, (0, 1)),)))

    def run(rank: Any) -> list[list[int]]:
        share = Share.of(sharding, rank.index)
        return [
            Chooser(rank, share, [Draws(how, 0, [1]) for how in ways])
            .choose(sharding.take(scores, rank.index))
            .tolist()
            for scores in (logits, broken)
        ]

    for right, found in on_ranks(atoms[0] * atoms[1], run):
        assert found == [right[0], *[NO_TOKEN] * 4] and NO_TOKEN not in right


@pytest.mark.parametrize(
    "dims", [((), ()), ((), (0,)), ((), (0, 1)), ((0,), (1,)), ((1, 0), ())], ids=str
)
def test_log_probabilities_are_those_of_all_logits(
    dims: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    """Also of equal scores, of excluded tokens, and of scores whose exponentials overflow."""
    logits = LOGITS[0].copy()
    logits[0, 100:] = np.round(logits[0, 100:])
    logits[1] += 1000
    logits[2, :600] = -np.inf
    sharding = SizedSharding((2, 2), (((ROWS, dims[0]),), ((SIZE, dims[1]),)))
    tokens, wanted = np.array([650, 3, 600]), [40, None, 200]

    def run(rank: Any) -> Any:
        share = Share.of(sharding, rank.index)
        return likelihoods(rank, share, sharding.take(logits, rank.index), tokens, wanted)

    found = on_ranks(4, run)
    assert all(one == found[0] for one in found) and found[0][1] is None
    # 701 float64 terms: the sum has at most 701 relative errors of 2^-53, its logarithm as many
    # absolute ones; the difference of numbers up to 1000 adds 1000 x 2^-52.
    bound = 701 * 2.0**-53 + 1000 * 2.0**-52
    for row in (0, 2):
        wide = logits[row].astype(np.float64)
        want = wide - np.logaddexp.reduce(wide)
        one = found[0][row]
        assert abs(one.logprob - want[tokens[row]]) <= bound
        order = np.argsort(-wide, kind="stable")[: wanted[row]]
        order = order[np.isfinite(wide[order])]
        assert [token for token, _ in one.best] == order.tolist()
        np.testing.assert_allclose([x for _, x in one.best], want[order], atol=bound, rtol=0)


def test_noise_is_that_of_the_token_wherever_it_is_made() -> None:
    whole = gumbel(3, 1, 4, 0, 50)
    for start in range(9):
        np.testing.assert_array_equal(gumbel(3, 1, 4, start, 17), whole[start : start + 17])
    others = [gumbel(4, 1, 4, 0, 50), gumbel(3, 2, 4, 0, 50), gumbel(3, 1, 5, 0, 50)]
    assert all(not np.isin(other, whole).any() for other in others)


def test_noise_has_the_distribution_of_gumbel() -> None:
    """Mean 0.5772, variance pi^2/6; the shares of three tokens are their probabilities."""
    noise = gumbel(0, 0, 0, 0, 200_000)
    assert abs(noise.mean() - 0.57722) < 0.01 and abs(noise.var() - np.pi**2 / 6) < 0.03
    shares = np.bincount(
        (noise[:199_998].reshape(-1, 3) + np.log([0.5, 0.3, 0.2])).argmax(1), minlength=3
    )
    # The deviation of a share of 66,666 draws is at most 0.0019: five of them.
    np.testing.assert_allclose(shares / shares.sum(), [0.5, 0.3, 0.2], atol=0.01)
