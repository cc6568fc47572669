"""Arithmetic on the elements of small tensors, for `onnxpar.ops.sizes.computed_sizes`.

It follows the specification and onnxruntime: a quotient of integers is rounded towards zero (for
sizes, which are not negative, this is the floor), and Mod has the sign of its divisor unless `fmod`
is set. If the sign of an operand is unknown, the expression holds for both signs.

A floating-point element is the exact value of its operations. It is kept only if a kernel gives
the same value. Kernels compute numbers below 2^24 exactly if their denominator is a power of two.
For other quotients of such numbers, kernels give the nearest float32, of which only floor and
ceiling are used here. These are exact: for integers a, b < 2^24, a quotient a/b near an integer n
differs from n by at least 1/b, which is about n/a and so more than n·2^-24. That is more than half
a step of float32 near n, so rounding never reaches n.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import TypeAlias

import numpy as np
import sympy

from onnxpar.core.symbols import NO_CONSTRAINTS, Dim, as_dim
from onnxpar.core.symbols.expressions import canonical, ceiling_expr, floor_expr, fraction, mod_expr

Number: TypeAlias = int | sympy.Expr

_EXACT = 2**24
_SHORT = 2**12
_MAX_POWER = 8


class UnknownError(Exception):
    """An element or a property of an element is unknown."""


def number(x: Number) -> Number:
    """A number in canonical form; an `int` if it is an integer."""
    if isinstance(x, int):
        return x
    found = canonical(x)
    return int(found) if found.is_Integer else found


def normal(x: Number) -> Number:
    """An integer in a normal form, in which most equal expressions are the same."""
    found = as_dim(x)
    return found if isinstance(found, int) else as_dim(NO_CONSTRAINTS.normal(found))


def split(x: Number) -> tuple[Dim, Dim]:
    """Numerator and denominator, both integers."""
    if isinstance(x, int):
        return x, 1
    top, bottom = fraction(x)
    return as_dim(top), as_dim(bottom)


def is_integer(x: Number) -> bool:
    """Whether a number is an integer."""
    return split(x)[1] == 1


def dyadic(x: Number) -> bool:
    """Whether the denominator is a power of two, so that kernels compute the number exactly."""
    bottom = split(x)[1]
    return isinstance(bottom, int) and bottom.bit_count() == 1


def _bounds(x: Number) -> tuple[int | None, int | None]:
    """Bounds of the numerator over a positive denominator; it has the sign of the number."""
    top, bottom = split(x)
    low, _ = NO_CONSTRAINTS.bounds(bottom)
    if low is None or low < 0:
        raise UnknownError
    return NO_CONSTRAINTS.bounds(top)


def truncated(x: Number) -> Number:
    """A number rounded towards zero."""
    if isinstance(x, int) or is_integer(x):
        return x
    low, high = _bounds(x)
    if low is not None and low >= 0:
        return normal(floor_expr(x))
    if high is not None and high <= 0:
        return normal(-floor_expr(-x))
    # One of the two is zero.
    return normal(sympy.Max(floor_expr(x), 0) + sympy.Min(ceiling_expr(x), 0))


def floored(x: Number) -> Number:
    """The greatest integer that is not above a number."""
    return x if isinstance(x, int) else normal(floor_expr(x))


def raised(x: Number) -> Number:
    """The least integer that is not below a number."""
    return x if isinstance(x, int) else normal(ceiling_expr(x))


def over(a: Number, b: Number) -> Number:
    """The quotient of a number by one of known sign, with a positive denominator.

    No model runs at sizes where the divisor is zero.
    """
    if b == 0:
        raise UnknownError
    low, high = _bounds(b)
    if high is not None and high <= 0:
        a, b = -a, -b
    elif low is None or low < 0:
        raise UnknownError
    top, bottom = sympy.sympify(a), sympy.sympify(b)
    return number(top / bottom)


def integer_quotient(a: Number, b: Number) -> Number:
    """Div of integers: rounded towards zero."""
    if isinstance(a, int) and isinstance(b, int) and b:
        quotient = abs(a) // abs(b)
        return quotient if (a < 0) == (b < 0) else -quotient
    exact = NO_CONSTRAINTS.exact_div(a, b)
    return truncated(over(a, b)) if exact is None else exact


def modulo(a: Number, b: Number, truncated: bool) -> Number:
    """Mod of integers, with the sign of the divisor or, `truncated`, of the dividend."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise UnknownError
        rest = abs(a) % abs(b)
        return (-rest if a < 0 else rest) if truncated else a % b
    if truncated:
        return normal(a - b * integer_quotient(a, b))
    low, high = NO_CONSTRAINTS.bounds(b)
    if b == 0 or not ((low is not None and low >= 0) or (high is not None and high <= 0)):
        raise UnknownError
    return normal(mod_expr(sympy.sympify(a), sympy.sympify(b)))


def _order(a: Number, b: Number) -> tuple[int | None, int | None, bool]:
    """Bounds of b - a, and whether it may be 0."""
    if not (dyadic(a) and dyadic(b)):
        raise UnknownError
    top, _ = split(number(sympy.expand(sympy.sympify(b - a))))
    facts = NO_CONSTRAINTS.facts(top)
    return facts.min, facts.max, facts.admits(0)


def equal(a: Number, b: Number) -> bool:
    """Whether two numbers are equal; `UnknownError` if both are possible."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    low, high, may = _order(a, b)
    if not may:
        return False
    if low == high == 0:
        return True
    raise UnknownError


def less(a: Number, b: Number, or_equal: bool = False) -> bool:
    """Whether a < b (or a <= b); `UnknownError` if both are possible."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b if or_equal else a < b
    low, high, _ = _order(a, b)
    least = 0 if or_equal else 1
    if low is not None and low >= least:
        return True
    if high is not None and high < least:
        return False
    raise UnknownError


def greatest(a: Number, b: Number) -> Number:
    """The greater of two numbers."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else _chosen(sympy.Max, a, b)


def least(a: Number, b: Number) -> Number:
    """The smaller of two numbers."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else _chosen(sympy.Min, a, b)


def _chosen(kind: Callable[..., sympy.Expr], a: Number, b: Number) -> Number:
    if is_integer(a) and is_integer(b):
        return normal(kind(a, b))
    return number(kind(a, b))


def power(a: Number, b: Number) -> Number:
    """A number to a small constant power."""
    if not isinstance(b, int) or not 0 <= b <= _MAX_POWER:
        raise UnknownError
    return number(a**b)


def absolute(x: Number) -> Number:
    """The absolute value of a number."""
    low, high = _bounds(x)
    if low is not None and low >= 0:
        return x
    if high is not None and high <= 0:
        return -x
    return greatest(x, -x)


def fits_float(x: Number) -> bool:
    """Whether a float32 holds a number exactly, as far as it is known."""
    top, _ = split(x)
    return not isinstance(top, int) or abs(top) < _EXACT


def of_float(x: float) -> Number | None:
    """The number that a float is; None if products with it may be rounded."""
    if not np.isfinite(x):
        return None
    exact = Fraction(x)
    if abs(exact.numerator) > _SHORT or exact.denominator > _SHORT:
        return None
    return number(sympy.Rational(exact.numerator, exact.denominator))
