"""The exact search, compared with all choices."""

from dataclasses import replace
from itertools import product
from math import inf, prod

import numpy as np
import pytest

from onnxpar.core.errors import ShardingError
from onnxpar.search import eliminate
from onnxpar.search.eliminate import solve
from onnxpar.search.lower_bound import Bounded, Scoped
from onnxpar.search.memory_bounded import Effort, best, least
from onnxpar.search.problem import Problem, Table, Term, Variable
from tests.tiers import FULL


def random_problem(seed: int) -> Problem:
    """A sum of random tables over a few variables, some entries of which are impossible."""
    rng = np.random.default_rng(seed)
    widths = [int(n) for n in rng.integers(1, 5, rng.integers(2, 8))]
    variables = tuple(
        Variable(str(i), rng.random(n), rng.integers(0, 9, n).astype(float))
        for i, n in enumerate(widths)
    )
    possible = [int(rng.integers(n)) for n in widths]
    terms = []
    for _ in range(int(rng.integers(1, 10))):
        size = min(int(rng.integers(1, 4)), len(widths))
        scope = tuple(int(v) for v in rng.choice(len(widths), size, replace=False))
        table = rng.random([widths[v] for v in scope])
        table[rng.random(table.shape) < 0.1] = inf
        table[tuple(possible[v] for v in scope)] = 0.5
        terms.append(Term(scope, table))
    return Problem(variables, tuple(terms), ())


def everything(problem: Problem) -> list[tuple[float, float, tuple[int, ...]]]:
    """Seconds, memory and choice of every assignment."""
    return [
        (problem.seconds(choice), problem.memory(choice), choice)
        for choice in product(*(range(len(v.cost)) for v in problem.variables))
    ]


@pytest.mark.parametrize("seed", range(250))
def test_elimination_finds_the_least(seed: int) -> None:
    problem = random_problem(seed)
    assert prod(len(v.cost) for v in problem.variables) <= 4**7
    least_seconds = min(seconds for seconds, _, _ in everything(problem))
    found = problem.seconds(solve(problem).choice)
    # The same costs summed in another order: at most 50 roundings of 2^-53.
    assert found == pytest.approx(least_seconds, rel=1e-12)


def entangled(seed: int) -> Problem:
    """A grid with two longer edges and a leaf at each node, for which bounds are seldom tight."""
    rng = np.random.default_rng(seed)
    side, width = 3, 4
    variables = tuple(
        Variable(str(i), 0.3 * rng.random(width), np.zeros(width)) for i in range(2 * side**2)
    )
    edges = [(v, v + 1) for v in range(side**2) if (v + 1) % side]
    edges += [(v, v + side) for v in range(side * (side - 1))]
    edges += [(0, side**2 - 1), (side - 1, side * (side - 1))]
    edges += [(v, v + side**2) for v in range(side**2)]
    return Problem(variables, tuple(Term(e, rng.random((width, width))) for e in edges), ())


@pytest.mark.parametrize(("easy", "largest"), [(16, 1 << 25), (16, 40), (1 << 18, 40)])
def test_bounds_exclude_no_best_choice(
    monkeypatch: pytest.MonkeyPatch, easy: int, largest: int
) -> None:
    """Tables may be large enough to eliminate everything, or so small that bounds decide."""
    thinned: list[int] = []
    bounded = eliminate.bounded

    def watched(units: list[Table], terms: list[Scoped]) -> Bounded:
        found = bounded(units, terms)
        thinned.append(sum(map(len, units)) - sum(map(len, found.kept)))
        return found

    problems = [entangled(seed) for seed in range(40 if FULL else 15)]
    exact = [p.seconds(solve(p).choice) for p in problems]
    monkeypatch.setattr(eliminate, "bounded", watched)
    monkeypatch.setattr(eliminate, "EASY_ENTRIES", easy)
    open_ones = 0
    for problem, least_seconds in zip(problems, exact, strict=True):
        found = solve(problem, largest=largest)
        seconds = problem.seconds(found.choice)
        assert seconds - found.slack <= least_seconds * (1 + 1e-9)
        if found.slack:
            open_ones += 1
            assert seconds >= least_seconds
        else:
            # The proof leaves the margin of the bound, 1e-9 of the cost.
            assert seconds == pytest.approx(least_seconds, rel=1e-9)
    assert any(n > 0 for n in thinned)
    assert (open_ones > 0) == (largest == 40)


@pytest.mark.parametrize("seed", range(120))
def test_a_limit_on_memory_is_kept_at_the_least_cost(seed: int) -> None:
    problem = random_problem(1000 + seed)
    tried = [item for item in everything(problem) if item[0] < inf]
    rng = np.random.default_rng(seed)
    memories = sorted({memory for _, memory, _ in tried})
    limit = float(rng.choice(memories))
    expected = min(seconds for seconds, memory, _ in tried if memory <= limit)
    found = best(problem, limit)
    assert found.memory <= limit
    assert found.seconds == pytest.approx(expected, rel=1e-9)
    assert found.bound <= found.seconds * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_memory_and_the_least_time_among_those(seed: int) -> None:
    problem = random_problem(2000 + seed)
    tried = [item for item in everything(problem) if item[0] < inf]
    memory, seconds = min((memory, seconds) for seconds, memory, _ in tried)
    found = least(problem)
    # Memory is equal to the bit; the proof of the time leaves the margin of the bound, 1e-9.
    assert (found.memory, found.seconds) == (memory, pytest.approx(seconds, rel=1e-9))


def test_an_error_has_the_least_memory_that_would_fit() -> None:
    variable = Variable("a", np.array([1.0, 2.0]), np.array([8.0, 4.0]))
    with pytest.raises(ShardingError, match="is 4 B, expected at most 3 B"):
        best(Problem((variable,), (), ()), 3.0)


def between(seed: int) -> tuple[Problem, float]:
    """An entangled problem with a limit that prices of memory alone do not meet."""
    rng = np.random.default_rng(seed)
    problem = entangled(seed)
    weighed = [
        replace(v, memory=rng.integers(0, 9, len(v.cost)).astype(float)) for v in problem.variables
    ]
    problem = replace(problem, variables=tuple(weighed))
    most = problem.memory(solve(problem).choice)
    return problem, (most + least(problem).memory) / 2


def test_branches_find_what_no_price_finds() -> None:
    problem, limit = between(1)
    found = best(problem, limit)
    assert found.memory <= limit and found.gap == 0
    prices = best(problem, limit, gap=inf)
    assert prices.memory <= limit and prices.gap > 0.01
    assert prices.bound <= found.seconds < prices.seconds


def test_a_gap_ends_branching() -> None:
    problem, limit = between(1)
    least_seconds = best(problem, limit).seconds
    found = best(problem, limit, gap=0.5)
    assert found.bound <= least_seconds < found.seconds
    assert found.gap <= 0.5


@pytest.mark.parametrize("seed", range(20 if FULL else 6))
@pytest.mark.parametrize("total", [0, 1 << 20])
def test_less_work_leaves_a_true_bound(seed: int, total: int) -> None:
    problem, limit = between(seed)
    exact = best(problem, limit)
    found = best(problem, limit, effort=Effort(total=total))
    assert found.memory <= limit
    assert found.bound <= exact.seconds * (1 + 1e-9) and exact.seconds <= found.seconds * (1 + 1e-9)
