"""Searches for the cheapest sequence of collectives between two placements of atoms on slots.

The components of all dims of a tensor are *slots*. A state is the run of atoms on each slot and the
set of partial atoms; a move is one collective (or a slice). Dijkstra's algorithm finds the cheapest
path under a latency + bandwidth cost (the α-β model of Thakur et al., "Optimization of Collective
Communication Operations in MPICH", 2005).

The search is bounded as follows. Atoms that are in the place that the goal gives them never move.
Neighbours that stay together move as one *unit*. With few units every move is tried, with many only
those that lead towards the goal. Paths that cost more than a fixed recipe (reduce, gather, slice)
are dropped; the recipe is also the result if the search takes too long.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from heapq import heappop, heappush
from itertools import combinations, count, pairwise, permutations, takewhile
from math import prod

from onnxpar.core.mesh import Atoms, Mesh

Slots = tuple[Atoms, ...]
PathState = tuple[Slots, frozenset[int]]

LATENCY = 4096.0
"""Cost of starting one collective, in bytes that could be sent in that time."""
# A slice sends nothing; it counts as one byte so that of two equal paths the shorter one wins.
_SLICE_COST = 1.0
# Up to this many units every move is tried: some hundred states, a few milliseconds.
_WIDE = 4
# The most states that are visited before the search gives up and returns the recipe.
_LIMIT = 2000


@dataclass(frozen=True)
class Move:
    """One step between two states.

    Attributes:
        kind: slice, all_gather, reduce_scatter, all_reduce, all_to_all or permute.
        atoms: Atoms of the groups, in the order of the group.
        gives: Slot that loses the atoms; None if there is none.
        takes: Slot that gains the atoms; None if there is none.
        after: The state after the move.
    """

    kind: str
    atoms: Atoms
    gives: int | None
    takes: int | None
    after: PathState


def ring_fraction(kind: str, group: int) -> tuple[int, int]:
    """Returns the bytes that one rank sends in a collective, as a fraction of its operand's bytes.

    These are the counts of the ring algorithms; the runtime uses the same formulas. In a permute
    some ranks keep what they have: the count is that of a rank that sends.

    Returns:
        Numerator and denominator.
    """
    if kind == "permute":
        return 1, 1
    if kind == "all_gather":
        return group - 1, 1
    return (2 if kind == "all_reduce" else 1) * (group - 1), group


def group_bytes(kind: str, operand: float, group: int) -> float:
    """Returns the bytes that one rank sends in a collective on `operand` bytes over `group` ranks.

    `onnxpar.resharding.routes.moved_bytes` returns the same as an integer or expression.
    """
    top, bottom = ring_fraction(kind, group)
    return operand * top / bottom


def cheapest(
    mesh: Mesh,
    sizes: tuple[int, ...],
    even: Callable[[int, int], bool],
    start: PathState,
    goal: PathState,
    itemsize: int,
) -> list[Move]:
    """Returns the moves of the cheapest path found from `start` to `goal`.

    Args:
        mesh: The mesh.
        sizes: Typical size of each slot, elements.
        even: Whether n is proved to divide the size of slot s evenly: `(s, n) -> bool`.
        start: The first state.
        goal: The last state; its partial atoms are partial at the start too.
        itemsize: Bytes per element.
    """
    fixed = tuple(r[: _agreeing(r, g)] for r, g in zip(start[0], goal[0], strict=True))
    free = _rest(start, fixed), _rest(goal, fixed)
    units = _units(*free)
    shards = [mesh.count(run) for run in fixed]
    sides = tuple(tuple(mesh.atoms[a] for a in unit) for unit in units)
    counts = _subproducts(prod(side) for side in sides)
    heads = {unit[0]: i for i, unit in enumerate(units)}
    moves = _answer(
        sides,
        tuple(-(-size // n) for size, n in zip(sizes, shards, strict=True)),
        tuple(frozenset(n for n in counts if even(s, shards[s] * n)) for s in range(len(sizes))),
        _coarse(free[0], heads),
        _coarse(free[1], heads),
        itemsize,
    )

    def fine(atoms: Iterable[int]) -> Atoms:
        return tuple(a for unit in atoms for a in units[unit])

    result = []
    for move in moves:
        slots = tuple(f + fine(run) for f, run in zip(fixed, move.after[0], strict=True))
        # The goal's partial atoms are not part of the search.
        after = (slots, goal[1].union(fine(move.after[1])))
        atoms = fine(move.atoms)
        if move.kind in ("all_reduce", "permute"):
            atoms = tuple(sorted(atoms))
        result.append(Move(move.kind, atoms, move.gives, move.takes, after))
    return result


def _subproducts(numbers: Iterable[int]) -> set[int]:
    """The products of every choice of some of the numbers."""
    found = {1}
    for number in numbers:
        found |= {number * n for n in found}
    return found


@lru_cache(maxsize=65536)
def _answer(
    units: tuple[tuple[int, ...], ...],
    sizes: tuple[int, ...],
    even: tuple[frozenset[int], ...],
    start: PathState,
    goal: PathState,
    itemsize: int,
) -> tuple[Move, ...]:
    """The cheapest path between two states of units, which is the same for many reshards.

    `even` has for each slot the numbers that are proved to divide its size.
    """
    search = RouteFinder(units, sizes, lambda s, n: n in even[s], goal, itemsize)
    return tuple(search.shortest(start))


def _rest(state: PathState, fixed: Slots) -> PathState:
    return tuple(r[len(f) :] for r, f in zip(state[0], fixed, strict=True)), state[1]


def _units(start: PathState, goal: PathState) -> list[Atoms]:
    """Runs of atoms that may move as one, of the atoms that are not in place.

    Two neighbours belong together if both start and goal have them as neighbours on a slot, have
    both replicated, or have both partial.
    """
    partials = start[1] - goal[1]
    links = []
    for slots, partial in ((start[0], partials), (goal[0], frozenset[int]())):
        after = {a: b for run in slots for a, b in pairwise(run)}
        placed = {a for run in slots for a in run}
        links.append((after, placed, partial))

    def together(a: int, b: int) -> bool:
        return all(
            after.get(a) == b if a in placed or b in placed else (a in partial) == (b in partial)
            for after, placed, partial in links
        )

    # Every atom comes after the one that it may follow: first the atoms of runs, then partial ones.
    order = dict.fromkeys(a for slots in (start[0], goal[0]) for run in slots for a in run)
    order.update(dict.fromkeys(sorted(partials)))
    followers = {a: b for after, _, _ in links for a, b in after.items()}
    alone = sorted(a for a in partials if a not in links[1][1])
    followers.update(pairwise(alone))
    heads = set(order) - {b for a, b in followers.items() if a in order and together(a, b)}
    units = []
    for atom in order:
        if atom in heads:
            unit = [atom]
            while unit[-1] in followers and together(unit[-1], followers[unit[-1]]):
                unit.append(followers[unit[-1]])
            units.append(tuple(unit))
    return units


def _coarse(state: PathState, heads: dict[int, int]) -> PathState:
    """A state in terms of units, given the number of the unit that begins with each atom."""
    slots = tuple(tuple(heads[a] for a in run if a in heads) for run in state[0])
    return slots, frozenset(heads[a] for a in state[1] if a in heads)


@dataclass(frozen=True)
class RouteFinder:
    """One search, over units.

    Attributes:
        units: The sizes of the atoms of each unit, major first.
        sizes: Typical size of each slot, elements.
        even: Whether n is proved to divide the size of slot s evenly: `(s, n) -> bool`.
        goal: The last state, without partial atoms.
        itemsize: Bytes per element.
    """

    units: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    even: Callable[[int, int], bool]
    goal: PathState
    itemsize: int
    # Caches: the number of shards of a run, the bytes of a shard, placements with equal blocks.
    _counts: dict[Atoms, int] = field(default_factory=dict, init=False)
    _sizes_of: dict[Slots, int] = field(default_factory=dict, init=False)
    _alike: dict[tuple[object, ...], list[Slots]] = field(default_factory=dict, init=False)

    @cached_property
    def _home(self) -> dict[int, tuple[int, int]]:
        """Where the goal has each unit: (slot, position in its run)."""
        return {unit: (s, i) for s, run in enumerate(self.goal[0]) for i, unit in enumerate(run)}

    def count(self, run: Atoms) -> int:
        """Returns the number of shards that a run of units makes."""
        found = self._counts.get(run)
        if found is None:
            found = prod(size for unit in run for size in self.units[unit])
            self._counts[run] = found
        return found

    def shortest(self, start: PathState) -> list[Move]:
        """Returns the moves of the cheapest path found."""
        known = self._search(start, self.recipe(start), self.moves)
        if len(self.units) <= _WIDE:
            known = self._search(start, known, self.all_moves)
        return known

    def _search(
        self, start: PathState, known: list[Move], moves: Callable[[PathState], Iterator[Move]]
    ) -> list[Move]:
        """Returns the cheapest path by `moves`; among equally cheap ones, a path of fewest moves.

        The path `known` is returned if none is cheaper, or if too many states are visited.
        """
        tie = count()
        bound = self.price(start, known)
        queue: list[tuple[float, int, int, PathState]] = [(0.0, 0, next(tie), start)]
        best: dict[PathState, tuple[float, int]] = {start: (0.0, 0)}
        came: dict[PathState, tuple[PathState, Move]] = {}
        done: set[PathState] = set()
        while queue and len(done) < _LIMIT:
            price, length, _, state = heappop(queue)
            if state in done:
                continue
            if state == self.goal:
                return _path(came, start, state)
            done.add(state)
            for move in moves(state):
                rest = LATENCY if self._unfinished(move.after) else 0.0
                if move.kind != "slice" and price + LATENCY + rest > bound:
                    continue
                after = price + self.cost(state, move)
                if after + rest > bound:
                    continue
                if move.after not in best or (after, length + 1) < best[move.after]:
                    best[move.after] = (after, length + 1)
                    came[move.after] = (state, move)
                    heappush(queue, (after, length + 1, next(tie), move.after))
        return known

    def recipe(self, start: PathState) -> list[Move]:
        """Returns the path that reduces, gathers what is out of place, and slices."""
        moves: list[Move] = []
        slots, partial = start
        if partial:
            moves.append(Move("all_reduce", tuple(sorted(partial)), None, None, (slots, _NONE)))
        for s, run in enumerate(slots):
            keep = _agreeing(run, self.goal[0][s])
            if keep < len(run):
                slots = _put(slots, {s: run[:keep]})
                moves.append(Move("all_gather", run[keep:], s, None, (slots, _NONE)))
        for s, run in enumerate(slots):
            if len(run) < len(self.goal[0][s]):
                slots = _put(slots, {s: self.goal[0][s]})
                moves.append(Move("slice", self.goal[0][s][len(run) :], None, s, (slots, _NONE)))
        return moves

    # -- costs -----------------------------------------------------------------------------------

    def price(self, start: PathState, moves: list[Move]) -> float:
        """Returns the cost of a path."""
        state, total = start, 0.0
        for move in moves:
            total += self.cost(state, move)
            state = move.after
        return total

    def cost(self, state: PathState, move: Move) -> float:
        """Returns the cost of one move, in bytes.

        Adding or removing padding costs as much as starting a collective.
        """
        price = 0.0
        for s, run in ((move.takes, move.after[0]), (move.gives, state[0])):
            if s is not None and not self.even(s, self.count(run[s])):
                price += LATENCY
        if move.kind == "slice":
            return price + _SLICE_COST
        group = self.count(move.atoms)
        if move.takes is None:
            operand = self._bytes(state[0])
        else:
            # The operand is padded to a multiple of the number of its shards.
            after = _put(state[0], {move.takes: state[0][move.takes] + move.atoms})
            operand = self._bytes(after) * group
        return price + LATENCY + group_bytes(move.kind, operand, group)

    def _bytes(self, slots: Slots) -> int:
        found = self._sizes_of.get(slots)
        if found is None:
            found = self.itemsize
            for size, run in zip(self.sizes, slots, strict=True):
                found *= -(-size // self.count(run))
            self._sizes_of[slots] = found
        return found

    def _unfinished(self, state: PathState) -> bool:
        """Whether the way to the goal needs more than slices."""
        if state[1]:
            return True
        for run, goal in zip(state[0], self.goal[0], strict=True):  # noqa: SIM110 the hottest loop
            if run != goal[: len(run)]:
                return True
        return False

    # -- moves -----------------------------------------------------------------------------------

    def all_moves(self, state: PathState) -> Iterator[Move]:
        """Yields all moves; for few units."""
        slots, partial = state
        replicated = sorted(self._replicated(state))
        for s, run in enumerate(slots):
            for length in range(1, len(replicated) + 1):
                for taken in permutations(replicated, length):
                    yield from self._slices(state, s, taken)
            for kept in range(len(run)):
                taken = run[kept:]
                yield Move("all_gather", taken, s, None, (_put(slots, {s: run[:kept]}), partial))
                for t in range(len(slots)):
                    if t != s:
                        after = _put(slots, {s: run[:kept], t: slots[t] + taken})
                        yield Move("all_to_all", taken, s, t, (after, partial))
        for length in range(1, len(partial) + 1):
            for chosen in combinations(sorted(partial), length):
                left = partial - set(chosen)
                yield Move("all_reduce", chosen, None, None, (slots, left))
                for taken in permutations(chosen):
                    for s, run in enumerate(slots):
                        after = _put(slots, {s: run + taken})
                        yield Move("reduce_scatter", taken, None, s, (after, left))
        for after in self._same_block_placements(slots, partial):
            yield from self._permutes(state, after)

    def moves(self, state: PathState) -> Iterator[Move]:
        """Yields the moves that lead towards the goal; for many units."""
        slots, partial = state
        replicated = self._replicated(state)
        for s, run in enumerate(slots):
            goal = self.goal[0][s]
            if run == goal[: len(run)]:
                ahead = goal[len(run) :]
                yield from self._slices(state, s, _leading(ahead, replicated))
                yield from self._scatters(state, s, _leading(ahead, partial))
            else:
                # An atom that the goal does not have here comes first. Shard at the minor end, and
                # let a permute reorder the run, which is cheaper on the smaller shards.
                missing = [a for a in goal if a not in run]
                room = len(goal) - len(run)
                yield from self._slices(state, s, _among(missing, replicated, room))
                yield from self._scatters(state, s, _among(missing, partial, room))
        placed = frozenset(self._home)
        for chosen in dict.fromkeys((partial, partial - placed, partial & placed)):
            if chosen:
                taken = tuple(sorted(chosen))
                yield Move("all_reduce", taken, None, None, (slots, partial - chosen))
        for s, run in enumerate(slots):
            for kept in range(_agreeing(run, self.goal[0][s]), len(run)):
                after = _put(slots, {s: run[:kept]})
                yield Move("all_gather", run[kept:], s, None, (after, partial))
                yield from self._exchange(state, s, kept)
        for after in dict.fromkeys((self._relabelled(state), *self._reordered(state))):
            yield from self._permutes(state, after)

    def _replicated(self, state: PathState) -> set[int]:
        return set(range(len(self.units))) - {u for run in state[0] for u in run} - state[1]

    def _slices(self, state: PathState, s: int, units: Atoms) -> Iterator[Move]:
        if units:
            slots, partial = state
            yield Move("slice", units, None, s, (_put(slots, {s: slots[s] + units}), partial))

    def _scatters(self, state: PathState, s: int, units: Atoms) -> Iterator[Move]:
        slots, partial = state
        for length in range(len(units), 0, -1):
            taken = units[:length]
            after = (_put(slots, {s: slots[s] + taken}), partial - set(taken))
            yield Move("reduce_scatter", taken, None, s, after)

    def _permutes(self, state: PathState, after: Slots) -> Iterator[Move]:
        if after != state[0]:
            pairs = [(a, b) for a, b in zip(state[0], after, strict=True) if a != b]
            units = tuple(sorted({u for pair in pairs for run in pair for u in run}))
            yield Move("permute", units, None, None, (after, state[1]))

    def _exchange(self, state: PathState, s: int, kept: int) -> Iterator[Move]:
        """The all-to-all that brings a minor end of slot s to the end of the slot of the goal."""
        slots, partial = state
        units = slots[s][kept:]
        if units[0] not in self._home:
            return
        home, position = self._home[units[0]]
        goal = self.goal[0][home]
        if home == s or slots[home] != goal[:position]:
            return
        if goal[position : position + len(units)] == units:
            after = _put(slots, {s: slots[s][:kept], home: slots[home] + units})
            yield Move("all_to_all", units, s, home, (after, partial))

    # -- placements with equal blocks --------------------------------------------------------------

    def _same_blocks(self, s: int, run: Atoms, other: Atoms) -> bool:
        """Whether two runs split slot s into the same blocks.

        They do if the sizes of their atoms are the same in the same order, or if the split is even:
        2 and then 3 give the same blocks as 3 and then 2.
        """
        sizes = [[n for unit in r for n in self.units[unit]] for r in (run, other)]
        if sizes[0] == sizes[1]:
            return True
        return self.count(run) == self.count(other) and self.even(s, self.count(run))

    def _same_block_placements(self, slots: Slots, partial: frozenset[int]) -> list[Slots]:
        """Every placement of the units that are not partial with the blocks of `slots`.

        Slots whose runs have atoms of the same sizes have the same placements.
        """
        key = (tuple(tuple(self.units[u] for u in run) for run in slots), partial)
        found = self._alike.get(key)
        if found is None:
            free = sorted(set(range(len(self.units))) - partial)
            found = self._alike[key] = list(self._rearranged(slots, 0, free))
        return found

    def _rearranged(self, slots: Slots, s: int, free: list[int]) -> Iterator[Slots]:
        """Every placement of the free units on the slots from s on that has the same blocks."""
        if s == len(slots):
            yield ()
            return
        pieces = self.count(slots[s])
        for length in range(len(free) + 1):
            for run in permutations(free, length):
                if self.count(run) == pieces and self._same_blocks(s, slots[s], run):
                    left = [u for u in free if u not in run]
                    for others in self._rearranged(slots, s + 1, left):
                        yield (run, *others)

    def _relabelled(self, state: PathState) -> Slots:
        """The placement with equal blocks in which most units are where the goal has them.

        Partial units are left out: a permute moves values only within a group.
        """
        slots, partial = state
        wanted: dict[tuple[int, int], int] = {}
        for s, (run, goal) in enumerate(zip(slots, self.goal[0], strict=True)):
            for i, (unit, other) in enumerate(zip(run, goal, strict=False)):
                if self.units[unit] != self.units[other]:
                    break
                if other not in partial:
                    wanted[s, i] = other
        taken = set(wanted.values())
        displaced = [
            unit
            for s, run in enumerate(slots)
            for i, unit in enumerate(run)
            if (s, i) in wanted and unit not in taken
        ]
        after = []
        for s, run in enumerate(slots):
            new = []
            for i, unit in enumerate(run):
                chosen = wanted.get((s, i), unit)
                if (s, i) not in wanted and unit in taken:
                    # There is one: as many units of a size lose their place as places their unit.
                    chosen = next(u for u in displaced if self.units[u] == self.units[unit])
                    displaced.remove(chosen)
                new.append(chosen)
            after.append(tuple(new))
        return tuple(after)

    def _reordered(self, state: PathState) -> Iterator[Slots]:
        """The goal's slots, where they have the same blocks."""
        slots, partial = state
        goal = self.goal[0]
        if not any(unit in partial for run in goal for unit in run) and all(
            self._same_blocks(s, run, other)
            for s, (run, other) in enumerate(zip(slots, goal, strict=True))
        ):
            yield goal


_NONE = frozenset[int]()


def _path(
    came: dict[PathState, tuple[PathState, Move]], start: PathState, state: PathState
) -> list[Move]:
    path: list[Move] = []
    while state != start:
        state, move = came[state]
        path.append(move)
    return path[::-1]


def _put(slots: Slots, runs: dict[int, Atoms]) -> Slots:
    after = list(slots)
    for s, run in runs.items():
        after[s] = run
    return tuple(after)


def _agreeing(run: Atoms, goal: Atoms) -> int:
    """How many leading atoms two runs share."""
    length = 0
    while length < min(len(run), len(goal)) and run[length] == goal[length]:
        length += 1
    return length


def _leading(run: Atoms, among: set[int] | frozenset[int]) -> Atoms:
    return tuple(takewhile(among.__contains__, run))


def _among(run: list[int], among: set[int] | frozenset[int], room: int) -> Atoms:
    return tuple([a for a in run if a in among][: max(room, 0)])
