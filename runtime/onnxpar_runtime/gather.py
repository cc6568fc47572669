"""Gathers the shards of an output to rank 0, over the ranks' transport."""

import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import TensorEntry
from onnxpar_runtime.collectives import Rank, World
from onnxpar_runtime.inputs import sharding_of
from onnxpar_runtime.manifest import Manifest

Array = NDArray[Any]
# MPI counts are 32-bit in Open MPI 5.0; bytes are sent in pieces well below 2^31.
PIECE_BYTES = 1 << 28
_TAG = 1


@dataclass
class _Board:
    """The shards that the threads of one world leave for rank 0, by number of the call and rank."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: dict[int, dict[int, Array]] = field(default_factory=lambda: defaultdict(dict))
    done: dict[int, int] = field(default_factory=lambda: defaultdict(int))


_lock = threading.Lock()
_boards: "WeakKeyDictionary[World, _Board]" = WeakKeyDictionary()
_communicators: "WeakKeyDictionary[World, Any]" = WeakKeyDictionary()


def gather_to_root(
    rank: Rank,
    sharding: SizedSharding,
    part: Array | None,
    first: int = 0,
    dtype: np.dtype[Any] | None = None,
) -> Array | None:
    """Returns the whole array on rank 0 and None elsewhere. Every rank of the world must call it.

    Args:
        rank: This rank.
        sharding: The array's sharding over the mesh that holds it.
        part: This rank's shard, of shape `sharding.local_shape`; None on ranks outside that mesh.
        first: The mesh's first rank.
        dtype: The array's type; needed if rank 0 has no shard.

    Raises:
        ValueError: The shard does not have the local shape.
    """
    if part is not None:
        if part.shape != sharding.local_shape:
            raise ValueError(f"expected a shard of shape {sharding.local_shape}, got {part.shape}")
        dtype = part.dtype
    if dtype is None:
        raise ValueError("expected a dtype, since this rank holds no shard of the array")
    world = rank.world
    owners = tuple(first + place for place in sharding.owners())
    if owners == (0,):
        # Rank 0 has the whole array; no communication is needed.
        return np.array(part) if rank.index == 0 else None
    if len(world.local_ranks) == world.size:
        return _gather_threads(rank, sharding, part, first, dtype)
    return _gather_mpi(rank, sharding, part, first, dtype)


def _gather_threads(
    rank: Rank, sharding: SizedSharding, part: Array | None, first: int, dtype: np.dtype[Any]
) -> Array | None:
    with _lock:
        board = _boards.setdefault(rank.world, _Board())
    with board.lock:
        number = board.done[rank.index]
        board.done[rank.index] += 1
        if part is not None:
            board.parts[number][rank.index] = part
    # The reduction is a barrier; it raises an error, and does not hang, if a rank has failed.
    rank.all_reduce(np.zeros(1, np.int64))
    if rank.index != 0:
        return None
    with board.lock:
        parts = board.parts.pop(number)
    return sharding.join(lambda place: parts[first + place], dtype)


def _gather_mpi(
    rank: Rank, sharding: SizedSharding, part: Array | None, first: int, dtype: np.dtype[Any]
) -> Array | None:
    world = rank.world
    comm = _communicators.get(world)
    if comm is None:
        comm = world.comm.Dup()
        _communicators[world] = comm
    if rank.index == 0:

        def receive(place: int) -> Array:
            if first + place == 0 and part is not None:
                return part
            buffer = np.empty(sharding.local_shape, dtype)
            for piece in _pieces(buffer):
                comm.Recv(piece, source=first + place, tag=_TAG)
            return buffer

        return sharding.join(receive, dtype)
    if part is not None and rank.index - first in sharding.owners():
        for piece in _pieces(np.ascontiguousarray(part)):
            comm.Send(piece, dest=0, tag=_TAG)
    return None


def _pieces(array: Array) -> list[NDArray[np.uint8]]:
    """Returns the contiguous array's memory as runs of bytes that MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[i : i + PIECE_BYTES] for i in range(0, flat.size, PIECE_BYTES)]


def join_outputs(
    rank: Rank,
    manifest: Manifest,
    made: Mapping[TensorEntry, int],
    parts: Mapping[str, Array],
    values: Mapping[str, int],
) -> dict[str, Array] | None:
    """Returns the global outputs on rank 0, None elsewhere. Every rank must call it.

    Args:
        rank: This rank.
        manifest: The manifest.
        made: The outputs, and the stage that makes each.
        parts: This rank's shards of the outputs that its stage makes.
        values: Global values of the symbols.

    Raises:
        DirectoryError: The sharding of an output cannot be evaluated.
    """
    joined: dict[str, Array] = {}
    for spec, stage in made.items():
        part = parts.get(spec.name)
        shape = _local_shape(rank, manifest, spec, part)
        sharding = sharding_of(manifest, spec, values, shape)
        first = stage * manifest.stage_devices
        array = gather_to_root(rank, sharding, part, first, DTYPES[spec.dtype].dtype)
        if array is not None:
            joined[spec.name] = array
    return joined if rank.index == 0 else None


def _local_shape(
    rank: Rank, manifest: Manifest, spec: TensorEntry, part: Array | None
) -> tuple[int, ...] | None:
    """Returns the local shape, which ranks of other stages learn by a reduction."""
    if manifest.stages == 1:
        return None if part is None else part.shape
    sizes = np.zeros(len(spec.shape), np.int64) if part is None else np.array(part.shape, np.int64)
    return tuple(int(n) for n in rank.all_reduce(sizes, op="max")) if spec.shape else ()
