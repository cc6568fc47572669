"""Limits on shapes and on formulas of sizes, in files and in what inference computes."""

import re

MAX_TEXT = 1000
"""Characters of a dim."""
MAX_OPERATIONS = 100
"""Operators, commas and pairs of parentheses in a dim."""
MAX_DIMS = 64
"""Dims of a tensor: numpy, which holds the data, has no more."""

_OPERATION = re.compile(r"[-+*/%(,]")


def operations(text: str) -> int:
    """Returns the number of operators, commas and pairs of parentheses in a formula."""
    return len(_OPERATION.findall(text))


def is_small(text: str) -> bool:
    """Whether a formula is within the limits, so that computing with it is quick."""
    return len(text) <= MAX_TEXT and operations(text) <= MAX_OPERATIONS
