"""Writes the weight files in one pass over the model's weights.

Every tensor is read once, in chunks; each chunk's part of every shard is appended to that shard's
file. Parts arrive in the order of the shard, so files are written and hashed as streams, and what a
part leaves out between two is padding: zeros. Hashing costs more than copying, so files are hashed
and written by several threads. Memory is bounded by a few chunks, whatever the size of a tensor.
"""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product, zip_longest
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from onnxpar.artifacts.sources import Bytes, reader
from onnxpar.passes.partitioned import Parameter
from onnxpar.passes.weight_layout import Shard, WeightLayout, stored_dtype
from onnxpar.sharding import Block

CHUNK = 1 << 20
"""Bytes read at a time: a chunk is read, gathered, hashed, written, and should stay in a cache.

Chunks of 8 MiB took twice the time in the system on a machine with 2 cores, those of 256 KiB a
third more in the interpreter.
"""

CHUNKS = 8
"""Chunks that are under way at once."""

LANES = max(2, min(4, os.cpu_count() or 1))
"""Threads that hash and write."""

MIN_RUN = 1 << 10
"""Bytes; shorter runs are sorted into shards faster in memory than by the system while it reads."""

MAX_RUNS = 1024
"""Runs that one system call reads, Linux's and macOS's limit."""

OPEN_FILES = 128
"""Output files kept open at once; a process may have 256 on macOS."""

_ZEROS = np.zeros(1 << 16, np.uint8)


