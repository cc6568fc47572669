"""Symbols follow from input shapes; contradictions name input, dim, expected and got."""

import pytest

from onnxpar_format.entries import EqualSizes, ProgramEntry, SymbolEntry, TensorEntry
from onnxpar_runtime.errors import InputError, SymbolValueError
from onnxpar_runtime.symbol_checks import (
    bind_local_symbols,
    bind_symbols,
    check_equal_sizes,
    check_symbols,
)


def spec(name: str, *shape: int | str, atoms: tuple[int, ...] = ()) -> TensorEntry:
    dims = tuple(((size, atoms if i == 0 else ()),) for i, size in enumerate(shape))
    return TensorEntry(name, "float32", shape, dims)


IDS, MASK = spec("ids", "batch", "seq"), spec("mask", "8*batch", "seq", 4)


def test_bound_and_checked() -> None:
    shapes = {"ids": (3, 5), "mask": (24, 5, 4)}
    assert bind_symbols([MASK, IDS], shapes) == {"seq": 5, "batch": 3}


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ((24, 6, 4), "input 'mask', dim 1: expected 5 ('seq' is 5 in dim 1 of input 'ids'), got 6"),
        ((25, 5, 4), "input 'mask', dim 0: expected 24 (= 8*batch), got 25"),
        ((24, 5, 3), "input 'mask', dim 2: expected 4, got 3"),
        ((24, 5), "input 'mask': expected 3 dims [8*batch, seq, 4], got shape [24, 5]"),
    ],
)
def test_contradiction(mask: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError) as caught:
        bind_symbols([IDS, MASK], {"ids": (3, 5), "mask": mask})
    assert str(caught.value) == message


def test_violated_constraint_names_symbol_value_and_constraint() -> None:
    with pytest.raises(SymbolValueError) as caught:
        check_symbols({"batch": SymbolEntry(divisor=8, max=64)}, {"batch": 12})
    message = "symbol 'batch' is 12, which violates its constraint: 8*N, N >= 1, at most 64"
    assert str(caught.value) == message


def test_names_of_one_unique_symbol_must_be_equal() -> None:
    symbols = {"a": SymbolEntry(unique=True), "b": SymbolEntry(unique=True, same_as="a")}
    check_symbols(symbols, {"a": 4, "b": 4})
    check_symbols(symbols, {"b": 4})
    with pytest.raises(SymbolValueError) as caught:
        check_symbols(symbols, {"b": 5, "a": 4})
    message = (
        "symbols 'a' and 'b': expected equal values, since they are one unique symbol, got 4 and 5"
    )
    assert str(caught.value) == message


def test_local_shapes_tell_only_what_is_certain() -> None:
    specs = [spec("x", "batch", "seq", atoms=(0, 1))]
    shapes = {"x": (2, 5)}
    assert bind_local_symbols(specs, shapes, (2, 3), {}) == {"seq": 5}
    even = {"batch": SymbolEntry(divisor=12)}
    assert bind_local_symbols(specs, shapes, (2, 3), even) == {"batch": 12, "seq": 5}
    shifted = {"batch": SymbolEntry(divisor=12, remainder=1)}
    assert bind_local_symbols(specs, shapes, (2, 3), shifted) == {"seq": 5}


@pytest.mark.parametrize(
    ("sizes", "values", "got"),
    [
        (("batch", "n"), {"batch": 3, "n": 3}, None),
        (("batch", "n"), {"batch": 3}, None),
        (("batch", 4), {"batch": 3}, "3 (batch = 3, dim 0 of input 'x') and 4"),
        (
            ("batch", "n"),
            {"batch": 3, "n": 4},
            "3 (batch = 3, dim 0 of input 'x') and 4 (n = 4, dim 1 of input 'y')",
        ),
        (
            ("2*batch + seq", "min(n, 9)"),
            {"batch": 3, "seq": 1, "n": 4},
            "7 (2*batch + seq; batch = 3, dim 0 of input 'x'; seq = 1) and 4 (min(n, 9); n = 4, "
            "dim 1 of input 'y')",
        ),
        (("odd name", 1), {"odd name": 2}, "2 (odd name = 2) and 1"),
    ],
)
def test_equal_sizes(
    sizes: tuple[int | str, int | str], values: dict[str, int], got: str | None
) -> None:
    equal = EqualSizes("loss", "Op", ("a", "b"), (0, 2), sizes)
    inputs = (spec("x", "batch", 7), spec("y", "batch", "n"))
    program = ProgramEntry("model", (), inputs, (), (), (), (equal,))
    if got is None:
        check_equal_sizes(program, values)
        return
    with pytest.raises(InputError) as caught:
        check_equal_sizes(program, values)
    expected = f"node 'loss' (Op): dim 0 of 'a' and dim 2 of 'b' must be equal, got {got}"
    assert str(caught.value) == expected
