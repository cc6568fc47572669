"""Exact minimum of a sum of tables, by eliminating one variable after another.

Eliminating a variable adds up its tables and keeps the least entry for every choice of its
neighbours (dynamic programming; Bertelè & Brioschi 1972, Dechter 1999). The work is linear in the
number of variables and exponential only in the width of the graph, which is small for a chain of
layers, however long. If the next layer has equal tables, the results are looked up. If the tables
of the remaining variables would be large, bounds first exclude some of their options
(`lower_bound`).
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from onnxpar.search.lower_bound import Bounded, Scoped, bounded
from onnxpar.search.problem import Problem, Table
from onnxpar.search.prune import alive

MAX_ENTRIES = 1 << 25
"""Entries of the largest table that an elimination may make (256 MiB)."""
EASY_ENTRIES = 1 << 18
"""Tables with up to this number of entries are made before bounds exclude options."""
_STEP = 8
"""The factor by which larger tables are allowed if bounds exclude few options."""
FEW_OPTIONS = 8
"""If no variable has more options, looking for dead options takes longer than eliminating them."""


@dataclass(frozen=True)
class Least:
    """A choice of least sum.

    Attributes:
        choice: The option of each variable.
        slack: How much less another choice may cost; 0 if this one is proved to be the least.
        work: How many entries of tables were computed.
    """

    choice: tuple[int, ...]
    slack: float = 0.0
    work: int = 0


def solve(problem: Problem, weight: float = 0.0, largest: int | None = None) -> Least:
    """Returns the choice of least seconds + `weight` · bytes.

    Args:
        problem: The problem.
        weight: The price of a byte of memory, in seconds.
        largest: Entries of the largest table that an elimination may make; by default
            `MAX_ENTRIES`.
    """
    everything = [np.arange(len(v.cost)) for v in problem.variables]
    few = all(len(options) <= FEW_OPTIONS for options in everything)
    kept = everything if few else alive(problem, memory=weight > 0)
    units = [
        (v.cost + weight * v.memory if weight else v.cost)[k]
        for v, k in zip(problem.variables, kept, strict=True)
    ]
    thinned: dict[tuple[object, ...], Table] = {}
    terms: list[Scoped] = []
    for term in problem.terms:
        if all(len(kept[v]) == n for v, n in zip(term.scope, term.table.shape, strict=True)):
            terms.append((term.scope, term.table))
            continue
        key = (id(term.table), *(kept[v].tobytes() for v in term.scope))
        if key not in thinned:
            thinned[key] = term.table[np.ix_(*(kept[v] for v in term.scope))]
        terms.append((term.scope, thinned[key]))
    found = minimise(units, terms, largest)
    choice = tuple(int(k[c]) for k, c in zip(kept, found.choice, strict=True))
    return replace(found, choice=choice)


def minimise(units: Sequence[Table], terms: Sequence[Scoped], largest: int | None = None) -> Least:
    """Returns the choice of least sum; see `solve`."""
    largest = MAX_ENTRIES if largest is None else largest
    graph = _Graph([np.asarray(u, float) for u in units])
    for scope, table in terms:
        graph.take(scope, table)
    most = min(EASY_ENTRIES, largest)
    graph.eliminate(most)
    slack, work = 0.0, 0
    while graph.left:
        core, scopes = graph.core()
        seen = bounded(core, scopes)
        work += seen.work
        thinned = 2 * sum(map(len, seen.kept)) <= sum(map(len, core))
        if seen.proved or (most >= largest and not thinned):
            slack = 0.0 if seen.proved else seen.cost - seen.bound
            graph.decide(seen)
            break
        graph.restrict(seen)
        # The more variables are eliminated, the tighter the bounds.
        if not thinned:
            most = min(most * _STEP, largest)
        graph.eliminate(most)
    return Least(graph.choice(), slack, work + graph.work)


@dataclass(frozen=True)
class _Step:
    """A variable, and its best option for every choice of others."""

    variable: int
    scope: tuple[int, ...]
    best: NDArray[np.intp]
    options: NDArray[np.intp] | None


@dataclass
class _Graph:
    """A sum while its variables are eliminated.

    Attributes:
        units: The cost of each option of each variable.
        left: The variables that are left.
    """

    units: list[Table]
    left: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Leaves out variables with one option."""
        self.width = [len(u) for u in self.units]
        self.left = {v for v, n in enumerate(self.width) if n > 1}
        # The original numbers of the options, for variables of which some were excluded.
        self.options: dict[int, NDArray[np.intp]] = {}
        self.tables: dict[int, tuple[tuple[int, ...], Table, int]] = {}
        self.holds: list[set[int]] = [set() for _ in self.units]
        self.neighbours: list[set[int]] = [set() for _ in self.units]
        self.steps: list[_Step] = []
        self.number = self.work = 0
        # Equal tables have one number, so that the same elimination is done only once.
        self.numbers: dict[object, int] = {}
        self.shaped: dict[int, Table] = {}
        self.made: dict[tuple[object, ...], tuple[NDArray[np.intp], Table, int]] = {}

    def take(self, scope: tuple[int, ...], table: Table) -> None:
        """Adds a table, without the variables that have one option."""
        free = tuple(v for v in scope if self.width[v] > 1)
        if not free:
            return
        if len(free) < len(scope):
            if id(table) not in self.shaped:
                self.shaped[id(table)] = table.reshape([n for n in table.shape if n > 1])
            table = self.shaped[id(table)]
        self.add(free, table, self.numbers.setdefault(("table", id(table)), len(self.numbers)))

    def add(self, scope: tuple[int, ...], table: Table, key: int) -> None:
        """Adds a table over variables with several options; tables with one key are equal."""
        if len(scope) == 1:
            self.units[scope[0]] = self.units[scope[0]] + table
            return
        self.tables[self.number] = scope, table, key
        for v in scope:
            self.holds[v].add(self.number)
            self.neighbours[v].update(scope)
            self.neighbours[v].discard(v)
        self.number += 1

    def size(self, v: int) -> float:
        """The number of entries of the sum that eliminating a variable computes."""
        return prod(map(float, (self.width[v], *(self.width[n] for n in self.neighbours[v]))))

    def fill(self, v: int) -> tuple[float, float]:
        """The entries of the pairs of neighbours that would be joined, then those of the sum."""
        around = sorted(self.neighbours[v]) if len(self.neighbours[v]) > 1 else []
        new = 0.0
        for i, a in enumerate(around):
            known = self.neighbours[a]
            for b in around[i + 1 :]:
                if b not in known:
                    new += self.width[a] * self.width[b]
        return new, self.size(v)

    def eliminate(self, most: int) -> None:
        """Eliminates variables that join few pairs first, with tables of up to `most` entries."""
        # A variable that is too large now may become smaller later. Until then its pairs are not
        # counted, because a value that every layer reads has many.
        easy = (v for v in sorted(self.left) if self.size(v) <= most)
        price = {v: self.fill(v) for v in easy}
        queue = [(*price[v], v) for v in price]
        heapq.heapify(queue)
        while queue:
            *priced, v = heapq.heappop(queue)
            if v not in self.left or price.get(v) != tuple(priced):
                continue
            scope = self.remove(v)
            # Variables further away can only have fewer pairs to join; their old price is kept.
            for n in scope:
                if self.size(n) > most:
                    price.pop(n, None)
                    continue
                now = self.fill(n)
                if price.get(n) != now:
                    price[n] = now
                    heapq.heappush(queue, (*now, n))

    def remove(self, v: int) -> tuple[int, ...]:
        """Eliminates one variable; returns its neighbours."""
        self.left.discard(v)
        scope = tuple(sorted(self.neighbours[v]))
        order = (*scope, v)
        place = {n: i for i, n in enumerate(order)}
        held = sorted(self.holds[v])
        parts = [self.tables[i] for i in held]
        key = (
            self.units[v].tobytes(),
            tuple(self.width[n] for n in scope),
            tuple((number, tuple([place[n] for n in names])) for names, _, number in parts),
        )
        if key not in self.made:
            total = self.units[v].reshape((1,) * len(scope) + (-1,))
            for names, table, _ in parts:
                total = total + _aligned(names, table, place)
            total = np.broadcast_to(total, (*(self.width[n] for n in scope), self.width[v]))
            best = total.argmin(axis=-1)
            least = np.take_along_axis(total, best[..., None], -1)[..., 0]
            number = self.numbers.setdefault(("made", len(self.made)), len(self.numbers))
            self.made[key] = best, least, number
            self.work += total.size
        best, least, number = self.made[key]
        self.steps.append(_Step(v, scope, best, self.options.get(v)))
        for index in held:
            for n in self.tables[index][0]:
                self.holds[n].discard(index)
            del self.tables[index]
        for n in scope:
            self.neighbours[n].discard(v)
        if scope:
            self.add(scope, least, number)
        return scope

    def core(self) -> tuple[list[Table], list[Scoped]]:
        """The units and tables that are left, with variables renumbered in ascending order."""
        place = {v: i for i, v in enumerate(sorted(self.left))}
        units = [self.units[v] for v in place]
        tables = (self.tables[i] for i in sorted(self.tables))
        return units, [(tuple(place[n] for n in scope), table) for scope, table, _ in tables]

    def restrict(self, seen: Bounded) -> None:
        """Removes the options that bounds exclude."""
        kept = dict(zip(sorted(self.left), seen.kept, strict=True))
        for v, options in kept.items():
            self.units[v] = self.units[v][options]
            self.width[v] = len(options)
            self.options[v] = self.options[v][options] if v in self.options else options
        # Earlier steps must look up their neighbours by the new numbers, too.
        self.steps = [_narrowed(step, kept) for step in self.steps]
        old = [self.tables[i] for i in sorted(self.tables)]
        self.tables = {}
        for v in kept:
            self.holds[v].clear()
            self.neighbours[v].clear()
        self.left = {v for v in self.left if self.width[v] > 1}
        for v in sorted(kept.keys() - self.left):
            self.steps.append(_Step(v, (), np.zeros((), np.intp), self.options[v]))
        for scope, table, _ in old:
            table = table[np.ix_(*(kept[v] for v in scope))]
            free = tuple(v for v in scope if v in self.left)
            if free:
                key = self.numbers.setdefault(("thinned", self.number), len(self.numbers))
                self.add(free, table.reshape([n for n in table.shape if n > 1]), key)

    def decide(self, seen: Bounded) -> None:
        """Takes the choice of the bounds for the variables that are left."""
        for v, c in zip(sorted(self.left), seen.choice, strict=True):
            self.steps.append(_Step(v, (), np.array(c, np.intp), self.options.get(v)))
        self.left = set()

    def choice(self) -> tuple[int, ...]:
        """The best option of every variable, by its original number."""
        chosen = [0] * len(self.units)
        shown = [0] * len(self.units)
        for step in reversed(self.steps):
            c = int(step.best[tuple(chosen[n] for n in step.scope)])
            chosen[step.variable] = c
            shown[step.variable] = c if step.options is None else int(step.options[c])
        return tuple(shown)


def _narrowed(step: _Step, kept: Mapping[int, NDArray[np.intp]]) -> _Step:
    """A step for the options of its neighbours that are kept."""
    if not any(n in kept for n in step.scope):
        return step
    places = (kept.get(n, np.arange(w)) for n, w in zip(step.scope, step.best.shape, strict=True))
    return replace(step, best=step.best[np.ix_(*places)])


def _aligned(scope: tuple[int, ...], table: Table, place: Mapping[int, int]) -> Table:
    """A table with its dims in the order of places; size 1 for variables that it does not have."""
    have = sorted(range(len(scope)), key=lambda i: place[scope[i]])
    moved = table.transpose(have)
    shape = [1] * len(place)
    for axis, i in enumerate(have):
        shape[place[scope[i]]] = moved.shape[axis]
    return moved.reshape(shape)
