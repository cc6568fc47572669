"""The sharding of one tensor: which atoms shard each dim, and over which it is partial.

A dim is a list of *components*, major first, whose sizes multiply to the dim's size: a dim that a
reshape merged from `(batch, heads)` is sharded by `dp` in its major and by `tp` in its minor
component (ONNX calls this `ShardedDimProto.simple_sharding`). Most dims have one component.

A component of size n that the atoms p1, p2, … shard is split atom by atom: into p1 blocks of
ceil(n/p1), each of those into p2 blocks of ceil(ceil(n/p1)/p2), and so on. Splits over a prefix of
the atoms therefore nest, every device holds the same local size, and in every block the valid
elements come first and the padding last.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakValueDictionary

import numpy as np
import sympy
from numpy.typing import NDArray

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.symbols import Dim, SymbolTable, ceil_div, dim_str
from onnxpar_format.boxes import SizedSharding

REDUCTIONS = ("sum", "max", "min", "prod")


@dataclass(frozen=True)
class Component:
    """A part of a dim: its size (elements, possibly symbolic) and the atoms that shard it."""

    size: Dim
    atoms: Atoms = ()


DimSharding = tuple[Component, ...]


def atoms_of(components: Iterable[Component]) -> Atoms:
    """Returns the atoms that shard some components, in their order."""
    return tuple(a for component in components for a in component.atoms)


@dataclass(frozen=True)
class Sharding:
    """How one tensor is placed on the mesh. Atoms that are not named replicate it.

    Attributes:
        dims: One tuple of components for each dim of the tensor.
        partial: Atoms, ascending, over which the value is partial: the tensor is the
            reduction of what the devices hold.
        reduction: The reduction over `partial`: sum, max, min or prod.
    """

    dims: tuple[DimSharding, ...]
    partial: Atoms = ()
    reduction: str = "sum"

    def __eq__(self, other: object) -> bool:
        """Compares the hashes first: tables of plans and costs compare shardings all the time."""
        if self is other:
            return True
        if not isinstance(other, Sharding):
            return NotImplemented
        return (
            self._hash == other._hash
            and self.dims == other.dims
            and self.partial == other.partial
            and self.reduction == other.reduction
        )

    def __hash__(self) -> int:
        """Hashes once: shardings are keys of every table of plans and costs."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.partial, self.reduction))

    @staticmethod
    def replicated(shape: Sequence[Dim]) -> "Sharding":
        """Returns the sharding that replicates a tensor of `shape`."""
        return Sharding(tuple((Component(size),) for size in shape))

    @staticmethod
    def of(
        shape: Sequence[Dim],
        atoms: Sequence[Sequence[int]],
        partial: Iterable[int] = (),
        reduction: str = "sum",
    ) -> "Sharding":
        """Returns the sharding of dim i of `shape` by `atoms[i]`, one component per dim."""
        dims = tuple((Component(s, tuple(a)),) for s, a in zip(shape, atoms, strict=True))
        return Sharding(dims, tuple(sorted(partial)), reduction)

    @property
    def rank(self) -> int:
        """Number of dims."""
        return len(self.dims)

    @property
    def shape(self) -> tuple[Dim, ...]:
        """Global shape, elements."""
        return tuple(_product(c.size for c in dim) for dim in self.dims)

    @cached_property
    def split_atoms(self) -> Atoms:
        """Atoms that shard some dim, in order of dims and components."""
        return tuple(a for dim in self.dims for a in atoms_of(dim))

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds all of the value."""
        return not self.partial and not self.split_atoms

    def with_partial(self, partial: Iterable[int], reduction: str = "sum") -> "Sharding":
        """Returns the sharding of the same dims that is partial over other atoms."""
        atoms = tuple(sorted(partial))
        return Sharding(self.dims, atoms, reduction) if atoms else self._complete

    @cached_property
    def _complete(self) -> "Sharding":
        """The sharding of the same dims that is not partial."""
        complete = not self.partial and self.reduction == "sum"
        return self if complete else Sharding(self.dims)

    def dim_atoms(self, dim: int) -> Atoms:
        """Atoms that shard one dim, major component first."""
        return atoms_of(self.dims[dim])

    def strategy(self, mesh: Mesh) -> tuple[int, ...]:
        """Returns the number of shards of each dim, as in MindSpore's tuples."""
        return tuple(mesh.count(self.dim_atoms(d)) for d in range(self.rank))

    def validate(self, mesh: Mesh, what: str) -> None:
        """Raises ShardingError unless each atom exists and is used once; `what` is the tensor."""
        used = [*self.split_atoms, *self.partial]
        if self.reduction not in REDUCTIONS:
            raise ShardingError(f"{what}: reduction must be one of {REDUCTIONS}")
        for atom in used:
            if not 0 <= atom < len(mesh.atoms):
                raise ShardingError(f"{what}: atom {atom} is not an atom of the mesh {mesh.atoms}")
        if len(set(used)) != len(used):
            raise ShardingError(f"{what}: an atom may shard a tensor once, got {used}")

    def local_shape(self, mesh: Mesh, table: SymbolTable | None = None) -> tuple[Dim, ...]:
        """Returns the shape, padding included, that every device holds."""
        return tuple(_product(local_size(c, mesh, table) for c in dim) for dim in self.dims)

    def canonical(self, mesh: Mesh, table: SymbolTable) -> "Sharding":
        """Returns the form that is the same for all equal shardings, and the same object."""
        found = Sharding(
            tuple(canonical_dim(dim, mesh, table) for dim in self.dims),
            tuple(sorted(self.partial)),
            self.reduction if self.partial else "sum",
        )
        return _CANONICAL.setdefault(found, found)

    def sized(self, mesh: Mesh) -> SizedSharding:
        """Returns the sharding without `partial`; all sizes must be integers."""
        dims = (tuple((int(c.size), c.atoms) for c in dim) for dim in self.dims)
        return SizedSharding(mesh.atoms, tuple(dims))

    def describe(self, mesh: Mesh) -> str:
        """Returns a short text for people: `[dp, ~, 3*tp] partial sum over tp`."""
        dims = []
        for dim in self.dims:
            if not any(c.atoms for c in dim):
                dims.append("~")
            elif len(dim) == 1:
                dims.append(mesh.describe(dim[0].atoms))
            else:
                dims.append(
                    "("
                    + " ".join(
                        f"{dim_str(c.size)}:{mesh.describe(c.atoms)}"
                        if c.atoms
                        else dim_str(c.size)
                        for c in dim
                    )
                    + ")"
                )
        text = "[" + ", ".join(dims) + "]"
        if self.partial:
            text += f" partial {self.reduction} over {mesh.describe(self.partial)}"
        return text


