"""Expressions and proofs: random trees against Python's own arithmetic."""

import random
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from math import ceil, floor
from typing import Any

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpar.core.errors import SymbolError
from onnxpar.core.symbols import (
    Dim,
    Symbol,
    SymbolTable,
    as_dim,
    ceil_div,
    dim_str,
    dim_symbol,
    exact_div,
    safe_name,
    symbol_name,
    symbols_of,
)
from tests.tiers import FULL

NAMES = ("a", "b", "c")
Texts = st.SearchStrategy[str]


class Exact:
    """A rational number with Python's spelling of the operators: the reference for expressions."""

    def __init__(self, value: Any) -> None:
        self.value = Fraction(value)

    def __neg__(self) -> "Exact":
        return Exact(-self.value)

    def __add__(self, other: "Exact") -> "Exact":
        return Exact(self.value + other.value)

    def __sub__(self, other: "Exact") -> "Exact":
        return Exact(self.value - other.value)

    def __mul__(self, other: "Exact") -> "Exact":
        return Exact(self.value * other.value)

    def __truediv__(self, other: "Exact") -> "Exact":
        return Exact(self.value / other.value)

    def __floordiv__(self, other: "Exact") -> "Exact":
        return Exact(self.value // other.value)

    def __mod__(self, other: "Exact") -> "Exact":
        return Exact(self.value % other.value)

    def __pow__(self, other: "Exact") -> "Exact":
        return Exact(self.value**other.value)

    def __lt__(self, other: "Exact") -> bool:
        return self.value < other.value


def reference(text: str, values: Mapping[str, int]) -> Fraction | None:
    """The value of an expression's text as a `Fraction`; None where it divides by zero."""
    scope: dict[str, Any] = {name: Exact(value) for name, value in values.items()}
    scope |= {"max": max, "min": min, "k": Exact}
    scope |= {"ceil": lambda x: Exact(ceil(x.value)), "floor": lambda x: Exact(floor(x.value))}
    marked = re.sub(r"(?<![\w.])\d+", r"k(\g<0>)", text)
    try:
        found: Exact = eval(marked, {"__builtins__": {}}, scope)
    except ZeroDivisionError:
        return None
    return found.value


def tree(leaves: Texts, fractions: bool) -> Texts:
    """Texts of random expressions; with true divisions if `fractions`."""
    divisors = st.integers(1, 9).map(str)

    def extend(inner: Texts) -> Texts:
        rounded = st.tuples(inner, st.sampled_from(["//", "%"]), divisors | st.sampled_from(NAMES))
        choices = [
            st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
                lambda t: f"({t[0]} {t[1]} {t[2]})"
            ),
            rounded.map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
            st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(
                lambda t: f"{t[0]}({t[1]}, {t[2]})"
            ),
            st.tuples(inner, divisors).map(lambda t: f"ceil({t[0]} / {t[1]})"),
            inner.map(lambda t: f"(0 - {t})"),
            inner.map(lambda t: f"({t})**2"),
        ]
        if fractions:
            choices.append(st.tuples(inner, divisors).map(lambda t: f"({t[0]} / {t[1]})"))
        return st.one_of(choices)

    return st.recursive(leaves, extend, max_leaves=5)


LEAVES = st.sampled_from(NAMES) | st.integers(0, 12).map(str)
INTEGERS = tree(LEAVES, fractions=False)
RATIONALS = tree(LEAVES, fractions=True)


@st.composite
def tables(draw: st.DrawFn) -> SymbolTable:
    """Constraints on some of the names, with few to many admissible sizes."""
    entries = {}
    for name in NAMES:
        if draw(st.booleans()):
            divisor = draw(st.integers(1, 9))
            least = draw(st.integers(1, 20))
            span = draw(st.integers(2 * divisor, 40))
            greatest = least + 9 + span if draw(st.booleans()) else 0
            entries[name] = Symbol(greatest, least, divisor, draw(st.integers(0, divisor - 1)))
    return SymbolTable(entries)


