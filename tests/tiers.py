"""The tier that runs, and which combinations of parameters the quick tier leaves out."""

import os
from collections.abc import Hashable, Iterable
from itertools import product
from typing import Any

import pytest

FULL = bool(os.environ.get("ONNXPAR_FULL"))
"""Whether this is the full tier."""


def covering(*axes: Iterable[Hashable]) -> list[Any]:
    """Returns every combination for `parametrize`; the quick tier runs some of them.

    It runs as many as the longest axis has values, and each value of each axis occurs in one.
    """
    values = [list(axis) for axis in axes]
    quick = {tuple(v[i % len(v)] for v in values) for i in range(max(map(len, values)))}
    return [
        combination if combination in quick else pytest.param(*combination, marks=pytest.mark.full)
        for combination in product(*values)
    ]
