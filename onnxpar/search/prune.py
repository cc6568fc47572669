"""Drops options that cannot be part of a best choice.

Option a is dead if another option b of the variable is strictly cheaper, whatever the neighbours
choose: cost(a) - cost(b) + Σ over terms of the least difference > 0 (Goldstein's criterion for
dead-end elimination, 1994). The remaining options have the same minimum.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar.search.problem import Problem, Table

_HUGE = 1e9
_ROUNDS = 3
_MARGIN = 1e-12


def alive(problem: Problem, *, memory: bool = False) -> tuple[NDArray[np.intp], ...]:
    """Returns for each variable the options that may be part of a best choice.

    Args:
        problem: The problem.
        memory: Whether options that need less memory than b must stay.
    """
    kept = [np.arange(len(v.cost)) for v in problem.variables]
    # Equal layers share their tables. What the verdict on a node depends on is numbered.
    shared = {id(t.table): t.table for t in problem.terms}
    tables = {key: np.minimum(table, _HUGE) for key, table in shared.items()}
    around: list[list[tuple[int, int, tuple[int, ...]]]] = [[] for _ in kept]
    for term in problem.terms:
        for axis, v in enumerate(term.scope):
            around[v].append((id(term.table), axis, term.scope))
    numbers: dict[bytes, int] = {}

    def number(array: NDArray[Any]) -> int:
        return numbers.setdefault(array.tobytes(), len(numbers))

    own = [(number(v.cost), number(v.memory) if memory else 0) for v in problem.variables]
    left = [number(k) for k in kept]
    known: dict[tuple[object, ...], NDArray[np.intp]] = {}
    # The verdict on a variable changes only when a neighbour loses an option.
    stale = set(range(len(kept)))
    for _ in range(_ROUNDS):
        for v in sorted(stale):
            stale.discard(v)
            if len(kept[v]) < 2:
                continue
            variable = problem.variables[v]
            key = (
                own[v],
                left[v],
                tuple((t, axis, tuple([left[n] for n in scope])) for t, axis, scope in around[v]),
            )
            if key not in known:
                known[key] = _survivors(
                    np.minimum(variable.cost, _HUGE),
                    variable.memory if memory else None,
                    kept,
                    v,
                    [(tables[t], axis, scope) for t, axis, scope in around[v]],
                )
            if len(known[key]) < len(kept[v]):
                kept[v] = known[key]
                left[v] = number(kept[v])
                stale.update(n for _, _, scope in around[v] for n in scope if n != v)
    return tuple(kept)


def _survivors(
    cost: Table,
    memory: Table | None,
    kept: Sequence[NDArray[np.intp]],
    v: int,
    parts: Sequence[tuple[Table, int, tuple[int, ...]]],
) -> NDArray[np.intp]:
    mine = kept[v]
    gain = cost[mine][:, None] - cost[mine][None, :]
    for table, axis, scope in parts:
        rows = table[np.ix_(*(kept[n] for n in scope))]
        rows = np.moveaxis(rows, axis, 0).reshape(len(mine), -1)
        rows = np.unique(rows, axis=1) if rows.shape[1] > 64 else rows
        gain += (rows[:, None, :] - rows[None, :, :]).min(axis=-1)
    dead = gain > _MARGIN
    if memory is not None:
        dead &= memory[mine][None, :] <= memory[mine][:, None]
    return mine[~dead.any(axis=1)]
