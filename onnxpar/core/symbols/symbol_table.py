"""`SymbolTable`: proofs about sizes from the constraints of their symbols."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType

import sympy

from onnxpar.core.errors import SymbolError
from onnxpar.core.symbols import congruences as known
from onnxpar.core.symbols.congruences import Facts
from onnxpar.core.symbols.constraints import ANY, Symbol
from onnxpar.core.symbols.expressions import (
    Dim,
    as_dim,
    canonical,
    dim_str,
    dim_symbol,
    floor_expr,
    fraction,
    mod_expr,
    symbols_of,
    value_of,
)


@dataclass(frozen=True, eq=False)
class SymbolTable(Mapping[str, Symbol]):
    """A mapping from symbol names to constraints, and proofs from it.

    A symbol that is not in the table is any integer from 1. "Proved" means true for all admissible
    sizes for which the expressions are integers; that a fact is not proved does not mean that it is
    false. Names that share one `Symbol` object marked `unique` have one size.

    All answers are cached, so a repeated question costs a dictionary look-up.
    """

    entries: Mapping[str, Symbol] = field(default_factory=dict)
    _facts: dict[Dim, Facts] = field(default_factory=dict, init=False, repr=False)
    _forms: dict[sympy.Expr, Facts] = field(default_factory=dict, init=False, repr=False)
    _normal: dict[sympy.Expr, sympy.Expr] = field(default_factory=dict, init=False, repr=False)
    _equal: dict[tuple[Dim, Dim], bool] = field(default_factory=dict, init=False, repr=False)
    _typical: dict[Dim, int] = field(default_factory=dict, init=False, repr=False)
    _ceilings: dict[tuple[Dim, int], Dim] = field(default_factory=dict, init=False, repr=False)
    _quotients: dict[tuple[Dim, Dim], Dim | None] = field(
        default_factory=dict, init=False, repr=False
    )
    _same: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Copies the entries and finds the names that have one size."""
        entries = {name: self.entries[name] for name in sorted(self.entries)}
        object.__setattr__(self, "entries", MappingProxyType(entries))
        first: dict[int, str] = {}
        for name, symbol in entries.items():
            if symbol.unique:
                self._same[name] = first.setdefault(id(symbol), name)

    def __getitem__(self, name: str) -> Symbol:
        """Returns the constraints of a symbol in the table."""
        return self.entries[name]

    def __iter__(self) -> Iterator[str]:
        """Names in alphabetical order."""
        return iter(self.entries)

    def __len__(self) -> int:
        """The number of symbols in the table."""
        return len(self.entries)

    def __hash__(self) -> int:
        """Equal tables have equal hashes."""
        return hash(tuple(self.entries.items()))

    def __reduce__(self) -> tuple[type["SymbolTable"], tuple[dict[str, Symbol]]]:
        """Copies and pickles contain the entries, without the cached answers."""
        return SymbolTable, (dict(self.entries),)

    def symbol(self, name: str) -> Symbol:
        """Returns the constraints of any symbol; those of `Symbol()` if it is not in the table."""
        return self.entries.get(name, ANY)

    def check(self, values: Mapping[str, int]) -> None:
        """Checks sizes of symbols that the user gives; the runtime checks those of its runs.

        Raises:
            SymbolError: A size violates its symbol's constraint, or two names of one unique symbol
                have two sizes.
        """
        for name in sorted(values):
            self.symbol(name).check(name, values[name])
            other = self._same.get(name, name)
            if other in values and values[other] != values[name]:
                raise SymbolError(
                    f"symbols {other!r} and {name!r}: expected equal values, since they are "
                    f"one unique symbol, got {values[other]} and {values[name]}"
                )

    def facts(self, expr: Dim) -> Facts:
        """Returns the facts of a size: divisor, remainder and bounds."""
        if isinstance(expr, int):
            return known.constant(expr)
        found = self._facts.get(expr)
        if found is None:
            size = as_dim(expr)
            if isinstance(size, int):
                found = known.constant(size)
            else:
                found = known.meet(self._best_facts(size), self._best_facts(self.normal(size)))
            self._facts[expr] = found
        return found

    def divisible(self, expr: Dim, k: int) -> bool:
        """Whether `k >= 1` is proved to divide the size."""
        if isinstance(expr, int):
            return expr % k == 0
        return self.facts(expr).divisible(k)

    def bounds(self, expr: Dim) -> tuple[int | None, int | None]:
        """Returns the least and the greatest value that a size may have, None if unbounded."""
        facts = self.facts(expr)
        return facts.min, facts.max

    def may_be_empty(self, expr: Dim) -> bool:
        """Whether a size is 0, or may be because a symbol that admits 0 is in it."""
        if isinstance(expr, int):
            return expr == 0
        if all(self.symbol(name).min > 0 for name in symbols_of(expr)):
            return False
        least = self.facts(expr).min
        return least is None or least <= 0

    def equal(self, a: Dim, b: Dim) -> bool:
        """Whether two sizes are proved equal."""
        if a is b:
            return True
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        key = (a, b)
        found = self._equal.get(key)
        if found is None:
            found = self._equal[key] = self._prove_equal(a, b)
        return found

    def one_only_with(self, a: Dim, b: Dim) -> bool:
        """Whether a size is 1 only where another one is, as min(32, n) is 1 only where n is 1."""
        return isinstance(a, sympy.Min) and all(
            arg > 1 if arg.is_Integer else self.equal(arg, b) for arg in a.args
        )

    def _prove_equal(self, a: Dim, b: Dim) -> bool:
        left, right = (self.normal(sympy.sympify(as_dim(x))) for x in (a, b))
        if left == right:
            return True
        difference = canonical(left - right)
        if sympy.expand(fraction(difference)[0]) == 0:
            return True
        return self.facts(difference).constant == 0

    def normal(self, expr: sympy.Expr) -> sympy.Expr:
        """Returns a canonical expression expanded and simplified by the constraints.

        Symbols of one possible size become numbers, a floor of an exact quotient becomes the
        quotient, a known modulo becomes a number, and min and max lose the arguments that cannot be
        the result.
        """
        found = self._normal.get(expr)
        if found is None:
            found = self._normal[expr] = self._simplify(expr)
        return found

    def _simplify(self, expr: sympy.Expr) -> sympy.Expr:
        value = None if expr.is_number else self._form_facts(expr).constant
        if value is not None and fraction(expr)[1] == 1:
            return sympy.Integer(value)
        if isinstance(expr, sympy.Symbol):
            return dim_symbol(self._same.get(expr.name, expr.name))
        if not expr.args:
            return expr
        args = [self.normal(arg) for arg in expr.args]
        if isinstance(expr, sympy.floor):
            numerator, denominator = fraction(args[0])
            facts = self._form_facts(numerator)
            if denominator.is_Integer and facts.divisor % int(denominator) == 0:
                return sympy.expand((numerator - facts.remainder % int(denominator)) / denominator)
            if denominator.free_symbols and (exact := self._divide_out(numerator, denominator)):
                return exact
        elif isinstance(expr, sympy.Max):
            args = self._undominated(args, 1)
        elif isinstance(expr, sympy.Min):
            args = self._undominated(args, -1)
        elif isinstance(expr, sympy.Mod):
            return sympy.expand(mod_expr(*args))
        return sympy.expand(canonical(expr.func(*args)))

    def _divide_out(self, numerator: sympy.Expr, denominator: sympy.Expr) -> sympy.Expr | None:
        """The exact quotient of two integers: `4*(n - 1)` by `n - 1` is 4."""
        quotient = sympy.cancel(numerator / denominator)
        return sympy.expand(quotient) if fraction(quotient)[1] == 1 else None

    def _undominated(self, args: list[sympy.Expr], sign: int) -> list[sympy.Expr]:
        """Drops arguments that another is proved to be at least (sign 1) or at most (sign -1)."""
        kept: list[sympy.Expr] = []
        for arg in args:
            if any(self._at_least_zero(sign * (other - arg)) for other in kept):
                continue
            kept = [other for other in kept if not self._at_least_zero(sign * (arg - other))]
            kept.append(arg)
        return kept

    def _at_least_zero(self, difference: sympy.Expr) -> bool:
        numerator, denominator = fraction(canonical(sympy.expand(difference)))
        if not denominator.is_nonnegative:
            return False
        low = self._best_facts(numerator).min
        return low is not None and low >= 0

    def _best_facts(self, expr: sympy.Expr) -> Facts:
        """Facts of a canonical expression from all its forms together."""
        forms = (expr, *_views(expr))
        return reduce(known.meet, (self._form_facts(form) for form in forms))

    def _form_facts(self, expr: sympy.Expr) -> Facts:
        """Facts from the form of a canonical expression alone."""
        found = self._forms.get(expr)
        if found is None:
            found = self._forms[expr] = self._derive(expr)
        return found

    def _derive(self, expr: sympy.Expr) -> Facts:
        if isinstance(expr, sympy.Symbol):
            return self.symbol(expr.name).facts
        if expr.is_Integer:
            return known.constant(int(expr))
        numerator, denominator = fraction(expr)
        if denominator != 1:
            return known.divide_exact(self._form_facts(numerator), self._form_facts(denominator))
        if isinstance(expr, sympy.floor):
            numerator, denominator = fraction(expr.args[0])
            return known.floor_divide(self._form_facts(numerator), self._form_facts(denominator))
        if isinstance(expr, sympy.Pow):
            return known.power(self._form_facts(expr.base), int(expr.exp))
        rule = _RULES.get(expr.func)
        if rule is None:
            raise SymbolError(f"the size uses an unknown function: {expr}")
        return reduce(rule, (self._form_facts(arg) for arg in expr.args))

    def typical(self, expr: Dim, sizes: Mapping[str, int] | None = None) -> int:
        """Returns one number for a size, for the cost model.

        Every symbol has its `Symbol.typical` size: the least admissible one of at least 64, or the
        greatest if all are below. A quotient that is not an integer at these sizes is rounded down.

        Args:
            expr: The size.
            sizes: Other sizes for some symbols.

        Raises:
            SymbolError: The expression divides by zero at these sizes.
        """
        if isinstance(expr, int):
            return expr
        if not sizes and expr in self._typical:
            return self._typical[expr]
        chosen = {name: self.symbol(name).typical() for name in symbols_of(expr)}
        value = value_of(expr, chosen | dict(sizes or {})).__floor__()
        if not sizes:
            self._typical[expr] = value
        return value

    def evaluate(self, expr: Dim, values: Mapping[str, int]) -> int:
        """Returns the value of a size at given values of its symbols.

        Raises:
            SymbolError: A symbol has no value, the expression divides by zero, or it is not an
                integer.
        """
        value = value_of(expr, values)
        if not isinstance(value, int):
            given = {name: values[name] for name in sorted(symbols_of(expr))}
            raise SymbolError(f"the size {dim_str(expr)} is not an integer at {given}: {value}")
        return value

    def ceil_div(self, expr: Dim, k: int) -> Dim:
        """Returns the size divided by `k >= 1`, rounded up; see the function `ceil_div`."""
        if isinstance(expr, int):
            return -(-expr // k)
        key = (expr, k)
        found = self._ceilings.get(key)
        if found is None:
            even = self.divisible(expr, k)
            quotient = sympy.expand(expr / k) if even else floor_expr(canonical((expr + k - 1) / k))
            found = self._ceilings[key] = as_dim(quotient)
        return found

    def exact_div(self, a: Dim, b: Dim) -> Dim | None:
        """Returns the size q with q·b = a, or None if none is known; see `exact_div` below."""
        key = (a, b)
        if key not in self._quotients:
            self._quotients[key] = self._divide(as_dim(a), as_dim(b))
        return self._quotients[key]

    def _divide(self, a: Dim, b: Dim) -> Dim | None:
        x, y = sympy.sympify(a), sympy.sympify(b)
        for top, bottom in ((x, y), (self.normal(x), self.normal(y))):
            if bottom.is_zero:
                return None
            for quotient in (top / bottom, sympy.expand(top / bottom), sympy.cancel(top / bottom)):
                numerator, denominator = fraction(canonical(quotient))
                if denominator.is_Integer and self.divisible(numerator, int(denominator)):
                    return as_dim(quotient)
        return None


_RULES = {
    sympy.Add: known.add,
    sympy.Mul: known.multiply,
    sympy.Max: known.maximum,
    sympy.Min: known.minimum,
    sympy.Mod: known.modulo,
}


def _views(expr: sympy.Expr) -> Iterator[sympy.Expr]:
    """Yields equal expressions from whose form more can be derived.

    In `4*floor((n + 3)/4) - n` the two terms are correlated, which interval arithmetic cannot see;
    written with p - p % q for q·floor(p/q) it is `3 - (n + 3) % 4`. Likewise `n - n % 8`, written
    with the floor, is a multiple of 8.
    """
    if not isinstance(expr, sympy.Add):
        return
    floors = {}
    for atom in expr.atoms(sympy.floor):
        numerator, denominator = fraction(atom.args[0])
        if denominator.is_Integer:
            floors[atom] = (numerator - mod_expr(numerator, denominator)) / denominator
    if floors:
        yield sympy.expand(canonical(expr.xreplace(floors)))
    mods = {
        atom: atom.args[0] - atom.args[1] * floor_expr(atom.args[0] / atom.args[1])
        for atom in expr.atoms(sympy.Mod)
    }
    if mods:
        yield sympy.expand(canonical(expr.xreplace(mods)))


NO_CONSTRAINTS = SymbolTable()
"""The table in which every symbol is any integer from 1."""


def ceil_div(expr: Dim, k: int, table: SymbolTable | None = None) -> Dim:
    """Returns `expr / k`, `k >= 1`, rounded up: the size of one of `k` shards.

    This is the exact quotient if `table` (by default one without constraints) proves that `k`
    divides the size, else `floor((expr + k - 1) / k)`.
    """
    if isinstance(expr, int):
        return -(-expr // k)
    return (NO_CONSTRAINTS if table is None else table).ceil_div(expr, k)


def exact_div(a: Dim, b: Dim, table: SymbolTable | None = None) -> Dim | None:
    """Returns the exact quotient of two sizes: `8*batch*seq` by `8*seq` is `batch`.

    Products are cancelled, and sums are divided as polynomials in their symbols (a rounded part
    counts as one symbol). An integer may remain as a denominator if `table` proves that it divides.

    Returns:
        The quotient, or None if it is not known to be an integer.
    """
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    return (NO_CONSTRAINTS if table is None else table).exact_div(a, b)
