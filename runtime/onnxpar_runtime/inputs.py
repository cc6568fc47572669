"""Shards a program's inputs for one rank: whole arrays, its own shards, or data ranks' batches."""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import ShardSlices, SizedSharding
from onnxpar_format.entries import ProgramEntry, TensorEntry
from onnxpar_format.expressions import ExpressionError, UnknownSymbolError
from onnxpar_runtime.cuda import Staged
from onnxpar_runtime.errors import DirectoryError, InputError, SymbolValueError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.npz import convert
from onnxpar_runtime.symbol_checks import (
    bind_local_symbols,
    check_index_ranges,
    check_values,
    symbol_values,
)

Array = NDArray[Any]
_MAX_SHAPES = 64


@dataclass(frozen=True)
class Feeds:
    """The inputs of one run on one rank.

    Attributes:
        values: Global values of the symbols.
        local: The rank's shard of every input, padding included; or a copy on its way to a GPU.
    """

    values: Mapping[str, int]
    local: Mapping[str, Array | Staged]

    @cached_property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """The symbols' values as a key of dicts."""
        return tuple(self.values.items())

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What is equal for runs whose inputs have equal sizes."""
        return self.sizes, tuple((name, array.shape) for name, array in self.local.items())


def sharding_of(
    manifest: Manifest,
    spec: TensorEntry,
    values: Mapping[str, int],
    local: tuple[int, ...] | None = None,
) -> SizedSharding:
    """Returns `spec.sharding(...)`; raises DirectoryError if it cannot be evaluated."""
    try:
        return spec.sharding(manifest.atoms, values, local)
    except ExpressionError as error:
        raise DirectoryError(f"{manifest.directory}: sharding of {spec.name!r}: {error}") from None


class Inputs:
    """Shards the inputs of a program for a rank. It needs no graph.

    Args:
        manifest: The manifest.
        program: Name of the program.
        rank: The rank's number.

    Attributes:
        manifest: The manifest.
        program: The program.
        rank: The rank's number.

    Raises:
        DirectoryError: There is no such program.
    """

    def __init__(self, manifest: Manifest, program: str, rank: int) -> None:
        """Shards nothing yet."""
        self.manifest = manifest
        self.program: ProgramEntry = manifest.program(program)
        self.rank = rank
        self._specs = {spec.name: spec for spec in self.program.inputs}
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Any, ...], tuple[dict[str, int], dict[str, ShardSlices]]]
        self._known = OrderedDict()

    def shard_inputs(self, feeds: Mapping[str, Array]) -> Feeds:
        """Returns the symbols' values and this rank's shard of every whole array.

        May be called from another thread while the program runs.

        Raises:
            InputError: An input is missing, unknown, of the wrong dtype or shape, or its sizes do
                not fit those of another.
            SymbolValueError: A symbol's value violates its constraint.
        """
        arrays = convert(self.program.inputs, feeds)
        values, shards = self._sharded(arrays)
        local = {
            # Not ascontiguousarray, which adds a dim to a scalar.
            name: np.asarray(shards[name].take(a), order="C")
            for name, a in arrays.items()
        }
        check_index_ranges(self.program, local, values)
        return Feeds(values, local)

    def values(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Returns the symbols' values of whole arrays; raises as `shard_inputs`."""
        return self._sharded(convert(self.program.inputs, feeds))[0]

    def _sharded(
        self, arrays: Mapping[str, Array]
    ) -> tuple[dict[str, int], dict[str, ShardSlices]]:
        key = tuple(a.shape for a in arrays.values())
        with self._lock:
            known = self._known.get(key)
            if known is None:
                shapes = {n: a.shape for n, a in arrays.items()}
                values = symbol_values(self.manifest.symbols, self.program, shapes)
                parts = {
                    n: sharding_of(self.manifest, s, values).slices(self.rank)
                    for n, s in self._specs.items()
                }
                known = values, parts
                self._known[key] = known
                while len(self._known) > _MAX_SHAPES:
                    self._known.popitem(last=False)
        return known

    def local_inputs(
        self, feeds: Mapping[str, Array], symbols: Mapping[str, int] | None = None
    ) -> Feeds:
        """Returns checked inputs from this rank's shards.

        Args:
            feeds: Local array of every input, padding included.
            symbols: Global values of the symbols. Without them they follow from the local shapes of
                dims that are replicated, or that the constraint lets every sharding divide evenly.

        Raises:
            InputError: An input is missing, unknown, or of the wrong dtype or local shape.
            SymbolValueError: A symbol has no value, or violates its constraint.
        """
        local = convert(self.program.inputs, feeds)
        values = self._local_symbols(local, symbols)
        self._check_local(local, values)
        return Feeds(values, local)

    def part_inputs(
        self, arrays: Mapping[str, Array], values: Mapping[str, int], atoms: tuple[int, ...]
    ) -> Feeds:
        """Returns this rank's shards of arrays whose dim 0 is already sharded over the data ranks.

        Args:
            arrays: By input, of the right dtypes. If `atoms` shard dim 0 of the input, the valid
                rows of this rank's data rank; otherwise the whole array.
            values: Global values of the symbols on this rank.
            atoms: Atoms that have sharded dim 0.
        """
        local = {}
        for name, spec in self._specs.items():
            array, sharding = arrays[name], sharding_of(self.manifest, spec, values)
            if atoms and sharding.dims and sharding.dims[0][0][1] == atoms:
                rows = sharding.local_shape[0]
                padding = [(0, rows - len(array))] + [(0, 0)] * (array.ndim - 1)
                array = np.pad(array, padding)
                # Only the other dims are still to be sharded.
                sharding = SizedSharding(sharding.atoms, (((rows, ()),), *sharding.dims[1:]))
            local[name] = np.asarray(sharding.take(array, self.rank), order="C")
        check_index_ranges(self.program, local, values)
        return Feeds(values, local)

    def _local_symbols(
        self, local: Mapping[str, Array], symbols: Mapping[str, int] | None
    ) -> dict[str, int]:
        shapes = {name: a.shape for name, a in local.items()}
        if symbols is None:
            values = bind_local_symbols(
                self.program.inputs, shapes, self.manifest.atoms, self.manifest.symbols
            )
        else:
            values = {name: int(value) for name, value in symbols.items()}
        check_values(self.manifest.symbols, self.program, values)
        for entry in self.program.system_inputs:
            if entry.symbol is not None and entry.symbol not in values:
                raise SymbolValueError(
                    f"symbol {entry.symbol!r} has no value: local shapes do not determine a dim "
                    "that may be sharded unevenly; pass `symbols`"
                )
        return values

    def _check_local(self, local: Mapping[str, Array], values: Mapping[str, int]) -> None:
        for name, array in local.items():
            try:
                expected = self._specs[name].sharding(self.manifest.atoms, values).local_shape
            except UnknownSymbolError:
                continue  # without the symbol's value there is nothing to compare with
            if array.shape != expected:
                raise InputError(
                    f"input {name!r}: expected the local shape {expected}, got {array.shape}"
                )
        check_index_ranges(self.program, local, values)