def points(table: SymbolTable, seed: str, how_many: int = 40) -> Iterator[dict[str, int]]:
    """Admissible sizes of the names: the smallest, and random ones."""
    rng = random.Random(seed)
    sizes = {}
    for name in NAMES:
        facts = table.symbol(name).facts
        sizes[name] = [v for v in range(1, 80) if facts.admits(v)]
    yield {name: sizes[name][0] for name in NAMES}
    for _ in range(how_many):
        yield {name: rng.choice(sizes[name]) for name in NAMES}


def read(text: str) -> Dim | None:
    """`as_dim`, None for a text that it rightly refuses: a plain fraction, a division by zero."""
    try:
        return as_dim(text)
    except SymbolError as error:
        assert "divides by zero" in str(error) or "not an integer" in str(error)
        ones = dict.fromkeys(NAMES, 1)
        value = reference(text, ones)
        assert value is None or value.denominator != 1, text
        return None


@pytest.mark.parametrize("texts", [INTEGERS, RATIONALS], ids=["integers", "rationals"])
@given(data=st.data(), table=tables())
@settings(max_examples=300 if FULL else 100, deadline=None, derandomize=True)
def test_facts_hold_for_every_size(
    texts: st.SearchStrategy[str], data: st.DataObject, table: SymbolTable
) -> None:
    """Of rationals, wherever an exact quotient is an integer."""
    text = data.draw(texts)
    expr = read(text)
    if expr is None:
        return
    facts = table.facts(expr)
    normal = as_dim(table.normal(sympy.sympify(expr)))
    for values in points(table, text):
        value = reference(text, values)
        if value is None:
            continue
        if value.denominator != 1:
            with pytest.raises(SymbolError, match="is not an integer at"):
                table.evaluate(expr, values)
            continue
        assert table.evaluate(expr, values) == value
        assert facts.admits(int(value)), (text, values, facts)
        assert table.evaluate(normal, values) == value, normal
        assert reference(dim_str(expr), values) == value


@given(INTEGERS)
@settings(max_examples=300 if FULL else 100, deadline=None, derandomize=True)
def test_printing_and_reading_back(text: str) -> None:
    expr = read(text)
    if expr is None:
        return
    printed = dim_str(expr)
    for values in points(SymbolTable(), text, 10):
        value = reference(text, values)
        if value is not None and not isinstance(expr, int):
            assert reference(printed, values) == value, printed
    assert as_dim(printed) == expr
    assert as_dim(expr) == expr


@given(INTEGERS, st.integers(1, 12), tables())
@settings(max_examples=150 if FULL else 50, deadline=None, derandomize=True)
def test_ceil_div(text: str, k: int, table: SymbolTable) -> None:
    expr = read(text)
    if expr is None:
        return
    plain, constrained = ceil_div(expr, k), ceil_div(expr, k, table)
    for values in points(table, text, 20):
        value = reference(text, values)
        if value is not None:
            assert table.evaluate(plain, values) == ceil(value / k)
            assert table.evaluate(constrained, values) == ceil(value / k)


@given(INTEGERS, INTEGERS, tables())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_exact_div_times_divisor_is_the_dividend(
    first: str, second: str, table: SymbolTable
) -> None:
    a, b = read(first), read(second)
    if a is None or b is None:
        return
    for dividend in (a, as_dim(sympy.sympify(a) * b)):
        quotient = exact_div(dividend, b, table)
        if quotient is None:
            continue
        for values in points(table, first + second, 20):
            if reference(first, values) is None or reference(second, values) is None:
                continue
            product, part = table.evaluate(dividend, values), table.evaluate(b, values)
            if part:
                assert table.evaluate(quotient, values) * part == product


@given(INTEGERS, INTEGERS, tables())
@settings(max_examples=200 if FULL else 70, deadline=None, derandomize=True)
def test_what_is_proved_equal_is_equal(first: str, second: str, table: SymbolTable) -> None:
    a, b = read(first), read(second)
    if a is None or b is None:
        return
    assert table.equal(a, a)
    if table.equal(a, b):
        for values in points(table, first, 20):
            left, right = reference(first, values), reference(second, values)
            assert left is None or right is None or left == right


