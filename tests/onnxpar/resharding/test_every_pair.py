"""Every pair of shardings on meshes of up to 8 devices, planned and played in numpy.

The player knows nothing of graphs: each step computes what a device then holds from what the
members of its group held before. `ONNXPAR_FULL=1` checks every pair (see `Player`), otherwise a
sample is played; a failure prints the seed of sample and order.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding, split
from onnxpar.core.symbols import SymbolTable
from onnxpar.resharding.lowering import permutation
from onnxpar.resharding.routes import ReshardStep, plan_reshard
from tests.shards import join
from tests.tiers import FULL

Ints = NDArray[Any]
NONE = SymbolTable({})
SAMPLE = 80 if FULL else 30
COMBINE = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


# -- the player ------------------------------------------------------------------------------


def pad(x: Ints, axis: int, size: int) -> Ints:
    width = [(0, 0)] * x.ndim
    width[axis] = (0, size - x.shape[axis])
    return np.pad(x, width)


def scatter(x: Ints, axis: int, parts: Sequence[int]) -> list[Ints]:
    """The shards of an axis that is split by `parts`, one after another, major first."""
    shards = [x]
    for count in parts:
        local = -(-shards[0].shape[axis] // count)
        shards = [
            part
            for shard in shards
            for part in np.split(pad(shard, axis, count * local), count, axis=axis)
        ]
    return shards


def gather(shards: list[Ints], axis: int, parts: Sequence[int], size: int) -> Ints:
    """The inverse of scatter on an axis of `size` elements."""
    sizes = [size]
    for count in parts:
        sizes.append(-(-sizes[-1] // count))
    for count, full in zip(reversed(parts), reversed(sizes[:-1]), strict=True):
        shards = [
            np.take(np.concatenate(shards[i : i + count], axis=axis), range(full), axis=axis)
            for i in range(0, len(shards), count)
        ]
    (result,) = shards
    return result


def view(sharding: Sharding, mesh: Mesh) -> list[int]:
    """Local sizes of all components."""
    return [-(-int(c.size) // mesh.count(c.atoms)) for dim in sharding.dims for c in dim]


def play(step: ReshardStep, shards: list[Ints], mesh: Mesh) -> tuple[list[Ints], int]:
    """What every device holds after a step, and the bytes that the busiest one sends."""
    before = view(step.before, mesh)
    locals_ = [shard.reshape(before) for shard in shards]
    parts = [mesh.atoms[a] for a in step.atoms]
    combine = COMBINE[step.before.reduction]

    def axis(place: tuple[int, int]) -> int:
        return sum(len(dim) for dim in step.before.dims[: place[0]]) + place[1]

    def gathered(place: tuple[int, int]) -> int:
        component = step.after.dims[place[0]][place[1]]
        return -(-int(component.size) // mesh.count(component.atoms))

    pairs = permutation(step, mesh) if step.kind == "permute" else []
    after: list[Ints] = []
    sent = 0
    for rank in range(mesh.size):
        group = mesh.group(rank, step.atoms)
        me, count = group.index(rank), len(group)
        held = [locals_[member] for member in group]
        mine = locals_[rank]
        if step.kind == "slice":
            assert step.target is not None
            mine = scatter(mine, axis(step.target), parts)[me]
        elif step.kind == "all_gather":
            assert step.source is not None
            sent = max(sent, mine.nbytes * (count - 1))
            mine = gather(held, axis(step.source), parts, gathered(step.source))
        elif step.kind == "all_reduce":
            sent = max(sent, 2 * mine.nbytes * (count - 1) // count)
            mine = held[0]
            for operand in held[1:]:
                mine = combine(mine, operand)
        elif step.kind == "reduce_scatter":
            assert step.target is not None
            shards_of = [scatter(x, axis(step.target), parts) for x in held]
            sent = max(sent, sum(shard.nbytes for shard in shards_of[0]) * (count - 1) // count)
            mine = shards_of[0][me]
            for theirs in shards_of[1:]:
                mine = combine(mine, theirs[me])
        elif step.kind == "all_to_all":
            assert step.source is not None and step.target is not None
            shards_of = [scatter(x, axis(step.target), parts) for x in held]
            sent = max(sent, sum(shard.nbytes for shard in shards_of[0]) * (count - 1) // count)
            received = [theirs[me] for theirs in shards_of]
            mine = gather(received, axis(step.source), parts, gathered(step.source))
        else:
            assert step.kind == "permute"
            assert sorted(p[0] for p in pairs) == sorted(p[1] for p in pairs) == list(range(count))
            (source,) = [p[0] for p in pairs if p[1] == me]
            sent = max(sent, held[source].nbytes)
            mine = held[source]
        after.append(mine.reshape([int(n) for n in step.after.local_shape(mesh, NONE)]))
    return after, sent


def holds(array: Ints, shards: list[Ints], target: Sharding, mesh: Mesh) -> None:
    """Fails unless the devices hold what the target says."""
    if target.partial:
        assert np.array_equal(join(shards, target, mesh), array)
        return
    for rank, shard in enumerate(shards):
        want, valid = split(array, target, mesh, rank), split(array != 0, target, mesh, rank)
        assert shard.shape == want.shape
        assert np.array_equal(shard[valid], want[valid]), f"device {rank}"
        assert not shard[~valid].any(), f"device {rank}: padding is not zero"


def play_through(
    array: Ints, shards: list[Ints], steps: Sequence[ReshardStep], target: Sharding, mesh: Mesh
) -> None:
    """Plays the steps of a reshard one after another and looks at the end."""
    for step in steps:
        shards, sent = play(step, shards, mesh)
        assert step.bytes == (0 if step.kind == "slice" else sent), step.kind
    holds(array, shards, target, mesh)


@dataclass
class Player:
    """Checks plans by their steps, each played once.

    A step moves elements by their position alone and reduces them one by one, so what it does to
    one array of different elements it does to all. Where every step brings the devices from what
    `before` says to what `after` says, and every `before` is the `after` that came before it seen
    as other components, the plan brings them from its source to its target.
    """

    mesh: Mesh
    array: Ints
    played: set[ReshardStep] = field(default_factory=set)
    same: dict[tuple[Sharding, Sharding], bool] = field(default_factory=dict)

    def check(self, steps: Sequence[ReshardStep], source: Sharding, target: Sharding) -> None:
        here = source
        for step in steps:
            assert self.is_same(here, step.before), f"{step.kind} takes {step.before} for {here}"
            if step not in self.played:
                shards = start_of(self.array, step.before, self.mesh)
                play_through(self.array, shards, [step], step.after, self.mesh)
                self.played.add(step)
            here = step.after
        assert self.is_same(here, target), f"ends with {here}"

    def is_same(self, one: Sharding, other: Sharding) -> bool:
        """Whether two shardings say that every device holds the same."""
        if one == other:
            return True
        key = (one, other)
        if key not in self.same:
            parts = [
                [split(self.array, s, self.mesh, rank) for rank in range(self.mesh.size)]
                for s in key
            ]
            self.same[key] = (one.partial, one.reduction) == (
                other.partial,
                other.reduction,
            ) and all(np.array_equal(a, b) for a, b in zip(*parts, strict=True))
        return self.same[key]


# -- the pairs -------------------------------------------------------------------------------


@cache
def placements(atoms: int, rank: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Every way to give atoms, in every order, to dims; the last run is the partial atoms."""
    found = []
    for homes in product(range(rank + 2), repeat=atoms):
        runs = [[a for a in range(atoms) if homes[a] == home] for home in range(rank + 1)]
        for orders in product(*(permutations(run) for run in runs[:rank])):
            found.append((*orders, tuple(runs[rank])))
    return tuple(found)


