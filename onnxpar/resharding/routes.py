"""Plans reshards: the cheapest sequence of collectives, a route, from one sharding to another.

The two shardings are first written with the same components of each dim (a merged dim can be
written as several lists of components without moving data, if it is proved to be sharded evenly);
then `onnxpar.resharding.shortest_path` finds the cheapest path. Bytes are those of the ring
algorithms, counted as in the runtime.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache

import sympy

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Component, DimSharding, Sharding, atoms_of, is_even, local_size
from onnxpar.core.symbols import Dim, SymbolTable, as_dim, exact_div
from onnxpar.resharding.shortest_path import Move, PathState, cheapest, ring_fraction

Slot = tuple[int, int]
"""A dim of a tensor, and the number of a component of it."""

OPERATORS = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
}
"""The collective of each kind of step, except for a slice."""


@dataclass(frozen=True)
class ReshardStep:
    """One step of a reshard.

    Attributes:
        kind: slice, all_gather, reduce_scatter, all_reduce, all_to_all or permute.
        atoms: Atoms of the groups, in the order of the group.
        source: (dim, component) that loses atoms; None if there is none.
        target: (dim, component) that gains atoms; None if there is none.
        before: Sharding before the step, in whose components `source` and `target` are. It may be
            the sharding after the previous step in terms of other components.
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


def reachable(source: Sharding, target: Sharding) -> bool:
    """Whether a value can be resharded: it cannot become partial where it is not."""
    if not target.partial:
        return True
    return set(target.partial) <= set(source.partial) and target.reduction == source.reduction


@lru_cache(maxsize=65536)
def plan_reshard(
    source: Sharding,
    target: Sharding,
    mesh: Mesh,
    table: SymbolTable,
    itemsize: int,
) -> tuple[ReshardStep, ...]:
    """Returns the cheapest steps from one sharding of a tensor to another.

    Args:
        source: The present sharding.
        target: The new sharding; it may be partial only over atoms over which the source is.
        mesh: The mesh.
        table: The symbols and their constraints; costs are those of typical sizes.
        itemsize: Bytes per element.

    Raises:
        ShardingError: The target is partial where the source is not, or the shapes differ.
    """
    if not reachable(source, target):
        raise ShardingError(
            f"cannot make a value partial {target.reduction} over "
            f"{mesh.describe(target.partial)}: it is {source.describe(mesh)}"
        )
    # Two symbolic sizes may be equal without a proof; then the graph is right at run time.
    if source.rank != target.rank or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(source.shape, target.shape, strict=True)
    ):
        raise ShardingError(f"cannot reshard a value of shape {source.shape} to {target.shape}")
    planner = _Planner(mesh, table, itemsize)
    return tuple(
        step
        for here, there in legs(source, target, mesh, table)
        for step in planner.steps(here, there)
    )


@dataclass(frozen=True)
class Route:
    """How a value is brought into a sharding.

    Attributes:
        source: The sharding from which it is brought.
        steps: The steps; none if it already has the sharding.
        bytes: Bytes that one rank sends, at the symbols' typical sizes.
    """

    source: Sharding
    steps: tuple[ReshardStep, ...]
    bytes: int


def cheapest_route(
    versions: Iterable[Sharding],
    target: Sharding,
    mesh: Mesh,
    table: SymbolTable,
    itemsize: int,
) -> Route:
    """Returns the cheapest route to a sharding from those that a value already has.

    Propagation uses it to price the operands of a node, and partitioning carries it out, so that
    the program is what was planned. Of equally cheap routes the one of fewest steps is taken, then
    the first.

    Args:
        versions: The shardings in which the value exists, at least one, in the order in which they
            were made.
        target: The new sharding.
        mesh: The mesh.
        table: The symbols and their constraints.
        itemsize: Bytes per element.

    Raises:
        ShardingError: The target can be reached from none of them.
    """
    sources = tuple(versions)
    if target in sources:
        return Route(target, (), 0)
    routes = []
    for source in [v for v in sources if reachable(v, target)] or sources[:1]:
        steps = plan_reshard(source, target, mesh, table, itemsize)
        routes.append(Route(source, steps, sum(table.typical(step.bytes) for step in steps)))
    return min(routes, key=lambda route: (route.bytes, len(route.steps)))


def legs(
    source: Sharding, target: Sharding, mesh: Mesh, table: SymbolTable
) -> tuple[tuple[Sharding, Sharding], ...]:
    """Returns the one or two moves of a reshard, each between shardings of the same components.

    If the components of a dim do not line up, the first move replicates those that do not. All
    other changes are left for the second move, in which both sides have the target's components.
    """
    if all(_alike(a, b) for a, b in zip(source.dims, target.dims, strict=True)):
        return ((source, target),)
    pairs = [_align(a, b, mesh, table) for a, b in zip(source.dims, target.dims, strict=True)]
    here = replace(source, dims=tuple(v.source for v in pairs))
    there = replace(target, dims=tuple(v.target for v in pairs))
    if all(v.gathered is None for v in pairs):
        return ((here, there),)
    gathered = tuple(v.source if v.gathered is None else v.gathered for v in pairs)
    rewritten = tuple(
        v.source
        if v.gathered is None
        else v.gathered[: v.agreed] + tuple(Component(c.size) for c in v.target[v.agreed :])
        for v in pairs
    )
    return ((here, replace(source, dims=gathered)), (replace(source, dims=rewritten), there))


def _alike(a: DimSharding, b: DimSharding) -> bool:
    """Whether two lists of components have the same sizes as they are."""
    return len(a) == len(b) and all([x.size == y.size for x, y in zip(a, b, strict=True)])