TABLE = SymbolTable(
    {
        "batch": Symbol(divisor=8, max=512),
        "seq": Symbol(max=2048),
        "odd": Symbol(divisor=2, remainder=1),
        "fixed": Symbol(min=4, max=5, divisor=4),
    }
)


@pytest.mark.parametrize(
    ("text", "k", "proved"),
    [
        ("batch", 8, True),
        ("batch", 16, False),
        ("8*batch", 64, True),
        ("batch*seq", 8, True),
        ("batch + seq", 8, False),
        ("batch + 16", 8, True),
        ("batch - 4", 4, True),
        ("batch - 4", 8, False),
        ("batch//2", 4, True),
        ("batch*seq//4", 2, True),
        ("max(batch, 16)", 8, True),
        ("min(batch, 12)", 4, True),
        ("seq - seq % 8", 8, True),
        ("8*((seq + 7)//8)", 8, True),
        ("(odd + 1)*(odd + 3)", 4, True),
        ("odd*odd - 1", 4, True),
        ("odd", 2, False),
        ("fixed*seq", 4, True),
        ("24", 8, True),
    ],
)
def test_divisible(text: str, k: int, proved: bool) -> None:
    assert TABLE.divisible(as_dim(text), k) is proved


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("batch", 8, 512),
        ("seq", 1, 2048),
        ("batch*seq", 8, 512 * 2048),
        ("odd", 3, None),
        ("unknown", 1, None),
        ("0 - odd", None, -3),
        ("ceil(seq / 4)", 1, 512),
        ("4*((seq + 3)//4) - seq", 0, 3),  # the padding of an uneven split
        ("max(4*((seq + 3)//4) - seq, 0)", 0, 3),
        ("seq % 7", 0, 6),
        ("min(odd, seq)", 1, 2048),
        ("odd//seq", 0, None),
        ("fixed", 4, 4),
    ],
)
def test_bounds(text: str, low: int | None, high: int | None) -> None:
    assert TABLE.bounds(as_dim(text)) == (low, high)


@pytest.mark.parametrize(
    ("size", "positive"), [("batch - 7", True), ("batch - 8", False), ("seq - seq//2", True)]
)
def test_the_least_value_shows_whether_a_size_is_positive(size: str, positive: bool) -> None:
    low, _ = TABLE.bounds(as_dim(size))
    assert (low is not None and low >= 1) == positive


@pytest.mark.parametrize(
    ("a", "b", "proved"),
    [
        ("8*(batch//8)", "batch", True),
        ("(batch + 3)//8", "batch//8", True),
        ("(batch + 1)*seq", "batch*seq + seq", True),
        ("-((0 - seq)//4)", "(seq + 3)//4", True),
        ("ceil(ceil(seq / 2) / 2)", "ceil(seq / 4)", True),
        ("seq//2//3", "seq//6", True),
        ("max(seq, 1)", "seq", True),
        ("max(batch, 4)", "batch", True),
        ("max(batch, 12)", "batch", False),
        ("min(seq, seq + batch)", "seq", True),
        ("batch % 4", "0", True),
        ("fixed + seq", "seq + 4", True),
        ("seq*batch/seq", "batch", True),
        ("seq - seq % 8", "8*(seq//8)", True),
        ("seq", "batch", False),
        ("8*(seq//8)", "seq", False),
        ("max(seq/2, 3)", "max(seq, 6)/2", True),
    ],
)
def test_equal(a: str, b: str, proved: bool) -> None:
    assert TABLE.equal(as_dim(a), as_dim(b)) is proved
    assert TABLE.equal(as_dim(b), as_dim(a)) is proved


