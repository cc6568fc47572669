"""The order of the samples of an epoch, of which any part can be computed by itself."""

from collections.abc import Callable
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Order = Callable[[Indices], Indices]
"""Returns the samples at these positions of an epoch."""


def as_they_are(positions: Indices) -> Indices:
    """The order of the source."""
    return positions


ROUNDS = 16
"""With 12, forty thousand seeds show that not all orders of five samples are equally frequent."""


def permutation(count: int, seed: int, epoch: int) -> Order:
    """Returns a random order of `count` samples, which depends on seed and epoch alone.

    It needs time and memory for `ROUNDS` tables of about sqrt(count) numbers, and then some time
    for each sample that is asked for.

    It is the generalised Feistel cipher of J. Black and P. Rogaway, Ciphers with Arbitrary Finite
    Domains (CT-RSA 2002): a number is a pair (low, high) in a rectangle with at least `count`
    places, and rounds in turn add a random function of one to the other. A place beyond `count` is
    enciphered again, until it is below. The functions are tables of raw numbers of PCG64, whose
    stream does not change between versions of NumPy.
    """
    width = isqrt(count - 1) + 1
    height = -(-count // width)
    bits = np.random.PCG64([seed, epoch])
    tables: list[Indices] = []
    for number in range(ROUNDS):
        entries, limit = (width, height) if number % 2 else (height, width)
        drawn: NDArray[Any] = bits.random_raw(entries)
        tables.append((drawn % np.uint64(limit)).astype(np.int64))

    def enciphered(places: Indices) -> Indices:
        high, low = np.divmod(places, width)
        for number, table in enumerate(tables):
            if number % 2:
                high = (high + table[low]) % height
            else:
                low = (low + table[high]) % width
        return high * width + low

    def order(positions: Indices) -> Indices:
        found = enciphered(positions)
        while (outside := found >= count).any():
            found[outside] = enciphered(found[outside])
        return found

    return order