@dataclass(frozen=True)
class _Aligned:
    """The two lists of components of a dim, split at the same sizes as far as possible.

    Attributes:
        source: Components of the source.
        target: Components of the target.
        agreed: How many leading components line up.
        gathered: The source with all other components replicated; None if all line up.
    """

    source: DimSharding
    target: DimSharding
    agreed: int
    gathered: DimSharding | None


def _align(a: DimSharding, b: DimSharding, mesh: Mesh, table: SymbolTable) -> _Aligned:
    left, right = list(a), list(b)
    source: list[Component] = []
    target: list[Component] = []
    coarser: tuple[DimSharding, DimSharding, DimSharding, DimSharding] | None = None
    while left and right:
        x, y = left[0], right[0]
        if table.equal(x.size, y.size):
            source.append(left.pop(0))
            target.append(right.pop(0))
        elif two := _split_at(x, y.size, mesh, table):
            left[0:1] = two
        elif two := _split_at(y, x.size, mesh, table):
            right[0:1] = two
        elif two := _split_first_atom(x, mesh, table):
            coarser = coarser or (tuple(source), tuple(target), tuple(left), tuple(right))
            left[0:1] = two
        elif two := _split_first_atom(y, mesh, table):
            coarser = coarser or (tuple(source), tuple(target), tuple(left), tuple(right))
            right[0:1] = two
        else:
            # In vain: undo splits by single atoms, so that their run is gathered at once.
            if coarser is not None:
                source, target, left, right = map(list, coarser)
            break
    # Components that remain on one side only have size 1.
    if not atoms_of((*left, *right)) and not (left and right):
        return _Aligned(tuple(source), tuple(target), len(source), None)
    return _Aligned(
        (*source, *left),
        (*target, *right),
        len(source),
        (*source, *(Component(c.size) for c in left)),
    )


def _split_at(c: Component, size: Dim, mesh: Mesh, table: SymbolTable) -> list[Component] | None:
    """A component as two, the major one of `size`; None if that would move elements."""
    rest = exact_div(c.size, size, table)
    if rest is None:
        return None
    if is_even(Component(size, c.atoms), mesh, table):
        return [Component(size, c.atoms), Component(rest)]
    for length in range(1, len(c.atoms)):
        if table.equal(size, mesh.count(c.atoms[:length])):
            return [Component(size, c.atoms[:length]), Component(rest, c.atoms[length:])]
    return None


def _split_first_atom(c: Component, mesh: Mesh, table: SymbolTable) -> list[Component] | None:
    """A component as its first atom and the rest; None if that would move elements."""
    if not c.atoms:
        return None
    size = mesh.atoms[c.atoms[0]]
    if table.equal(c.size, size) or not table.divisible(c.size, size):
        return None
    rest = exact_div(c.size, size, table)
    return None if rest is None else [Component(size, c.atoms[:1]), Component(rest, c.atoms[1:])]


@dataclass(frozen=True)
class _Planner:
    """Plans between two shardings that have the same components."""

    mesh: Mesh
    table: SymbolTable
    itemsize: int

    def steps(self, source: Sharding, target: Sharding) -> tuple[ReshardStep, ...]:
        slots = [(d, c) for d, dim in enumerate(source.dims) for c in range(len(dim))]
        sizes = [source.dims[d][c].size for d, c in slots]
        start = _state(source, slots)
        goal = _state(target, slots)
        path = cheapest(
            self.mesh,
            tuple(self.table.typical(s) for s in sizes),
            lambda s, shards: self.table.divisible(sizes[s], shards),
            start,
            goal,
            self.itemsize,
        )
        steps = []
        state = start
        for move in path:
            steps.append(
                ReshardStep(
                    move.kind,
                    move.atoms,
                    None if move.gives is None else slots[move.gives],
                    None if move.takes is None else slots[move.takes],
                    self._sharding(source, slots, state),
                    self._sharding(source, slots, move.after),
                    self._bytes(move, state, sizes),
                )
            )
            state = move.after
        return tuple(steps)

    def _sharding(self, source: Sharding, slots: list[Slot], state: PathState) -> Sharding:
        atoms = dict(zip(slots, state[0], strict=True))
        dims = tuple(
            tuple(Component(part.size, atoms[d, c]) for c, part in enumerate(dim))
            for d, dim in enumerate(source.dims)
        )
        return Sharding(dims).with_partial(state[1], source.reduction)

    def _bytes(self, move: Move, state: PathState, sizes: list[Dim]) -> Dim:
        """Bytes that one rank sends, including the padding of the collective's operand."""
        if move.kind == "slice":
            return 0
        runs, group = list(state[0]), self.mesh.count(move.atoms)
        operand: Dim = self.itemsize
        if move.takes is not None:
            runs[move.takes] += move.atoms
            operand = operand * group
        for size, run in zip(sizes, runs, strict=True):
            operand = operand * local_size(Component(size, run), self.mesh, self.table)
        return moved_bytes(move.kind, as_dim(operand), group)


def _state(sharding: Sharding, slots: list[Slot]) -> PathState:
    return tuple(sharding.dims[d][c].atoms for d, c in slots), frozenset(sharding.partial)


def moved_bytes(kind: str, operand: Dim, group: int) -> Dim:
    """Returns the bytes that one rank sends in a collective on `operand` bytes over `group` ranks.

    A fraction is rounded down. See `onnxpar.resharding.shortest_path.ring_fraction`.
    """
    top, bottom = ring_fraction(kind, group)
    total = operand * top
    if bottom == 1:
        return as_dim(total)
    return total // bottom if isinstance(total, int) else as_dim(sympy.floor(total / bottom))