@pytest.mark.parametrize(
    ("a", "b", "quotient"),
    [
        ("8*batch*seq", "8*seq", "batch"),
        ("8*batch*seq", "batch*seq", "8"),
        ("batch*seq", "8", "batch*seq/8"),
        ("batch*seq", "8*seq", "batch/8"),
        ("seq*odd", "8*seq", None),
        ("batch*seq + 2*batch", "seq + 2", "batch"),
        ("(batch + 1)*(seq + 2)", "seq + 2", "batch + 1"),
        ("batch**2 - 1", "batch - 1", "batch + 1"),
        ("batch*(seq//3)", "seq//3", "batch"),
        ("8*(batch//8)*seq", "batch", "seq"),
        ("batch*((seq + 3)//4)", "batch*((seq + 3)//4)", "1"),
        ("seq", "batch", None),
        ("batch", "0", None),
        ("0", "seq", "0"),
        ("24", "8", "3"),
        ("24", "9", None),
    ],
)
def test_exact_div(a: str, b: str, quotient: str | None) -> None:
    expected = None if quotient is None else as_dim(quotient)
    assert exact_div(as_dim(a), as_dim(b), TABLE) == expected


def test_division_without_constraints() -> None:
    batch, seq = dim_symbol("batch"), dim_symbol("seq")
    assert exact_div(8 * batch * seq, 8 * seq) == batch
    assert exact_div(batch, 8) is None
    assert ceil_div(8 * batch, 4) == 2 * batch
    assert ceil_div(batch, 4) == as_dim("(batch + 3)//4")
    assert ceil_div(batch, 4, TABLE) == batch / 4
    assert ceil_div(7, 4) == 2


def test_typical() -> None:
    batch = as_dim("batch")
    assert TABLE.typical(batch) == 64
    assert TABLE.typical(as_dim("odd")) == 65
    assert TABLE.typical(as_dim("fixed")) == 4
    assert TABLE.typical(as_dim("odd/2")) == 32
    assert TABLE.typical(as_dim("batch*seq"), {"seq": 3}) == 192
    assert TABLE.typical(as_dim("batch*seq")) == 4096
    assert TABLE.typical(7) == 7


def test_evaluate_refuses() -> None:
    assert TABLE.evaluate(as_dim("batch*seq//3"), {"batch": 8, "seq": 2}) == 5
    with pytest.raises(SymbolError, match="expected a value for the symbol 'seq'; given: batch"):
        TABLE.evaluate(as_dim("batch*seq"), {"batch": 8})
    with pytest.raises(SymbolError, match=r"batch//3 is not an integer at {'batch': 8}: 8/3"):
        TABLE.evaluate(as_dim("batch/3"), {"batch": 8})
    with pytest.raises(SymbolError, match=r"divides by zero at {'batch': 8, 'seq': 8}"):
        TABLE.evaluate(as_dim("batch//(batch - seq)"), {"batch": 8, "seq": 8})


@pytest.mark.parametrize(
    "text",
    ["", "3//0", "batch % 0", "batch/(seq - seq)", "3/2", "Mod(4, 0)"],
)
def test_text_that_is_no_size(text: str) -> None:
    with pytest.raises(SymbolError):
        as_dim(text)


@pytest.mark.parametrize("value", [True, 1.0, b"batch", [1], sympy.Symbol])
def test_types_that_are_no_size(value: Any) -> None:
    with pytest.raises(TypeError):
        as_dim(value)


@pytest.mark.parametrize(
    "value",
    [
        None,
        sympy.Rational(1, 2),
        sympy.oo,
        sympy.zoo,
        sympy.Float(2),
        sympy.sqrt(dim_symbol("n")),
        sympy.sin(dim_symbol("n")),
        2 ** dim_symbol("n"),
    ],
)
def test_expressions_that_are_no_size(value: Any) -> None:
    with pytest.raises(SymbolError):
        as_dim(value)


def test_numbers_become_int() -> None:
    for value in (8, sympy.Integer(8), "8", " 2*4 ", "max(3, 8)", "17//2"):
        found = as_dim(value)
        assert type(found) is int
        assert found == 8


def test_symbols_are_given_their_assumptions() -> None:
    loose = sympy.Symbol("batch")
    assert as_dim(loose * 8) == 8 * dim_symbol("batch")
    assert as_dim("batch") is dim_symbol("batch")


