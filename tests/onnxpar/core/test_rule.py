"""The rule language: what it reads, what it refuses, and that writing and reading agree."""

import pytest

from onnxpar.core.errors import RuleError
from onnxpar.core.rule import format_rule, parse_rule

GOOD = (
    "b m k, b k n -> b m n; sum: k; linear: sum 0, sum 1",
    "a b -> a b; linear: any 0",
    "(b s) d -> b s d",
    "a 1, a b -> a b; replicated: b; linear: sum 0+1, max 0+1",
    "v d, i j -> i j d; sum: v",
    "a c -> a c; special: c",
    "n c h w, m c k l -> n m h w; sum: c; replicated: k l; scaled: h w",
    "n c h, n m h -> m c k; sum: n h; replicated: k; scaled: h",
    "m k, ., * -> m k, -; replicated: m",
    "-> ",
)


@pytest.mark.parametrize("text", GOOD)
def test_format_reads_back(text: str) -> None:
    rule = parse_rule(text)
    again = parse_rule(format_rule(rule))
    assert again == rule


def test_kinds_and_linearity() -> None:
    rule = parse_rule("m k, k n -> m n; sum: k; linear: sum 0, sum 1")
    assert dict(rule.kinds) == {"m": "parallel", "k": "sum", "n": "parallel"}
    assert rule.linear == (("sum", frozenset({0})), ("sum", frozenset({1})))
    assert rule.splittable == ("m", "k", "n")
    any_rule = parse_rule("a -> a; linear: any 0")
    assert {r for r, _ in any_rule.linear} == {"sum", "max", "min", "prod"}


def test_scaled_factors_are_special() -> None:
    rule = parse_rule("n h -> n h; scaled: h")
    assert rule.kinds["h"] == "special" and rule.scaled == {"h"}


BAD = (
    ("m k", "'->'"),
    ("m k -> m", "no output"),
    ("(a h) -> a h; scaled: h", "scaled factor is in a merged dim"),
    ("m k -> m k; sum: k", "is in every output"),
    ("m k -> m; sum: z", "does not name a factor"),
    ("m m -> m", "twice"),
    ("m k -> m; sum: k; max: k", "two kinds"),
    ("m -> m; linear: sum 3", "names operand 3"),
    ("m -> m; linear: mean 0", "expected 'linear"),
    ("m -> m; linear: sum x", "are numbers"),
    ("m -> m; odd: m", "unknown clause"),
    ("m -> m; all m", "has no ':'"),
    ("m & -> m", "cannot read"),
)


@pytest.mark.parametrize(("text", "message"), BAD)
def test_refusals_say_what_is_wrong(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_rule(text)


@pytest.mark.timeout(10)
def test_a_rule_of_many_outputs_is_read_in_time() -> None:
    """A Split of 20,000 outputs took 26 s: each factor was looked for in each output."""
    factors = [f"d{n}" for n in range(20_000)]
    text = (
        f"b s -> {', '.join(f'b {factor}' for factor in factors)}; special: s {' '.join(factors)}"
    )
    rule = parse_rule(text)
    # No assertion on the rule itself: its text has 500 KB.
    assert len(rule.outputs) == 20_000
