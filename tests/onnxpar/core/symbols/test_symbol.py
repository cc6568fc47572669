"""`Symbol`: validation, parsing, checking."""

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpar.core.errors import SymbolError
from onnxpar.core.symbols import Facts, Symbol, SymbolTable, as_dim


@pytest.mark.parametrize(
    "arguments",
    [
        {name: value}
        for name in ("max", "min", "divisor", "remainder")
        for value in (1.0, "1", None, True, False)
    ]
    + [{name: value} for name in ("unique", "per_rank") for value in (1, 0, "true", None)],
)
def test_wrong_types_are_refused(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(TypeError, match=name):
        Symbol(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min": -3}, "min: expected at least 0, got -3"),
        ({"divisor": 0}, "divisor: expected at least 1, got 0"),
        ({"divisor": -8}, "divisor: expected at least 1, got -8"),
        ({"remainder": 1}, "less than the divisor 1, got 1"),
        ({"divisor": 8, "remainder": 8}, "less than the divisor 8, got 8"),
        ({"divisor": 8, "remainder": -1}, "less than the divisor 8, got -1"),
        ({"divisor": 8, "max": 7}, "no size satisfies divisor=8,max=7"),
        ({"min": 9, "max": 3}, "max: expected at least min, 9, got 3"),
        ({"divisor": 8, "min": 17, "max": 23}, "no size satisfies"),
    ],
)
def test_wrong_values_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Symbol(**arguments)


@pytest.mark.parametrize(
    ("arguments", "least", "greatest"),
    [
        ({}, 1, None),
        ({"max": 7}, 1, 7),
        ({"max": 1}, 1, None),  # max counts only above min
        ({"max": -5}, 1, None),
        ({"divisor": 8}, 8, None),
        ({"divisor": 8, "remainder": 3}, 11, None),  # 8·N + 3 with N >= 1
        ({"divisor": 8, "remainder": 3, "min": 12, "max": 40}, 19, 35),
        ({"divisor": 8, "min": 9, "max": 23}, 16, 16),
    ],
)
def test_admissible_sizes(arguments: dict[str, Any], least: int, greatest: int | None) -> None:
    facts = Symbol(**arguments).facts
    assert (facts.min, facts.max) == (least, greatest)


@settings(derandomize=True, deadline=None)
@given(
    st.integers(-3, 60),
    st.integers(0, 30),
    st.integers(1, 9),
    st.integers(0, 8),
    st.integers(-2, 90),
)
def test_check_admits_what_the_definition_admits(
    greatest: int, least: int, divisor: int, remainder: int, value: int
) -> None:
    remainder %= divisor
    sizes = {divisor * n + remainder for n in range(int(least > 0), 200)}
    sizes = {s for s in sizes if s >= least and (greatest <= least or s <= greatest)}
    if not sizes or 0 < greatest < least:
        with pytest.raises(ValueError, match=r"no size|max: expected at least min"):
            Symbol(greatest, least, divisor, remainder)
        return
    symbol = Symbol(greatest, least, divisor, remainder)
    assert symbol.facts.admits(value) == (value in sizes)
    above = [s for s in sizes if s >= 64]
    assert symbol.typical() == (min(above) if above else max(sizes))
    if value in sizes:
        symbol.check("n", value)
    else:
        with pytest.raises(SymbolError, match=f"symbol 'n' is {value},"):
            symbol.check("n", value)


@pytest.mark.parametrize(
    ("symbol", "value", "message"),
    [
        (Symbol(min=4), 3, "minimum is 4"),
        (Symbol(max=9), 10, "maximum is 9"),
        (Symbol(divisor=8), 12, "leaves a remainder of 4 when divided by 8, but 0 is required"),
        (Symbol(divisor=8, remainder=3), 3, "smallest value of the form 8·N \\+ 3 .* is 11"),
        (Symbol(), 0, "minimum is 1"),
    ],
)
def test_check_names_symbol_value_and_constraint(symbol: Symbol, value: Any, message: str) -> None:
    with pytest.raises(SymbolError, match=f"'batch' is {value}, .*{message}"):
        symbol.check("batch", value)


