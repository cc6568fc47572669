"""Plans reshards: the cheapest sequence of collectives, a route, from one sharding to another.

The two shardings are first written over the same components of each dim (a dim that a reshape
merged can be seen as several lists of components without moving anything, where splits are proved
even); then `onnxpar.resharding.shortest_path` finds the cheapest path. Byte counts are those of the
ring algorithms, the same that the runtime counts.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import sympy

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Component, DimSharding, Sharding, local_size
from onnxpar.core.symbols import Dim, SymbolTable, as_dim, exact_div
from onnxpar.resharding.shortest_path import Move, PathState, cheapest

Slot = tuple[int, int]

OPERATORS = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
}
"""The collective of each kind of step; a slice is none."""


@dataclass(frozen=True)
class LinkCost:
    """Cost of one collective: `latency` (in bytes' worth of time) plus the bytes one rank sends."""

    latency: float = 4096.0


@dataclass(frozen=True)
class ReshardStep:
    """One step of a reshard.

    Attributes:
        kind: slice, all_gather, reduce_scatter, all_reduce, all_to_all or permute. Between two
            steps the same local elements may be seen as other components.
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


def reachable(source: Sharding, target: Sharding) -> bool:
    """Whether a value can be brought from one sharding to another: no reduction becomes partial."""
    if not target.partial:
        return True
    return set(target.partial) <= set(source.partial) and target.reduction == source.reduction


def plan_reshard(
    source: Sharding,
    target: Sharding,
    mesh: Mesh,
    table: SymbolTable,
    itemsize: int,
    cost: LinkCost = LinkCost(),
) -> tuple[ReshardStep, ...]:
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


@dataclass(frozen=True)
class Route:
    """How a value comes into a sharding.

    Attributes:
        source: The sharding that it is brought from.
        steps: The steps; none where it is there already.
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
    """Returns the way to a sharding from the nearest of those in which a value is there.

    Propagation prices a node's operands by it and partitioning carries it out, so what was planned
    is what is emitted. Of equally cheap ways the one of fewest steps is taken, then the first.

    Args:
        versions: The shardings in which the value is there, at least one, the first made first.
        target: The sharding wanted.
        mesh: The mesh.
        table: What is known of the symbols.
        itemsize: Bytes per element.

    Raises:
        ShardingError: From none of them can it be reached.
    """
    there = tuple(versions)
    if target in there:
        return Route(target, (), 0)
    ways = []
    for source in [v for v in there if reachable(v, target)] or there[:1]:
        steps = plan_reshard(source, target, mesh, table, itemsize)
        ways.append(Route(source, steps, sum(table.typical(step.bytes) for step in steps)))
    return min(ways, key=lambda way: (way.bytes, len(way.steps)))


@lru_cache(maxsize=65536)
def _plan(
    source: Sharding,
    target: Sharding,
    mesh: Mesh,
    table: SymbolTable,
    itemsize: int,
    cost: LinkCost,
) -> tuple[ReshardStep, ...]:
    if not reachable(source, target):
        raise ShardingError(
            f"cannot make a value partial {target.reduction} over "
            f"{mesh.describe(target.partial)}: it is {source.describe(mesh)}"
        )
    # Two symbolic sizes may be equal without a proof: the graph decides.
    if source.rank != target.rank or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(source.shape, target.shape, strict=True)
    ):
        raise ShardingError(f"cannot reshard a value of shape {source.shape} to {target.shape}")
    run = _Run(mesh, table, itemsize, cost)
    return tuple(
        step for here, there in legs(source, target, mesh, table) for step in run.steps(here, there)
    )


def legs(
    source: Sharding, target: Sharding, mesh: Mesh, table: SymbolTable
) -> tuple[tuple[Sharding, Sharding], ...]:
    """Returns the one or two moves that a reshard is made of, each between equal components.

    Where the components of a dim do not line up, their part of it goes through being replicated;
    what else differs is left for afterwards, when both sides are seen as the target's components.
    """
    views = [_aligned(a, b, mesh, table) for a, b in zip(source.dims, target.dims, strict=True)]
    here = Sharding(tuple(v.source for v in views), source.partial, source.reduction)
    there = Sharding(tuple(v.target for v in views), target.partial, target.reduction)
    if all(v.gathered is None for v in views):
        return ((here, there),)
    whole = Sharding(
        tuple(v.source if v.gathered is None else v.gathered for v in views),
        source.partial,
        source.reduction,
    )
    seen = Sharding(
        tuple(
            v.source
            if v.gathered is None
            else v.gathered[: v.agreed] + tuple(Component(c.size) for c in v.target[v.agreed :])
            for v in views
        ),
        source.partial,
        source.reduction,
    )
    return ((here, whole), (seen, there))


