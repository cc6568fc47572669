"""Exact minimum of a sum of tables, by eliminating one variable after another.

Eliminating a variable adds up the tables that it stands in and keeps, for every choice of its
neighbours, the least (dynamic programming; Bertelè & Brioschi 1972, Dechter 1999). The work is
exponential in the width of the graph only, which for a chain of layers is small however long the
chain, and linear in the number of variables.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from onnxpar.analysis.search.problem import Problem, Table
from onnxpar.analysis.search.prune import alive
from onnxpar.errors import ShardingError

MAX_ENTRIES = 1 << 25
"""Entries of the largest table that an elimination may make (256 MiB)."""


@dataclass(frozen=True)
class _Step:
    variable: int
    scope: tuple[int, ...]
    best: NDArray[np.intp]


def solve(problem: Problem, weight: float = 0.0) -> tuple[int, ...]:
    """Returns the choice of least seconds + `weight` · bytes.

    Args:
        problem: The problem.
        weight: Seconds that a byte of memory is worth.

    Raises:
        ShardingError: The graph is so entangled that a table would have more than `MAX_ENTRIES`.
    """
    kept = alive(problem, memory=weight > 0)
    units = [
        (v.cost + weight * v.memory if weight else v.cost)[k]
        for v, k in zip(problem.variables, kept, strict=True)
    ]
    terms = [(t.scope, t.table[np.ix_(*(kept[v] for v in t.scope))]) for t in problem.terms]
    found = minimise(units, terms)
    return tuple(int(k[c]) for k, c in zip(kept, found, strict=True))


def minimise(
    units: Sequence[Table], terms: Sequence[tuple[tuple[int, ...], Table]]
) -> tuple[int, ...]:
    """Returns the choice of least sum; see `solve`."""
    units = [np.asarray(u, float) for u in units]
    tables: dict[int, tuple[tuple[int, ...], Table]] = {}
    holds: list[set[int]] = [set() for _ in units]
    neighbours: list[set[int]] = [set() for _ in units]
    number = 0

    def add(scope: tuple[int, ...], table: Table) -> None:
        nonlocal number
        if len(scope) == 1:
            units[scope[0]] = units[scope[0]] + table
            return
        tables[number] = scope, table
        for v in scope:
            holds[v].add(number)
            neighbours[v].update(set(scope) - {v})
        number += 1

    for scope, table in terms:
        free = tuple(v for v in scope if len(units[v]) > 1)
        if len(free) < len(scope):
            table = table.reshape([n for n in table.shape if n > 1])
        if free:
            add(free, table)
    width = [len(u) for u in units]

    def size(v: int) -> float:
        return prod(map(float, (width[v], *(width[n] for n in neighbours[v]))))

    def fill(v: int) -> tuple[float, float]:
        """The entries of the pairs of neighbours that would newly meet, then those of the table."""
        around = sorted(neighbours[v])
        new = 0.0
        for i, a in enumerate(around):
            for b in around[i + 1 :]:
                if b not in neighbours[a]:
                    new += width[a] * width[b]
        return new, size(v)

    price = {v: fill(v) for v in range(len(units))}
    queue = [(*price[v], v) for v in price]
    heapq.heapify(queue)
    steps: list[_Step] = []
    while queue:
        *priced, v = heapq.heappop(queue)
        if price.get(v) != tuple(priced):
            continue
        del price[v]
        if size(v) > MAX_ENTRIES:
            raise ShardingError(
                f"the exact search would need a table of {size(v):.0f} entries; the model's values "
                "are read by too many nodes together"
            )
        scope = tuple(sorted(neighbours[v]))
        order = (*scope, v)
        total = units[v].reshape((1,) * len(scope) + (-1,))
        for index in sorted(holds[v]):
            total = total + _aligned(*tables[index], order)
        total = np.broadcast_to(total, (*(width[n] for n in scope), width[v]))
        best = total.argmin(axis=-1)
        least = np.take_along_axis(total, best[..., None], -1)[..., 0]
        steps.append(_Step(v, scope, best))
        for index in list(holds[v]):
            for n in tables[index][0]:
                holds[n].discard(index)
            del tables[index]
        for n in scope:
            neighbours[n].discard(v)
        if scope:
            add(scope, least)
        # Those further away have fewer pairs to join at most; their old price will do.
        for n in scope:
            now = fill(n)
            if now != price[n]:
                price[n] = now
                heapq.heappush(queue, (*now, n))
    choice = [0] * len(units)
    for step in reversed(steps):
        choice[step.variable] = int(step.best[tuple(choice[n] for n in step.scope)])
    return tuple(choice)


def _aligned(scope: tuple[int, ...], table: Table, order: tuple[int, ...]) -> Table:
    """A table with its dims in `order`, 1 where it does not have a variable."""
    have = sorted(range(len(scope)), key=lambda i: order.index(scope[i]))
    moved = table.transpose(have)
    shape = [1] * len(order)
    for axis, i in enumerate(have):
        shape[order.index(scope[i])] = moved.shape[axis]
    return moved.reshape(shape)
