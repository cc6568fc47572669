"""The best choice under a limit on memory, with a proof of how good it is.

Without a limit elimination is exact. With one, a price on memory (a Lagrange multiplier) turns the
limit into a part of the sum: for every price the exact minimum gives a lower bound, and where its
memory is below the limit, a choice. Where the two do not meet, what is left is an integer program
for HiGHS, over the options that the bound does not exclude.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, prod
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from onnxpar.analysis.search.eliminate import solve
from onnxpar.analysis.search.problem import Problem
from onnxpar.errors import ShardingError

MAX_COLUMNS = 400_000
"""Columns of the largest integer program that is given to HiGHS."""
_PRICES = 40


@dataclass(frozen=True)
class Solution:
    """A choice and what is known of it.

    Attributes:
        choice: The option of each variable.
        seconds: What it costs.
        memory: Bytes of one device.
        bound: No choice within the limit costs less seconds.
    """

    choice: tuple[int, ...]
    seconds: float
    memory: float
    bound: float

    @property
    def gap(self) -> float:
        """How much better another choice might be, relative to this one's cost."""
        return max(0.0, 1 - self.bound / self.seconds) if self.seconds else 0.0


def best(
    problem: Problem, limit: float = inf, *, gap: float = 0.0, seconds: float = 60.0
) -> Solution:
    """Returns the cheapest choice whose memory is within a limit.

    Args:
        problem: The problem.
        limit: Bytes of one device.
        gap: Stop where no better choice than this share is possible.
        seconds: Stop after this time with what was found; the bound says how good it is.

    Raises:
        ShardingError: No choice is within the limit; the message says the least memory there is.
    """
    started = perf_counter()
    found = _solution(problem, solve(problem))
    if found.memory <= limit:
        return found
    bracket = _lagrange(problem, limit, found, least(problem, limit))
    if bracket.gap <= gap:
        return bracket
    left = seconds - (perf_counter() - started)
    return _integer(problem, limit, bracket, gap, max(left, 1.0))


def _solution(problem: Problem, choice: Sequence[int], bound: float | None = None) -> Solution:
    cost = problem.seconds(choice)
    memory = problem.memory(choice)
    return Solution(tuple(choice), cost, memory, cost if bound is None else bound)


def least(problem: Problem, limit: float = inf) -> Solution:
    """Returns the choice of least memory, and of least time among those.

    Raises:
        ShardingError: That is more than `limit` bytes.
    """
    total = sum(float(v.cost.max()) for v in problem.variables)
    total += sum(float(np.where(np.isfinite(t.table), t.table, 0).max()) for t in problem.terms)
    found = _solution(problem, solve(problem, total + 1.0))
    if found.memory > limit:
        raise ShardingError(
            f"no strategy fits: the least memory of a device is {found.memory:.0f} bytes, "
            f"expected at most {limit:.0f}"
        )
    return Solution(found.choice, found.seconds, found.memory, 0.0)


def _lagrange(problem: Problem, limit: float, over: Solution, under: Solution) -> Solution:
    """The best choice within the limit for some price of memory, with the best bound."""
    best_found, bound = under, over.seconds
    low, high = over, under
    for _ in range(_PRICES):
        if low.memory <= high.memory:
            break
        price = (high.seconds - low.seconds) / (low.memory - high.memory)
        middle = _solution(problem, solve(problem, price))
        value = middle.seconds + price * (middle.memory - limit)
        bound = max(bound, value)
        if middle.memory <= limit and middle.seconds < best_found.seconds:
            best_found = middle
        if middle.choice in (low.choice, high.choice) or value >= low.seconds + price * (
            low.memory - limit
        ) - 1e-15 * abs(value):
            break
        if middle.memory > limit:
            low = middle
        else:
            high = middle
    return Solution(
        best_found.choice, best_found.seconds, best_found.memory, min(bound, best_found.seconds)
    )


# -- the integer program -------------------------------------------------------------------------


def _integer(
    problem: Problem, limit: float, known: Solution, gap: float, seconds: float
) -> Solution:
    """Solves the integer program; returns what is known where it is too large or takes too long.

    One column for each option of a variable (0 or 1) and for each entry of a table, whose sums
    along each dim are the options' columns (the local polytope; Wainwright & Jordan 2008).
    """
    widths = [len(v.cost) for v in problem.variables]
    first = np.concatenate([[0], np.cumsum(widths)]).astype(int)
    count = int(first[-1]) + sum(prod(t.table.shape) for t in problem.terms)
    if count > MAX_COLUMNS:
        return known
    cost = np.concatenate([v.cost for v in problem.variables])
    memory = np.concatenate([v.memory for v in problem.variables])
    rows: list[NDArray[np.intp]] = []
    columns: list[NDArray[np.intp]] = []
    values: list[NDArray[np.float64]] = []
    right: list[float] = []
    upper = [np.ones(int(first[-1]))]

    def put(row: NDArray[np.intp], column: NDArray[np.intp], value: float) -> None:
        rows.append(row)
        columns.append(column)
        values.append(np.full(len(row), value))

    for v, width in enumerate(widths):
        put(np.full(width, len(right)), first[v] + np.arange(width), 1.0)
        right.append(1.0)
    start = int(first[-1])
    costs = [cost]
    for term in problem.terms:
        entries = np.arange(prod(term.table.shape)).reshape(term.table.shape)
        flat = term.table.ravel()
        costs.append(np.where(np.isfinite(flat), flat, 0.0))
        upper.append(np.where(np.isfinite(flat), 1.0, 0.0))
        for axis, v in enumerate(term.scope):
            moved = np.moveaxis(entries, axis, 0).reshape(widths[v], -1)
            for option in range(widths[v]):
                put(np.full(moved.shape[1], len(right)), start + moved[option], 1.0)
                put(np.array([len(right)]), np.array([first[v] + option]), -1.0)
                right.append(0.0)
        start += entries.size
    matrix = coo_array(
        (np.concatenate(values), (np.concatenate(rows), np.concatenate(columns))),
        shape=(len(right), count),
    ).tocsr()
    scale = max(float(memory.max()), 1.0)
    weights = coo_array(
        (memory / scale, (np.zeros(len(memory), int), np.arange(len(memory)))), shape=(1, count)
    )
    unit = max(known.seconds, 1e-30)
    result = milp(
        np.concatenate(costs) / unit,
        integrality=(np.arange(count) < first[-1]).astype(int),
        bounds=Bounds(0, np.concatenate(upper)),
        constraints=[
            LinearConstraint(matrix, right, right),
            LinearConstraint(weights.tocsr(), -np.inf, limit / scale),
        ],
        options={"time_limit": seconds, "mip_rel_gap": max(gap, 1e-9)},
    )
    bound = known.bound
    if result.mip_dual_bound is not None:
        bound = max(bound, float(result.mip_dual_bound) * unit)
    if result.x is None:
        return Solution(known.choice, known.seconds, known.memory, min(bound, known.seconds))
    choice = tuple(
        int(result.x[first[v] : first[v] + width].argmax()) for v, width in enumerate(widths)
    )
    found = _solution(problem, choice)
    if found.memory > limit or found.seconds > known.seconds:
        found = known
    return Solution(found.choice, found.seconds, found.memory, min(bound, found.seconds))