@pytest.mark.parametrize(
    ("text", "symbol"),
    [
        ("", Symbol()),
        ("divisor=8,max=512", Symbol(divisor=8, max=512)),
        (" divisor = 8 , remainder=3 ", Symbol(divisor=8, remainder=3)),
        ("min=2,unique", Symbol(min=2, unique=True)),
        ("unique=false,per_rank=True", Symbol(per_rank=True)),
    ],
)
def test_parse(text: str, symbol: Symbol) -> None:
    assert Symbol.parse(text) == symbol
    assert Symbol.parse(str(symbol)) == symbol


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step=8", "expected one of max, min, divisor, remainder, unique, per_rank, got 'step'"),
        ("8", "got '8'"),
        ("max=8,", "got ''"),
        ("max=8,max=9", "max is given twice"),
        ("max=eight", "max: expected an integer, got 'eight'"),
        ("max", "max: expected an integer, got none"),
        ("max=1.5", "max: expected an integer"),
        ("unique=1", "unique: expected true or false, got '1'"),
        ("divisor=0", "divisor: expected at least 1, got 0"),
        ("divisor=8,max=4", "no size satisfies"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(SymbolError, match=message):
        Symbol.parse(text)


def test_parse_named() -> None:
    assert Symbol.parse_named("batch:divisor=8") == ("batch", Symbol(divisor=8))
    assert Symbol.parse_named("a::b:max=4") == ("a::b", Symbol(max=4))
    for text in ("batch", ":divisor=8", ""):
        with pytest.raises(SymbolError, match="expected NAME:CONSTRAINTS"):
            Symbol.parse_named(text)


def test_a_unique_symbol_under_two_names_is_one_size() -> None:
    shared = Symbol(divisor=8, unique=True)
    table = SymbolTable({"x0": shared, "y0": shared, "z0": Symbol(divisor=8, unique=True)})
    x, y, z = (as_dim(name) for name in ("x0", "y0", "z0"))
    assert table.equal(x, y)
    assert table.equal(x + 1 - y, 1)
    assert not table.equal(x, z)
    table.check({"x0": 16, "y0": 16, "z0": 8})
    with pytest.raises(
        SymbolError,
        match=r"'x0' and 'y0': expected equal values, .* one unique symbol, got 16 and 8",
    ):
        table.check({"x0": 16, "y0": 8})


def test_names_that_only_share_constraints_are_not_one_size() -> None:
    shared = Symbol(divisor=8)
    table = SymbolTable({"x0": shared, "y0": shared})
    assert not table.equal(as_dim("x0"), as_dim("y0"))
    table.check({"x0": 16, "y0": 8})


def test_table_is_a_frozen_mapping() -> None:
    entries = {"seq": Symbol(max=9), "batch": Symbol(divisor=8)}
    table = SymbolTable(entries)
    entries["late"] = Symbol()
    assert list(table) == ["batch", "seq"]
    assert "late" not in table
    assert table == SymbolTable({"batch": Symbol(divisor=8), "seq": Symbol(max=9)})
    assert hash(table) == hash(SymbolTable(dict(table)))
    assert table.symbol("late") == Symbol()
    with pytest.raises(KeyError):
        table["late"]
    with pytest.raises(TypeError):
        table.entries["late"] = Symbol()  # type: ignore[index]
    assert copy.deepcopy(table) == table
    assert pickle.loads(pickle.dumps(table)) == table


def test_table_check_names_the_symbol() -> None:
    table = SymbolTable({"batch": Symbol(divisor=8)})
    table.check({"batch": 16, "seq": 5})
    with pytest.raises(SymbolError, match="'batch' is 12"):
        table.check({"batch": 12})
    with pytest.raises(SymbolError, match="'seq' is 0"):
        table.check({"seq": 0})


def test_constant_facts() -> None:
    facts = Symbol(divisor=8, min=9, max=23).facts
    assert facts == Facts(0, 16, 16, 16)
    assert facts.constant == 16
    assert facts.divisible(16)
    assert not facts.divisible(3)