@dataclass(frozen=True)
class _View:
    """The two lists of components of a dim, cut at the same sizes as far as that goes.

    Attributes:
        source: Components of the source.
        target: Components of the target.
        agreed: How many leading components line up.
        gathered: The source with the rest whole; None where all components line up.
    """

    source: DimSharding
    target: DimSharding
    agreed: int
    gathered: DimSharding | None


def _aligned(a: DimSharding, b: DimSharding, mesh: Mesh, table: SymbolTable) -> _View:
    left, right = list(a), list(b)
    source: list[Component] = []
    target: list[Component] = []
    coarser: tuple[DimSharding, DimSharding, DimSharding, DimSharding] | None = None
    while left and right:
        x, y = left[0], right[0]
        if table.equal(x.size, y.size):
            source.append(left.pop(0))
            target.append(right.pop(0))
        elif pieces := _cut(x, y.size, mesh, table):
            left[0:1] = pieces
        elif pieces := _cut(y, x.size, mesh, table):
            right[0:1] = pieces
        elif pieces := _cut_first(x, mesh, table):
            coarser = coarser or (tuple(source), tuple(target), tuple(left), tuple(right))
            left[0:1] = pieces
        elif pieces := _cut_first(y, mesh, table):
            coarser = coarser or (tuple(source), tuple(target), tuple(left), tuple(right))
            right[0:1] = pieces
        else:
            # Do not split a run atom by atom: gather it at once.
            if coarser is not None:
                source, target, left, right = map(list, coarser)
            break
    # What is left on one side when the other is used up has no elements but one.
    if not any(c.atoms for c in (*left, *right)) and not (left and right):
        return _View(tuple(source), tuple(target), len(source), None)
    return _View(
        (*source, *left),
        (*target, *right),
        len(source),
        (*source, *(Component(c.size) for c in left)),
    )


def _cut(c: Component, size: Dim, mesh: Mesh, table: SymbolTable) -> list[Component] | None:
    """A component seen as two, the major one of `size`; None where that would move elements."""
    rest = exact_div(c.size, size, table)
    if rest is None:
        return None
    if not c.atoms or table.divisible(size, mesh.count(c.atoms)):
        return [Component(size, c.atoms), Component(rest)]
    for length in range(1, len(c.atoms)):
        if table.equal(size, mesh.count(c.atoms[:length])):
            return [Component(size, c.atoms[:length]), Component(rest, c.atoms[length:])]
    return None


def _cut_first(c: Component, mesh: Mesh, table: SymbolTable) -> list[Component] | None:
    """A component seen as its first atom and the rest; None where that would move elements."""
    if not c.atoms:
        return None
    size = mesh.atoms[c.atoms[0]]
    if table.equal(c.size, size) or not table.divisible(c.size, size):
        return None
    rest = exact_div(c.size, size, table)
    return None if rest is None else [Component(size, c.atoms[:1]), Component(rest, c.atoms[1:])]


@dataclass(frozen=True)
class _Run:
    """Plans between two shardings that have the same components."""

    mesh: Mesh
    table: SymbolTable
    itemsize: int
    cost: LinkCost

    def steps(self, source: Sharding, target: Sharding) -> tuple[ReshardStep, ...]:
        slots = [(d, c) for d, dim in enumerate(source.dims) for c in range(len(dim))]
        sizes = [source.dims[d][c].size for d, c in slots]
        start = _state(source, slots)
        goal = _state(target, slots)
        path = cheapest(
            self.mesh,
            tuple(self.table.typical(s) for s in sizes),
            lambda s, pieces: self.table.divisible(sizes[s], pieces),
            start,
            goal,
            self.itemsize,
            self.cost.latency,
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
        """Bytes that one rank sends: of the collective's operand, padding for its cut included."""
        if move.kind == "slice":
            return 0
        cut = list(state[0])
        group = 1
        if move.takes is not None:
            cut[move.takes] += move.atoms
            group = self.mesh.count(move.atoms)
        operand: Dim = self.itemsize * group
        for size, run in zip(sizes, cut, strict=True):
            operand = operand * local_size(Component(size, run), self.mesh, self.table)
        return moved_bytes(move.kind, as_dim(operand), self.mesh.count(move.atoms))


def _state(sharding: Sharding, slots: list[Slot]) -> PathState:
    return tuple(sharding.dims[d][c].atoms for d, c in slots), frozenset(sharding.partial)


def moved_bytes(kind: str, operand: Dim, group: int) -> Dim:
    """Returns the bytes that one rank sends in a collective on `operand` bytes over `group` ranks.

    A fraction is rounded down. These are the counts that the runtime keeps, but for a permute, in
    which some ranks keep what they have: the count is that of a rank that sends.
    """
    if kind in ("permute", "all_gather"):
        return as_dim(operand if kind == "permute" else operand * (group - 1))
    top = (2 if kind == "all_reduce" else 1) * operand * (group - 1)
    if isinstance(top, int):
        return top // group
    return as_dim(sympy.floor(top / sympy.Integer(group)))
