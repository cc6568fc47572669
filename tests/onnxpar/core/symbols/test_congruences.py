"""Constraint arithmetic against brute force."""

import operator
from collections.abc import Callable
from itertools import product
from math import gcd

import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from onnxpar.core.symbols import Facts
from onnxpar.core.symbols import congruences as known
from tests.tiers import FULL

SEEDED = settings(derandomize=True, deadline=None, max_examples=100 if FULL else 30)

REACH = 40
"""Facts without a bound are sampled this far past the other one; periods are below it."""


@st.composite
def some_facts(draw: st.DrawFn) -> Facts:
    """Facts with divisor up to 12, of either sign, bounded on both sides, one or none."""
    low = draw(st.none() | st.integers(-20, 20))
    high = draw(st.none() | st.integers(-20, 20))
    divisor = draw(st.integers(0, 12))
    facts = known.make(divisor, draw(st.integers(-15, 15)), low, high)
    if facts is None:
        reject()
    return facts


def members(facts: Facts) -> list[int]:
    low = facts.min if facts.min is not None else (facts.max or 0) - REACH
    high = facts.max if facts.max is not None else (facts.min or 0) + REACH
    return [value for value in range(low, high + 1) if facts.admits(value)]


def check(facts: Facts, values: set[int]) -> None:
    """Every value satisfies the facts, and the facts are in canonical form."""
    wrong = [value for value in values if not facts.admits(value)]
    assert not wrong, (facts, wrong)
    assert facts == known.make(facts.divisor, facts.remainder, facts.min, facts.max)


@SEEDED
@given(some_facts(), some_facts())
@pytest.mark.parametrize(
    ("rule", "function"),
    [
        (known.add, operator.add),
        (known.multiply, operator.mul),
        (known.maximum, max),
        (known.minimum, min),
    ],
)
def test_binary(
    rule: Callable[..., Facts], function: Callable[..., int], a: Facts, b: Facts
) -> None:
    check(rule(a, b), {function(x, y) for x, y in product(members(a), members(b))})


@SEEDED
@given(some_facts(), some_facts())
@pytest.mark.parametrize(
    ("rule", "function"),
    [(known.floor_divide, operator.floordiv), (known.modulo, operator.mod)],
)
def test_rounding_division(
    rule: Callable[..., Facts], function: Callable[..., int], a: Facts, b: Facts
) -> None:
    pairs = [(x, y) for x, y in product(members(a), members(b)) if y]
    check(rule(a, b), {function(x, y) for x, y in pairs})


@SEEDED
@given(some_facts(), some_facts())
def test_exact_division(a: Facts, b: Facts) -> None:
    pairs = [(x, y) for x, y in product(members(a), members(b)) if y and x % y == 0]
    check(known.divide_exact(a, b), {x // y for x, y in pairs})


@SEEDED
@given(some_facts(), st.integers(0, 5))
def test_power(a: Facts, exponent: int) -> None:
    check(known.power(a, exponent), {x**exponent for x in members(a)})


@SEEDED
@given(some_facts())
def test_negation(a: Facts) -> None:
    check(known.negate(a), {-x for x in members(a)})
    assert known.negate(known.negate(a)) == a


@SEEDED
@given(some_facts(), some_facts())
def test_meet_and_join(a: Facts, b: Facts) -> None:
    both = set(members(a)) & set(members(b))
    check(known.meet(a, b), both)
    check(known.join(a, b), set(members(a)) | set(members(b)))


@SEEDED
@given(some_facts(), some_facts())
def test_meet_is_no_weaker_than_either(a: Facts, b: Facts) -> None:
    """Where the two can hold together, nothing outside of either is admitted."""
    assume(set(members(a)) & set(members(b)))
    met = known.meet(a, b)
    assert all(a.admits(x) and b.admits(x) for x in members(met))


def congruence(divisor: int, remainder: int) -> Facts:
    return Facts(divisor, remainder)


@pytest.mark.parametrize("d1", range(1, 9))
@pytest.mark.parametrize("d2", range(1, 9))
def test_congruences_are_the_tightest_for_sums_and_products(d1: int, d2: int) -> None:
    """A sum's and a product's modulus is the gcd of all differences, found here by brute force."""
    for r1, r2 in product(range(d1), range(d2)):
        for rule, function in ((known.add, operator.add), (known.multiply, operator.mul)):
            derived = rule(congruence(d1, r1), congruence(d2, r2))
            values = [function(d1 * m + r1, d2 * n + r2) for m in range(3) for n in range(3)]
            tightest = 0
            for value in values:
                tightest = gcd(tightest, value - values[0])
            assert derived.divisor == tightest


@pytest.mark.parametrize(
    ("derived", "divisor", "remainder"),
    [
        (known.floor_divide(congruence(8, 3), known.constant(4)), 2, 0),
        (known.floor_divide(congruence(8, 7), known.constant(4)), 2, 1),
        (known.modulo(congruence(8, 3), known.constant(4)), 0, 3),
        (known.modulo(congruence(8, 3), known.constant(12)), 4, 3),
        (known.divide_exact(congruence(8, 4), known.constant(4)), 2, 1),
        (known.divide_exact(congruence(8, 0), known.constant(4)), 2, 0),
        (known.divide_exact(congruence(8, 0), congruence(4, 0)), 1, 0),  # 8 / 8 is odd
        (known.divide_exact(congruence(8, 0), congruence(2, 1)), 2, 0),
        (known.power(congruence(2, 1), 2), 4, 1),
        (known.maximum(congruence(8, 4), congruence(12, 0)), 4, 0),
    ],
)
def test_congruences(derived: Facts, divisor: int, remainder: int) -> None:
    assert (derived.divisor, derived.remainder) == (divisor, remainder)


def test_bounds_at_infinity() -> None:
    natural = Facts(1, 0, 1, None)
    assert known.add(natural, known.negate(natural)) == known.UNKNOWN
    assert known.multiply(natural, known.constant(-3)) == Facts(3, 0, None, -3)
    assert known.multiply(known.UNKNOWN, known.constant(0)) == known.constant(0)
    assert known.floor_divide(natural, natural).min == 0
    assert known.divide_exact(natural, natural).min == 1
    assert known.modulo(natural, natural).min == 0
