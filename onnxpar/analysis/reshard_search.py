"""Searches the cheapest sequence of collectives between two placements of atoms on slots.

The components of a tensor, of all its dims, are *slots*. A state is the run of atoms on each slot
and the set of partial atoms; a move is one collective (or a slice). Dijkstra's algorithm finds the
cheapest path under a latency + bandwidth cost (the α-β model of Thakur et al., "Optimization of
Collective Communication Operations in MPICH", 2005).

Two things bound the search. Atoms that already lie where the goal has them never move, and runs
that stay together on both sides are moved whole. And the recipe that reduces, gathers and slices is
always there: nothing dearer is looked at, and it is the answer where the search grows too wide.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import prod

from onnxpar.mesh import Atoms, Mesh

Slots = tuple[Atoms, ...]
State = tuple[Slots, frozenset[int]]

# A slice sends nothing; it counts as one byte so that of two equal paths the shorter one wins.
_SLICE_COST = 1.0
# States looked at before the search settles for the best that is known. Real reshards look at ten.
_LIMIT = 2000


@dataclass(frozen=True)
class Move:
    """One step between two states.

    Attributes:
        kind: slice, all_gather, reduce_scatter, all_reduce, all_to_all or permute.
        atoms: Atoms of the groups, in the order of the group.
        gives: Slot that loses the atoms; None where there is none.
        takes: Slot that gains the atoms; None where there is none.
        after: The state that it leads to.
    """

    kind: str
    atoms: Atoms
    gives: int | None
    takes: int | None
    after: State


def group_bytes(kind: str, operand: float, group: int) -> float:
    """Returns the bytes that one rank sends in a collective on `operand` bytes over `group` ranks.

    These are the counts of the ring algorithms; the runtime counts by the same formulas.
    """
    if kind == "permute":
        return operand
    if kind == "all_gather":
        return operand * (group - 1)
    return (2 if kind == "all_reduce" else 1) * operand * (group - 1) / group


@dataclass(frozen=True)
class Search:
    """One search.

    Attributes:
        mesh: The mesh.
        sizes: Typical size of each slot, elements.
        even: Whether a split of slot s into n pieces is proved even: `(s, n) -> bool`.
        goal: The state that is wanted; its partial atoms are partial at the start too.
        itemsize: Bytes per element.
        latency: Cost of one collective, in bytes.
    """

    mesh: Mesh
    sizes: tuple[int, ...]
    even: Callable[[int, int], bool]
    goal: State
    itemsize: int
    latency: float

    @cached_property
    def _home(self) -> dict[int, tuple[int, int]]:
        """Where the goal has each atom: (slot, position in its run)."""
        return {atom: (s, i) for s, run in enumerate(self.goal[0]) for i, atom in enumerate(run)}

    def shortest(self, start: State) -> list[Move]:
        """Returns the moves of the cheapest path; among equal costs the one found first."""
        tie = count()
        known = self.recipe(start)
        bound = self._price(start, known)
        queue: list[tuple[float, int, State]] = [(0.0, next(tie), start)]
        best: dict[State, float] = {start: 0.0}
        came: dict[State, tuple[State, Move]] = {}
        done: set[State] = set()
        while queue and len(done) < _LIMIT:
            price, _, state = heappop(queue)
            if state in done:
                continue
            if state == self.goal:
                return _path(came, start, state)
            done.add(state)
            for move in self._moves(state):
                after = price + self._cost(state, move)
                rest = self.latency if self._unfinished(move.after) else 0.0
                if after + rest <= bound and after < best.get(move.after, float("inf")):
                    best[move.after] = after
                    came[move.after] = (state, move)
                    heappush(queue, (after, next(tie), move.after))
        return known

    def recipe(self, start: State) -> list[Move]:
        """Returns the path that reduces, gathers what is out of place and slices; always there."""
        moves: list[Move] = []
        slots, partial = start
        pending = partial - self.goal[1]
        if pending:
            after = (slots, self.goal[1])
            moves.append(Move("all_reduce", tuple(sorted(pending)), None, None, after))
            slots, partial = after
        for s, run in enumerate(slots):
            keep = _agreeing(run, self.goal[0][s])
            if keep < len(run):
                after = (_put(slots, {s: run[:keep]}), partial)
                moves.append(Move("all_gather", run[keep:], s, None, after))
                slots, partial = after
        for s, run in enumerate(slots):
            if len(run) < len(self.goal[0][s]):
                after = (_put(slots, {s: self.goal[0][s]}), partial)
                moves.append(Move("slice", self.goal[0][s][len(run) :], None, s, after))
                slots, partial = after
        return moves

    # -- costs -----------------------------------------------------------------------------------

    def _price(self, start: State, moves: list[Move]) -> float:
        state, total = start, 0.0
        for move in moves:
            total += self._cost(state, move)
            state = move.after
        return total

    def _cost(self, state: State, move: Move) -> float:
        if move.kind == "slice":
            return _SLICE_COST
        group = self.mesh.count(move.atoms)
        if move.kind == "reduce_scatter":
            operand = self._bytes(move.after[0]) * group
        elif move.kind == "all_to_all" and move.takes is not None:
            taken = _put(state[0], {move.takes: state[0][move.takes] + move.atoms})
            operand = self._bytes(taken) * group
        else:
            operand = self._bytes(state[0])
        return self.latency + group_bytes(move.kind, operand, group)

    def _bytes(self, slots: Slots) -> int:
        return self.itemsize * prod(
            -(-size // self.mesh.count(run)) for size, run in zip(self.sizes, slots, strict=True)
        )

    def _unfinished(self, state: State) -> bool:
        """Whether more than slices is missing to the goal."""
        return state[1] != self.goal[1] or any(
            run != goal[: len(run)] for run, goal in zip(state[0], self.goal[0], strict=True)
        )

    # -- moves -----------------------------------------------------------------------------------

    def _moves(self, state: State) -> Iterator[Move]:
        slots, partial = state
        pending = partial - self.goal[1]
        replicated = set(range(len(self.mesh.atoms))) - {a for r in slots for a in r} - partial
        for s, run in enumerate(slots):
            goal = self.goal[0][s]
            if run == goal[: len(run)]:
                ahead = goal[len(run) :]
                yield from self._slices(state, s, _leading(ahead, replicated))
                yield from self._scatters(state, s, _leading(ahead, pending))
            else:
                # What the goal has first is behind something else: cut by it at the minor end, and
                # let a permute put the run in order, which is cheaper on the smaller shards.
                missing = [a for a in goal if a not in run]
                room = len(goal) - len(run)
                yield from self._slices(state, s, _among(missing, replicated, room))
                yield from self._scatters(state, s, _among(missing, pending, room))
        if pending:
            placed = frozenset(self._home)
            for chosen in dict.fromkeys((pending, pending - placed, pending & placed)):
                if chosen:
                    atoms = tuple(sorted(chosen))
                    yield Move("all_reduce", atoms, None, None, (slots, partial - chosen))
        for s, run in enumerate(slots):
            keep = _agreeing(run, self.goal[0][s])
            for cut in range(keep, len(run)):
                if cut > keep and self._linked(run[cut - 1], run[cut]):
                    continue
                atoms = run[cut:]
                yield Move("all_gather", atoms, s, None, (_put(slots, {s: run[:cut]}), partial))
                yield from self._exchange(state, s, cut)
        for after in dict.fromkeys((self._relabelled(state), *self._reordered(state))):
            if after != slots:
                pairs = [(a, b) for a, b in zip(slots, after, strict=True) if a != b]
                atoms = tuple(sorted({a for pair in pairs for run in pair for a in run}))
                yield Move("permute", atoms, None, None, (after, partial))

    def _slices(self, state: State, s: int, atoms: Atoms) -> Iterator[Move]:
        if atoms:
            slots, partial = state
            yield Move("slice", atoms, None, s, (_put(slots, {s: slots[s] + atoms}), partial))

    def _scatters(self, state: State, s: int, atoms: Atoms) -> Iterator[Move]:
        slots, partial = state
        for length in range(len(atoms), 0, -1):
            taken = atoms[:length]
            after = (_put(slots, {s: slots[s] + taken}), partial - set(taken))
            yield Move("reduce_scatter", taken, None, s, after)

    def _exchange(self, state: State, s: int, cut: int) -> Iterator[Move]:
        """The all-to-all that brings a minor end of slot s home, to the minor end of its slot."""
        slots, partial = state
        atoms = slots[s][cut:]
        if atoms[0] not in self._home:
            return
        home, position = self._home[atoms[0]]
        goal = self.goal[0][home]
        if home == s or slots[home] != goal[:position]:
            return
        if goal[position : position + len(atoms)] == atoms:
            after = _put(slots, {s: slots[s][:cut], home: slots[home] + atoms})
            yield Move("all_to_all", atoms, s, home, (after, partial))

    def _linked(self, major: int, minor: int) -> bool:
        """Whether two neighbours on a slot have no reason to part on the way to the goal."""
        if major not in self._home or minor not in self._home:
            return major not in self._home and minor not in self._home
        (s, i), (t, j) = self._home[major], self._home[minor]
        return s == t and i + 1 == j

    def _relabelled(self, state: State) -> Slots:
        """The placement with equal blocks in which most atoms are where the goal has them.

        Blocks are equal where the sizes of the atoms are, one after another. Atoms that are partial
        stay out of it: a permute moves whole values of one group into another place.
        """
        slots, partial = state
        wanted: dict[tuple[int, int], int] = {}
        for s, (run, goal) in enumerate(zip(slots, self.goal[0], strict=True)):
            for i, (atom, other) in enumerate(zip(run, goal, strict=False)):
                if self.mesh.atoms[atom] != self.mesh.atoms[other]:
                    break
                if other not in partial:
                    wanted[s, i] = other
        taken = set(wanted.values())
        displaced = [
            atom
            for s, run in enumerate(slots)
            for i, atom in enumerate(run)
            if (s, i) in wanted and atom not in taken
        ]
        after = []
        for s, run in enumerate(slots):
            new = []
            for i, atom in enumerate(run):
                chosen = wanted.get((s, i), atom)
                if (s, i) not in wanted and atom in taken:
                    size = self.mesh.atoms[atom]
                    chosen = next(a for a in displaced if self.mesh.atoms[a] == size)
                    displaced.remove(chosen)
                new.append(chosen)
            after.append(tuple(new))
        return tuple(after)

    def _reordered(self, state: State) -> Iterator[Slots]:
        """The goal's slots, where all blocks are equal though atoms of unequal size change places.

        An even split into 2 and then 3 has the blocks of one into 3 and then 2; an uneven one not.
        """
        slots, partial = state
        if any(a in partial for run in self.goal[0] for a in run):
            return
        for s, (run, goal) in enumerate(zip(slots, self.goal[0], strict=True)):
            pieces = self.mesh.count(run)
            if pieces != self.mesh.count(goal):
                return
            sizes = [self.mesh.atoms[a] for a in run], [self.mesh.atoms[a] for a in goal]
            if sizes[0] != sizes[1] and not self.even(s, pieces):
                return
        yield self.goal[0]


def _path(came: dict[State, tuple[State, Move]], start: State, state: State) -> list[Move]:
    path: list[Move] = []
    while state != start:
        state, move = came[state]
        path.append(move)
    return path[::-1]


def _put(slots: Slots, runs: dict[int, Atoms]) -> Slots:
    return tuple(runs.get(s, run) for s, run in enumerate(slots))


def _agreeing(run: Atoms, goal: Atoms) -> int:
    """How many leading atoms two runs share."""
    length = 0
    while length < min(len(run), len(goal)) and run[length] == goal[length]:
        length += 1
    return length


def _leading(run: Atoms, among: set[int] | frozenset[int]) -> Atoms:
    length = 0
    while length < len(run) and run[length] in among:
        length += 1
    return run[:length]


def _among(run: list[int], among: set[int] | frozenset[int], room: int) -> Atoms:
    return tuple([a for a in run if a in among][: max(room, 0)])