def start_of(array: Ints, source: Sharding, mesh: Mesh) -> list[Ints]:
    """What every device holds: its shard, or what reduces to it over the partial atoms."""
    reduction = source.reduction
    shards: list[Ints] = [split(array, source, mesh, rank) for rank in range(mesh.size)]
    for group in mesh.groups(source.partial) if source.partial else ():
        rng = np.random.default_rng([3, group[0]])
        shard = shards[group[0]]
        if reduction == "sum":
            parts: list[Ints] = [rng.integers(-9, 10, shard.shape) for _ in group[1:]]
            parts.append(shard - sum(parts))
        elif reduction == "prod":
            parts = [rng.choice([-1, 1], shard.shape) for _ in group[1:]]
            parts.append(shard * prod(parts))
        else:
            step = -1 if reduction == "max" else 1
            parts = [shard + step * rng.integers(1, 9, shard.shape) for _ in group[1:]]
            # Padding is zero on every device, as split and every step leave it.
            parts = [np.where(shard == 0, 0, part) for part in parts]
            parts.insert(int(rng.integers(len(group))), shard)
        for rank, part in zip(group, parts, strict=True):
            shards[rank] = part
    return shards


MESHES = [(2,), (3,), (5,), (7,), (2, 2), (2, 3), (3, 2), (2, 2, 2)]
SHAPES = [(8,), (7,), (1,), (8, 12), (5, 7), (3, 4, 5), (8, 4, 6)]


