"""Philox against the algorithm of Salmon et al. (2011), written again here, and its vectors."""

import math

import numpy as np
import pytest

from onnxpar_runtime.collectives import Rank
from tests.runtime.collectives.teams import Team, run_text

MASK = 0xFFFFFFFF


def philox4x32(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, section 4.2 of the paper and its round constants."""
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (b >> 32) ^ counter[1] ^ key[0],
            b & MASK,
            (a >> 32) ^ counter[3] ^ key[1],
            a & MASK,
        ]
        key = [(key[0] + 0x9E3779B9) & MASK, (key[1] + 0xBB67AE85) & MASK]
    return counter


def numbers(key: list[int], count: int, distribution: str) -> np.ndarray:
    """The first `count` elements of a stream, as `kernels/host/philox.h` defines them."""
    seed, step, micro_batch, node = (k & 0xFFFFFFFFFFFFFFFF for k in key)
    state = philox4x32([step & MASK, step >> 32, micro_batch, node], [seed & MASK, seed >> 32])
    words: list[int] = []
    for block in range(-(-count // 4)):
        words += philox4x32([block & MASK, block >> 32, state[2], state[3]], state[:2])
    if distribution == "uniform":
        return np.array([(w >> 8) * 2.0**-24 for w in words[:count]], np.float32)
    out: list[float] = []
    for a, b in zip(words[::2], words[1::2], strict=True):
        radius = math.sqrt(-2 * math.log((a + 1) * 2.0**-32))
        out += [radius * math.cos(2 * math.pi * b * 2.0**-32)]
        out += [radius * math.sin(2 * math.pi * b * 2.0**-32)]
    return np.array(out[:count], np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([MASK] * 4, [MASK] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_the_reference_gives_the_published_vectors(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert philox4x32(counter, key) == expected


def draw(
    rank: Rank, key: list[int], shape: list, tensor: list, start: list, kind: str
) -> np.ndarray:
    """What the operator gives."""
    dims = ", ".join(f"d{i}" for i in range(len(shape)))
    out = f"float[{dims}]" if shape else "float"
    text = f"""g (int64[4] k, int64[r] s, int64[r] w, int64[r] o) => ({out} y) {{
        y = onnxpar.Philox <distribution="{kind}", dtype=1> (k, s, w, o) }}"""
    ints = {
        name: np.array(v, np.int64)
        for name, v in {"k": key, "s": shape, "w": tensor, "o": start}.items()
    }
    return run_text(rank, text, **ints)[0]


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("key", [[0, 0, 0, 0], [-1, 2**40 + 3, 5, 2**32 - 1]], ids=str)
def test_a_block_is_the_same_part_of_the_tensor(team: Team, kind: str, key: list[int]) -> None:
    """Uniform: equal to the bit. Normal: float64 functions rounded once, at most one ulp apart."""
    tensor = [4, 6, 5]
    reference = numbers(key, math.prod(tensor), kind).reshape(tensor)

    def act(rank: Rank) -> None:
        for start, shape in [([0, 0, 0], tensor), ([1, 3, 2], [2, 3, 3]), ([3, 5, 4], [1, 1, 1])]:
            got = draw(rank, key, shape, tensor, start, kind)
            box = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
            if kind == "uniform":
                np.testing.assert_array_equal(got, reference[box])
            else:
                np.testing.assert_array_max_ulp(got, reference[box], 1)

    team.run(act)


@pytest.mark.parametrize("kind", ["uniform", "normal"])
def test_moments(team: Team, kind: str) -> None:
    """Mean and variance within 5 standard errors of 2^16 draws; the seed is fixed."""
    n = 1 << 16

    def act(rank: Rank) -> None:
        x = draw(rank, [7, 1, 0, 3], [n], [n], [0], kind).astype(np.float64)
        mean, variance, fourth = (0.5, 1 / 12, 1 / 80) if kind == "uniform" else (0.0, 1.0, 3.0)
        assert abs(x.mean() - mean) < 5 * math.sqrt(variance / n)
        assert abs(x.var() - variance) < 5 * math.sqrt((fourth - variance**2) / n)
        if kind == "uniform":
            assert x.min() >= 0 and x.max() < 1

    team.run(act)


def test_scalars_and_empty_blocks(team: Team) -> None:
    key = [1, 2, 3, 4]

    def act(rank: Rank) -> None:
        assert draw(rank, key, [], [], [], "uniform") == numbers(key, 1, "uniform")[0]
        assert draw(rank, key, [0, 3], [4, 3], [4, 0], "uniform").shape == (0, 3)

    team.run(act)


@pytest.mark.parametrize(
    ("key", "start", "message"),
    [
        ([1, 2, -3, 4], [0], "micro_batch and node"),
        ([1, 2, 3, 2**32], [0], "micro_batch and node"),
        ([1, 2, 3, 4], [-1], "negative"),
        ([1, 2, 3, 4], [2**63 - 1], "beyond 2\\^63 elements"),
    ],
)
def test_what_it_refuses(team: Team, key: list[int], start: list[int], message: str) -> None:
    def act(rank: Rank) -> None:
        with pytest.raises(Exception, match=f"rank {rank.index}: Philox .*{message}"):
            draw(rank, key, [3], [4], start, "uniform")

    team.run(act)