@pytest.mark.parametrize(
    "name",
    [
        "a b?",
        "2batch",
        "batch#1",
        "batch,seq",
        "f(x)",
        "max()",
        "max(a, key=b)",
        "floor(a, b)",
        "sqrt(n)",
        "(batch",
        "9**9**9",
        "a**65",
        "a**b",
        "1_000",
        "1.5",
        "0x10",
        "'a'",
        "a if b else c",
        "[a]",
        "a@b",
        "~a",
        "a == b",
        "a\nb",
        "unk__1::0",
        "__import__('os').system('true')",
        "(" * 5000,
        "-" * 5000 + "a",
        "9" * 5000,
    ],
)
def test_text_that_is_no_expression_names_one_symbol(name: str) -> None:
    symbol = as_dim(name)
    assert symbol is dim_symbol(name)
    assert symbols_of(symbol) == {name}
    assert as_dim(dim_str(symbol)) is symbol


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("batch", {"batch"}),
        ("past.45_dim_1 + seq", {"past.45_dim_1", "seq"}),
        ("if + for", {"if", "for"}),
        ("größe*2", {"größe"}),
        ("max + 1", {"max"}),
        ("8", set()),
    ],
)
def test_names(text: str, names: set[str]) -> None:
    expr = as_dim(text)
    assert symbols_of(expr) == names
    printed = dim_str(expr)
    assert printed.isascii()
    assert as_dim(printed) == expr


@settings(derandomize=True, deadline=None)
@given(st.text(min_size=1))
def test_safe_names_are_identifiers_and_read_back(name: str) -> None:
    safe = safe_name(name)
    assert safe.isidentifier()
    assert safe.isascii()
    assert symbol_name(safe) == name
    assert as_dim(dim_str(dim_symbol(name))) is dim_symbol(name)


@pytest.mark.parametrize(
    "name",
    ["sym__a", "._x2e_", "sym___x2e_", "_x", "x._x", "__x.x_", "sym__sym___x", "_x5f_x."],
)
def test_safe_names_of_names_like_safe_ones(name: str) -> None:
    assert safe_name(name).isidentifier()
    assert symbol_name(safe_name(name)) == name


@pytest.mark.parametrize("name", ["batch", "seq_len", "_0", "x", "decoder_x2e_"])
def test_identifiers_are_their_own_safe_name(name: str) -> None:
    assert safe_name(name) == name


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("8*batch", "8*batch"),
        ("floor(batch/8 + 3/8)", "(batch + 3)//8"),
        ("ceiling(batch/2)", "(batch + 1)//2"),
        ("Max(a, b + 1)", "max(a, b + 1)"),
        ("Mod(a, 4)*3", "3*(a % 4)"),
        ("-a", "0 - a"),
        ("3 - a", "3 - a"),
        ("a**3", "a*a*a"),
        ("a*b/c", "a*b//c"),
        ("(a + 1)*(b - 1)", "(a + 1)*(b - 1)"),
        ("a//(2*b)", "a//(2*b)"),
        ("8*(a//8)", "8*(a//8)"),
        ("(a + 1)**2*2", "(a + 1)*(a + 1)*2"),
    ],
)
def test_printed_form(text: str, printed: str) -> None:
    assert dim_str(as_dim(text)) == printed


@pytest.mark.parametrize(
    "text",
    ["4*(a % 3) % 5", "4*(a % 5) % 5", "(a % 3)*(b + 1) % 4", "-4*(a % 3) % 5", "4*(a % -2) % 5",
     "(4*(a % 3) + b) % 5", "(2*(a % 3) % 5)*(b % 3) % 5", "(a % b)*3 % b"],
)  # fmt: skip
def test_a_remainder_of_a_product_with_a_remainder(text: str) -> None:
    """sympy 1.14 takes 4*(a % 3) % 5 for 4*(a % 3)**2 % 5, and 4*(a % 5) % 5 for 4*(a % 5)."""
    size = as_dim(text)
    normal = SymbolTable().normal(sympy.sympify(size))
    for a in range(1, 12):
        for b in range(1, 8):
            values = {"a": a, "b": b}
            expected = eval(text, {}, dict(values))
            for form in (size, as_dim(dim_str(size)), as_dim(normal)):
                assert SymbolTable().evaluate(form, values) == expected, (form, values)
