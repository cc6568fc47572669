"""How prices grow with the symbols: large sizes, and what grows faster than in proportion.

Prices are compared at typical sizes. There, a term that is quadratic in a symbol (attention scores)
may be smaller than one that is linear. So what grows faster than in proportion to a symbol is
compared at large sizes as well.
"""

from collections.abc import Callable, Mapping

from onnxpar.core.symbols import Symbol, symbols_of
from onnxpar.core.symbols.symbol_table import SymbolTable
from onnxpar.facts.program import Program

LARGE = 16
"""How many times larger than its typical size a symbol is at large sizes."""
_SLACK = 1.25
"""By how much more than in proportion a price grows that is said to grow faster. Rounding and
padding stay below; a quadratic term that is a fiftieth at typical sizes is above."""

Sizes = Mapping[str, int]
"""Sizes of some symbols, by name; others have their typical size."""


def large_size(symbol: Symbol) -> int:
    """Returns a large admissible size of a symbol."""
    typical, facts = symbol.typical(), symbol.facts
    if facts.constant is not None:
        return typical
    most = LARGE * typical if facts.max is None else min(facts.max, LARGE * typical)
    return typical + (most - typical) // facts.divisor * facts.divisor


def large_sizes(program: Program) -> dict[str, int]:
    """Returns a large size of each symbol of a program's inputs."""
    env = program.env
    shapes = (env.shapes.get(value.name or "", ()) for value in program.graph.inputs)
    names = {name for shape in shapes for size in shape for name in symbols_of(size)}
    return {name: large_size(env.table.symbol(name)) for name in sorted(names)}


def grows_faster(
    price: Callable[[Sizes], float], table: SymbolTable, large: Sizes
) -> tuple[str, ...]:
    """Returns the symbols with which a price grows faster than in proportion.

    Args:
        price: Returns a price at sizes of symbols.
        table: The symbols.
        large: A large size of each symbol that counts.
    """
    base = price({})
    if not base:
        return ()
    times = {name: size / max(table.symbol(name).typical(), 1) for name, size in large.items()}
    return tuple(n for n, s in large.items() if price({n: s}) > _SLACK * times[n] * base)
