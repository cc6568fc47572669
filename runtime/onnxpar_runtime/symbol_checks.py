"""Finds the values of symbols from the shapes of the inputs, and checks their constraints."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.entries import ProgramEntry, SymbolEntry, TensorEntry
from onnxpar_format.expressions import (
    ExpressionError,
    Size,
    UnknownSymbolError,
    bare_name,
    evaluate,
    names_of,
)
from onnxpar_runtime.errors import InputError, SymbolValueError

Shape = tuple[int, ...]
_FEW = 32


def bind_symbols(specs: Sequence[TensorEntry], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Returns the value of every symbol that follows from the global shapes of the inputs.

    A dim that is a bare name gives its value; all other dims are checked against the values.

    Args:
        specs: The inputs.
        shapes: Global shape of each input by name.

    Raises:
        InputError: A shape has the wrong rank or contradicts an expression; names input, dim,
            expected and got.
    """
    values: dict[str, int] = {}
    origin: dict[str, str] = {}
    for spec in specs:
        shape = shapes[spec.name]
        if len(shape) != len(spec.shape):
            raise InputError(
                f"input {spec.name!r}: expected {len(spec.shape)} dims {_text(spec.shape)}, got "
                f"shape {_text(shape)}"
            )
        for index, (size, got) in enumerate(zip(spec.shape, shape, strict=True)):
            name = bare_name(size)
            if name is not None and name not in values:
                values[name] = got
                origin[name] = f"dim {index} of input {spec.name!r}"
    for spec in specs:
        for index, (size, got) in enumerate(zip(spec.shape, shapes[spec.name], strict=True)):
            try:
                expected = evaluate(size, values)
            except UnknownSymbolError:
                continue
            except ExpressionError as error:
                raise InputError(f"input {spec.name!r}, dim {index}: {error}") from None
            if expected != got:
                name = bare_name(size)
                why = f" ({name!r} is {expected} in {origin[name]})" if name in origin else ""
                if not why and isinstance(size, str):
                    why = f" (= {size})"
                raise InputError(
                    f"input {spec.name!r}, dim {index}: expected {expected}{why}, got {got}"
                )
    return values


def bind_local_symbols(
    specs: Sequence[TensorEntry],
    shapes: Mapping[str, Shape],
    atoms: Sequence[int],
    symbols: Mapping[str, SymbolEntry],
) -> dict[str, int]:
    """Returns the value of every symbol that follows from the *local* shapes of the inputs.

    A dim gives its symbol if it is replicated, or if the constraint makes its shards equally large.
    """
    values: dict[str, int] = {}
    for spec in specs:
        for dim, got in zip(spec.dims, shapes[spec.name], strict=False):
            name = bare_name(dim[0][0]) if len(dim) == 1 else None
            if name is None or name in values:
                continue
            parts = prod(atoms[a] for a in dim[0][1])
            symbol = symbols.get(name, SymbolEntry())
            if parts == 1 or (symbol.divisor % parts == 0 and symbol.remainder == 0):
                values[name] = got * parts
    return values


def symbol_values(
    symbols: Mapping[str, SymbolEntry], program: ProgramEntry, shapes: Mapping[str, Shape]
) -> dict[str, int]:
    """Returns the checked values of the symbols at these global shapes of a program's inputs.

    Raises:
        InputError: As `bind_symbols` and `check_equal_sizes`.
        SymbolValueError: As `check_symbols`.
    """
    values = bind_symbols(program.inputs, shapes)
    check_values(symbols, program, values)
    return values


def check_values(
    symbols: Mapping[str, SymbolEntry], program: ProgramEntry, values: Mapping[str, int]
) -> None:
    """Raises as `check_symbols` and `check_equal_sizes` unless a program can run at the values."""
    check_symbols(symbols, values)
    check_equal_sizes(program, values)


