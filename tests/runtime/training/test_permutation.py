"""Orders of samples: each has every sample once, and all of them are equally frequent."""

import tracemalloc
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxpar_runtime.training.permutation import permutation


def test_every_sample_comes_once() -> None:
    for count in range(1, 200):
        found = permutation(count, 3, count)(np.arange(count))
        np.testing.assert_array_equal(np.sort(found), np.arange(count))


@pytest.mark.parametrize("count", [999_983, 1_000_000, 1_000_001])
def test_every_sample_of_many_comes_once(count: int) -> None:
    found = permutation(count, 0, 1)(np.arange(count))
    assert (np.bincount(found, minlength=count) == 1).all()


@given(st.integers(1, 10**11), st.integers(0, 2**63), st.integers(0, 10**6), st.data())
def test_a_part_of_an_order(count: int, seed: int, epoch: int, data: st.DataObject) -> None:
    order = permutation(count, seed, epoch)
    begin = data.draw(st.integers(0, count - 1))
    places = np.arange(begin, min(begin + 64, count))
    found = order(places)
    assert len(set(found)) == len(places) and found.min() >= 0 and found.max() < count
    # A place has the same sample, however many others are asked for.
    np.testing.assert_array_equal(order(places[-1:]), found[-1:])


def test_the_order_depends_on_seed_and_epoch() -> None:
    first, places = permutation(50, 3, 1), np.arange(50)
    np.testing.assert_array_equal(first(places), permutation(50, 3, 1)(places))
    for other in (permutation(50, 3, 2), permutation(50, 4, 1)):
        assert (first(places) != other(places)).sum() > 40


def test_orders_are_the_same_in_every_version() -> None:
    assert permutation(8, 0, 1)(np.arange(8)).tolist() == [3, 0, 4, 7, 6, 2, 1, 5]
    assert permutation(10**9, 7, 2)(np.arange(4)).tolist() == [
        764053669,
        450959747,
        119248285,
        79588665,
    ]


@pytest.mark.parametrize("count", [3, 5])
def test_all_orders_of_few_samples_are_equally_frequent(count: int) -> None:
    places = np.arange(count)
    found = Counter(tuple(permutation(count, seed, 1)(places)) for seed in range(2400))
    possible = list(permutations(range(count)))
    expected = 2400 / len(possible)
    distance = sum((found[one] - expected) ** 2 / expected for one in possible)
    # Chi-squared has the mean k and the variance 2k; the seeds are fixed, so it never varies.
    k = len(possible) - 1
    assert distance < k + 3 * np.sqrt(2 * k)


def test_neighbours_are_not_kept() -> None:
    """Differences of neighbours are as those of two independent places: a third of the count."""
    count = 10**6
    found = permutation(count, 0, 1)(np.arange(count))
    distance = np.abs(np.diff(found)).mean() / count
    # A difference has the standard deviation 0.24, the mean of a million 2.4e-4.
    assert abs(distance - 1 / 3) < 1e-3


def test_a_large_file_needs_little_memory() -> None:
    tracemalloc.start()
    try:
        permutation(10**9, 0, 1)(np.arange(64))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 8_000_000  # 16 tables of 31,623 numbers: 4 MB