def check_pairs(
    mesh: Mesh, array: Ints, pairs: Iterable[tuple[Sharding, Sharding]], count: int, seed: int
) -> None:
    """Plays a sample of the plans from end to end and in the full tier every plan by its steps."""
    player = Player(mesh, array)
    # Odd, so that every reduction is met.
    stride = count // SAMPLE | 1
    for index, (source, target) in enumerate(pairs):
        steps = plan_reshard(source, target, mesh, NONE, array.itemsize)
        try:
            if FULL:
                player.check(steps, source, target)
            if index % stride == 0:
                play_through(array, start_of(array, source, mesh), steps, target, mesh)
        except AssertionError as error:
            raise AssertionError(
                f"seed {seed}: {source.describe(mesh)} -> {target.describe(mesh)}: {error}"
            ) from error


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("atoms", MESHES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair(atoms: tuple[int, ...], shape: tuple[int, ...]) -> None:
    mesh = Mesh.of({f"x{i}": size for i, size in enumerate(atoms)})
    every = placements(len(atoms), len(shape))
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    pairs = [(a, b) for a in every for b in every if set(b[-1]) <= set(a[-1])]
    rng.shuffle(pairs)
    if not FULL:
        del pairs[SAMPLE:]

    def shardings() -> Iterator[tuple[Sharding, Sharding]]:
        for index, (a, b) in enumerate(pairs):
            reduction = ("sum", "max", "min", "prod")[index % 4]
            source = Sharding.of(shape, a[:-1]).with_partial(a[-1], reduction)
            yield source, Sharding.of(shape, b[:-1]).with_partial(b[-1], reduction)

    array = np.arange(1, 1 + prod(shape)).reshape(shape)
    check_pairs(mesh, array, shardings(), len(pairs), seed)


FUSED = [
    (24,),
    (3, 8),
    (8, 3),
    (2, 12),
    (12, 2),
    (4, 6),
    (6, 4),
    (2, 3, 4),
    (4, 3, 2),
    (2, 2, 6),
]


def orbits(every: Sequence[Sharding], atoms: int) -> list[list[Sharding]]:
    """Shardings that are one but for the names of the atoms, which have equal sizes.

    Renaming the atoms of a source and of its targets alike renames what the search is asked and
    what it answers, and permutes the devices that play it. So one source of each is enough.
    """
    found: dict[frozenset[Sharding], list[Sharding]] = {}
    for sharding in every:
        names = (
            Sharding(
                tuple(
                    tuple(Component(c.size, tuple(order[a] for a in c.atoms)) for c in dim)
                    for dim in sharding.dims
                )
            )
            for order in permutations(range(atoms))
        )
        found.setdefault(frozenset(names), []).append(sharding)
    return list(found.values())


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("atoms", [(2, 2), (2, 3), (2, 2, 2)], ids=str)
def test_fused_dims(atoms: tuple[int, ...]) -> None:
    """A dim of 24 seen in many ways beside a plain one of 5, uneven splits among them."""
    mesh = Mesh.of({f"x{i}": size for i, size in enumerate(atoms)})
    every = []
    for sizes in FUSED:
        for runs in placements(len(atoms), len(sizes) + 1):
            if not runs[-1]:
                dim = tuple(Component(n, run) for n, run in zip(sizes, runs, strict=False))
                every.append(Sharding((dim, (Component(5, runs[len(sizes)]),))))
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    sources = every
    if len(atoms) > 2:
        # 1264 ways to write 712 shardings: only what the partitioner asks for, the canonical form.
        every = list(dict.fromkeys(s.canonical(mesh, NONE) for s in every))
        sources = [rng.choice(orbit) for orbit in orbits(every, len(atoms))]
    pairs: Iterable[tuple[Sharding, Sharding]] = product(sources, every)
    count = len(sources) * len(every)
    if not FULL:
        count = SAMPLE
        pairs = [(rng.choice(sources), rng.choice(every)) for _ in range(count)]
    check_pairs(mesh, np.arange(1, 121).reshape(24, 5), pairs, count, seed)
