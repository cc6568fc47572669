"""Writes the weight files in one parallel pass over the model's weights.

Each of a few threads makes its own files, from front to back. It goes through the weights in the
order of the shards, and appends each file's part of a chunk, which is hashed and written while it
is in the cache. Threads share nothing and so do not wait for one another. They rarely wait for the
interpreter's lock: most of the work is hashing, and the rest is a few calls per chunk. Memory is
bounded by a few chunks for each thread, whatever the size of a tensor. Gaps between parts are
padding: zeros.
"""

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from threading import Event
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from onnxpar.emit.weight_layout import Shard, WeightFile, WeightLayout, stored_dtype
from onnxpar.emit.weight_sources import Bytes, reader
from onnxpar.partition.partitioned_model import Parameter
from onnxpar_format.boxes import Block
from onnxpar_format.entries import FileEntry

CHUNK = 1 << 20
"""Bytes of a shard that are gathered, hashed and written at a time; they fit into a cache.

Smaller chunks cost more time in the system, which then fills fewer pages at a time.
"""

SPAN = 32
"""The most chunks of the source that are read for one chunk of a shard."""

LANES = max(2, min(4, os.cpu_count() or 1))
"""Threads that read, hash and write."""

OPEN_FILES = 128
"""Output files that are open at once; macOS allows a process 256."""

_ZEROS = np.zeros(1 << 16, np.uint8)


def write_weights(
    parameters: Sequence[Parameter],
    layout: WeightLayout,
    folder: Path,
    *,
    ranks: Iterable[int] | None = None,
    chunk: int = CHUNK,
) -> dict[str, FileEntry]:
    """Writes the weight files of a layout.

    Args:
        parameters: The parameters, in any order; those without shards in the layout are left out.
        layout: Where each shard is stored.
        folder: An existing folder.
        ranks: Write only the files that these ranks read; None: all files.
        chunk: Bytes of a shard at a time.

    Returns:
        Checksum and size of each file written, by name.

    Raises:
        DirectoryError: A weight cannot be read.
        OSError: A file cannot be written.
    """
    wanted = None if ranks is None else frozenset(ranks)
    files = [f for f in layout.files.values() if wanted is None or wanted & set(f.ranks)]
    by_name = {p.name: p for p in parameters}
    stop = Event()
    written: dict[str, FileEntry] = {}
    with ThreadPoolExecutor(LANES) as pool:
        lanes = [
            pool.submit(_fill, lane, by_name, layout, chunk, stop) for lane in _lanes(files, folder)
        ]
        try:
            for lane in as_completed(lanes):
                written |= lane.result()
        finally:
            # After a failure or an interrupt, do not wait until the other threads are done.
            stop.set()
    return {f.name: written[f.name] for f in files}


def _lanes(files: Sequence[WeightFile], folder: Path) -> "list[_Files]":
    """Distributes files over threads, the largest first, each to the thread with the least work."""
    if len(files) == 1:
        # Hashing takes three times as long as writing: one thread for both would take a third more.
        return [_Files(files, folder, write=False), _Files(files, folder, hashed=False)]
    lanes: list[list[WeightFile]] = [[] for _ in range(min(LANES, len(files)))]
    for file in sorted(files, key=lambda f: -f.size):
        min(lanes, key=lambda lane: sum(f.size for f in lane)).append(file)
    return [_Files(lane, folder) for lane in lanes]


def _fill(
    files: "_Files",
    parameters: Mapping[str, Parameter],
    layout: WeightLayout,
    chunk: int,
    stop: Event,
) -> dict[str, FileEntry]:
    """Makes the files of one thread; returns early, with unfinished files, if `stop` is set."""
    with files:
        files.start()
        for name, shards in layout.shards.items():
            shards = tuple(s for s in shards if s.file in files)
            if shards and shards[0].length and not stop.is_set():
                _write_parameter(parameters[name], shards, files, chunk, stop)
        return files.finish()


