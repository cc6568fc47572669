"""The boxes of a checkpoint are the parts of the ranks, each element once, whatever the cut."""

from math import prod
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxpar_runtime.boxes import Cut
from onnxpar_runtime.checkpoint.layout import (
    boxes_of,
    kept_states,
    stored_tensors,
    unpadded_shape,
    written,
)
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.manifest_entries import ShardBox
from tests.runtime.hand_trained import regression


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Draws a cut: fused dims, any order of atoms, even and uneven, some atoms replicating."""
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
    return Cut(atoms, tuple(dims))


def put(boxes: tuple[ShardBox, ...], part: NDArray[np.int64], whole: NDArray[np.int64]) -> None:
    for box in boxes:
        whole[tuple(slice(*i) for i in box.source)] += part[tuple(slice(*i) for i in box.local)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cuts())
def test_boxes_are_the_parts_of_the_ranks(cut: Cut) -> None:
    whole = np.arange(1, 1 + prod(cut.shape)).reshape(cut.shape)
    for rank in range(prod(cut.atoms)):
        part = cut.take(whole, rank)
        mine = np.zeros_like(whole)
        put(boxes_of(cut, rank, padded=True), part, mine)
        wanted = np.zeros_like(whole)
        cut.put(wanted, part, rank)
        np.testing.assert_array_equal(mine, wanted)
        # Without padding the same elements follow one another as they do with it.
        dense = part[part != 0].reshape(unpadded_shape(cut, rank))
        again = np.zeros_like(whole)
        put(boxes_of(cut, rank, padded=False), dense, again)
        np.testing.assert_array_equal(again, wanted)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(cuts())
def test_a_whole_dim_of_merged_components_is_one_box(cut: Cut) -> None:
    plain = Cut(cut.atoms, tuple(tuple((n, ()) for n, _ in dim) for dim in cut.dims))
    (box,) = boxes_of(plain, 0, padded=True)
    assert box.source == box.local == tuple((0, n) for n in plain.shape)


def test_replicas_share_the_work_and_no_element_is_written_twice(tmp_path: Path) -> None:
    manifest = Manifest.load(regression(tmp_path / "a", ranks=2))
    assert [s.spec.name for s in kept_states(manifest)] == ["onnxpar.moment1.w", "w"]
    assert [(part.state.spec.name, part.rank) for part in written(manifest)] == [
        ("onnxpar.moment1.w", 0),
        ("w", 1),
    ]
    for tensor in stored_tensors(manifest).values():
        count = np.zeros(tensor.shape, np.int64)
        for shard in tensor.shards:
            put(shard.boxes, np.ones(shard.shape, np.int64), count)
        np.testing.assert_array_equal(count, 1)
