"""Sizes as expressions: reading, canonical form, printing, evaluation.

A size is a Python `int` or a sympy expression over `sympy.Symbol(name, integer=True,
nonnegative=True)`. Its value is an integer: whoever writes `batch*seq/8` knows that the quotient is
exact. Parts of an expression need not be integers (`batch/2 + seq/2`).

The canonical form that `as_dim` returns has floor as its only rounding, with integer constants
outside of it and nested floors merged, so that equal sizes are mostly equal expressions.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import lru_cache
from itertools import count
from keyword import iskeyword
from math import gcd
from typing import SupportsIndex, TypeAlias

import sympy

from onnxpar.core.errors import SymbolError
from onnxpar_format.expressions import ExpressionError, evaluate_exact

Dim: TypeAlias = int | sympy.Expr
"""The size of a tensor dimension: an `int` or an expression that is not a number."""

MAX_EXPONENT = 64
"""Greatest exponent in the text of a dimension; a guard against `9**9**9`."""

_CACHE = 1 << 16


@lru_cache(_CACHE)
def dim_symbol(name: str) -> sympy.Symbol:
    """Returns the symbol of a dimension's name, which may be any text except the empty one.

    Raises:
        SymbolError: The name is empty.
    """
    if not name:
        raise SymbolError("a symbolic dimension needs a name, got an empty one")
    return sympy.Symbol(name, integer=True, nonnegative=True)


def as_dim(x: SupportsIndex | str | sympy.Expr | None) -> Dim:
    """Returns a size in canonical form.

    Text is read as an expression of integers, names (which may contain dots), `+ - * / // % **`,
    parentheses, `min`, `max`, `floor`, `ceil` and `mod` (and sympy's spelling of them). ONNX allows
    any text as a dimension's name, so other text is the name of one symbol.

    Args:
        x: An integer, text, or an expression; symbols get sympy's assumptions of an integer from 0
            if they lack them.

    Raises:
        SymbolError: Not a size: None, empty text, a fraction, a division by zero, or an expression
            of other functions.
        TypeError: Another type, `bool` and `float` included.
    """
    if isinstance(x, sympy.Expr):
        return _dim_of_expr(x)
    if isinstance(x, str):
        return _dim_of_text(x)
    if x is None:
        raise SymbolError("a dimension has neither a size nor a name")
    if isinstance(x, bool):
        raise TypeError("a dimension must be an integer, text or an expression, got a bool")
    return operator.index(x)


@lru_cache(_CACHE)
def _dim_of_expr(expr: sympy.Expr) -> Dim:
    found = canonical(expr)
    if found.has(sympy.zoo, sympy.nan, sympy.oo, -sympy.oo):
        raise SymbolError(f"the size {expr} divides by zero")
    if found.is_Integer:
        return int(found)
    if found.is_Rational:
        raise SymbolError(f"the size {expr} is not an integer")
    return found


@lru_cache(_CACHE)
def _dim_of_text(text: str) -> Dim:
    expr = _parse(text.strip())
    return _dim_of_expr(dim_symbol(text) if expr is None else expr)


@lru_cache(_CACHE)
def fraction(expr: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr]:
    """Splits a canonical expression into numerator and denominator, both integers for all sizes."""
    numerator, denominator = expr.as_numer_denom()
    return numerator, denominator


@lru_cache(_CACHE)
def canonical(expr: sympy.Expr) -> sympy.Expr:
    """Returns the canonical form of an expression (see the module's docstring), or a fraction.

    Raises:
        SymbolError: A function, power or number that cannot occur in a size.
    """
    if isinstance(expr, sympy.Symbol):
        return dim_symbol(expr.name)
    if expr.is_Rational:
        return expr
    if isinstance(expr, sympy.Pow):
        base, exponent = expr.args
        if not exponent.is_Integer:
            raise SymbolError(f"the size {expr} is a power whose exponent is not an integer")
        return canonical(base) ** exponent
    rebuild = _REBUILD.get(expr.func)
    if rebuild is None:
        raise SymbolError(
            f"expected a size that uses only + - * / // % min max floor ceil, got {expr}"
        )
    return rebuild(*(canonical(arg) for arg in expr.args))


def floor_expr(x: sympy.Expr) -> sympy.Expr:
    """Returns floor(x) of a canonical expression, in canonical form."""
    numerator, denominator = fraction(x)
    if denominator == 1:
        return x
    exact: list[sympy.Expr] = []
    rest: list[sympy.Expr] = []
    for term in sympy.Add.make_args(sympy.expand(numerator)):
        quotient = term / denominator
        if fraction(quotient)[1] == 1:
            exact.append(quotient)
        else:
            rest.append(term)
    outside = sympy.Add(*exact)
    if not rest:
        return outside
    if not denominator.is_Integer:
        return outside + sympy.floor(sympy.Add(*rest) / denominator)
    return outside + _floor_by_integer(rest, int(denominator))


def _floor_by_integer(terms: list[sympy.Expr], k: int) -> sympy.Expr:
    """Returns floor(Σ terms / k) of integers, not all of which are multiples of k >= 2."""
    constant = sum(int(term) for term in terms if term.is_Integer)
    rest = [term for term in terms if not term.is_Integer]
    coefficients = [int(term.as_coeff_Mul()[0]) for term in rest]
    if rest and all(coefficient < 0 for coefficient in coefficients):
        # floor(-y) = -ceil(y): one form for rounding up, however it was written.
        return -floor_expr((sympy.Add(*(-term for term in rest)) - constant + k - 1) / k)
    outside, constant = divmod(constant, k)
    # All terms except the constant are multiples of the gcd, so the constant is rounded down to it.
    constant -= constant % gcd(k, *coefficients)
    floors = [term for term in rest if isinstance(term, sympy.floor)]
    if len(floors) == 1:
        # floor((p + floor(y)) / k) = floor((p + y) / k) for integer p. Several floors are left,
        # since the form would depend on which one is merged.
        inner = sympy.Add(*rest, constant, -floors[0], floors[0].args[0])
        return outside + floor_expr(inner / k)
    return outside + sympy.floor((sympy.Add(*rest) + constant) / k)


def ceiling_expr(x: sympy.Expr) -> sympy.Expr:
    """Returns ceil(x) of a canonical expression, in canonical form."""
    numerator, denominator = fraction(x)
    if denominator == 1:
        return x
    if denominator.is_nonnegative:
        return floor_expr((numerator + denominator - 1) / denominator)
    return -floor_expr(-x)


def mod_expr(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Returns a modulo b, which has the sign of b; the operands of the sympy.Mod are integers.

    Raises:
        SymbolError: `b` is zero.
    """
    if b.is_zero:
        raise SymbolError(f"the size ({a}) % ({b}) divides by zero")
    (a_over, a_under), (b_over, b_under) = fraction(a), fraction(b)
    return _mod(a_over * b_under, b_over * a_under) / (a_under * b_under)


def _mod(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
    """Returns a modulo b of integers, by the floor where sympy is wrong.

    If `a` is a product that contains a Mod, sympy 1.14 multiplies by that twice, or drops the outer
    Mod.
    """
    if isinstance(a, sympy.Mul) and any(isinstance(factor, sympy.Mod) for factor in a.args):
        return a - b * floor_expr(a / b)
    return sympy.Mod(a, b)


def max_expr(*args: sympy.Expr) -> sympy.Expr:
    """Returns the maximum of canonical expressions; the operands of the sympy.Max are integers."""
    return _choose(sympy.Max, args)


def min_expr(*args: sympy.Expr) -> sympy.Expr:
    """Returns the minimum of canonical expressions; the operands of the sympy.Min are integers."""
    return _choose(sympy.Min, args)


def _choose(kind: Callable[..., sympy.Expr], args: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """Returns max or min, with the denominators outside: the arguments may be fractions."""
    scale = sympy.S.One
    for arg in args:
        scale = sympy.lcm(scale, fraction(arg)[1]) if fraction(arg)[1] != 1 else scale
    if not scale.is_nonnegative:
        raise SymbolError(
            f"the sign of {scale}, which divides a size in a min or max, is not known"
        )
    return kind(*(sympy.expand(arg * scale) if scale != 1 else arg for arg in args)) / scale


_REBUILD: dict[type[sympy.Basic], Callable[..., sympy.Expr]] = {
    sympy.Add: sympy.Add,
    sympy.Mul: sympy.Mul,
    sympy.Max: max_expr,
    sympy.Min: min_expr,
    sympy.floor: floor_expr,
    sympy.ceiling: ceiling_expr,
    sympy.Mod: mod_expr,
}

# Reading text.

_NAME = re.compile(r"[^\W\d][\w.]*")
_REST = re.compile(r"[0-9 \t+\-*/%(),]*")
_FUNCTIONS: dict[str, tuple[Callable[..., sympy.Expr], int | None]] = {
    "max": (max_expr, None),
    "Max": (max_expr, None),
    "min": (min_expr, None),
    "Min": (min_expr, None),
    "floor": (floor_expr, 1),
    "ceil": (ceiling_expr, 1),
    "ceiling": (ceiling_expr, 1),
    "mod": (mod_expr, 2),
    "Mod": (mod_expr, 2),
}


class _NoExpressionError(Exception):
    """The text is a name, not an expression."""


def _parse(text: str) -> sympy.Expr | None:
    """Reads an expression; returns None if the text is not one."""
    names: dict[str, str] = {}
    fresh = count()

    def placeholder(match: re.Match[str]) -> str:
        key = f"v{next(fresh)}"
        names[key] = match.group()
        return f" {key} "  # The spaces make `2batch` a syntax error, not a number.

    source = _NAME.sub(placeholder, text)
    if not _REST.fullmatch(_NAME.sub("", text)):
        return None
    try:
        return _Reader(names).read(ast.parse(source.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, _NoExpressionError):
        return None


class _Reader:
    """Turns a Python syntax tree into an expression; `names` has the name of each placeholder."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def read(self, node: ast.expr) -> sympy.Expr:
        """Reads one node; `_NoExpressionError` for anything but arithmetic."""
        match node:
            case ast.Constant(value=int() as value):
                return sympy.Integer(value)
            case ast.Name(id=key):
                return dim_symbol(symbol_name(self.names[key]))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.read(operand)
            case ast.UnaryOp(op=ast.UAdd(), operand=operand):
                return self.read(operand)
            case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int() as exponent)):
                if exponent > MAX_EXPONENT:
                    raise _NoExpressionError
                return self.read(left) ** exponent
            case ast.BinOp(left=left, op=op, right=right):
                return self.binary(op, self.read(left), self.read(right))
            case ast.Call(func=ast.Name(id=key), args=args, keywords=[]) if args:
                function, arity = _FUNCTIONS.get(self.names[key], (None, None))
                if function is None or arity not in (None, len(args)):
                    raise _NoExpressionError
                return function(*(self.read(arg) for arg in args))
            case _:
                raise _NoExpressionError

    def binary(self, op: ast.operator, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr:
        """Returns `a op b`."""
        if isinstance(op, ast.Div | ast.FloorDiv) and b.is_zero:
            raise SymbolError(f"the size ({a}) / ({b}) divides by zero")
        if isinstance(op, ast.Mod) and b.is_zero:
            raise SymbolError(f"the size ({a}) % ({b}) divides by zero")
        match op:
            case ast.Add():
                return a + b
            case ast.Sub():
                return a - b
            case ast.Mult():
                return a * b
            case ast.Div():
                return a / b
            case ast.FloorDiv():
                return floor_expr(a / b)
            case ast.Mod():
                return mod_expr(a, b)
            case _:
                raise _NoExpressionError


# Writing text.

_ESCAPED = "sym__"
_ESCAPE = re.compile(r"_x([0-9a-f]+)_")


def safe_name(name: str) -> str:
    """Returns an ASCII Python identifier for a symbol's name, different for different names.

    Identifiers stay. Other names, keywords and function names get the prefix `sym__`, and `_x`, the
    hexadecimal code point and `_` for each character that an identifier cannot have. `symbol_name`
    undoes this.
    """
    plain = name.isascii() and name.isidentifier() and not iskeyword(name)
    if plain and name not in _FUNCTIONS and not name.startswith(_ESCAPED):
        return name
    return _ESCAPED + re.sub(r"_(?=x)|[^A-Za-z0-9_]", lambda m: f"_x{ord(m.group()):x}_", name)


def symbol_name(safe: str) -> str:
    """Returns the name from which `safe_name` made `safe`."""
    if not safe.startswith(_ESCAPED):
        return safe
    return _ESCAPE.sub(lambda m: chr(int(m.group(1), 16)), safe.removeprefix(_ESCAPED))


_SUM, _PRODUCT, _ATOM = range(3)


def dim_str(expr: Dim) -> str:
    """Prints a size as Python integer arithmetic that `as_dim` reads back.

    Only integers, `safe_name`s, `+ - * // %`, parentheses, `min(…)` and `max(…)` are used; the only
    unary minus is that of a lone negative integer. An exact quotient is printed with `//`, so it
    reads back as a floor of the same value.
    """
    return str(expr) if isinstance(expr, int) else _text_of(as_dim(expr))


def dim_text(expr: Dim) -> str:
    """Prints a size like `dim_str`, for people: symbols have their own names."""
    return re.sub(rf"\b{_ESCAPED}\w+", lambda m: symbol_name(m.group()), dim_str(expr))


def count_str(count: Dim, text: Callable[[Dim], str] = dim_str) -> int | str:
    """Returns a count for JSON; it may be a fraction, such as half of an odd number of bytes."""
    if isinstance(count, int) or count.is_Integer:
        return int(count)
    over, under = fraction(count)
    return text(count) if under == 1 else f"({text(over)})/({text(under)})"


@lru_cache(_CACHE)
def _text_of(expr: Dim) -> str:
    return str(expr) if isinstance(expr, int) else _show(expr, _SUM)


def _show(expr: sympy.Expr, level: int) -> str:
    """Prints a canonical expression, in parentheses where it binds looser than `level`."""
    text, own = _form(expr)
    return text if own >= level else f"({text})"


def _form(expr: sympy.Expr) -> tuple[str, int]:
    numerator, denominator = fraction(expr)
    if denominator != 1:
        return f"{_show(numerator, _PRODUCT)}//{_show(denominator, _ATOM)}", _PRODUCT
    if isinstance(expr, sympy.Symbol):
        return safe_name(expr.name), _ATOM
    if isinstance(expr, sympy.floor):
        return _form(expr.args[0])
    if isinstance(expr, sympy.Max | sympy.Min):
        name = "max" if isinstance(expr, sympy.Max) else "min"
        args = sorted(expr.args, key=sympy.default_sort_key)
        return f"{name}({', '.join(_show(arg, _SUM) for arg in args)})", _ATOM
    if isinstance(expr, sympy.Mod):
        return f"{_show(expr.args[0], _ATOM)} % {_show(expr.args[1], _ATOM)}", _PRODUCT
    if expr.is_Integer and expr >= 0:
        return str(expr), _ATOM
    if isinstance(expr, sympy.Add) or expr.as_coeff_Mul()[0] < 0:
        return _form_sum(expr), _SUM
    ordered = expr.as_ordered_factors()
    if (
        len(ordered) > 1
        and ordered[0].is_Integer
        and isinstance(ordered[1].as_base_exp()[0], sympy.Add)
    ):
        # sympy multiplies a number into the sum beside it, so the number comes last.
        ordered = [*ordered[1:], ordered[0]]
    factors: list[str] = []
    for factor in ordered:
        base, exponent = factor.as_base_exp()
        factors += [_show(base, _ATOM)] * int(exponent)
    return "*".join(factors), _PRODUCT


def _form_sum(expr: sympy.Expr) -> str:
    plus: list[str] = []
    minus: list[str] = []
    for term in expr.as_ordered_terms():
        negative = term.as_coeff_Mul()[0] < 0
        (minus if negative else plus).append(_show(-term if negative else term, _PRODUCT))
    return " - ".join([" + ".join(plus) or "0", *minus])


# Values.


def symbols_of(expr: Dim) -> frozenset[str]:
    """Returns the names of the symbols in a size."""
    return frozenset() if isinstance(expr, int) else _symbols_of(expr)


@lru_cache(_CACHE)
def _symbols_of(expr: sympy.Expr) -> frozenset[str]:
    return frozenset(symbol.name for symbol in expr.free_symbols)


@lru_cache(_CACHE)
def _quotient(expr: sympy.Expr) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Returns numerator and denominator as text, and for each symbol its name there and its own."""
    over, under = fraction(canonical(expr))
    names = tuple((safe_name(name), name) for name in sorted(symbols_of(expr)))
    return _text_of(over), _text_of(under), names


def value_of(expr: Dim, values: Mapping[str, int]) -> int | Fraction:
    """Returns the value of a size; a `Fraction` if it is not an integer.

    Raises:
        SymbolError: A symbol has no value, or the expression divides by zero.
    """
    if isinstance(expr, int):
        return expr
    over, under, names = _quotient(expr)
    try:
        given = {safe: values[name] for safe, name in names}
    except KeyError as missing:
        known = ", ".join(sorted(values)) or "none"
        raise SymbolError(
            f"expected a value for the symbol {missing.args[0]!r}; given: {known}"
        ) from None
    try:
        found = evaluate_exact(over, given) / evaluate_exact(under, given)
    except (ExpressionError, ZeroDivisionError):
        given = {name: values[name] for _, name in names}
        raise SymbolError(f"the size {dim_str(expr)} divides by zero at {given}") from None
    return found.numerator if found.denominator == 1 else found
