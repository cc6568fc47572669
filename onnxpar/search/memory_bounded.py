"""The best choice under a limit on memory, with a proof of how good it is.

Without a limit, elimination is exact. With a limit, a price on memory (a Lagrange multiplier) makes
the limit part of the sum. For every price, the exact minimum gives a lower bound and, if its memory
is within the limit, a choice. If the two do not meet, branches follow (branch and bound; Land and
Doig, 1960): the options of one variable are divided into those that need little memory and those
that need much, and prices solve both halves.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from math import inf

import numpy as np
from numpy.typing import NDArray

from onnxpar.core.errors import ShardingError
from onnxpar.search.eliminate import solve
from onnxpar.search.problem import Problem, Term
from onnxpar.search.solution import Solution, gap, solution
from onnxpar_format.texts import bytes_text


@dataclass(frozen=True)
class Effort:
    """How much work a search may do. The clock does not end it: plans are the same everywhere.

    Attributes:
        largest: Entries of the largest table that an elimination may make; None for its default.
        total: Entries of all tables after which no other price is tried and no branch divided.
    """

    largest: int | None = None
    total: int = 1 << 32


THOROUGH = Effort()
"""It ends after about a minute."""
_PRICES = 40
"""How many prices are tried for one problem, at most."""
_PER_VARIABLE = 4096
"""Entries whose computation takes as long as what is done once for each variable."""
_Kept = Mapping[int, NDArray[np.intp]]
"""The options that are left of some variables."""


def best(
    problem: Problem, limit: float = inf, *, gap: float = 0.0, effort: Effort = THOROUGH
) -> Solution:
    """Returns the cheapest choice whose memory is within a limit.

    Args:
        problem: The problem.
        limit: Bytes of one device.
        gap: Stops if no other choice can be better by more than this share.
        effort: Stops after this much work.

    Raises:
        ShardingError: No choice is within the limit; the message has the least possible memory.
    """
    return _Search(problem, limit, gap, effort).run()


def least(problem: Problem, limit: float = inf) -> Solution:
    """Returns the choice of least memory, and among these the one of least time.

    Raises:
        ShardingError: The least memory is more than `limit` bytes.
    """
    return _Search(problem, limit, 0.0, THOROUGH).least(problem)


def priced(problem: Problem, price: float) -> Solution:
    """Returns a choice that takes little time and memory; nothing is proved of it.

    Args:
        problem: The problem.
        price: What a byte costs, as a multiple of the seconds that the fastest choice takes for
            each of its bytes.
    """
    fastest = solve(problem, 0.0).choice
    unit = problem.seconds(fastest) / max(problem.memory(fastest), 1.0)
    return solution(problem, solve(problem, price * unit).choice, 0.0)


@dataclass(frozen=True)
class _Bracket:
    """What prices of memory find.

    Attributes:
        best: The best choice within the limit, with the best bound.
        over: The last choice above the limit; None if the least sum is within the limit.
        under: The choice within the limit for a higher price.
    """

    best: Solution
    over: Solution | None
    under: Solution


@dataclass
class _Search:
    problem: Problem
    limit: float
    gap: float
    effort: Effort
    spent: int = 0

    def run(self) -> Solution:
        """Solves one branch after another; the one of least bound comes first."""
        found: Solution | None = None
        # The least bound of the branches that cannot be divided.
        closed = inf
        number = count()
        queue: list[tuple[float, int, _Kept]] = [(-inf, next(number), {})]
        while queue:
            _, _, kept = heapq.heappop(queue)
            branch = _restricted(self.problem, kept)
            try:
                bracket = self.bracket(branch)
            except ShardingError:
                # If nothing fits into the first, complete problem, nothing fits at all.
                if found is None:
                    raise
                continue
            if found is None or bracket.best.seconds < found.seconds:
                choice = list(bracket.best.choice)
                for v, options in kept.items():
                    choice[v] = int(options[choice[v]])
                found = replace(bracket.best, choice=tuple(choice))
            halves = _halves(branch, bracket, kept)
            for half in halves:
                heapq.heappush(queue, (bracket.best.bound, next(number), half))
            if not halves:
                closed = min(closed, bracket.best.bound)
            bound = min(closed, queue[0][0] if queue else inf)
            if gap(found.seconds, bound) <= self.gap or self.spent >= self.effort.total:
                break
        assert found is not None
        bound = min(closed, queue[0][0] if queue else inf)
        return replace(found, bound=min(bound, found.seconds))

    def priced(self, problem: Problem, price: float) -> Solution:
        """The choice of least seconds + `price` · bytes; the bound omits what is not proved."""
        found = solve(problem, price, self.effort.largest)
        self.spent += found.work + _PER_VARIABLE * len(problem.variables)
        cost = problem.seconds(found.choice)
        return solution(problem, found.choice, cost - found.slack)

    def least(self, problem: Problem) -> Solution:
        """The choice of least memory, and among these the one of least time."""
        total = sum(float(v.cost.max()) for v in problem.variables)
        total += sum(float(np.where(np.isfinite(t.table), t.table, 0).max()) for t in problem.terms)
        found = self.priced(problem, total + 1.0)
        if found.memory > self.limit:
            raise ShardingError(
                "no strategy fits the memory limit: the smallest possible peak is "
                f"{bytes_text(found.memory)}, expected at most {bytes_text(self.limit)}"
            )
        return replace(found, bound=0.0)

    def bracket(self, problem: Problem) -> _Bracket:
        """The best choice within the limit for some price of memory.

        Raises:
            ShardingError: No choice is within the limit.
        """
        limit = self.limit
        low = self.priced(problem, 0.0)
        if low.memory <= limit:
            return _Bracket(low, None, low)
        high = self.least(problem)
        found, bound = high, low.bound
        for _ in range(_PRICES):
            if low.memory <= high.memory or self.spent >= self.effort.total:
                break
            price = (high.seconds - low.seconds) / (low.memory - high.memory)
            middle = self.priced(problem, price)
            value = middle.bound + price * (middle.memory - limit)
            bound = max(bound, value)
            if middle.memory <= limit and middle.seconds < found.seconds:
                found = middle
            if middle.choice in (low.choice, high.choice) or value >= low.seconds + price * (
                low.memory - limit
            ) - 1e-15 * abs(value):
                break
            if middle.memory > limit:
                low = middle
            else:
                high = middle
        return _Bracket(replace(found, bound=min(bound, found.seconds)), low, high)


def _halves(branch: Problem, bracket: _Bracket, kept: _Kept) -> list[_Kept]:
    """The two halves of a branch, or nothing if its best choice is proved to be the best.

    The variable whose memory differs most between the choices above and below the limit is divided.
    """
    over, under = bracket.over, bracket.under
    if over is None or bracket.best.gap <= 0:
        return []
    memory = [v.memory for v in branch.variables]
    pairs = list(zip(memory, over.choice, under.choice, strict=True))
    v = int(np.argmax([abs(m[a] - m[b]) for m, a, b in pairs]))
    sizes, a, b = pairs[v]
    little = sizes <= (sizes[a] + sizes[b]) / 2
    options = kept.get(v, np.arange(len(sizes)))
    return [{**kept, v: options[half]} for half in (little, ~little) if half.any()]


def _restricted(problem: Problem, kept: _Kept) -> Problem:
    """The problem with some of its options."""
    variables = list(problem.variables)
    for v, options in kept.items():
        old = variables[v]
        variables[v] = replace(old, cost=old.cost[options], memory=old.memory[options])
    terms = []
    for term in problem.terms:
        table = term.table
        for axis, v in enumerate(term.scope):
            table = table.take(kept[v], axis=axis) if v in kept else table
        terms.append(term if table is term.table else Term(term.scope, table))
    return Problem(tuple(variables), tuple(terms))
