"""Brings the parts of an output to rank 0, over whichever transport the ranks use."""

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.boxes import Cut
from onnxpar_runtime.collectives import Rank, World

Array = NDArray[Any]
# MPI counts are 32-bit in Open MPI 5.0; bytes are sent in pieces well below 2^31.
PIECE_BYTES = 1 << 28
_TAG = 1


@dataclass
class _Board:
    """Where the threads of one world leave parts for rank 0: gathering number -> rank -> part."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    parts: dict[int, dict[int, Array]] = field(default_factory=lambda: defaultdict(dict))
    done: dict[int, int] = field(default_factory=lambda: defaultdict(int))


_lock = threading.Lock()
_boards: "WeakKeyDictionary[World, _Board]" = WeakKeyDictionary()
_communicators: "WeakKeyDictionary[World, Any]" = WeakKeyDictionary()


def gather_to_root(rank: Rank, cut: Cut, part: Array) -> Array | None:
    """Returns the global array on rank 0 and None elsewhere. Every rank of the world must call it.

    Args:
        rank: This rank.
        cut: How the array is cut.
        part: This rank's part, of shape `cut.local_shape`.

    Raises:
        ValueError: The part does not have the local shape.
    """
    if part.shape != cut.local_shape:
        raise ValueError(f"expected a part of shape {cut.local_shape}, got {part.shape}")
    world = rank.world
    if not cut.is_split:
        # Each rank has all of it; nothing needs to move.
        return np.array(part) if rank.index == 0 else None
    if len(world.local_ranks) == world.size:
        return _gather_threads(rank, cut, part)
    return _gather_mpi(rank, cut, part)


def _gather_threads(rank: Rank, cut: Cut, part: Array) -> Array | None:
    with _lock:
        board = _boards.setdefault(rank.world, _Board())
    with board.lock:
        number = board.done[rank.index]
        board.done[rank.index] += 1
        board.parts[number][rank.index] = part
    # The reduction is a barrier that ends with an error, not a hang, when a rank has failed.
    rank.all_reduce(np.zeros(1, np.int64))
    if rank.index != 0:
        return None
    with board.lock:
        parts = board.parts.pop(number)
    return cut.join(parts.__getitem__, part.dtype)


def _gather_mpi(rank: Rank, cut: Cut, part: Array) -> Array | None:
    world = rank.world
    comm = _communicators.get(world)
    if comm is None:
        comm = world.comm.Dup()
        _communicators[world] = comm
    if rank.index == 0:

        def receive(source: int) -> Array:
            if source == 0:
                return part
            buffer = np.empty(cut.local_shape, part.dtype)
            for piece in _pieces(buffer):
                comm.Recv(piece, source=source, tag=_TAG)
            return buffer

        return cut.join(receive, part.dtype)
    if rank.index in cut.owners():
        for piece in _pieces(np.ascontiguousarray(part)):
            comm.Send(piece, dest=0, tag=_TAG)
    return None


def _pieces(array: Array) -> list[NDArray[np.uint8]]:
    """Returns the contiguous array's memory as runs of bytes that MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[i : i + PIECE_BYTES] for i in range(0, flat.size, PIECE_BYTES)]
