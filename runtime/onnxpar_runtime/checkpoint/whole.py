"""Writes a checkpoint of complete tensors, which another program trained."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.checkpoint import (
    GENERATOR,
    SCHEMA,
    CheckpointContents,
    Progress,
    StoredTensor,
)
from onnxpar_format.dtypes import DTYPES, lossless
from onnxpar_runtime.checkpoint.folder import finish, new_checkpoint, write_file
from onnxpar_runtime.checkpoint.layout import kept_tensors, rank_file
from onnxpar_runtime.checkpoint.reshard import Made, unsharded
from onnxpar_runtime.checkpoint.sums import sum_of
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tensor_file import Entry, header, raw_bytes, read_tensors


def write_whole(
    manifest: Manifest,
    target: Path,
    arrays: Mapping[str, NDArray[Any]],
    progress: Progress,
    run: Mapping[str, Any],
) -> Made:
    """Writes a checkpoint for a directory.

    Args:
        manifest: The directory's manifest.
        target: The checkpoint to write, which must not exist.
        arrays: An array for each of `kept_tensors`.
        progress: How far training has come.
        run: The options of the training that are known.

    Raises:
        CheckpointError: An array has another shape, or a type whose conversion loses information;
            or the checkpoint cannot be written. Nothing has been written then.
    """
    tensors, parts, file = {}, [], rank_file(0)
    wanted = sorted(kept_tensors(manifest).values(), key=lambda t: -DTYPES[t.dtype].dtype.itemsize)
    for tensor in wanted:
        array = lossless(arrays[tensor.name], DTYPES[tensor.dtype].dtype)
        if array is None or array.shape != tensor.shape:
            raise CheckpointError(
                f"{tensor.kind} of {tensor.parameter!r}: expected {tensor.dtype} "
                f"{list(tensor.shape)}, got {arrays[tensor.name].dtype} "
                f"{list(arrays[tensor.name].shape)}"
            )
        stored = StoredTensor(**tensor._asdict(), sum=sum_of(np.atleast_1d(array)), shards=())
        tensors[tensor.name] = unsharded(stored, file)
        parts.append((Entry(tensor.name, tensor.dtype, tensor.shape), array))
    with new_checkpoint(target) as partial:
        pieces: list[bytes | memoryview] = [
            header([entry for entry, _ in parts]),
            *(raw_bytes(array) for _, array in parts),
        ]
        entry = write_file(partial / file, pieces)
        made = CheckpointContents(
            schema=SCHEMA,
            generator=GENERATOR,
            model=manifest.model,
            optimizer=manifest.trained().optimizer,
            devices=1,
            progress=progress,
            run=run,
            tensors=tensors,
            files={file: entry},
        )
        finish(partial, made, target)
    return Made(target, progress.step, len(tensors), 1, entry.bytes)


def check_weight(manifest: Manifest, name: str, array: NDArray[Any]) -> None:
    """Raises CheckpointError if a weight that is not trained differs from the directory's.

    Args:
        manifest: The directory's manifest.
        name: The weight; nothing is compared if the directory does not have it.
        array: The complete weight.
    """
    for shard in manifest.parameters[name].shards if name in manifest.parameters else ():
        own = read_tensors(manifest.directory / shard.file)[name]
        for box in shard.boxes:
            here, there = (tuple(slice(*r) for r in ranges) for ranges in (box.local, box.source))
            if not np.array_equal(own[here], array[there].astype(own.dtype)):
                raise CheckpointError(
                    f"{name!r} is not trained: expected its elements in {manifest.directory}, got "
                    "others; export and shard the module again after it has been loaded"
                )