def check_symbols(symbols: Mapping[str, SymbolEntry], values: Mapping[str, int]) -> None:
    """Raises SymbolValueError, with symbols, values and constraint, if a constraint is violated."""
    for name, value in values.items():
        symbol = symbols.get(name, SymbolEntry())
        if not symbol.admits(value):
            raise SymbolValueError(
                f"symbol {name!r} is {value}, which violates its constraint: {symbol.constraint}"
            )
        other = values.get(symbol.same_as, value) if symbol.same_as is not None else value
        if other != value:
            raise SymbolValueError(
                f"symbols {symbol.same_as!r} and {name!r}: expected equal values, since they are "
                f"one unique symbol, got {other} and {value}"
            )


def check_equal_sizes(program: ProgramEntry, values: Mapping[str, int]) -> None:
    """Compares the sizes that operators of the program need to be equal.

    Sizes with a symbol without a value (local shapes may leave it open) are not compared.

    Raises:
        InputError: Two differ; names the node, both dims, their sizes and the inputs.
    """
    for equal in program.equal_sizes:
        try:
            left, right = (evaluate(size, values) for size in equal.sizes)
        except UnknownSymbolError:
            continue
        except ExpressionError as error:
            raise InputError(f"node {equal.node!r} ({equal.op_type}): {error}") from None
        if left != right:
            dims = [f"dim {d} of {v!r}" for v, d in zip(equal.values, equal.dims, strict=True)]
            sizes = [_explained(size, values, program.inputs) for size in equal.sizes]
            raise InputError(
                f"node {equal.node!r} ({equal.op_type}): {dims[0]} and {dims[1]} must be equal, "
                f"got {sizes[0]} and {sizes[1]}"
            )


def check_index_ranges(
    program: ProgramEntry,
    arrays: Mapping[str, NDArray[Any]],
    values: Mapping[str, int],
    of: str = " of this rank's shard",
) -> None:
    """Checks the elements of a rank's inputs that operators read as indices.

    Args:
        program: The program.
        arrays: This rank's shard of each input; padding holds zeros.
        values: Global values of the symbols.
        of: The end of the message, which says in what the place is counted.

    Raises:
        InputError: An element is out of range; names input, range, element, place and node.
    """
    for demand in program.index_ranges:
        array = arrays[demand.input]
        try:
            low, high = (evaluate(size, values) for size in (demand.low, demand.high))
        except ExpressionError:
            continue
        if not array.size:
            continue
        # Python compares the few tokens of a step faster than numpy.
        few = array.ravel().tolist() if array.size <= _FEW else (array.min(), array.max())
        if min(few) >= low and max(few) <= high:
            continue
        wrong = (array < low) | (array > high)
        if demand.ignored is not None:
            wrong &= array != demand.ignored
        if wrong.any():
            place = [int(i) for i in np.argwhere(wrong)[0]]
            besides = "" if demand.ignored is None else f", or {demand.ignored}"
            raise InputError(
                f"input {demand.input!r}: expected elements from {low} to {high}{besides} for node "
                f"{demand.node!r} ({demand.op_type}), got {array[tuple(place)]} at {place}{of}"
            )


def _explained(size: Size, values: Mapping[str, int], inputs: Sequence[TensorEntry]) -> str:
    """Returns a size and where it comes from: `3 (batch = 3, dim 0 of input 'x')`."""
    places = {
        name: f", dim {index} of input {spec.name!r}"
        for spec in reversed(inputs)
        for index, dim in enumerate(spec.shape)
        if (name := bare_name(dim)) is not None
    }
    parts = [f"{name} = {values[name]}{places.get(name, '')}" for name in names_of(size)]
    if bare_name(size) is None:
        parts[:0] = [str(size)] if parts else []
    return f"{evaluate(size, values)}" + (f" ({'; '.join(parts)})" if parts else "")


def _text(shape: Sequence[int | str]) -> str:
    return "[" + ", ".join(str(s) for s in shape) + "]"
