"""The best choice under a limit on memory, with a proof of how good it is.

Without a limit, elimination is exact. With a limit, a price on memory (a Lagrange multiplier) makes
the limit part of the sum. For every price, the exact minimum gives a lower bound and, if its memory
is within the limit, a choice. If the two do not meet, an integer program for HiGHS follows.
"""

from dataclasses import replace
from math import inf

import numpy as np

from onnxpar.core.errors import ShardingError
from onnxpar.search.eliminate import solve
from onnxpar.search.integer_program import solve_integer
from onnxpar.search.problem import Problem
from onnxpar.search.solution import Solution, solution

_PRICES = 40


def best(
    problem: Problem, limit: float = inf, *, gap: float = 0.0, integer: bool = True
) -> Solution:
    """Returns the cheapest choice whose memory is within a limit.

    Args:
        problem: The problem.
        limit: Bytes of one device.
        gap: Stops if no other choice can be better by more than this share.
        integer: Whether an integer program follows if prices of memory leave a larger gap.

    Raises:
        ShardingError: No choice is within the limit; the message has the least possible memory.
    """
    found = _priced(problem, 0.0)
    if found.memory <= limit:
        return found
    bracket = _lagrange(problem, limit, found, least(problem, limit))
    if bracket.gap <= gap or not integer:
        return bracket
    return solve_integer(problem, limit, bracket, gap)


def least(problem: Problem, limit: float = inf) -> Solution:
    """Returns the choice of least memory, and among these the one of least time.

    Raises:
        ShardingError: The least memory is more than `limit` bytes.
    """
    total = sum(float(v.cost.max()) for v in problem.variables)
    total += sum(float(np.where(np.isfinite(t.table), t.table, 0).max()) for t in problem.terms)
    found = _priced(problem, total + 1.0)
    if found.memory > limit:
        raise ShardingError(
            "no strategy fits the memory limit: the smallest possible peak is "
            f"{found.memory:.0f} bytes, expected at most {limit:.0f}"
        )
    return replace(found, bound=0.0)


def _priced(problem: Problem, price: float) -> Solution:
    """The choice of least seconds + `price` · bytes; the bound leaves out what is not proved."""
    found = solve(problem, price)
    cost = problem.seconds(found.choice)
    return solution(problem, found.choice, cost - found.slack)


def _lagrange(problem: Problem, limit: float, over: Solution, under: Solution) -> Solution:
    """The best choice within the limit for some price of memory, with the best bound."""
    best_found, bound = under, over.bound
    low, high = over, under
    for _ in range(_PRICES):
        if low.memory <= high.memory:
            break
        price = (high.seconds - low.seconds) / (low.memory - high.memory)
        middle = _priced(problem, price)
        value = middle.bound + price * (middle.memory - limit)
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
    return replace(best_found, bound=min(bound, best_found.seconds))