_CANONICAL: WeakValueDictionary[Sharding, Sharding] = WeakValueDictionary()
"""The canonical shardings that exist: most comparisons then find one object."""


def _product(sizes: Iterable[Dim]) -> Dim:
    result: Dim = 1
    for size in sizes:
        result = size if isinstance(result, int) and result == 1 else result * size
    return int(result) if isinstance(result, sympy.Integer) else result


def is_even(component: Component, mesh: Mesh, table: SymbolTable) -> bool:
    """Whether the atoms of a component are proved to divide its size, so that nothing is padded."""
    return not component.atoms or table.divisible(component.size, mesh.count(component.atoms))


def local_size(component: Component, mesh: Mesh, table: SymbolTable | None = None) -> Dim:
    """Returns the elements of a component that each device holds, padding included.

    Splitting atom by atom gives the same size as splitting by the product of the atoms, since
    ceil(ceil(n/a)/b) = ceil(n/(ab)).
    """
    if not component.atoms:
        return component.size
    return ceil_div(component.size, mesh.count(component.atoms), table)


def canonical_dim(dim: DimSharding, mesh: Mesh, table: SymbolTable) -> DimSharding:
    """Returns the canonical components of a dim.

    Components of size 1 are dropped. A replicated component is merged with the one before it where
    that is sharded evenly. Any component is merged with the one before it if that is split into
    single elements: the blocks of both together are those of the merged component.
    """
    if len(dim) == 1:
        return dim
    merged: list[Component] = []
    for component in dim:
        if component.size == 1 and not component.atoms:
            continue
        if merged and not component.atoms:
            last = merged[-1]
            if is_even(last, mesh, table):
                merged[-1] = Component(last.size * component.size, last.atoms)
                continue
        if merged and merged[-1].atoms and mesh.count(merged[-1].atoms) == merged[-1].size:
            last = merged[-1]
            atoms = (*last.atoms, *component.atoms)
            merged[-1] = Component(last.size * component.size, atoms)
            continue
        merged.append(component)
    return tuple(merged) or (Component(_product(c.size for c in dim)),)


def split(
    array: NDArray[np.generic], sharding: Sharding, mesh: Mesh, rank: int
) -> NDArray[np.generic]:
    """Returns the shard of `array` that device `rank` holds, padded with zeros.

    Args:
        array: The whole array.
        sharding: Its sharding, with integer sizes. `partial` is ignored.
        mesh: The mesh.
        rank: The device.

    Raises:
        ShardingError: The shape of the array differs from that of the sharding.
    """
    if tuple(array.shape) != tuple(int(s) for s in sharding.shape):
        raise ShardingError(f"expected an array of shape {sharding.shape}, got {array.shape}")
    return sharding.sized(mesh).take(array, rank)
