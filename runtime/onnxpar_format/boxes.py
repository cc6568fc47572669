"""Which elements of a tensor a rank holds, and how arrays are sharded and joined.

A dim is a list of components, major first, whose sizes multiply to the dim's size. A component of n
elements split by the atoms p1, p2, … is split into p1 blocks of ceil(n/p1), each of those into p2
blocks, and so on: every rank has the same local size, and its valid elements are a prefix of it,
followed by padding. This is the arithmetic of the manifest's `dims`; sizes here are plain integers.
A shard is also given as boxes of indices, for readers that do not know shardings.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.records import Check, Key

Array = NDArray[Any]
Interval = Annotated[
    tuple[int, int], Check("0 <= start <= stop of [start, stop]", lambda i: 0 <= i[0] <= i[1])
]
"""Indices of a dim: `[start, stop)`."""

Component = tuple[int, tuple[int, ...]]
"""Elements of a component, and the atoms that split it."""


def coordinates(rank: int, atoms: Sequence[int]) -> tuple[int, ...]:
    """Returns the mixed-radix digits of `rank` over the atom sizes, first atom most significant."""
    digits = []
    for size in reversed(atoms):
        rank, digit = divmod(rank, size)
        digits.append(digit)
    return tuple(reversed(digits))


@dataclass(frozen=True)
class Block:
    """A rank's elements of one component: the first, how many are valid, the local size."""

    start: int
    valid: int
    local: int


