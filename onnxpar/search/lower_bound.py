"""A lower bound of a sum of tables, a good choice, and the options that the two exclude.

Every variable in turn takes from each of its tables the least entry for each of its options, and
gives each table an equal share of the total (max-sum diffusion; Werner 2007, Kolmogorov 2006). The
sum of every choice stays the same, while the sum of the tables' least entries, a lower bound,
rises. An option whose own bound is above the cost of a known choice cannot be part of a better one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
Scoped = tuple[tuple[int, ...], Table]

_SWEEPS, _STALLED = 200, 5
_EAGER = 10
"""A choice is made after each of the first sweeps; for most networks the bound soon meets it."""
_MARGIN = 1e-9


@dataclass(frozen=True)
class Bounded:
    """What is known about the least sum.

    Attributes:
        choice: A good choice.
        cost: What it costs.
        bound: No choice costs less.
        kept: For each variable the options of this choice and of all choices that may be better.
        work: How many entries of tables were read.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    kept: tuple[NDArray[np.intp], ...]
    work: int = 0

    @property
    def proved(self) -> bool:
        """Whether no choice costs less, up to rounding."""
        return self.cost - self.bound <= _MARGIN * abs(self.cost)


def bounded(units: Sequence[Table], terms: Sequence[Scoped]) -> Bounded:
    """Returns bounds of the least sum of units and tables, which are finite or infinite."""
    large = 1.0 + sum(_largest(t) for t in (*units, *(t for _, t in terms)))
    plain = [np.where(np.isfinite(u), u, large) for u in units]
    scoped = [(scope, np.where(np.isfinite(t), t, large)) for scope, t in terms]
    own, tables = [u.copy() for u in plain], [t.copy() for _, t in scoped]
    around: list[list[tuple[int, int]]] = [[] for _ in units]
    for index, (scope, _) in enumerate(scoped):
        for axis, v in enumerate(scope):
            around[v].append((index, axis))
    best: tuple[float, tuple[int, ...]] | None = None
    low, stalled = -np.inf, 0
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for v in range(len(units)) if forward else reversed(range(len(units))):
            _share(v, own, tables, around[v])
        now = sum(float(u.min()) for u in own) + sum(float(t.min()) for t in tables)
        if sweep < _EAGER or sweep % 10 == 0 or sweep == _SWEEPS - 1:
            choice = _descend(_decode(own, scoped, tables, around), plain, scoped, around)
            cost = _cost(choice, plain, scoped)
            best = min(best, (cost, choice)) if best is not None else (cost, choice)
            if best[0] - now <= _MARGIN * abs(best[0]):
                low = max(low, now)
                break
        stalled = stalled + 1 if now - low <= 1e-5 * max(abs(low), 1e-30) else 0
        low = max(low, now)
        if stalled >= _STALLED and sweep % 10 == 0:
            break
    assert best is not None
    kept = []
    for v, unit in enumerate(own):
        marginal = unit.copy()
        least = float(unit.min())
        for index, axis in around[v]:
            rows = _least(tables[index], axis)
            marginal += rows
            least += float(rows.min())
        excess = marginal - least + low - best[0]
        kept.append(np.flatnonzero(excess <= _MARGIN * abs(best[0])))
        if best[1][v] not in kept[-1]:
            kept[-1] = np.sort(np.append(kept[-1], best[1][v]))
    work = (sweep + 1) * sum(t.size * t.ndim for t in tables)
    return Bounded(best[1], best[0], min(low, best[0]), tuple(kept), work)


def _largest(table: Table) -> float:
    finite = table[np.isfinite(table)]
    return float(np.abs(finite).max()) if finite.size else 0.0


def _least(table: Table, axis: int) -> Table:
    """The least entry for each index of one dim."""
    others = tuple(a for a in range(table.ndim) if a != axis)
    least: Table = table.min(axis=others) if others else table
    return least


def _share(v: int, own: list[Table], tables: list[Table], around: list[tuple[int, int]]) -> None:
    """Takes the least entries from every table of a variable, and shares the total equally."""
    if not around:
        return
    least = [_least(tables[index], axis) for index, axis in around]
    each = (own[v] + sum(least)) / len(around)
    own[v] = np.zeros_like(own[v])
    for (index, axis), rows in zip(around, least, strict=True):
        shape = [1] * tables[index].ndim
        shape[axis] = -1
        tables[index] = tables[index] + (each - rows).reshape(shape)


def _decode(
    own: list[Table],
    terms: Sequence[Scoped],
    tables: list[Table],
    around: list[list[tuple[int, int]]],
) -> list[int]:
    """Decides one variable after another, assuming the least for those not yet decided."""
    choice = [-1] * len(own)
    for v, unit in enumerate(own):
        total = unit.copy()
        for index, axis in around[v]:
            scope, table = terms[index][0], tables[index]
            decided = tuple(choice[n] if choice[n] >= 0 else slice(None) for n in scope)
            total += _least(table[decided], sum(choice[n] < 0 for n in scope[:axis]))
        choice[v] = int(total.argmin())
    return choice


def _descend(
    choice: list[int],
    units: list[Table],
    terms: Sequence[Scoped],
    around: list[list[tuple[int, int]]],
) -> tuple[int, ...]:
    """Changes one variable at a time as long as that reduces the cost."""
    changed = True
    while changed:
        changed = False
        for v, unit in enumerate(units):
            total = unit.copy()
            for index, axis in around[v]:
                scope, table = terms[index]
                others = (slice(None) if a == axis else choice[n] for a, n in enumerate(scope))
                total += table[tuple(others)]
            least = int(total.argmin())
            if total[least] < total[choice[v]] - _MARGIN * abs(total[choice[v]]):
                choice[v], changed = least, True
    return tuple(choice)


def _cost(choice: Sequence[int], units: Sequence[Table], terms: Sequence[Scoped]) -> float:
    total = sum(float(u[c]) for u, c in zip(units, choice, strict=True))
    return total + sum(float(t[tuple(choice[n] for n in scope)]) for scope, t in terms)
