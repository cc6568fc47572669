"""The runtime shards and joins as `onnxpar.core.sharding` does, and one undoes the other."""

from itertools import permutations
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxpar.core import sharding
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar_format.boxes import ShardBox, SizedSharding, block, coordinates


@st.composite
def sharded_sizes(draw: st.DrawFn) -> SizedSharding:
    """Draws a sharding: fused dims, any order of atoms, even and uneven, some atoms replicating."""
    atoms = tuple(draw(st.lists(st.sampled_from([2, 3]), max_size=3)))
    free = draw(st.permutations(range(len(atoms))))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        parts = []
        for _ in range(draw(st.integers(1, 3))):
            taken = draw(st.integers(0, len(free)))
            parts.append((draw(st.integers(1, 7)), tuple(free[:taken])))
            free = free[taken:]
        dims.append(tuple(parts))
    return SizedSharding(atoms, tuple(dims))


def devices(sized: SizedSharding) -> int:
    return int(np.prod(sized.atoms, dtype=int))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(sharded_sizes())
def test_equals_the_transformers(sized: SizedSharding) -> None:
    mesh = Mesh((), sized.atoms)
    other = Sharding(tuple(tuple(Component(n, a) for n, a in dim) for dim in sized.dims))
    array = np.arange(1, 1 + np.prod(sized.shape)).reshape(sized.shape)
    parts = [sized.take(array, rank) for rank in range(devices(sized))]
    for rank, part in enumerate(parts):
        np.testing.assert_array_equal(part, sharding.split(array, other, mesh, rank))
    np.testing.assert_array_equal(sized.join(parts.__getitem__, array.dtype), array)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sharded_sizes())
def test_padding_is_not_read_and_owners_suffice(sized: SizedSharding) -> None:
    array = np.arange(1, 1 + np.prod(sized.shape)).reshape(sized.shape)
    asked: list[int] = []

    def part_of(rank: int) -> np.ndarray:
        asked.append(rank)
        part = sized.take(array, rank).copy()
        part[part == 0] = -1  # the array has no zero, so these are padding
        return part

    np.testing.assert_array_equal(sized.join(part_of, array.dtype), array)
    split = {a for dim in sized.dims for _, by in dim for a in by}
    assert len(asked) == np.prod([sized.atoms[a] for a in split], dtype=int)


def test_nested_split_of_ten_by_two_and_three() -> None:
    # 10 -> 2 blocks of 5 -> 3 blocks of 2 each: 0-2, 2-4, 4-5, and the same from 5 on.
    found = [block(10, (2, 3), coordinates(rank, (2, 3))) for rank in range(6)]
    assert [(b.start, b.valid, b.local) for b in found] == [
        (0, 2, 2), (2, 2, 2), (4, 1, 2), (5, 2, 2), (7, 2, 2), (9, 1, 2)
    ]  # fmt: skip


def test_an_unpadded_part_is_a_view() -> None:
    array = np.arange(32).reshape(8, 4)
    part = SizedSharding((2, 2), (((8, (0, 1)),), ((4, ()),))).take(array, 3)
    assert np.shares_memory(part, array)
    assert part.tolist() == array[6:].tolist()


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_order_of_atoms_is_order_of_blocks(order: tuple[int, ...]) -> None:
    atoms = (2, 3, 2)
    sized = SizedSharding(atoms, (((12, order),),))
    for rank in range(12):
        digits = coordinates(rank, atoms)
        place = 0
        for atom in order:
            place = place * atoms[atom] + digits[atom]
        assert sized.take(np.arange(12), rank).tolist() == [place]


def put(boxes: tuple[ShardBox, ...], part: NDArray[np.int64], array: NDArray[np.int64]) -> None:
    for box in boxes:
        array[tuple(slice(*i) for i in box.source)] += part[tuple(slice(*i) for i in box.local)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sharded_sizes())
def test_boxes_are_the_parts_of_the_ranks(sized: SizedSharding) -> None:
    array = np.arange(1, 1 + prod(sized.shape)).reshape(sized.shape)
    for rank in range(prod(sized.atoms)):
        part = sized.take(array, rank)
        mine = np.zeros_like(array)
        put(sized.boxes(rank, padded=True), part, mine)
        wanted = np.zeros_like(array)
        sized.put(wanted, part, rank)
        np.testing.assert_array_equal(mine, wanted)
        # Without padding the same elements follow one another as they do with it.
        dense = part[part != 0].reshape(sized.unpadded_shape(rank))
        again = np.zeros_like(array)
        put(sized.boxes(rank, padded=False), dense, again)
        np.testing.assert_array_equal(again, wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(sharded_sizes())
def test_an_unsharded_dim_of_merged_components_is_one_box(sized: SizedSharding) -> None:
    plain = SizedSharding(sized.atoms, tuple(tuple((n, ()) for n, _ in dim) for dim in sized.dims))
    (box,) = plain.boxes(0, padded=True)
    assert box.source == box.local == tuple((0, n) for n in plain.shape)
