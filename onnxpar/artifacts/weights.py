"""Writes the weight files in one pass over the model's weights.

Every tensor is read once, front to back, in chunks; each chunk's part of every shard is appended to
that shard's file. Parts arrive in ascending order in the global tensor and hence in every shard, so
files are written and hashed as streams, and what a part leaves out between two is padding: zeros.
Memory is bounded by a few chunks, whatever the size of a tensor.
"""

import hashlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from onnxpar.artifacts.sources import Bytes, Reader, reader
from onnxpar.passes.layout import Shard, WeightLayout, stored_dtype
from onnxpar.passes.partitioned import Parameter
from onnxpar.sharding import Block

CHUNK = 8 << 20
"""Bytes read at a time: large enough that a system call costs nothing, small enough for caches."""

OPEN_FILES = 128
"""Output files kept open at once; a process may have 256 on macOS."""

# Below this a hand-over to the hashing thread costs more than hashing.
_THREADED = 1 << 18
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
    with ThreadPoolExecutor(2) as pool, _Files(folder, pool) as files:
        for file in layout.files.values():
            if wanted is None or wanted & set(file.ranks):
                files.append(file.name, np.frombuffer(file.header, np.uint8))
        for name, shards in layout.shards.items():
            shards = tuple(s for s in shards if s.file in files)
            if shards and shards[0].length:
                _write_parameter(by_name[name], shards, files, pool, chunk)
        return files.written()


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
    pool: ThreadPoolExecutor,
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
    count = max(1, chunk // row) if row else 1
    scratch = np.empty(min(count, sizes[axis]) * row, np.uint8)
    unit = _unit(itemsize)
    chunks = _chunks(sizes, blocks, axis, count, row)
    with (
        reader(parameter) as source,
        closing(_read_ahead(source, chunks, scratch.size, pool)) as pieces,
    ):
        for piece, data in pieces:
            rows = data.view(unit).reshape(piece.high - piece.low, *sizes[axis + 1 :], -1)
            for index, inside in piece.held:
                at, part = _part(rows, blocks[index], axis, piece, inside, scratch)
                if part is not None:
                    file = shards[index].file
                    files.pad(file, starts[index] + at * itemsize)
                    files.append(file, part)
    for shard, start in zip(shards, starts, strict=True):
        files.pad(shard.file, start + shard.length)


def _chunks(
    sizes: Sequence[int], blocks: Sequence[Sequence[Block]], axis: int, count: int, row: int
) -> Iterator[_Chunk]:
    """Yields the chunks that some shard needs, at most `count` rows of `row` bytes, ascending."""
    for outer in product(*(range(n) for n in sizes[:axis])):
        held = tuple(
            (index, tuple(g - b.start for g, b in zip(outer, mine, strict=False)))
            for index, mine in enumerate(blocks)
            if all(b.start <= g < b.start + b.valid for g, b in zip(outer, mine, strict=False))
        )
        before = 0
        for g, n in zip(outer, sizes, strict=False):
            before = before * n + g
        before *= sizes[axis]
        for low, high in _ranges([blocks[i][axis] for i, _ in held], count):
            yield _Chunk(low, high, (before + low) * row, (before + high) * row, held)


def _read_ahead(
    source: Reader, chunks: Iterator[_Chunk], size: int, pool: ThreadPoolExecutor
) -> Generator[tuple[_Chunk, Bytes], None, None]:
    """Yields each chunk with its bytes, while the next one is being read."""
    memory = [np.empty(size, np.uint8), np.empty(size, np.uint8)]

    def begin() -> tuple[_Chunk, Future[Bytes]] | None:
        chunk = next(chunks, None)
        if chunk is None:
            return None
        memory.reverse()
        return chunk, pool.submit(source.read, chunk.first, chunk.last, memory[0])

    ahead = begin()
    try:
        while ahead is not None:
            chunk, future = ahead
            ahead = None
            data = future.result()
            ahead = begin()
            yield chunk, data
    finally:
        # The reader's file must not be closed under it.
        if ahead is not None:
            wait([ahead[1]])


def _unit(itemsize: int) -> np.dtype[Any]:
    # 16-byte complex numbers are copied as two halves; the last dim of a chunk holds them.
    return np.dtype(f"u{min(itemsize, 8)}")


def _chunk_axis(sizes: Sequence[int], itemsize: int, chunk: int) -> int:
    """Returns the first axis of which one index is no more than a chunk."""
    for axis in range(len(sizes)):
        if prod(sizes[axis + 1 :]) * itemsize <= chunk:
            return axis
    raise AssertionError("a chunk holds less than one element")


def _ranges(blocks: Sequence[Block], count: int) -> Iterator[tuple[int, int]]:
    """Yields ranges of at most `count` indices that together cover what the blocks need."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted((b.start, b.start + b.valid) for b in blocks if b.valid):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    for start, stop in merged:
        for first in range(start, stop, count):
            yield first, min(first + count, stop)


def _part(
    rows: NDArray[Any],
    blocks: Sequence[Block],
    axis: int,
    piece: _Chunk,
    inside: Sequence[int],
    scratch: Bytes,
) -> tuple[int, Bytes | None]:
    """Returns a shard's part of a chunk, and the place of its first element in the shard.

    Args:
        rows: The chunk's rows, and the halves of elements as last dim.
        blocks: The shard's block of each component.
        axis: Component that the rows index.
        piece: The chunk.
        inside: Local indices along the components before `axis`.
        scratch: Memory for a part that is not contiguous, as long as the rows.
    """
    mine = blocks[axis]
    low = piece.low
    first, last = max(low, mine.start), min(piece.high, mine.start + mine.valid)
    if first >= last:
        return 0, None
    trailing = blocks[axis + 1 :]
    at = 0
    for index, b in zip([*inside, first - mine.start], blocks, strict=False):
        at = at * b.local + index
    at *= prod(b.local for b in trailing)
    picked = rows[
        (slice(first - low, last - low), *(slice(b.start, b.start + b.valid) for b in trailing))
    ]
    local = (last - first, *(b.local for b in trailing), rows.shape[-1])
    if picked.shape == local and picked.flags.c_contiguous:
        return at, picked.reshape(-1).view(np.uint8)
    length = prod(local) * rows.itemsize
    room = scratch[:length].view(rows.dtype).reshape(local)
    if picked.shape != local:
        room[...] = 0
    room[tuple(slice(0, n) for n in picked.shape)] = picked
    return at, scratch[:length]


class _Files:
    """Files that are appended to and hashed together, few of them open at a time."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._folder = folder
        self._pool = pool
        self._open: dict[str, BinaryIO] = {}
        self._digest: dict[str, Any] = {}
        self._size: dict[str, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._open.values():
            stream.close()

    def __contains__(self, name: str) -> bool:
        return name in self._size

    def size(self, name: str) -> int:
        return self._size[name]

    def append(self, name: str, data: Bytes) -> None:
        """Appends bytes; returns when `data` may be reused."""
        digest = self._digest.setdefault(name, hashlib.sha256())
        stream = self._stream(name)
        view = data.data
        if len(view) < _THREADED:
            digest.update(view)
            _write(stream, view)
        else:
            hashed = self._pool.submit(digest.update, view)
            try:
                _write(stream, view)
            finally:
                hashed.result()
        self._size[name] = self._size.get(name, 0) + len(view)

    def pad(self, name: str, size: int) -> None:
        """Appends zeros until the file has `size` bytes."""
        while self._size[name] < size:
            self.append(name, _ZEROS[: size - self._size[name]])

    def written(self) -> dict[str, Written]:
        return {n: Written(size, self._digest[n].hexdigest()) for n, size in self._size.items()}

    def _stream(self, name: str) -> BinaryIO:
        stream = self._open.pop(name, None)
        if stream is None:
            if len(self._open) >= OPEN_FILES:
                self._open.pop(next(iter(self._open))).close()
            stream = (self._folder / name).open("ab", buffering=0)
        self._open[name] = stream
        return stream


def _write(stream: BinaryIO, view: memoryview) -> None:
    done = 0
    while done < len(view):
        done += stream.write(view[done:])
