"""The choice as an integer program for HiGHS."""

from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from onnxpar.search.problem import Problem
from onnxpar.search.solution import Solution, solution

MAX_COLUMNS = 40_000
"""Columns of the largest integer program that HiGHS gets.

With 111,000 columns it did not solve the first relaxation in 30 s.
"""
SECONDS = 60.0
"""The time limit. Normally `NODES` is reached before, so that results are the same everywhere."""
NODES = 2000
"""Relaxations on which HiGHS may branch."""

# The status of scipy.optimize.milp if the time limit stopped it; the limit on nodes has another.
_TIME = 1


def solve_integer(
    problem: Problem, limit: float, known: Solution, gap: float, seconds: float = SECONDS
) -> Solution:
    """Solves the integer program; returns `known` if it is too large or finds nothing better.

    It stops after `NODES` relaxations. If it takes longer than `seconds`, the result is `timed`.

    One column for each option of a variable (0 or 1) and for each entry of a table, whose sums
    along each dim are the options' columns (the local polytope; Wainwright & Jordan 2008).
    """
    # These take half a second to load, and most searches do not need them.
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

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
        options={"time_limit": seconds, "node_limit": NODES, "mip_rel_gap": max(gap, 1e-9)},
    )
    best, bound = known, known.bound
    if result.mip_dual_bound is not None:
        bound = max(bound, float(result.mip_dual_bound) * unit)
    if result.x is not None:
        choice = [int(result.x[first[v] : first[v + 1]].argmax()) for v in range(len(widths))]
        found = solution(problem, choice)
        if found.memory <= limit and found.seconds <= known.seconds:
            best = found
    return replace(best, bound=min(bound, best.seconds), timed=result.status == _TIME)
