"""Repeated layers as one: of a model's problem, the smaller one in which alike layers choose alike.

A deep model is a few layers, then the same layer again and again. A layer's options and tables are
those of the one before; where all but the outermost also choose as the one but one before them (so
that two kinds of layers may take turns: columns, then rows), the sum has the variables of four
layers, whatever the depth. Its least choice is one of the whole problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from onnxpar.analysis.layers import find_layers
from onnxpar.analysis.search.flow import Item
from onnxpar.analysis.search.problem import Problem, Table, Term, Variable

_PERIODS = 2
"""Layers that take turns."""
_LEAST = _PERIODS + 3
"""Layers from which on something is the same as something else: two are the outermost."""


@dataclass(frozen=True)
class Run:
    """What repeats: `count` times `period` nodes, from number `start` on."""

    start: int
    period: int
    count: int


@dataclass(frozen=True)
class Folded:
    """A problem in which variables of one class have one choice.

    Attributes:
        problem: The problem, a variable for each class.
        classes: The class of each variable of the whole problem.
    """

    problem: Problem
    classes: tuple[int, ...]

    def unfold(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Returns the choice of the whole problem's variables."""
        return tuple(choice[c] for c in self.classes)


def runs(items: Sequence[Item]) -> tuple[Run, ...]:
    """Returns what repeats in a row of nodes, and so often that something can be spared.

    Args:
        items: The nodes.
    """
    if not items:
        return ()
    found: list[Run] = []
    for layer in find_layers([item.view.node for item in items], items[0].view.env):
        size = layer.stop - layer.start
        last = found[-1] if found else None
        if last and last.period == size and last.start + size * last.count == layer.start:
            found[-1] = replace(last, count=last.count + 1)
        else:
            found.append(Run(layer.start, size, 1))
    return tuple(run for run in found if run.count >= _LEAST)


def fold(problem: Problem, repeated: Sequence[Run]) -> Folded:
    """Returns the problem in which alike layers choose alike.

    Args:
        problem: The whole problem.
        repeated: What repeats among its nodes.
    """
    classes = _classes(problem, repeated)
    costs: dict[int, Table] = {}
    memories: dict[int, Table] = {}
    first: dict[int, Variable] = {}
    for variable, c in zip(problem.variables, classes, strict=True):
        if c in first:
            costs[c], memories[c] = costs[c] + variable.cost, memories[c] + variable.memory
        else:
            first[c], costs[c], memories[c] = variable, variable.cost, variable.memory
    counts: dict[tuple[int, tuple[int, ...]], int] = {}
    tables: dict[int, Table] = {}
    for term in problem.terms:
        key = (id(term.table), tuple([classes[v] for v in term.scope]))
        counts[key] = counts.get(key, 0) + 1
        tables[key[0]] = term.table
    variables = (Variable(v.name, v.kind, costs[c], memories[c]) for c, v in first.items())
    made: dict[tuple[object, ...], Table] = {}
    terms = [_term(tables[t], scope, n, made) for (t, scope), n in counts.items()]
    return Folded(Problem(tuple(variables), tuple(terms), ()), tuple(classes))


def _classes(problem: Problem, repeated: Sequence[Run]) -> list[int]:
    """The class of each variable, numbered in the order in which they come."""
    numbers: dict[object, int] = {}
    nodes = len(problem.options)
    keys: list[object] = list(range(nodes))
    for run in repeated:
        for layer in range(1, run.count - 1):
            for place in range(run.period):
                item = run.start + layer * run.period + place
                keys[item] = run.start, layer % _PERIODS, place, id(problem.options[item])
    classes = [numbers.setdefault(key, len(numbers)) for key in keys]
    # A parameter or a kept version is as the nodes that it is for.
    around: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in problem.variables]
    for term in problem.terms:
        for v in term.scope:
            if v >= nodes:
                mine = tuple([classes[n] for n in term.scope if n < nodes])
                around[v].append((id(term.table), mine))
    for v in range(nodes, len(problem.variables)):
        classes.append(numbers.setdefault(tuple(around[v]) or v, len(numbers)))
    return classes


def _term(
    table: Table, scope: tuple[int, ...], count: int, made: dict[tuple[object, ...], Table]
) -> Term:
    """What a table costs `count` times, over classes; made once for equal ones."""
    distinct = tuple(dict.fromkeys(scope))
    pattern = tuple([distinct.index(c) for c in scope])
    key = (id(table), pattern, count)
    if key not in made:
        cut = table if len(distinct) == len(scope) else _diagonal(table, pattern)
        made[key] = cut if count == 1 else cut * count
    return Term(distinct, made[key])


def _diagonal(table: Table, pattern: tuple[int, ...]) -> Table:
    """The entries in which dims of one number have one index."""
    letters = "abcdefgh"
    dims = "".join(letters[i] for i in pattern)
    cut: Table = np.einsum(f"{dims}->{letters[: len(set(pattern))]}", table)
    return cut
