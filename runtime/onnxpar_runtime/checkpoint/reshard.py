"""Makes another checkpoint of a checkpoint, for any mesh, with one piece in memory at a time.

Files are written one after another. Each piece of a tensor, of `PIECE_BYTES` at most, is copied
from the boxes of the source that it needs, so memory is bounded for tensors of any size. The sums
of the tensors are compared with those of the source. On request, a thread compares the SHA-256 of
the source's files meanwhile. The result gets its name only if all of them are equal.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import ShardBox
from onnxpar_format.checkpoint import (
    GENERATOR,
    SCHEMA,
    CheckpointContents,
    StoredShard,
    StoredTensor,
)
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import FileEntry
from onnxpar_format.manifest import FROM_FILES
from onnxpar_format.new_file import new_file
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.copying import Box, Source
from onnxpar_runtime.checkpoint.folder import finish, new_checkpoint, write_file
from onnxpar_runtime.checkpoint.layout import rank_file, stored_tensors
from onnxpar_runtime.checkpoint.restore import check_fits
from onnxpar_runtime.checkpoint.sums import modulus, sum_of
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tensor_file import Entry, header

Bytes = NDArray[np.uint8]
PIECE_BYTES = 1 << 25
SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Made:
    """What was written.

    Attributes:
        path: The folder or file.
        step: Number of steps that the run had done.
        tensors: Number of tensors.
        files: Number of files with tensors.
        bytes: Bytes of these files.
    """

    path: Path
    step: int
    tensors: int
    files: int
    bytes: int


def reshard(
    source: str | Path, target: str | Path, to: str | Path, *, verify: bool = False
) -> Made:
    """Writes a checkpoint as the ranks of a directory hold it.

    Args:
        source: The checkpoint, or a folder of checkpoints, whose last complete one is taken.
        target: The checkpoint to write, which must not exist.
        to: The directory.
        verify: Whether to compare the SHA-256 of the source's files. Sizes and the sums of tensors
            are always compared. A source without sums is always compared by SHA-256.

    Raises:
        DirectoryError: `to` cannot be read, or is not for training.
        CheckpointError: The source is incomplete or does not fit the directory, or the target
            cannot be written; nothing has been written then.
    """
    checkpoint, manifest = Checkpoint.last(source), Manifest.load(to)
    check_fits(checkpoint, manifest)
    return _write(checkpoint, stored_tensors(manifest), manifest.devices, Path(target), verify)


def merge(source: str | Path, target: str | Path, *, verify: bool = False) -> Made:
    """Writes a checkpoint with every tensor unsharded, in one file, as one device holds it.

    Args:
        source: As `reshard`.
        target: As `reshard`.
        verify: As `reshard`.

    Raises:
        CheckpointError: As `reshard`.
    """
    checkpoint = Checkpoint.last(source)
    tensors = {n: unsharded(t, rank_file(0)) for n, t in checkpoint.tensors.items()}
    return _write(checkpoint, tensors, 1, Path(target), verify)


def export_weights(
    source: str | Path,
    target: str | Path,
    kinds: Collection[str] = FROM_FILES,
    *,
    verify: bool = False,
) -> Made:
    """Writes trained parameters and running statistics, unsharded, by their names in the model.

    Args:
        source: As `reshard`.
        target: The safetensors file, which is replaced if it exists.
        kinds: Kinds of states; moments are named as their parameters are.
        verify: As `reshard`.

    Raises:
        CheckpointError: As `reshard`.
    """
    checkpoint, path = Checkpoint.last(source), Path(target)
    weights = sorted(
        (t for t in checkpoint.tensors.values() if t.kind in kinds), key=lambda t: t.parameter
    )
    parts = [(unsharded(tensor, path.name), tensor) for tensor in weights]
    with new_file(path, CheckpointError) as file, _verified(checkpoint, verify) as files:
        entry = files(file, parts, lambda tensor: tensor.parameter)
    return Made(path, checkpoint.progress.step, len(weights), 1, entry.bytes)


def unsharded(tensor: StoredTensor, file: str) -> StoredTensor:
    """Returns a tensor as one shard in a file."""
    box = tuple((0, n) for n in tensor.shape)
    shards = (StoredShard(file, tensor.shape, (ShardBox(box, box),)),) if tensor.bytes else ()
    return replace(tensor, shards=shards)


def _write(
    checkpoint: Checkpoint,
    tensors: Mapping[str, StoredTensor],
    devices: int,
    target: Path,
    verify: bool,
) -> Made:
    """Writes a checkpoint of these tensors' shards; the folder appears complete or not at all."""
    with new_checkpoint(target) as partial:
        with _verified(checkpoint, verify) as files:
            entries = {
                name: files(partial / name, parts, _name_in_file)
                for name, parts in _by_file(checkpoint, tensors).items()
            }
        summed = {n: replace(t, sum=files.sums.get(n, 0)) for n, t in tensors.items()}
        made = CheckpointContents(
            schema=SCHEMA,
            generator=GENERATOR,
            model=checkpoint.model,
            optimizer=checkpoint.optimizer,
            devices=devices,
            progress=checkpoint.progress,
            run=checkpoint.run,
            tensors=summed,
            files=entries,
        )
        finish(partial, made, target)
    total = sum(entry.bytes for entry in entries.values())
    return Made(target, checkpoint.progress.step, len(tensors), len(entries), total)


