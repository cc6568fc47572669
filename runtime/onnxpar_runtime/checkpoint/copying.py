"""Copies boxes of global tensors from the files of a checkpoint into arrays."""

import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import ShardBox
from onnxpar_format.checkpoint import StoredShard, StoredTensor
from onnxpar_format.dtypes import DTYPES
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.errors import CheckpointError, InputError
from onnxpar_runtime.tensor_file import read_tensors

Array = NDArray[Any]
Box = tuple[tuple[int, int], ...]


class Source:
    """The tensors of a checkpoint; they stay on the disk until they are read.

    Args:
        checkpoint: The checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Opens nothing yet."""
        self.checkpoint = checkpoint
        self._files: dict[str, dict[str, Array]] = {}

    def array(self, tensor: StoredTensor, shard: StoredShard) -> Array:
        """Returns a shard as its file has it.

        Raises:
            CheckpointError: The file cannot be read, or has another type or shape.
        """
        path = self.checkpoint.directory / shard.file
        if shard.file not in self._files:
            try:
                self._files[shard.file] = dict(read_tensors(path))
            except InputError as error:
                raise CheckpointError(str(error)) from None
        name = shard.name or tensor.name
        array = self._files[shard.file].get(name)
        wanted = DTYPES[tensor.dtype].dtype
        if array is None or array.shape != shard.shape or array.dtype != wanted:
            got = "nothing" if array is None else f"{array.dtype} {array.shape}"
            raise CheckpointError(f"{path}: {name!r}: expected {wanted} {shard.shape}, got {got}")
        return array

    def forget(self) -> None:
        """Gives back the memory of the files read so far: it counts as the process's own."""
        for arrays in self._files.values():
            base = next(iter(arrays.values()), None)
            while isinstance(base, np.ndarray):
                base = base.base
            if isinstance(base, mmap.mmap):
                base.madvise(mmap.MADV_DONTNEED)

    def fill(self, tensor: StoredTensor, target: Array, boxes: Sequence[ShardBox]) -> None:
        """Copies boxes of a tensor to their places in `target`.

        Raises:
            CheckpointError: As `array`.
        """
        for shard in tensor.shards:
            pairs = [pair for wanted in boxes for pair in _overlaps(wanted, shard.boxes)]
            if not pairs:
                continue
            array = self.array(tensor, shard)
            for to, source in pairs:
                target[_slices(to)] = array[_slices(source)]


def _overlaps(wanted: ShardBox, there: Sequence[ShardBox]) -> Iterator[tuple[Box, Box]]:
    """Yields the boxes of the common elements: in the target, and in the stored shard."""
    for box in there:
        both = tuple(
            (max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted.source, box.source, strict=True)
        )
        if all(start < stop for start, stop in both):
            yield _moved(both, wanted), _moved(both, box)


def _moved(common: Box, box: ShardBox) -> Box:
    """Returns a part of a box in the local coordinates of the box."""
    return tuple(
        (start - origin + local, stop - origin + local)
        for (start, stop), (origin, _), (local, _) in zip(
            common, box.source, box.local, strict=True
        )
    )


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
