"""Reads a rank's shards from a checkpoint, which may have been written on any mesh."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_runtime.agree import together, together_for_long
from onnxpar_runtime.checkpoint.contents import Checkpoint
from onnxpar_runtime.checkpoint.copying import Source
from onnxpar_runtime.checkpoint.layout import held_states, kept_tensors
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import CheckpointError
from onnxpar_runtime.manifest import Manifest

Array = NDArray[Any]
SHOWN = 3


def open_checkpoint(rank: Rank, manifest: Manifest, path: str | Path) -> Checkpoint:
    """Returns a checkpoint that fits a directory. Every rank must call it.

    Every byte is read once, each file by one of the ranks, and compared with its checksum.

    Args:
        rank: This rank.
        manifest: The directory's manifest.
        path: The checkpoint, or a folder of checkpoints, whose last complete one is taken.

    Raises:
        CheckpointError: There is none, it is incomplete, or it has another model or optimizer.
        RankError: Likewise, on another rank.
    """

    def find() -> Checkpoint:
        checkpoint = Checkpoint.last(path)
        check_fits(checkpoint, manifest)
        return checkpoint

    checkpoint = together(rank, find)

    def verify() -> None:
        for number, name in enumerate(sorted(checkpoint.files)):
            if number % rank.world.size == rank.index:
                checkpoint.verify_file(name)

    together_for_long(rank, verify)
    return checkpoint


def check_fits(checkpoint: Checkpoint, manifest: Manifest) -> None:
    """Raises CheckpointError unless a checkpoint has exactly the states of the directory."""
    where = f"{checkpoint.directory} does not fit {manifest.directory}"
    optimizer = manifest.trained().optimizer
    wanted = kept_tensors(manifest)
    wrong = []
    for name, own in wanted.items():
        tensor = checkpoint.tensors.get(name)
        expected = f"expected {own.kind} {name!r} {own.dtype} {list(own.shape)}"
        if tensor is None:
            wrong.append(f"{expected}, got none")
        elif (tensor.kind, tensor.dtype, tensor.shape) != (own.kind, own.dtype, own.shape):
            wrong.append(f"{expected}, got {tensor.kind} {tensor.dtype} {list(tensor.shape)}")
    wrong += [
        f"got {tensor.kind} {name!r}, which the directory does not have"
        for name, tensor in checkpoint.tensors.items()
        if name not in wanted
    ]
    if checkpoint.optimizer != optimizer:
        wrong.insert(0, f"expected the optimizer {optimizer}, got {checkpoint.optimizer}")
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise CheckpointError(f"{where}: {'; '.join(wrong[:SHOWN])}{more}")


def load_states(
    rank: Rank,
    manifest: Manifest,
    checkpoint: Checkpoint,
    put: Callable[[str, Array], None],
) -> None:
    """Reads this rank's shard of every state, one after another. Every rank must call it.

    Args:
        rank: This rank.
        manifest: The directory's manifest, which the checkpoint fits.
        checkpoint: The checkpoint.
        put: Takes a state's name and this rank's shard, padding included.

    Raises:
        CheckpointError: A file cannot be read.
        RankError: Likewise, on another rank.
    """

    def load() -> None:
        source = Source(checkpoint)
        for state in held_states(manifest, rank.index):
            sharding = state.sharding(manifest.atoms)
            part = np.zeros(sharding.local_shape, DTYPES[state.dtype].dtype)
            boxes = sharding.boxes(rank.index % manifest.stage_devices, padded=True)
            source.fill(checkpoint.tensors[state.tensor.name], part, state.in_tensor(boxes))
            put(state.name, part)

    together_for_long(rank, load)


MUST_AGREE: Mapping[str, str] = {
    "seed": "--seed",
    "batch_size": "--batch-size",
    "validation": "--validation",
    "steps_per_epoch": (
        "the steps of an epoch (by the number of samples, and by `shard --symbol BATCH:divisor=N`, "
        "which leaves out the rest)"
    ),
}
"""Options on which the position in the data depends, by key."""


def check_run(checkpoint: Checkpoint, run: Mapping[str, Any]) -> list[str]:
    """Returns how the options of a resumed run differ from those of the checkpoint's run.

    Only `train` records the position in the data: a checkpoint of another program, or of a loop of
    one's own, has no seed among its options.

    Raises:
        CheckpointError: The run would take other samples.
    """
    before = checkpoint.run
    for key, option in MUST_AGREE.items() if "seed" in before else ():
        expected, got = ("none" if v is None else v for v in (before.get(key), run[key]))
        if expected != got:
            raise CheckpointError(
                f"{checkpoint.directory}: {option}: expected {expected}, as when it was written, "
                f"got {got}; the position in the data depends on it"
            )
    return [
        f"notice: {key} is {value}, but the checkpoint was written with {before[key]}"
        for key, value in run.items()
        if key not in MUST_AGREE and key in before and before[key] != value
    ]
