"""Patterns that stand for names, as in `fnmatch`."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import pytest

from onnxpar.core.name_patterns import patterns_of, prefixes_of

LAYERS = range(12)
NAMES = [
    *(f"/m/layers.{n}/attn/Softmax" for n in LAYERS),
    *(f"/m/layers.{n}/attn/Mul" for n in LAYERS),
    *(f"/m/layers.{n}/attn/Mul_{k}" for n in LAYERS for k in (1, 2)),
    *(f"/m2/h[{n}]/Add" for n in LAYERS),
    "/m/layers.3/extra/attn/Mul",
    "Gather",
    "*",
]


def matched(patterns: Sequence[str]) -> list[str]:
    """The names that patterns match; a text that is a name stands for it alone."""
    pairs = ((n, p) for n in NAMES for p in patterns)
    return sorted(n for n, p in pairs if (p == n if p in NAMES else fnmatchcase(n, p)))


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([], []),
        (["Gather"], ["Gather"]),
        (NAMES[:12], ["/m/layers.*/attn/Softmax"]),
        # A pattern may match no other name.
        (NAMES[:3], NAMES[:3]),
        (NAMES[12:24], NAMES[12:24]),
        ([n for n in NAMES if n.endswith("Mul_2")], ["/m/layers.*/attn/Mul_2"]),
        (
            [n for n in NAMES if n.endswith(("Softmax", "Mul_1"))],
            ["/m/layers.*/attn/Softmax", "/m/layers.*/attn/Mul_1"],
        ),
        # The number that differs is the second, and brackets are no class of characters.
        ([n for n in NAMES if n.endswith("Add")], ["/m2/h[[]*]/Add"]),
        (["*"], ["*"]),
    ],
)
def test_patterns_match_the_names_and_no_others(names: list[str], patterns: list[str]) -> None:
    found = patterns_of(names, NAMES)
    assert found == patterns
    assert matched(found) == sorted(names)


@pytest.mark.parametrize(
    ("names", "patterns"),
    [
        ([], []),
        (["Gather"], ["Gather"]),
        # One part of a path ends before `layers.10`.
        ([n for n in NAMES if n.startswith("/m/layers.1/")], ["/m/layers.1/*"]),
        ([n for n in NAMES if n.startswith("/m/layers.3/attn")], ["/m/layers.3/attn/*"]),
        ([n for n in NAMES if n.startswith("/m/")], ["/m/*"]),
        ([n for n in NAMES if n.endswith("[3]/Add")], ["/m2/h[3]/Add"]),
        ([n for n in NAMES if n.startswith("/m2/")], ["/m2/*"]),
        (NAMES[:2], NAMES[:2]),
        (["*"], ["*"]),
    ],
)
def test_prefixes_match_the_names_and_no_others(names: list[str], patterns: list[str]) -> None:
    rest = [name for name in NAMES if name not in names]
    found = prefixes_of({0: names, 1: rest}, NAMES)[0]
    assert found == patterns
    assert matched(found) == sorted(names)
