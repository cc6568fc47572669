"""Sharding: splitting then joining gives the tensor back; equal canonical forms, equal data."""

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, DimSharding, Sharding, is_even, split
from onnxpar.core.symbols import Symbol, SymbolTable, dim_symbol
from onnxpar_format.boxes import Block, block
from tests.shards import concrete, join
from tests.tiers import FULL

NONE = SymbolTable({})
MESHES = [
    Mesh.of(a=2),
    Mesh.of(a=3),
    Mesh.of(a=2, b=2),
    Mesh.of(a=2, b=3),
    Mesh.of(a=3, b=2),
    Mesh.of(a=2, b=2, c=2),
    Mesh.of(a=2, b=3, c=2),
]


@st.composite
def placed(draw: st.DrawFn, mesh: Mesh) -> tuple[list[list[list[int]]], list[int]]:
    """The atoms of each component of each dim, and the atoms left over."""
    order = list(draw(st.permutations(range(len(mesh.atoms)))))
    dims: list[list[list[int]]] = [
        [[] for _ in range(draw(st.integers(1, 3)))] for _ in range(draw(st.integers(1, 3)))
    ]
    slots = [component for dim in dims for component in dim]
    left: list[int] = []
    for atom in order:
        home = draw(st.integers(-1, len(slots) - 1))
        (left if home < 0 else slots[home]).append(atom)
    return dims, left


@st.composite
def shardings(draw: st.DrawFn) -> tuple[Mesh, Sharding]:
    """A sharding of up to three dims, each of up to three components of sizes 0 to 7."""
    mesh = draw(st.sampled_from(MESHES))
    dims, left = draw(placed(mesh))
    sizes = st.integers(0, 7)
    components = tuple(tuple(Component(draw(sizes), tuple(atoms)) for atoms in dim) for dim in dims)
    partial = [atom for atom in sorted(left) if draw(st.booleans())]
    reduction = draw(st.sampled_from(["sum", "max", "min", "prod"]))
    return mesh, Sharding(components, tuple(partial), reduction if partial else "sum")


def parts_of(shard: np.ndarray, count: int, reduction: str, seed: int) -> list[np.ndarray]:
    """Integers that reduce to `shard`, no one of them the neutral element everywhere."""
    rng = np.random.default_rng(seed)
    if reduction == "sum":
        parts = [rng.integers(-9, 10, shard.shape) for _ in range(count - 1)]
        return [shard - sum(parts, np.zeros_like(shard)), *parts]
    if reduction == "prod":
        # Signs: their product is one, whichever they are, once the first part takes it up.
        signs = [rng.choice([-1, 1], shard.shape) for _ in range(count - 1)]
        return [shard * prod(signs, start=np.ones_like(shard)), *signs]
    step = -1 if reduction == "max" else 1
    parts = [shard + step * rng.integers(0, 9, shard.shape) for _ in range(count)]
    parts[int(rng.integers(count))] = shard
    return parts


@settings(max_examples=300 if FULL else 100, deadline=None)
@given(shardings(), st.integers(0, 2**31))
def test_splitting_then_joining_gives_the_tensor_back(
    case: tuple[Mesh, Sharding], seed: int
) -> None:
    mesh, sharding = case
    sharding.validate(mesh, "x")
    shape = [int(s) for s in sharding.shape]
    array = np.random.default_rng(seed).integers(-99, 100, shape)
    shards = [split(array, sharding, mesh, rank) for rank in range(mesh.size)]
    if sharding.partial:
        for group in mesh.groups(sharding.partial):
            parts = parts_of(shards[group[0]], len(group), sharding.reduction, seed + group[0])
            for rank, part in zip(group, parts, strict=True):
                shards[rank] = part
    assert all(s.shape == tuple(sharding.local_shape(mesh, NONE)) for s in shards)
    assert np.array_equal(join(shards, sharding, mesh), array)


@settings(max_examples=300 if FULL else 100, deadline=None)
@given(shardings())
def test_the_canonical_form_holds_the_same_local_data(
    case: tuple[Mesh, Sharding],
) -> None:
    mesh, sharding = case
    canonical = sharding.canonical(mesh, NONE)
    assert canonical.canonical(mesh, NONE) == canonical
    assert canonical.strategy(mesh) == sharding.strategy(mesh)
    array = np.arange(1, 1 + prod(int(s) for s in sharding.shape)).reshape(
        [int(s) for s in sharding.shape]
    )
    for rank in range(mesh.size):
        assert np.array_equal(
            split(array, canonical, mesh, rank), split(array, sharding, mesh, rank)
        )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((Component(4, (0,)), Component(3)), (Component(12, (0,)),)),
        ((Component(1), Component(6, (0,))), (Component(6, (0,)), Component(1))),
        (
            (Component(2), Component(3), Component(4, (1,))),
            (Component(6), Component(4, (1,))),
        ),
        ((Component(5),), (Component(1), Component(5), Component(1))),
        # The first atom takes all of the major component.
        ((Component(2, (0,)), Component(6, (1,))), (Component(12, (0, 1)),)),
        ((Component(2, (0,)), Component(5, (1,))), (Component(10, (0, 1)),)),
    ],
)
def test_equal_layouts_have_one_canonical_form(one: DimSharding, other: DimSharding) -> None:
    mesh = Mesh.of(a=2, b=2)
    assert Sharding((one,)).canonical(mesh, NONE) == Sharding((other,)).canonical(mesh, NONE)


