"""The size expressions of a manifest: exact values, and nothing outside the grammar."""

from fractions import Fraction

import pytest

from onnxpar_format.expressions import (
    ExpressionError,
    UnknownSymbolError,
    bare_name,
    evaluate,
    evaluate_exact,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (7, 7),
        ("7", 7),
        ("batch", 12),
        ("8*batch", 96),
        ("batch*seq/4", 15),
        ("(batch + 7)//8", 2),
        ("-batch + 20", 8),
        ("batch % seq", 2),
        ("max(batch, seq) - min(batch, 3)", 9),
        ("Max(batch, 13)*2**3", 104),
        ("ceiling(batch/5) + floor(batch/5)", 5),
        ("ceil(batch/5)", 3),
        ("Mod(batch, 7)", 5),
        ("a dim: odd", 3),
    ],
)
def test_value(text: int | str, value: int) -> None:
    assert evaluate(text, {"batch": 12, "seq": 5, "a dim: odd": 3}) == value


def test_bytes_may_be_fractions() -> None:
    # 2·n·(g-1)/g for n = 5 and g = 4 is no whole number, and must not be rounded on the way.
    assert evaluate_exact("2*n*3/4", {"n": 5}) == Fraction(15, 2)
    with pytest.raises(ExpressionError, match="not an integer"):
        evaluate("2*n*3/4", {"n": 5})


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "a.b", "a[0]", "max()", "Mod(a)", "max(a, key=a)", "a if a else 1", "True",
     "2**-1", "2**1000", "1/0", "1%0", "a and a", "f(a)", "1.5", "'a'", "lambda: 1", "~a"],
)  # fmt: skip
def test_outside_the_grammar(text: str) -> None:
    with pytest.raises(ExpressionError):
        evaluate(text, {"a": 2})


def test_unknown_symbol_is_named() -> None:
    with pytest.raises(UnknownSymbolError, match="'seq'") as caught:
        evaluate("batch*seq", {"batch": 2})
    assert caught.value.symbol == "seq"


@pytest.mark.parametrize(
    ("size", "name"),
    [(3, None), ("3", None), ("batch", "batch"), ("2*batch", None), ("past len", "past len")],
)
def test_bare_name(size: int | str, name: str | None) -> None:
    assert bare_name(size) == name
