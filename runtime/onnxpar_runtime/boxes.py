"""Which elements of a tensor a rank holds, and how to cut and join arrays so.

A dim is a list of components, major first, whose sizes multiply to the dim's size. A component of n
elements split by the atoms p1, p2, … is split into p1 blocks of ceil(n/p1), each of those into p2
blocks, and so on: every rank has the same local size, and its valid elements are a prefix of it,
followed by padding. This is the arithmetic of the manifest's `dims`; sizes here are plain integers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
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
    """A rank's part of one component: where it starts, its valid elements, its local size."""

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
class Part:
    """What a rank takes of a tensor, worked out for taking it often.

    Attributes:
        sizes: Global size of every component.
        slices: The rank's valid elements of every component.
        blocks: Local size of every component, padding included.
        shape: Local shape.
        whole: Whether it takes everything.
    """

    sizes: tuple[int, ...]
    slices: tuple[slice, ...]
    blocks: tuple[int, ...]
    shape: tuple[int, ...]
    whole: bool

    def take(self, array: Array) -> Array:
        """Returns the part of the global `array`: a view where it is not padded."""
        if self.whole:
            return array
        view = array.reshape(self.sizes)[self.slices]
        if view.shape != self.blocks:
            padded = np.zeros(self.blocks, dtype=array.dtype)
            padded[tuple(slice(0, n) for n in view.shape)] = view
            view = padded
        return view.reshape(self.shape)


@dataclass(frozen=True)
class Cut:
    """How one tensor of known size is cut over the mesh.

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
        """Shape of every rank's part, padding included."""
        blocks = iter(self.blocks(0))
        return tuple(prod(next(blocks).local for _ in dim) for dim in self.dims)

    @property
    def is_split(self) -> bool:
        """Whether any atom splits the tensor."""
        return any(atoms for dim in self.dims for _, atoms in dim)

    def blocks(self, rank: int) -> list[Block]:
        """Returns the rank's block of each component, in order of dims and components."""
        coords = coordinates(rank, self.atoms)
        return [
            block(n, [self.atoms[a] for a in atoms], [coords[a] for a in atoms])
            for dim in self.dims
            for n, atoms in dim
        ]

    def owners(self) -> tuple[int, ...]:
        """Returns the ranks whose parts make up the tensor, each part once."""
        used = {a for dim in self.dims for _, atoms in dim for a in atoms}
        return tuple(
            rank
            for rank in range(prod(self.atoms))
            if not any(c for a, c in enumerate(coordinates(rank, self.atoms)) if a not in used)
        )

    def part(self, rank: int) -> "Part":
        """Returns what a rank takes of the tensor."""
        blocks = self.blocks(rank)
        sizes = tuple(n for dim in self.dims for n, _ in dim)
        return Part(
            sizes=sizes,
            slices=tuple(slice(b.start, b.start + b.valid) for b in blocks),
            blocks=tuple(b.local for b in blocks),
            shape=self.local_shape,
            whole=all(b.valid == b.local == n for b, n in zip(blocks, sizes, strict=True)),
        )

    def take(self, array: Array, rank: int) -> Array:
        """Returns the rank's part of the global `array`: a view where it is not padded."""
        return self.part(rank).take(array)

    def put(self, whole: Array, part: Array, rank: int) -> None:
        """Writes the valid elements of the rank's `part` into the contiguous array `whole`."""
        blocks = self.blocks(rank)
        target = whole.reshape([n for dim in self.dims for n, _ in dim])
        source = part.reshape([b.local for b in blocks])
        target[tuple(slice(b.start, b.start + b.valid) for b in blocks)] = source[
            tuple(slice(0, b.valid) for b in blocks)
        ]

    def join(self, part_of: Callable[[int], Array], dtype: np.dtype[Any]) -> Array:
        """Returns the global array from the owners' parts, asked for one rank at a time."""
        whole = np.zeros(self.shape, dtype=dtype)
        for rank in self.owners():
            self.put(whole, part_of(rank), rank)
        return whole