@dataclass(frozen=True)
class _Chunk:
    """Rows `[low, high)` along one axis of a tensor, at one index of each axis before it.

    Attributes:
        low: First row.
        high: Index after the last row.
        first: Their first byte in the tensor.
        last: Index after their last byte.
        held: The shards that have a part of it, with their local indices along the axes before.
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
    chunk: int,
    stop: Event,
) -> None:
    """Appends the shards of one tensor to their files; each shard has another file."""
    dtype = parameter.source.dtype
    assert dtype is not None, "layout() refuses parameters without a type"
    itemsize, _ = stored_dtype(dtype)
    sizes = shards[0].sizes or (1,)
    blocks = [s.blocks or (Block(0, 1, 1),) for s in shards]
    starts = [files.size(s.file) for s in shards]
    axis, count = _rows(sizes, blocks[0], itemsize, chunk)
    row = prod(sizes[axis + 1 :]) * itemsize
    scratch = np.empty(count * prod(b.local for b in blocks[0][axis + 1 :]) * itemsize, np.uint8)
    unit = _unit(itemsize)
    with reader(parameter) as source:
        for piece in _chunks(sizes, blocks, axis, count, row):
            if stop.is_set():
                return
            data = source.read(piece.first, piece.last)
            rows = data.view(unit).reshape(piece.high - piece.low, *sizes[axis + 1 :], -1)
            for index, inside in piece.held:
                at = _place(blocks[index], axis, piece, inside)
                file = shards[index].file
                files.pad(file, starts[index] + at * itemsize)
                files.append(file, _part(rows, blocks[index][axis + 1 :], scratch))
    for shard, start in zip(shards, starts, strict=True):
        files.pad(shard.file, start + shard.length)


def _chunks(
    sizes: Sequence[int], blocks: Sequence[Sequence[Block]], axis: int, count: int, row: int
) -> Iterator[_Chunk]:
    """Yields the chunks that some shard needs, at most `count` rows of `row` bytes each.

    They ascend for every shard.
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
        for (begin, end), shards in held.items():
            for low in range(begin, end, count):
                high = min(low + count, end)
                first, last = (before + low) * row, (before + high) * row
                yield _Chunk(low, high, first, last, tuple(shards))


def _unit(itemsize: int) -> np.dtype[Any]:
    # A 16-byte complex number is copied as two halves, which are the last dim of a chunk.
    return np.dtype(f"u{min(itemsize, 8)}")


def _rows(
    sizes: Sequence[int], blocks: Sequence[Block], itemsize: int, chunk: int
) -> tuple[int, int]:
    """Returns the axis along which a tensor is split into chunks, and the rows of a chunk.

    It is the first axis whose rows are small enough.
    """
    for axis in range(len(sizes)):
        # With padding, a part may be larger than its row.
        part = prod(b.local for b in blocks[axis + 1 :]) * itemsize
        row = prod(sizes[axis + 1 :]) * itemsize
        count = min(chunk // max(part, 1), SPAN * chunk // max(row, 1))
        if count:
            return axis, count
    raise AssertionError("a chunk holds less than one element")


def _place(blocks: Sequence[Block], axis: int, piece: _Chunk, inside: Sequence[int]) -> int:
    """Returns the offset in a shard, in elements, of its part of a chunk."""
    at = 0
    for index, b in zip([*inside, piece.low - blocks[axis].start], blocks, strict=False):
        at = at * b.local + index
    return at * prod(b.local for b in blocks[axis + 1 :])


def _part(rows: NDArray[Any], trailing: Sequence[Block], scratch: Bytes) -> Bytes:
    """Returns a shard's part of a chunk, padded.

    Args:
        rows: The chunk's rows, which all belong to the shard; the halves of elements are the last
            dim.
        trailing: The shard's block of each component after the rows' component.
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


class _Files:
    """The files that one thread writes from front to back, and hashes.

    Args:
        files: The files.
        folder: Their folder.
        hashed: Hash them.
        write: Write them; False: only hash them.
    """

    def __init__(
        self, files: Sequence[WeightFile], folder: Path, *, hashed: bool = True, write: bool = True
    ) -> None:
        self._files = {f.name: f for f in files}
        self._folder = folder
        self._digest = {f.name: hashlib.sha256() for f in files} if hashed else {}
        self._write = write
        self._size: dict[str, int] = {}
        self._open: dict[str, BinaryIO] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def start(self) -> None:
        """Begins every file with its header."""
        for file in self._files.values():
            self.append(file.name, np.frombuffer(file.header, np.uint8))

    def size(self, name: str) -> int:
        return self._size[name]

    def append(self, name: str, data: Bytes) -> None:
        view = data.data
        if name in self._digest:
            self._digest[name].update(view)
        if self._write:
            stream = self._stream(name)
            done = 0
            while done < len(view):
                done += stream.write(view[done:])
        self._size[name] = self._size.get(name, 0) + len(view)

    def pad(self, name: str, size: int) -> None:
        """Appends zeros until the file has `size` bytes."""
        while self._size[name] < size:
            self.append(name, _ZEROS[: size - self._size[name]])

    def finish(self) -> dict[str, FileEntry]:
        return {n: FileEntry(d.hexdigest(), self._size[n]) for n, d in self._digest.items()}

    def _stream(self, name: str) -> BinaryIO:
        """Opens a file at its end; a new file gets all its blocks at once.

        To write 1 GiB in chunks then took 0.16 to 0.25 s, instead of 0.3 to 0.9 s (ext4, 2 cores).
        """
        if name in self._open:
            return self._open[name]
        if len(self._open) >= OPEN_FILES // LANES:
            self._open.pop(next(iter(self._open))).close()
        new = name not in self._size
        stream = self._open[name] = (self._folder / name).open("xb" if new else "r+b", buffering=0)
        if not new:
            stream.seek(self._size[name])
        elif self._files[name].size and hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(stream.fileno(), 0, self._files[name].size)
            except OSError as error:
                # Some file systems and C libraries cannot do it.
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        return stream
