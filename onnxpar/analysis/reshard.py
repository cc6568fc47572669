"""Plans reshards: the cheapest sequence of collectives from one sharding of a tensor to another.

A tensor's components, of all its dims, are *slots*; a state is the run of atoms on each slot and the
set of partial atoms. Moves between states are the collectives; Dijkstra's algorithm finds the
cheapest path under a latency + bandwidth cost (the α-β model of Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005). Byte counts are those of the ring algorithms,
the same that the runtime counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from heapq import heappop, heappush
from itertools import count
from math import prod

import sympy

from onnxpar.errors import ShardingError
from onnxpar.mesh import Atoms, Mesh
from onnxpar.sharding import Component, Dim, DimSharding, Sharding, local_size
from onnxpar.symbols import SymbolTable, as_dim, exact_div

Slot = tuple[int, int]
Slots = tuple[Atoms, ...]
State = tuple[Slots, frozenset[int]]


@dataclass(frozen=True)
class LinkCost:
    """Cost of one collective: `latency` (in bytes' worth of time) plus the bytes one rank sends."""

    latency: float = 4096.0


@dataclass(frozen=True)
class Step:
    """One step of a reshard.

    Attributes:
        kind: slice, all_gather, reduce_scatter, all_reduce, all_to_all, permute, or view: the same
            local elements seen as other components.
        atoms: Atoms of the groups, in the order of the group.
        source: (dim, component) that loses atoms; None where there is none.
        target: (dim, component) that gains atoms; None where there is none.
        before: Sharding before the step; its components are those of the positions above.
        after: Sharding after the step.
        bytes: Bytes that one rank sends, possibly symbolic.
    """

    kind: str
    atoms: Atoms
    source: Slot | None
    target: Slot | None
    before: Sharding
    after: Sharding
    bytes: Dim


def plan_reshard(
    source: Sharding,
    target: Sharding,
    mesh: Mesh,
    table: SymbolTable,
    itemsize: int,
    cost: LinkCost = LinkCost(),
) -> tuple[Step, ...]:
    """Returns the cheapest steps from one sharding of a tensor to another.

    Args:
        source: Sharding of the value that is there.
        target: Sharding wanted; it may be partial only over atoms that the source is partial over.
        mesh: The mesh.
        table: What is known of the symbols; costs are taken at their typical sizes.
        itemsize: Bytes per element.
        cost: The link model.

    Raises:
        ShardingError: The target is partial where the source is not, or the shapes differ.
    """
    if source == target:
        return ()
    return _plan(source, target, mesh, table, itemsize, cost)


@lru_cache(maxsize=65536)
def _plan(
    source: Sharding,
    target: Sharding,
    mesh: Mesh,
    table: SymbolTable,
    itemsize: int,
    cost: LinkCost,
) -> tuple[Step, ...]:
    extra = set(target.partial) - set(source.partial)
    if extra or (target.partial and target.reduction != source.reduction):
        raise ShardingError(
            f"cannot make a value partial over {mesh.describe(target.partial)}: it is "
            f"{source.describe(mesh)}"
        )
    if source.rank != target.rank:
        raise ShardingError(f"cannot reshard {source.rank} dims to {target.rank}")
    pairs = [
        _aligned(a, b, mesh, table) for a, b in zip(source.dims, target.dims, strict=True)
    ]
    planner = _Planner(mesh, table, itemsize, cost)
    if all(p is not None for p in pairs):
        before = Sharding(tuple(p[0] for p in pairs if p), source.partial, source.reduction)
        after = Sharding(tuple(p[1] for p in pairs if p), target.partial, target.reduction)
        return planner.run(before, after)
    # A dim whose two lists of components do not line up goes through being whole.
    whole = tuple(
        (Component(_size(b)),) if p is None else a
        for a, b, p in zip(source.dims, target.dims, pairs, strict=True)
    )
    middle = Sharding(whole, source.partial, source.reduction)
    gathered = Sharding(
        tuple(
            tuple(Component(c.size) for c in a) if p is None else a
            for a, p in zip(source.dims, pairs, strict=True)
        ),
        source.partial,
        source.reduction,
    )
    return planner.run(source, gathered) + _plan(middle, target, mesh, table, itemsize, cost)


def _size(dim: DimSharding) -> Dim:
    total: Dim = 1
    for component in dim:
        total = as_dim(total * component.size)
    return total


def _aligned(
    a: DimSharding, b: DimSharding, mesh: Mesh, table: SymbolTable
) -> tuple[DimSharding, DimSharding] | None:
    """Returns both lists of components cut at the same sizes, None where that moves elements."""
    left, right = list(a), list(b)
    out: tuple[list[Component], list[Component]] = ([], [])
    while left and right:
        x, y = left[0], right[0]
        if table.equal(x.size, y.size):
            out[0].append(left.pop(0))
            out[1].append(right.pop(0))
            continue
        for big, small, queue in ((x, y, left), (y, x, right)):
            rest = exact_div(big.size, small.size)
            if rest is not None and (
                not big.atoms or table.divisible(small.size, mesh.count(big.atoms))
            ):
                queue[0:1] = [Component(small.size, big.atoms), Component(rest)]
                break
        else:
            return None
    if any(c.atoms for c in (*left, *right)):
        return None
    return tuple(out[0]), tuple(out[1])


@dataclass(frozen=True)
class _Planner:
    mesh: Mesh
    table: SymbolTable
    itemsize: int
    cost: LinkCost

    def run(self, source: Sharding, target: Sharding) -> tuple[Step, ...]:
        slots = [(d, c) for d, dim in enumerate(source.dims) for c in range(len(dim))]
        sizes = [source.dims[d][c].size for d, c in slots]
        start: State = (
            tuple(source.dims[d][c].atoms for d, c in slots),
            frozenset(source.partial),
        )
        goal: State = (
            tuple(target.dims[d][c].atoms for d, c in slots),
            frozenset(target.partial),
        )
        typical = [self.table.typical(s) for s in sizes]
        search = _Search(self.mesh, self.table, tuple(sizes), tuple(typical), goal)
        path = search.shortest(start, self.cost, self.itemsize)
        steps = []
        state = start
        for kind, atoms, gives, takes, after in path:
            steps.append(
                Step(
                    kind,
                    atoms,
                    None if gives is None else slots[gives],
                    None if takes is None else slots[takes],
                    self._sharding(source, slots, state),
                    self._sharding(source, slots, after),
                    self._bytes(kind, atoms, state, sizes),
                )
            )
            state = after
        return tuple(steps)

    def _sharding(self, source: Sharding, slots: list[Slot], state: State) -> Sharding:
        atoms = dict(zip(slots, state[0], strict=True))
        dims = tuple(
            tuple(Component(part.size, atoms[d, c]) for c, part in enumerate(dim))
            for d, dim in enumerate(source.dims)
        )
        return Sharding(dims, (), "sum").with_partial(state[1], source.reduction)

    def _bytes(self, kind: str, atoms: Atoms, state: State, sizes: list[Dim]) -> Dim:
        if kind == "slice":
            return 0
        elements: Dim = self.itemsize
        for size, split in zip(sizes, state[0], strict=True):
            elements = elements * local_size(Component(size, split), self.mesh, self.table)
        group = self.mesh.count(atoms)
        return moved_bytes(kind, as_dim(elements), group)


def moved_bytes(kind: str, operand: Dim, group: int) -> Dim:
    """Returns the bytes that one rank sends in a collective on `operand` bytes over `group` ranks.

    A fraction is rounded up; these are the counts that the runtime keeps.
    """
    if kind == "permute":
        return operand
    if kind == "all_gather":
        return as_dim(operand * (group - 1))
    top = as_dim((2 if kind == "all_reduce" else 1) * operand * (group - 1))
    if isinstance(top, int):
        return -(-top // group)
    return as_dim(sympy.floor((top + group - 1) / sympy.Integer(group)))


Move = tuple[str, Atoms, int | None, int | None, State]


@dataclass(frozen=True)
class _Search:
    mesh: Mesh
    table: SymbolTable
    sizes: tuple[Dim, ...]
    typical: tuple[int, ...]
    goal: State

    def shortest(self, start: State, cost: LinkCost, itemsize: int) -> list[Move]:
        """Dijkstra's algorithm; among equal costs the path found first, moves being in fixed order."""
        tie = count()
        queue: list[tuple[float, int, State]] = [(0.0, next(tie), start)]
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, Move]] = {}
        done: set[State] = set()
        while queue:
            price, _, state = heappop(queue)
            if state in done:
                continue
            done.add(state)
            if state == self.goal:
                break
            elements = prod(
                -(-n // self.mesh.count(a)) for n, a in zip(self.typical, state[0], strict=True)
            )
            for move in self._moves(state):
                kind, atoms = move[0], move[1]
                if kind == "slice":
                    step = 1.0
                else:
                    moved = moved_bytes(kind, elements * itemsize, self.mesh.count(atoms))
                    step = cost.latency + float(moved)
                after = price + step
                if after < best.get(move[4], float("inf")):
                    best[move[4]] = after
                    came[move[4]] = (state, move)
                    heappush(queue, (after, next(tie), move[4]))
        if self.goal not in came and start != self.goal:
            raise ShardingError("no sequence of collectives makes this reshard")
        path: list[Move] = []
        state = self.goal
        while state != start:
            state, move = came[state]
            path.append(move)
        return path[::-1]

    def _moves(self, state: State) -> Iterator[Move]:
        slots, partial = state
        goal_slots, goal_partial = self.goal
        replicated = (
            set(range(len(self.mesh.atoms))) - {a for run in slots for a in run} - partial
        )
        # What the target has next on each slot that so far agrees with it.
        wanted = {
            s: goal_slots[s][len(run) :]
            for s, run in enumerate(slots)
            if goal_slots[s][: len(run)] == run and len(goal_slots[s]) > len(run)
        }
        for s, run in wanted.items():
            length = _leading(run, replicated)
            if length:
                yield "slice", run[:length], None, s, self._with(state, {s: run[:length]})
            length = _leading(run, partial - goal_partial)
            for taken in range(length, 0, -1):
                atoms = run[:taken]
                after = self._with(state, {s: atoms})
                yield "reduce_scatter", atoms, None, s, (after[0], partial - set(atoms))
        pending = partial - goal_partial
        if pending:
            everywhere = {a for run in goal_slots for a in run}
            for chosen in (pending, pending - everywhere, pending & everywhere):
                if chosen:
                    yield (
                        "all_reduce",
                        tuple(sorted(chosen)),
                        None,
                        None,
                        (slots, partial - chosen),
                    )
        for s, run in enumerate(slots):
            keep = 0
            while keep < len(run) and goal_slots[s][: keep + 1] == run[: keep + 1]:
                keep += 1
            for length in range(len(run) - keep, 0, -1):
                atoms = run[len(run) - length :]
                for t, next_run in wanted.items():
                    if t != s and next_run[:length] == atoms:
                        shorter = self._with(state, {t: atoms}, {s: length})
                        yield "all_to_all", atoms, s, t, shorter
                yield "all_gather", atoms, s, None, self._with(state, {}, {s: length})
        if partial == goal_partial and slots != goal_slots and self._same_blocks(slots):
            changed = {
                a
                for mine, other in zip(slots, goal_slots, strict=True)
                if mine != other
                for a in (*mine, *other)
            }
            yield "permute", tuple(sorted(changed)), None, None, self.goal

    def _with(
        self, state: State, gains: dict[int, Atoms], losses: dict[int, int] | None = None
    ) -> State:
        slots = list(state[0])
        for s, length in (losses or {}).items():
            slots[s] = slots[s][: len(slots[s]) - length]
        for s, atoms in gains.items():
            slots[s] = slots[s] + atoms
        return tuple(slots), state[1]

    def _same_blocks(self, slots: Slots) -> bool:
        for size, mine, other in zip(self.sizes, slots, self.goal[0], strict=True):
            if mine == other:
                continue
            if self.mesh.count(mine) != self.mesh.count(other):
                return False
            parts = [self.mesh.atoms[a] for a in mine], [self.mesh.atoms[a] for a in other]
            if parts[0] != parts[1] and not self.table.divisible(size, self.mesh.count(mine)):
                return False
        return True


def _leading(run: Atoms, among: set[int] | frozenset[int]) -> int:
    length = 0
    while length < len(run) and run[length] in among:
        length += 1
    return length