def test_an_uneven_component_is_not_merged_with_what_follows() -> None:
    mesh = Mesh.of(a=2)
    fused = Sharding(((Component(3, (0,)), Component(2)),))
    merged = Sharding(((Component(6, (0,)),),))
    assert fused.canonical(mesh, NONE) != merged.canonical(mesh, NONE)
    # 3 rows of 2 over 2 devices: two rows and one; 6 elements over 2 devices: three and three.
    assert split(np.arange(6), fused, mesh, 1).tolist() == [4, 5, 0, 0]
    assert split(np.arange(6), merged, mesh, 1).tolist() == [3, 4, 5]


def test_a_symbolic_component_merges_only_where_its_split_is_proved_even() -> None:
    mesh = Mesh.of(a=2)
    n = dim_symbol("n")
    fused = Sharding(((Component(n, (0,)), Component(8)),))
    even = fused.canonical(mesh, SymbolTable({"n": Symbol(divisor=2)}))
    assert even.dims == ((Component(8 * n, (0,)),),)
    assert fused.canonical(mesh, NONE).dims == fused.dims


@given(st.integers(0, 40), st.lists(st.integers(1, 4), max_size=3))
def test_blocks_cover_every_element_once_and_nest(size: int, parts: list[int]) -> None:
    seen: list[int] = []
    for flat in range(prod(parts)):
        position = [int(i) for i in np.unravel_index(flat, parts)] if parts else []
        here = block(size, parts, position)
        assert here.local == -(-size // prod(parts))
        seen += range(here.start, here.start + here.valid)
        if parts:
            outer = block(size, parts[:-1], position[:-1])
            if here.valid:
                assert outer.start <= here.start
                assert here.start + here.valid <= outer.start + outer.valid
    assert seen == list(range(size))


def test_a_split_by_two_atoms_differs_from_one_split_by_their_product() -> None:
    # 5 over 2 then 2: blocks of 3, each of pieces of 2. 5 over 4 at once would end 2, 2, 1, 0.
    assert [block(5, [2, 2], [i, j]) for i in range(2) for j in range(2)] == [
        Block(0, 2, 2),
        Block(2, 1, 2),
        Block(3, 2, 2),
        Block(5, 0, 2),
    ]


def test_facts_about_a_sharding() -> None:
    mesh = Mesh.of(dp=2, tp=4)
    n = dim_symbol("n")
    table = SymbolTable({"n": Symbol(divisor=8)})
    sharding = Sharding((((Component(n, (0,)), Component(8, (1, 2)))), (Component(3),)))
    assert sharding.shape == (8 * n, 3)
    assert sharding.strategy(mesh) == (8, 1)
    assert sharding.local_shape(mesh, table) == (n, 3)
    assert all(is_even(c, mesh, table) for dim in sharding.dims for c in dim)
    assert not is_even(Component(n, (0, 1, 2)), mesh, NONE)
    assert not sharding.is_replicated
    assert Sharding.replicated((n, 3)).is_replicated
    assert not Sharding.replicated((n, 3)).with_partial([0]).is_replicated
    assert sharding.describe(mesh) == "[(n:dp 8:tp), ~]"
    assert concrete(sharding, table, {"n": 16}).shape == (128, 3)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        (Sharding.of((4, 4), [(0,), (0,)]), "once"),
        (Sharding.of((4,), [(0,)], (0,)), "once"),
        (Sharding.of((4,), [(7,)]), "atom 7 is not an atom of the mesh"),
        (Sharding.of((4,), [()], (0,), "mean"), "reduction must be one of"),
    ],
)
def test_illegal_shardings_are_refused(sharding: Sharding, message: str) -> None:
    with pytest.raises(ShardingError, match=f"x: .*{message}"):
        sharding.validate(Mesh.of(a=2, b=2), "x")


def test_arrays_that_do_not_fit_are_refused() -> None:
    mesh = Mesh.of(a=2)
    sharding = Sharding.of((4,), [(0,)])
    with pytest.raises(ShardingError, match="shape"):
        split(np.zeros(5), sharding, mesh, 0)
    with pytest.raises(ShardingError, match="expected 2 shards, got 1"):
        join([np.zeros(2)], sharding, mesh)
    with pytest.raises(ShardingError, match="device 1"):
        join([np.zeros(2), np.zeros(3)], sharding, mesh)