def block(size: int, parts: Sequence[int], position: Sequence[int]) -> Block:
    """Returns the block at `position` of `size` elements split by `parts` one after another."""
    start, valid, local = 0, size, size
    for count, index in zip(parts, position, strict=True):
        local = -(-local // count)
        start += index * local
        valid = min(max(valid - index * local, 0), local)
    return Block(start, valid, local)


@dataclass(frozen=True)
class ShardSlices:
    """What a rank takes of a tensor, computed once for taking it often.

    Attributes:
        sizes: Global size of every component.
        slices: The rank's valid elements of every component.
        blocks: Local size of every component, padding included.
        shape: Local shape.
        everything: Whether the shard is the whole array.
    """

    sizes: tuple[int, ...]
    slices: tuple[slice, ...]
    blocks: tuple[int, ...]
    shape: tuple[int, ...]
    everything: bool

    def take(self, array: Array) -> Array:
        """Returns the shard of the global `array`: a view where it is not padded."""
        if self.everything:
            return array
        view = array.reshape(self.sizes)[self.slices]
        if view.shape != self.blocks:
            padded = np.zeros(self.blocks, dtype=array.dtype)
            padded[tuple(slice(0, n) for n in view.shape)] = view
            view = padded
        return view.reshape(self.shape)


@dataclass(frozen=True)
class ShardBox:
    """A box of indices of a global tensor and its place in the shard, an interval a dim."""

    source: Annotated[tuple[Interval, ...], Key(("global",))]
    local: tuple[Interval, ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of the box in each dim of the global tensor."""
        return tuple(end - start for start, end in self.source)


@dataclass(frozen=True)
class SizedSharding:
    """How one tensor of known size is sharded over the mesh.

    Attributes:
        atoms: Sizes of the mesh's atoms, major first.
        dims: Components of each dim.
    """

    atoms: tuple[int, ...]
    dims: tuple[tuple[Component, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(prod(n for n, _ in dim) for dim in self.dims)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of every rank's shard, padding included."""
        return self._shape(block.local for block in self.blocks(0))

    def unpadded_shape(self, rank: int) -> tuple[int, ...]:
        """Returns the shape of a rank's shard without padding."""
        return self._shape(block.valid for block in self.blocks(rank))

    def _shape(self, sizes: Iterator[int]) -> tuple[int, ...]:
        """Returns the sizes of the dims, given those of all components."""
        return tuple(prod(next(sizes) for _ in dim) for dim in self.dims)

    def blocks(self, rank: int) -> list[Block]:
        """Returns the rank's block of each component, in order of dims and components."""
        coords = coordinates(rank, self.atoms)
        return [
            block(n, [self.atoms[a] for a in atoms], [coords[a] for a in atoms])
            for dim in self.dims
            for n, atoms in dim
        ]

    def owners(self) -> tuple[int, ...]:
        """Returns the ranks whose shards make up the tensor, each shard once."""
        used = {a for dim in self.dims for _, atoms in dim for a in atoms}
        return tuple(
            rank
            for rank in range(prod(self.atoms))
            if not any(c for a, c in enumerate(coordinates(rank, self.atoms)) if a not in used)
        )

    def slices(self, rank: int) -> ShardSlices:
        """Returns what a rank takes of the tensor."""
        blocks = self.blocks(rank)
        sizes = tuple(n for dim in self.dims for n, _ in dim)
        return ShardSlices(
            sizes=sizes,
            slices=tuple(slice(b.start, b.start + b.valid) for b in blocks),
            blocks=tuple(b.local for b in blocks),
            shape=self.local_shape,
            everything=all(b.valid == b.local == n for b, n in zip(blocks, sizes, strict=True)),
        )

    def take(self, array: Array, rank: int) -> Array:
        """Returns the rank's shard of the global `array`: a view where it is not padded."""
        return self.slices(rank).take(array)

    def put(self, target: Array, shard: Array, rank: int) -> None:
        """Writes the valid elements of a rank's shard to the contiguous whole array `target`."""
        slices = self.slices(rank)
        target.reshape(slices.sizes)[slices.slices] = self._valid(shard, rank)

    def unpadded(self, shard: Array, rank: int) -> Array:
        """Returns a rank's shard without its padding: a view where it has none."""
        return self._valid(shard, rank).reshape(self.unpadded_shape(rank))

    def _valid(self, shard: Array, rank: int) -> Array:
        """Returns the valid elements of a rank's shard, with a dim for each component."""
        blocks = self.blocks(rank)
        return shard.reshape([b.local for b in blocks])[tuple(slice(0, b.valid) for b in blocks)]

    def join(self, shard_of: Callable[[int], Array], dtype: np.dtype[Any]) -> Array:
        """Returns the whole array from the owners' shards, asked for one rank at a time."""
        array = np.zeros(self.shape, dtype=dtype)
        for rank in self.owners():
            self.put(array, shard_of(rank), rank)
        return array

    def boxes(self, rank: int, *, padded: bool) -> tuple[ShardBox, ...]:
        """Returns the boxes that a rank holds, and their places in its shard.

        There are several if a dim has several components and a minor one is sharded.

        Args:
            rank: The rank's place on its mesh.
            padded: Whether the shard has its padding, and so the shape `local_shape`.
        """
        blocks = iter(self.blocks(rank))
        dims = [[(n, next(blocks)) for n, _ in dim] for dim in self.dims]
        return tuple(
            ShardBox(
                tuple((start, start + length) for start, _, length in runs),
                tuple((start, start + length) for _, start, length in runs),
            )
            for runs in product(*(_runs(dim, padded) for dim in dims))
        )


def _runs(parts: Sequence[tuple[int, Block]], padded: bool) -> list[tuple[int, int, int]]:
    """Returns runs `(global start, local start, length)` of a dim, given its components."""
    runs, complete = [(0, 0, 1)], True
    wide = narrow = 1
    for size, block in reversed(parts):
        if complete:
            # All minor components are complete, so consecutive indices of this one are adjacent.
            runs = [(block.start * wide, 0, block.valid * wide)]
        else:
            runs = [
                ((block.start + index) * wide + start, index * narrow + local, length)
                for index in range(block.valid)
                for start, local, length in runs
            ]
        held = block.local if padded else block.valid
        complete = complete and block.valid == held == size
        wide, narrow = wide * size, narrow * held
    return [run for run in runs if run[2]]
