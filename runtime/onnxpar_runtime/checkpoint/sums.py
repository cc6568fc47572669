"""Sums of tensors that tell a change, and are the same however the tensor is cut.

A tensor's elements, their bits taken as integers, are added up modulo 2^32, or 2^64 where an
element has 8 bytes. Parts add up to the whole, so a sum holds before and after a tensor is cut
anew, and finds an element that is missing or there twice. One changed bit changes it, always; two
elements that have changed places do not.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def modulus(itemsize: int) -> int:
    """Returns what sums of elements of so many bytes are taken modulo."""
    return 1 << (64 if itemsize == 8 else 32)


def sum_of(array: NDArray[Any]) -> int:
    """Returns the sum of an array's elements, each taken as an integer of its bits."""
    size = array.dtype.itemsize
    words = np.uint64 if size == 8 else np.uint32
    return int(np.sum(array.view(_BITS[size]), dtype=words))