@dataclass(frozen=True)
class Written:
    """A file that was written: its length in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


def write_weights(
    parameters: Sequence[Parameter],
    layout: WeightLayout,
    folder: Path,
    *,
    ranks: Iterable[int] | None = None,
    chunk: int = CHUNK,
) -> dict[str, Written]:
    """Writes the weight files of a layout.

    Args:
        parameters: The parameters, in any order; those without a place are left out.
        layout: Where each shard lies.
        folder: An existing folder.
        ranks: Write only what these ranks read; None: everything.
        chunk: Bytes read at a time.

    Returns:
        Length and checksum of each file written, by name.

    Raises:
        ArtifactError: A weight cannot be read.
        OSError: A file cannot be written.
    """
    wanted = None if ranks is None else frozenset(ranks)
    by_name = {p.name: p for p in parameters}
    slots = deque(_Slot(np.empty(chunk, np.uint8)) for _ in range(CHUNKS))
    sizes = {name: file.size for name, file in layout.files.items()}
    with _Files(folder, sizes) as files:
        for file in layout.files.values():
            if wanted is None or wanted & set(file.ranks):
                files.append(file.name, np.frombuffer(file.header, np.uint8))
        for name, shards in layout.shards.items():
            shards = tuple(s for s in shards if s.file in files)
            if shards and shards[0].length:
                _write_parameter(by_name[name], shards, files, slots, chunk)
        return files.finish()


@dataclass
class _Slot:
    """Memory for one chunk, and what still reads it."""

    stage: Bytes
    scratch: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    readers: "list[Future[Any]]" = field(default_factory=list)

    def free(self, size: int) -> None:
        """Waits until nobody reads it, and makes `size` bytes of scratch memory."""
        for future in self.readers:
            future.result()
        self.readers = []
        if self.scratch.size < size:
            self.scratch = np.empty(size, np.uint8)


@dataclass(frozen=True)
class _Chunk:
    """Rows `[low, high)` along one axis of a tensor, at one place along the axes before it.

    Attributes:
        low: First row.
        high: Index after the last row.
        first: Their first byte in the tensor.
        last: Index after their last byte.
        held: Which shards may have a part, each with its local indices along the axes before.
    """

    low: int
    high: int
    first: int
    last: int
    held: tuple[tuple[int, tuple[int, ...]], ...]


def _write_parameter(
    parameter: Parameter,
    shards: Sequence[Shard],
    files: "_Files",
    slots: "deque[_Slot]",
    chunk: int,
) -> None:
    """Appends every shard of one tensor to its file; no two shards are of one file."""
    dtype = parameter.source.dtype
    assert dtype is not None, "layout() refuses parameters without a type"
    itemsize, _ = stored_dtype(dtype)
    sizes = shards[0].sizes or (1,)
    blocks = [s.blocks or (Block(0, 1, 1),) for s in shards]
    starts = [files.size(s.file) for s in shards]
    axis = _chunk_axis(sizes, itemsize, chunk)
    row = prod(sizes[axis + 1 :]) * itemsize
    # Padding may make the parts larger than the rows that they are of.
    apart = len({b[axis] for b in blocks})
    parts = prod(b.local for b in blocks[0][axis + 1 :]) * itemsize * (len(blocks) // apart)
    count = max(1, chunk // max(row, parts))
    unit = _unit(itemsize)
    with reader(parameter) as source:
        for piece in _chunks(sizes, blocks, axis, count, row):
            slot = slots.popleft()
            slots.append(slot)
            slot.free(count * parts)
            scratch = slot.scratch
            ready = _columns(piece, blocks, axis, sizes, itemsize, scratch)
            if not ready or not source.scatter(piece.first, _interleaved(ready)):
                ready = {}
                data = source.read(piece.first, piece.last, slot.stage)
                rows = data.view(unit).reshape(piece.high - piece.low, *sizes[axis + 1 :], -1)
            for index, inside in piece.held:
                if index in ready:
                    part = ready[index].reshape(-1)
                else:
                    part = _part(rows, blocks[index][axis + 1 :], scratch)
                    if np.may_share_memory(part, scratch):
                        scratch = scratch[part.size :]
                at = _place(blocks[index], axis, piece, inside)
                file = shards[index].file
                slot.readers += files.pad(file, starts[index] + at * itemsize)
                slot.readers += files.append(file, part)
    last = slots[-1].readers
    for shard, start in zip(shards, starts, strict=True):
        last += files.pad(shard.file, start + shard.length)


def _chunks(
    sizes: Sequence[int], blocks: Sequence[Sequence[Block]], axis: int, count: int, row: int
) -> Iterator[_Chunk]:
    """Yields the chunks that some shard needs, at most `count` rows of `row` bytes each.

    They ascend for every shard; shards of different rows take turns, so that their files are hashed
    at the same time.
    """
    for outer in product(*(range(n) for n in sizes[:axis])):
        held: dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]] = {}
        for index, mine in enumerate(blocks):
            inside = tuple(g - b.start for g, b in zip(outer, mine, strict=False))
            if all(0 <= i < b.valid for i, b in zip(inside, mine, strict=False)):
                rows = (mine[axis].start, mine[axis].start + mine[axis].valid)
                held.setdefault(rows, []).append((index, inside))
        before = 0
        for g, n in zip(outer, sizes, strict=False):
            before = before * n + g
        before *= sizes[axis]
        for turn in zip_longest(*(range(*rows, count) for rows in held)):
            for low, (rows, shards) in zip(turn, held.items(), strict=True):
                if low is not None:
                    high = min(low + count, rows[1])
                    first, last = (before + low) * row, (before + high) * row
                    yield _Chunk(low, high, first, last, tuple(shards))


def _unit(itemsize: int) -> np.dtype[Any]:
    # 16-byte complex numbers are copied as two halves; the last dim of a chunk holds them.
    return np.dtype(f"u{min(itemsize, 8)}")


def _chunk_axis(sizes: Sequence[int], itemsize: int, chunk: int) -> int:
    """Returns the first axis of which one index is no more than a chunk."""
    for axis in range(len(sizes)):
        if prod(sizes[axis + 1 :]) * itemsize <= chunk:
            return axis
    raise AssertionError("a chunk holds less than one element")


def _place(blocks: Sequence[Block], axis: int, piece: _Chunk, inside: Sequence[int]) -> int:
    """Returns where in a shard its part of a chunk begins, in elements."""
    at = 0
    for index, b in zip([*inside, piece.low - blocks[axis].start], blocks, strict=False):
        at = at * b.local + index
    return at * prod(b.local for b in blocks[axis + 1 :])


def _part(rows: NDArray[Any], trailing: Sequence[Block], scratch: Bytes) -> Bytes:
    """Returns a shard's part of a chunk, padded.

    Args:
        rows: The chunk's rows, all of them the shard's; the halves of elements are the last dim.
        trailing: The shard's block of each component after the one that the rows index.
        scratch: Memory for a part that is not contiguous.
    """
    picked = rows[(slice(None), *(slice(b.start, b.start + b.valid) for b in trailing))]
    local = (len(rows), *(b.local for b in trailing), rows.shape[-1])
    if picked.shape == local and picked.flags.c_contiguous:
        return picked.reshape(-1).view(np.uint8)
    length = prod(local) * rows.itemsize
    room = scratch[:length].view(rows.dtype).reshape(local)
    if picked.shape != local:
        room[...] = 0
    room[tuple(slice(0, n) for n in picked.shape)] = picked
    return scratch[:length]


def _columns(
    piece: _Chunk,
    blocks: Sequence[Sequence[Block]],
    axis: int,
    sizes: Sequence[int],
    itemsize: int,
    scratch: Bytes,
) -> dict[int, Bytes]:
    """Returns memory for the parts of a chunk whose runs take turns in the file, none left out.

    That is so where one component alone is split after the one that rows index, evenly, and all of
    its shards are wanted. Elsewhere nothing is returned.

    Returns:
        By shard, in the order in the file: its part as [runs, bytes of a run].
    """
    held = [index for index, _ in piece.held]
    split = [
        t for t in range(axis + 1, len(sizes)) if any(blocks[i][t].local != sizes[t] for i in held)
    ]
    if len(split) != 1:
        return {}
    (t,) = split
    held.sort(key=lambda i: blocks[i][t].start)
    inner = prod(sizes[t + 1 :]) * itemsize
    runs = (piece.high - piece.low) * prod(sizes[axis + 1 : t])
    parts: dict[int, Bytes] = {}
    position = 0
    for index in held:
        b = blocks[index][t]
        if b.start != position or b.valid != b.local or b.valid * inner < MIN_RUN:
            return {}
        position += b.valid
        length = runs * b.valid * inner
        parts[index] = scratch[:length].reshape(runs, b.valid * inner)
        scratch = scratch[length:]
    return parts if position == sizes[t] and runs * len(held) <= MAX_RUNS else {}


def _interleaved(parts: dict[int, Bytes]) -> list[Bytes]:
    return [run for turn in zip(*parts.values(), strict=True) for run in turn]


class _Files:
    """Files that are appended to and hashed at the same time, each in its order."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._lanes = [_Lane(folder, sizes) for _ in range(LANES)]
        self._lane: dict[str, int] = {}
        self._digest: dict[str, Any] = {}
        self._size: dict[str, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for lane in self._lanes:
            lane.close()

    def __contains__(self, name: str) -> bool:
        return name in self._size

    def size(self, name: str) -> int:
        return self._size[name]

    def append(self, name: str, data: Bytes) -> "list[Future[Any]]":
        """Begins to append bytes; `data` must not change until the futures returned are done."""
        if name not in self._size:
            self._lane[name] = len(self._lane)
            self._digest[name] = hashlib.sha256()
            self._size[name] = 0
        view, lane = data.data, self._lane[name]
        self._size[name] += len(view)
        # Two lanes, so that one file alone, of what all ranks hold, is not slower than it must be.
        return [
            self._lanes[lane % LANES].submit(self._digest[name].update, view),
            self._lanes[(lane + 1) % LANES].append(name, view),
        ]

    def pad(self, name: str, size: int) -> "list[Future[Any]]":
        """Begins to append zeros until the file has `size` bytes."""
        done = []
        while self._size[name] < size:
            done += self.append(name, _ZEROS[: size - self._size[name]])
        return done

    def finish(self) -> dict[str, Written]:
        """Waits until everything is written, and returns what is."""
        for lane in self._lanes:
            lane.drain()
        return {n: Written(size, self._digest[n].hexdigest()) for n, size in self._size.items()}


class _Lane:
    """One thread that does what it is given in order, and the files that it writes."""

    def __init__(self, folder: Path, sizes: Mapping[str, int]) -> None:
        self._folder = folder
        self._sizes = sizes
        self._written: dict[str, int] = {}
        self._thread = ThreadPoolExecutor(1)
        self._open: dict[str, BinaryIO] = {}
        self._failed: BaseException | None = None

    def submit(self, task: Callable[..., object], *arguments: object) -> "Future[Any]":
        return self._thread.submit(self._guard, task, *arguments)

    def append(self, name: str, view: memoryview) -> "Future[Any]":
        return self.submit(self._append, name, view)

    def drain(self) -> None:
        """Waits for all that was submitted; raises what it raised."""
        self._thread.submit(self._raise).result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        for stream in self._open.values():
            stream.close()

    def _guard(self, task: Callable[..., object], *arguments: object) -> None:
        # After a failure the rest would only leave holes: it is not done, and fails alike.
        self._raise()
        try:
            task(*arguments)
        except BaseException as error:
            self._failed = error
            raise

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _append(self, name: str, view: memoryview) -> None:
        stream = self._open.pop(name, None)
        if stream is None:
            if len(self._open) >= OPEN_FILES // LANES:
                self._open.pop(next(iter(self._open))).close()
            stream = self._stream(name)
        self._open[name] = stream
        done = 0
        while done < len(view):
            done += stream.write(view[done:])
        self._written[name] += len(view)

    def _stream(self, name: str) -> BinaryIO:
        """Opens a file at the place where it was left; a new one gets all its blocks at once.

        Writing 1 GiB in pieces took 0.16 to 0.25 s so, 0.3 to 0.9 s where it grew (ext4, 2 cores).
        """
        path = self._folder / name
        if name in self._written:
            stream = path.open("r+b", buffering=0)
            stream.seek(self._written[name])
            return stream
        self._written[name] = 0
        stream = path.open("xb", buffering=0)
        if self._sizes[name] and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(stream.fileno(), 0, self._sizes[name])
        return stream
