"""What a checkpoint holds is written by one rank each, and replicas share the work."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import ShardBox
from onnxpar_runtime.checkpoint.layout import kept_states, stored_tensors, written
from onnxpar_runtime.manifest import Manifest
from tests.runtime.hand_trained import regression


def put(boxes: tuple[ShardBox, ...], part: NDArray[np.int64], array: NDArray[np.int64]) -> None:
    for box in boxes:
        array[tuple(slice(*i) for i in box.source)] += part[tuple(slice(*i) for i in box.local)]


def test_replicas_share_the_work_and_no_element_is_written_twice(tmp_path: Path) -> None:
    manifest = Manifest.load(regression(tmp_path / "a", ranks=2))
    assert [s.name for s in kept_states(manifest)] == ["onnxpar.moment1.w", "w"]
    assert [(part.state.name, part.rank) for part in written(manifest)] == [
        ("onnxpar.moment1.w", 0),
        ("w", 1),
    ]
    for tensor in stored_tensors(manifest).values():
        count = np.zeros(tensor.shape, np.int64)
        for shard in tensor.shards:
            put(shard.boxes, np.ones(shard.shape, np.int64), count)
        np.testing.assert_array_equal(count, 1)
