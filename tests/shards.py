"""Shards of arrays: shardings at given sizes of the symbols, and shards joined again."""

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce

import numpy as np
from numpy.typing import NDArray

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component, Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar_format.boxes import ShardSlices


def concrete(sharding: Sharding, table: SymbolTable, values: Mapping[str, int]) -> Sharding:
    """Returns the sharding with every symbolic size evaluated at `values`."""
    dims = tuple(
        tuple(Component(table.evaluate(c.size, values), c.atoms) for c in dim)
        for dim in sharding.dims
    )
    return Sharding(dims, sharding.partial, sharding.reduction)


def split_and_mask(
    array: NDArray[np.generic], sharding: Sharding, mesh: Mesh, rank: int
) -> tuple[NDArray[np.generic], NDArray[np.bool_]]:
    """Returns what `split` does, and which elements of it are none of the padding."""
    slices, valid = _slices(sharding, mesh, rank)
    assert array.shape == sharding.shape
    return slices.take(array), valid


@lru_cache(maxsize=10_000)
def _slices(sharding: Sharding, mesh: Mesh, rank: int) -> tuple[ShardSlices, NDArray[np.bool_]]:
    """What many cases split in the same way; the mask is not to be written to."""
    sized = sharding.sized(mesh)
    slices = sized.slices(rank)
    valid = slices.take(np.ones(sized.shape, bool))
    valid.flags.writeable = False
    return slices, valid


def join(
    shards: Sequence[NDArray[np.generic]], sharding: Sharding, mesh: Mesh
) -> NDArray[np.generic]:
    """Returns the whole array from the shards of all devices, with partial values reduced.

    Raises:
        ShardingError: The number of shards is not the number of devices, or a shape is wrong.
    """
    if len(shards) != mesh.size:
        raise ShardingError(f"expected {mesh.size} shards, got {len(shards)}")
    sized = sharding.sized(mesh)
    local = sized.local_shape
    array = np.zeros(sized.shape, dtype=shards[0].dtype)
    combine = {"sum": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}
    for rank in range(mesh.size):
        coords = mesh.coords(rank)
        # One of the devices with equal shards, and of those whose shards are reduced together.
        if any(coords[a] for a in set(range(len(mesh.atoms))) - set(sharding.split_atoms)):
            continue
        terms = []
        for member in mesh.group(rank, sharding.partial):
            if tuple(shards[member].shape) != local:
                raise ShardingError(
                    f"device {member}: expected a shard of shape {local}, got "
                    f"{tuple(shards[member].shape)}"
                )
            terms.append(shards[member])
        total = reduce(combine[sharding.reduction], terms)
        sized.put(array, total, rank)
    return array
