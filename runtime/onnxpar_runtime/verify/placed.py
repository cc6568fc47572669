"""Values of a program where they are: the shards of all ranks, compared with the whole array."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding, coordinates
from onnxpar_format.entries import DimComponent, TensorEntry
from onnxpar_format.expressions import ExpressionError
from onnxpar_runtime.manifest import Manifest

Array = NDArray[Any]
Json = dict[str, Any]
_REDUCTIONS = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Difference:
    """Where a rank's shard differs most from the whole array.

    Attributes:
        ranks: The rank; for a partial value all ranks whose terms were reduced.
        index: Index of the element in the whole array; empty if the shapes differ.
        got: The element that the ranks have.
        expected: The element of the whole array.
        amount: Their difference.
    """

    ranks: tuple[int, ...]
    index: tuple[int, ...]
    got: float
    expected: float
    amount: float


@dataclass(frozen=True)
class PlacedValue:
    """A value's sharding over the mesh of its stage, and over which atoms it is partial.

    Attributes:
        name: Name of the value.
        entry: Its shape and sharding; the element type is not used.
        reduction: The reduction that has not been done yet; "" for none.
        partial: The atoms over which it has not been done.
    """

    name: str
    entry: TensorEntry
    reduction: str = ""
    partial: tuple[int, ...] = ()

    @staticmethod
    def of(name: str, item: Json, layouts: Mapping[str, Any]) -> "PlacedValue | None":
        """Returns the place of an operand or result in a report; None if it is unknown.

        Args:
            name: Name of the value.
            item: Its entry in the report.
            layouts: The report's entry `layouts`.
        """
        shape, dims = item["shape"], layouts.get(item["sharding"])
        if shape is None or dims is None or len(dims) != len(shape):
            return None
        components = tuple(
            tuple(DimComponent(size if part is None else part, tuple(atoms)) for part, atoms in dim)
            for size, dim in zip(shape, dims, strict=True)
        )
        entry = TensorEntry(name, "float32", tuple(shape), components)
        partial = item["partial"]
        if not partial:
            return PlacedValue(name, entry)
        return PlacedValue(name, entry, partial["reduction"], tuple(partial["atoms"]))


class Shards:
    """The shards of one value on all ranks that have it.

    Args:
        manifest: The manifest.
        place: Where the value is.
        shards: Its local array on each rank that has it, padding included.
        values: Values of the symbols.

    Raises:
        ValueError: The arrays do not have the local shape, or it cannot be evaluated.
    """

    def __init__(
        self,
        manifest: Manifest,
        place: PlacedValue,
        shards: Mapping[int, Array],
        values: Mapping[str, int],
    ) -> None:
        """Reduces the terms of a partial value."""
        local = next(iter(shards.values())).shape
        try:
            self.sharding: SizedSharding = place.entry.sharding(manifest.atoms, values, local)
        except (ExpressionError, IndexError) as error:
            raise ValueError(f"{place.name!r}: {error}") from None
        for rank, array in shards.items():
            if array.shape != self.sharding.local_shape:
                raise ValueError(
                    f"{place.name!r}: expected the shape {self.sharding.local_shape}, got "
                    f"{array.shape} on rank {rank}"
                )
        self._first = min(shards) // manifest.stage_devices * manifest.stage_devices
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(shards):
            coords = coordinates(rank - self._first, manifest.atoms)
            key = tuple(c for a, c in enumerate(coords) if a not in place.partial)
            groups.setdefault(key, []).append(rank)
        join = _REDUCTIONS.get(place.reduction)
        self.parts: list[tuple[tuple[int, ...], Array]] = []
        for ranks in groups.values():
            terms = [shards[rank] for rank in ranks]
            if join is not None:
                # The sum of many terms is rounded once.
                wide = np.float64 if terms[0].dtype.kind not in "iub" else terms[0].dtype
                total = reduce(join, [term.astype(wide) for term in terms])
                self.parts.append((tuple(ranks), total.astype(terms[0].dtype)))
            else:
                self.parts += [((rank,), shards[rank]) for rank in ranks]

    def whole(self) -> Array:
        """Returns the whole array, from the first replicas."""
        dtype = self.parts[0][1].dtype
        by_rank = {ranks[0] - self._first: array for ranks, array in self.parts}
        array = np.zeros(self.sharding.shape, dtype)
        for place in self.sharding.owners():
            # A partial value is held by the first rank of each group.
            shard = by_rank.get(place)
            if shard is not None:
                self.sharding.put(array, shard, place)
        return array

    def differences(self, expected: Array) -> list[Difference]:
        """Returns the largest difference on each rank."""
        if expected.shape != self.sharding.shape:
            inf = float("inf")
            return [Difference(ranks, (), inf, inf, inf) for ranks, _ in self.parts]
        found = []
        for ranks, array in self.parts:
            place = ranks[0] - self._first
            cut = self.sharding.slices(place)
            wanted = expected.reshape(cut.sizes)[cut.slices]
            got = self.sharding.unpadded(array, place).reshape(wanted.shape)
            apart = distances(wanted, got)
            if not apart.size:
                continue
            at = np.unravel_index(int(apart.argmax()), apart.shape)
            starts = [s.start for s in cut.slices]
            index = self._index([int(i) + s for i, s in zip(at, starts, strict=True)])
            found.append(
                Difference(ranks, index, float(got[at]), float(wanted[at]), float(apart[at]))
            )
        return found

    def _index(self, components: list[int]) -> tuple[int, ...]:
        """Returns the index in the tensor of an index into components of dims."""
        left, found = list(components), []
        for dim in self.sharding.dims:
            own, left = left[: len(dim)], left[len(dim) :]
            found.append(int(np.ravel_multi_index(own, [n for n, _ in dim])) if dim else 0)
        return tuple(found)


def distances(expected: Array, got: Array) -> Array:
    """Returns the distance of each pair of elements; infinite if only one is finite."""
    a, b = expected.astype(np.float64), got.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.asarray(np.abs(a - b))
    apart[(a == b) | (np.isnan(a) & np.isnan(b))] = 0
    apart[np.isnan(apart)] = np.inf
    if expected.dtype.kind in "iu":
        # Integers beyond 2^53 may be equal in float64.
        apart[(apart == 0) & (expected != got)] = 1
    return apart
