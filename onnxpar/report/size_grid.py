"""The sizes at which times are predicted; a page estimates those between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from onnxpar.core.symbols import Symbol

_POINTS = 64
"""How many combinations of sizes there are at most, unless two sizes for each symbol are more."""
_LARGEST = 16
"""The sizes are powers of two up to this power, as those of the page's sliders."""


@dataclass(frozen=True)
class SizeGrid:
    """Combinations of sizes of symbols.

    Attributes:
        axes: For each symbol its sizes, in rising order.
        shown: The combination that the page shows first, by its place in `points`.
    """

    axes: Mapping[str, tuple[int, ...]]
    shown: int

    @property
    def points(self) -> list[dict[str, int]]:
        """All combinations; the size of the last symbol changes first."""
        return [dict(zip(self.axes, sizes, strict=True)) for sizes in product(*self.axes.values())]

    def data(self) -> list[dict[str, Any]]:
        """Returns the axes for the page."""
        return [{"name": name, "sizes": list(sizes)} for name, sizes in self.axes.items()]


def size_grid(symbols: Mapping[str, Symbol], sizes: Mapping[str, int]) -> SizeGrid:
    """Returns the admissible sizes near those that a page shows first, for all symbols.

    Args:
        symbols: The symbols.
        sizes: The sizes that the page shows first; `Symbol.typical` for others.
    """
    many = max(2, int(_POINTS ** (1 / max(len(symbols), 1)) + 1e-9))
    axes, shown = {}, 0
    for name, symbol in symbols.items():
        first = sizes.get(name, symbol.typical())
        powers = {_admissible(symbol, 2**power) for power in range(_LARGEST + 1)} - {first}
        near = sorted(powers, key=lambda size: max(size, first) / max(min(size, first), 1))
        axis = tuple(sorted([first, *near[: many - 1]]))
        shown = shown * len(axis) + axis.index(first)
        axes[name] = axis
    return SizeGrid(axes, shown)


def _admissible(symbol: Symbol, size: int) -> int:
    """The nearest admissible size, as `admissible` of the page's script `sizes.js`."""
    facts = symbol.facts
    step = max(facts.divisor, 1)
    least = facts.min or 0
    found = least + max(0, (size - least + step // 2) // step) * step
    return found if facts.max is None else min(found, facts.max)
