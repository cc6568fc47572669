"""How tokens are chosen, against a direct computation over the whole vocabulary."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.options import Sampling
from onnxpar_runtime.collectives import World
from onnxpar_runtime.generation.sampling import Chooser, Share, gumbel

Array = NDArray[Any]
ROWS, SIZE, STEPS = 3, 701, 12
LOGITS = np.random.default_rng(0).normal(0, 3, (STEPS, ROWS, SIZE)).astype(np.float32)
PROMPTS = [[1, 2, 3], [700], [5, 5, 9]]


def chosen(sharding: SizedSharding, sampling: Sampling) -> list[list[int]]:
    """The tokens of all steps, equal on all ranks."""
    size = int(np.prod(sharding.atoms))

    def run(rank: Any) -> list[list[int]]:
        chooser = Chooser(rank, Share.of(sharding, rank.index), sampling, PROMPTS)
        return [
            chooser.choose(sharding.take(logits, rank.index), step).tolist()
            for step, logits in enumerate(LOGITS)
        ]

    world = World.threads(size)
    try:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(size) as pool:
            found = list(pool.map(lambda r: run(world.rank(r)), range(size)))
    finally:
        world.close()
    assert all(one == found[0] for one in found)
    return found[0]


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
    "sampling",
    [
        Sampling(),
        Sampling(repetition_penalty=1.7),
        Sampling(temperature=0.7, seed=1),
        Sampling(temperature=1.3, top_k=7, seed=2),
        Sampling(temperature=0.9, top_p=0.6, seed=3),
        Sampling(temperature=40.0, top_p=0.99, seed=4),
        Sampling(temperature=2.0, top_k=50, top_p=0.8, repetition_penalty=1.2, seed=5),
        Sampling(temperature=1.0, top_k=5000, seed=6),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "dims", [((), ()), ((), (0,)), ((), (0, 1)), ((0,), (1,)), ((1, 0), ())], ids=str
)
def test_tokens_of_any_sharding_are_those_of_a_direct_computation(
    dims: tuple[tuple[int, ...], tuple[int, ...]], sampling: Sampling
) -> None:
    """701 tokens and 3 rows are divided evenly by nothing; 40 degrees need all tokens."""
    sharding = SizedSharding((2, 2), (((ROWS, dims[0]),), ((SIZE, dims[1]),)))
    assert chosen(sharding, sampling) == direct(sampling)


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
    np.testing.assert_allclose(shares / shares.sum(), [0.5, 0.3, 0.2], atol=0.01)
