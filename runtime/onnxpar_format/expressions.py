"""Evaluates the size expressions of a manifest: integers, symbol names, and integer arithmetic.

The grammar is a part of Python's: `+ - * / // % **`, unary minus, `min(...)`, `max(...)`,
`floor(...)`, `ceil(...)` and `Mod(a, b)` over integers and names. A name that is not a Python
identifier (an ONNX dim_param may be any text) can only be an expression on its own. Evaluation uses
exact rationals, so that `3*batch/2` has no rounding.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor

Size = int | str
"""A size expression: an int, or the text of one."""

# Integers stay integers until a division, because arithmetic on them is much faster.
_Exact = int | Fraction
_BINARY: dict[type[ast.operator], Callable[[_Exact, _Exact], _Exact]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: Fraction(a, b),
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_CALLS: dict[str, Callable[..., _Exact]] = {
    "min": lambda *a: min(a),
    "max": lambda *a: max(a),
    "floor": floor,
    "ceil": ceil,
    "ceiling": ceil,
    "Mod": lambda a, b: a % b,
}
_SIGNS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
}
# The word of each function in `postfix`, and the number of its operands; 0 for one or more.
_SPELLINGS: dict[str, tuple[str, int]] = {
    "min": ("min", 0),
    "max": ("max", 0),
    "floor": ("floor", 1),
    "ceil": ("ceil", 1),
    "ceiling": ("ceil", 1),
    "mod": ("%", 2),
}
_MAX_EXPONENT = 64


class ExpressionError(ValueError):
    """An expression that is outside the grammar, has an unknown name, or divides by zero."""


class UnknownSymbolError(ExpressionError):
    """An expression names a symbol that has no value yet.

    Attributes:
        symbol: The name.
    """

    def __init__(self, symbol: str, text: Size) -> None:
        """Makes the error of `symbol` in the expression `text`."""
        super().__init__(f"symbol {symbol!r} in {text!r} has no value")
        self.symbol = symbol


@lru_cache(maxsize=65536)
def _parse(text: str) -> ast.expr | None:
    """Returns the syntax tree; None if the text is not an expression, but a bare name."""
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None


def bare_name(size: Size) -> str | None:
    """Returns the symbol if a size is a symbol alone; None for integers and other expressions."""
    if isinstance(size, int):
        return None
    tree = _parse(size)
    if tree is None:
        return size
    return tree.id if isinstance(tree, ast.Name) else None


def names_of(size: Size) -> tuple[str, ...]:
    """Returns the symbols in a size, in order of appearance."""
    if isinstance(size, int):
        return ()
    tree = _parse(size)
    if tree is None:
        return (size,)
    functions = {call.func for call in ast.walk(tree) if isinstance(call, ast.Call)}
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n not in functions]
    return tuple(dict.fromkeys(n.id for n in sorted(names, key=lambda n: n.col_offset)))


def postfix(size: Size) -> list[int | str | list[str]]:
    """Returns an expression as a sequence for a stack, which needs no parser to evaluate.

    An integer is pushed. A name, in a list of its own, pushes the symbol's value. `neg`, `floor`
    and `ceil` replace the last value; each other text is an operator, or `min` or `max`, that
    replaces the last two.

    Raises:
        ExpressionError: The text is outside the grammar.
    """
    if isinstance(size, int):
        return [size]
    tree = _parse(size)
    return [[size]] if tree is None else list(_flat(tree, size))


def _flat(tree: ast.expr, text: str) -> Iterator[int | str | list[str]]:
    match tree:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            yield number
        case ast.Name(id=name):
            yield [name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield from _flat(operand, text)
            yield "neg"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            yield from _flat(left, text)
            yield from _flat(right, text)
            yield _SIGNS[type(op)]
        case ast.Call(func=ast.Name(id=name), args=[first, *rest], keywords=[]) if (
            name.lower() in _SPELLINGS
        ):
            word, operands = _SPELLINGS[name.lower()]
            if operands and len(rest) != operands - 1:
                raise ExpressionError(f"{text!r}: wrong arguments of {name}")
            yield from _flat(first, text)
            for argument in rest:
                yield from _flat(argument, text)
                yield word
            if operands == 1:
                yield word
        case _:
            raise ExpressionError(f"{text!r} is not a size expression")


def evaluate_exact(size: Size, values: Mapping[str, int]) -> Fraction:
    """Returns the exact value of an expression.

    Raises:
        UnknownSymbolError: A name has no value.
        ExpressionError: The text is outside the grammar, or divides by zero.
    """
    return Fraction(_exact(size, values))


def _exact(size: Size, values: Mapping[str, int]) -> _Exact:
    if isinstance(size, int):
        return size
    if size in values:
        return values[size]
    tree = _parse(size)
    if tree is None:
        raise UnknownSymbolError(size, size)
    try:
        return _walk(tree, values, size)
    except ZeroDivisionError:
        raise ExpressionError(f"{size!r} divides by zero") from None
    except RecursionError:
        raise ExpressionError("an expression is nested too deeply") from None


def evaluate(size: Size, values: Mapping[str, int]) -> int:
    """Returns the value of a size expression.

    Raises:
        UnknownSymbolError: A name has no value.
        ExpressionError: The text is outside the grammar, or its value is not an integer.
    """
    result = _exact(size, values)
    if result.denominator != 1:
        raise ExpressionError(f"{size!r} is {result}, which is not an integer")
    return result.numerator


def _walk(tree: ast.expr, values: Mapping[str, int], text: str) -> _Exact:
    match tree:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name):
            if name not in values:
                raise UnknownSymbolError(name, text)
            return values[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_walk(operand, values, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = _walk(right, values, text)
            if exponent.denominator != 1 or not 0 <= exponent <= _MAX_EXPONENT:
                raise ExpressionError(
                    f"{text!r}: expected an integer from 0 to {_MAX_EXPONENT} as exponent, got "
                    f"{exponent}"
                )
            return _walk(left, values, text) ** exponent.numerator
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_walk(left, values, text), _walk(right, values, text))
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as args, keywords=[]) if (
            name.lower() in _CALLS or name in _CALLS
        ):
            function = _CALLS.get(name) or _CALLS[name.lower()]
            try:
                return function(*(_walk(a, values, text) for a in args))
            except TypeError:
                raise ExpressionError(f"{text!r}: wrong arguments of {name}") from None
    raise ExpressionError(f"{text!r} is not a size expression")
