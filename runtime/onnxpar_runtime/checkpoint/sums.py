"""Sums of tensors that detect changes and do not depend on the sharding.

The bits of a tensor's elements are added as integers modulo 2^32, or 2^64 for elements of 8 bytes.
The sums of the shards add up to the sum of the tensor, so resharding does not change it. It detects
elements that are missing or doubled. It always detects one changed bit, but not two elements that
have changed places.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def modulus(itemsize: int) -> int:
    """Returns the modulus of sums of elements of `itemsize` bytes."""
    return 1 << (64 if itemsize == 8 else 32)


def sum_of(array: NDArray[Any]) -> int:
    """Returns the sum of an array's elements, each taken as an integer of its bits."""
    size = array.dtype.itemsize
    words = np.uint64 if size == 8 else np.uint32
    return int(np.sum(array.view(_BITS[size]), dtype=words))