Parts = Sequence[tuple[StoredTensor, StoredTensor]]
"""Tensors with their one shard in a file, and the same tensors in the source."""


def _name_in_file(tensor: StoredTensor) -> str:
    """The name of a tensor's one shard."""
    return next((shard.name for shard in tensor.shards if shard.name), tensor.name)


def _by_file(checkpoint: Checkpoint, tensors: Mapping[str, StoredTensor]) -> dict[str, Parts]:
    found: dict[str, list[tuple[StoredTensor, StoredTensor]]] = {}
    for name, tensor in tensors.items():
        for shard in tensor.shards:
            part = replace(tensor, shards=(shard,)), checkpoint.tensors[name]
            found.setdefault(shard.file, []).append(part)
    return {file: found[file] for file in sorted(found)}


class _Files:
    """Writes files with pieces of a checkpoint, which is verified meanwhile.

    Attributes:
        sums: Sum of the elements written so far of each tensor that has elements, by its name.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._source = Source(checkpoint)
        self._checkpoint = checkpoint
        self._buffer: Bytes = np.empty(PIECE_BYTES, np.uint8)
        self.sums: dict[str, int] = {}

    def __call__(self, path: Path, parts: Parts, name: Callable[[StoredTensor], str]) -> FileEntry:
        """Writes the parts to a file, under the names that `name` gives them."""
        # Larger elements first, so that all tensors are aligned.
        ordered = sorted(parts, key=lambda part: (-part[0].itemsize, name(part[0])))
        entries = [Entry(name(part), part.dtype, _shape(part)) for part, _ in ordered]
        return write_file(path, self._pieces(header(entries), ordered))

    def _pieces(self, first: bytes, parts: Parts) -> Iterator[bytes | memoryview]:
        yield first
        for part, stored in parts:
            for shard in part.shards:
                for region in pieces_of(shard.shape, part.itemsize):
                    yield self._piece(part, stored, shard, region)
                    self._source.forget()

    def _piece(
        self, part: StoredTensor, stored: StoredTensor, shard: StoredShard, region: Box
    ) -> memoryview:
        shape = tuple(stop - start for start, stop in region)
        raw = self._buffer[: prod(shape) * part.itemsize]
        array: NDArray[Any] = raw.view(DTYPES[part.dtype].dtype).reshape(shape)
        self._source.fill(stored, array, [*_clipped(shard.boxes, region)])
        total = self.sums.get(stored.name, 0) + sum_of(array)
        self.sums[stored.name] = total % modulus(stored.itemsize)
        return raw.data

    def check(self) -> None:
        """Raises CheckpointError unless the tensors that were written have the source's sums."""
        for name, got in self.sums.items():
            tensor = self._checkpoint.tensors[name]
            if tensor.sum not in (None, got):
                files = ", ".join(dict.fromkeys(shard.file for shard in tensor.shards))
                raise CheckpointError(
                    f"{self._checkpoint.directory}: tensor {name!r} in {files}: its content has "
                    f"changed: expected the checksum {tensor.sum}, got {got}"
                )


@contextmanager
def _verified(checkpoint: Checkpoint, verify: bool) -> Iterator[_Files]:
    """Yields a writer of files; raises at the end if the checkpoint's files have changed."""
    unsummed = any(tensor.sum is None for tensor in checkpoint.tensors.values())
    names = sorted(checkpoint.files) if verify or unsummed else []
    pool = ThreadPoolExecutor(1, "onnxpar-verify")
    found = [pool.submit(checkpoint.verify_file, name) for name in names]
    try:
        files = _Files(checkpoint)
        yield files
        for each in found:
            each.result()
        files.check()
    finally:
        pool.shutdown(cancel_futures=True)


def _shape(part: StoredTensor) -> tuple[int, ...]:
    return part.shards[0].shape if part.shards else part.shape


def pieces_of(shape: Sequence[int], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[Box]:
    """Returns boxes that make up an array, each contiguous, in the order of its memory.

    Args:
        shape: Shape of the array.
        itemsize: Bytes of an element.
        limit: The most bytes of a box; a single element may be larger.
    """
    if not shape:
        yield ()
        return
    # The first dim of which one index fits: the indices of dims before it are visited one by one.
    fits = (d for d in range(len(shape)) if prod(shape[d + 1 :]) * itemsize <= limit)
    dim = next(fits, len(shape) - 1)
    rows = max(1, limit // max(1, prod(shape[dim + 1 :]) * itemsize))
    rest = tuple((0, n) for n in shape[dim + 1 :])
    for outer in product(*(range(n) for n in shape[:dim])):
        for start in range(0, shape[dim], rows):
            end = min(start + rows, shape[dim])
            yield (*((i, i + 1) for i in outer), (start, end), *rest)


def _clipped(boxes: Sequence[ShardBox], region: Box) -> Iterator[ShardBox]:
    """Yields the parts of the boxes in a region of the shard, relative to the region."""
    for box in boxes:
        common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box.local, region, strict=True)]
        if all(start < stop for start, stop in common):
            source = tuple(
                (start - local + origin, stop - local + origin)
                for (start, stop), (local, _), (origin, _) in zip(
                    common, box.local, box.source, strict=True
                )
            )
            local = tuple(
                (start - first, stop - first)
                for (start, stop), (first, _) in zip(common, region, strict=True)
            )
            yield ShardBox(source, local)
