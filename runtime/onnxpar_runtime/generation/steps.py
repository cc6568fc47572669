"""Runs a decoder step by step on one rank, with as little as possible between two runs.

All that stays the same stays bound: system inputs and inputs of one shape are written where they
lie, states that grow in place are bound once. What grows is bound anew: the mask, and states that
are written anew. Symbols follow from shapes by a look-up; sizes are compared with each other only
in the first runs of a batch, since later ones differ from these in what grows alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import SystemInput, TensorEntry
from onnxpar_format.expressions import ExpressionError, bare_name, evaluate, names_of
from onnxpar_runtime.errors import InputError, RankError, first_line
from onnxpar_runtime.executor import Executor, Loader
from onnxpar_runtime.generation.roles import Roles, roles_of
from onnxpar_runtime.generation.states import State, states_of
from onnxpar_runtime.inputs import sharding_of
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.symbol_checks import (
    check_equal_sizes,
    check_index_ranges,
    check_symbols,
)
from onnxpar_runtime.tensors import to_host, to_ort

Array = NDArray[Any]
_COMPARED = 2
"""The runs of a batch in which sizes are compared with each other: a prompt and a step."""


@dataclass(frozen=True)
class _Rows:
    """A rank's share of arrays of which only dim 0 is sharded."""

    start: int
    valid: int
    local: int

    def take(self, array: Array) -> Array:
        """Returns the rank's rows, and rows of zeros for padding."""
        rows = array[self.start : self.start + self.valid]
        if self.valid == self.local:
            return rows
        padded = np.zeros((self.local, *array.shape[1:]), array.dtype)
        padded[: self.valid] = rows
        return padded


class Steps:
    """A program of a directory with its states bound from run to run.

    Args:
        manifest: The manifest.
        program: Name of the program.
        loader: Makes the session.

    Attributes:
        manifest: The manifest.
        roles: What its inputs and outputs are for.
        in_place: Whether the states are extended in place, each sequence at its own length.
        values: Values of the symbols in the last run.
        sharding: How the logits of the last run are sharded.

    Raises:
        InputError: The program does not predict tokens, or has no states.
        DirectoryError: As `Executor`.
        LaunchError: As `Executor`.
    """

    def __init__(self, manifest: Manifest, program: str, loader: Loader) -> None:
        """Loads the rank's graph."""
        self.manifest, self.program = manifest, manifest.program(program)
        if manifest.stages > 1:
            raise InputError(
                f"{manifest.directory}: expected a directory without pipeline stages, got "
                f"{manifest.stages}: a pipeline cannot generate yet"
            )
        self.roles: Roles = roles_of(self.program)
        self._carried = {state.input: state for state in self.program.carried}
        if not self._carried:
            raise InputError(
                f"{manifest.directory}: program {program!r} has no states to carry from token to "
                "token; name them with `onnxpar shard --state INPUT=OUTPUT`"
            )
        self.in_place = any(state.appends for state in self._carried.values())
        # Positions are checked at once for a whole batch.
        ranges = [r for r in self.program.index_ranges if r.input == self.roles.tokens.name]
        self._ranges = replace(self.program, index_ranges=tuple(ranges))
        self._executor = Executor(manifest, program, loader)
        self._loader, self.rank = loader, loader.rank
        self._specs = {spec.name: spec for spec in self.program.inputs}
        self._outputs = {spec.name: spec for spec in self.program.outputs}
        made = {state.output for state in self.program.carried}
        self._others = [n for n in self._outputs if n not in made and n != self.roles.logits.name]
        self._place = (loader.device.value, loader.index)
        self._sources = self._symbol_sources()
        sizes = self.roles.logits.shape
        self._logits_symbols = list(dict.fromkeys(n for size in sizes for n in names_of(size)))
        # Sizes that may violate their constraint as they grow; `check_length` knows the greatest.
        self._limited = {
            name: symbol
            for name, symbol in manifest.symbols.items()
            if name in self._sources and (symbol.divisor > 1 or symbol.same_as is not None)
        }
        self.sharding: SizedSharding | None = None
        self._states: list[State] = []
        self.values: dict[str, int] = {}
        self._runs = 0

    def _symbol_sources(self) -> dict[str, tuple[str, int]]:
        """Returns, by symbol, the input and the dim that give its value."""
        found: dict[str, tuple[str, int]] = {}
        for spec in sorted(self.program.inputs, key=lambda spec: spec.name in self._carried):
            for dim, size in enumerate(spec.shape):
                name = bare_name(size)
                if name is not None:
                    found.setdefault(name, (spec.name, dim))
        return found

    def begin(
        self, tokens: Array, capacity: int, constants: Mapping[str, Array] | None = None
    ) -> None:
        """Empties the states for a new batch.

        Args:
            tokens: The tokens of the first run.
            capacity: The length of a sequence at most, for states that grow in place.
            constants: Global arrays of inputs that stay the same in all runs.

        Raises:
            InputError: An input is missing.
        """
        constants = dict(constants or {})
        missing = [spec.name for spec in self.roles.rest if spec.name not in constants]
        if missing:
            raise InputError(
                f"program {self.program.name!r}: inputs {missing} are neither tokens, mask, "
                "positions nor states; give their values as constants"
            )
        self._io: Any = self._executor.session.io_binding()
        # On the CPU they say nothing, and onnxruntime would look into them in each run.
        self._options = None if self._loader.queue is None else self._loader.run_options(None)
        self._bound: dict[str, Array] = {}
        self._rows: dict[str, _Rows | None] = {}
        self._logits: Array | None = None
        self._logits_sizes: list[int | None] | None = None
        self._runs = 0
        shapes = {name: array.shape for name, array in constants.items()}
        shapes[self.roles.tokens.name] = tokens.shape
        self.values = {
            symbol: shapes[name][dim]
            for symbol, (name, dim) in self._sources.items()
            if name in shapes
        }
        first = {bare_name(self._specs[n].shape[0]) for n in self._carried if self._specs[n].shape}
        for name in first - self.values.keys() - {None}:
            self.values[str(name)] = len(tokens)
        self._states = states_of(
            self._carried,
            self._specs,
            {name: self._state_shape(name) for name in self._carried},
            self._place,
            capacity,
        )
        for name, array in constants.items():
            self._bind(name, self._local(name, array))
        # The next run writes the symbols' values; none is known here.
        sizes = dict.fromkeys(self.manifest.symbols, -1)
        self._numbers = [
            (entry, self._executor.system_memory(entry, sizes))
            for entry in self.program.system_inputs
            if entry.name in self._executor.graph_inputs
        ]
        for entry, memory in self._numbers:
            self._bind_number(entry, memory)
        self._steady = all(state.in_place for state in self._states)
        if self._steady:
            for state in self._states:
                state.bind(self._io, state.length)

    def check_length(self, columns: int, longest: int) -> None:
        """Checks that all steps of a batch can run, before the first one does.

        Args:
            columns: The number of columns of the mask in the last run.
            longest: Tokens of the longest sequence then.

        Raises:
            InputError: A sequence would be longer than the model's table of positions, or a symbol
                greater than it may be.
        """
        for name in self._grown_symbols():
            symbol = self.manifest.symbols.get(name)
            if symbol is not None and symbol.max > symbol.min and columns > symbol.max:
                raise InputError(
                    f"prompts and new tokens: expected at most {symbol.max} columns, by the "
                    f"constraint on symbol {name!r}, got {columns}"
                )
        positions = self.roles.positions
        for demand in self.program.index_ranges:
            if positions is None or demand.input != positions.name:
                continue
            try:
                high = evaluate(demand.high, self.values)
            except ExpressionError:
                continue
            if longest - 1 > high:
                raise InputError(
                    f"prompts and new tokens: expected at most {high + 1} in a sequence, by node "
                    f"{demand.node!r} ({demand.op_type}), got {longest}"
                )

    def _grown_symbols(self) -> set[str]:
        """Returns the symbols of the dims that grow from run to run."""
        sizes = [self.roles.mask.shape[1]] if self.roles.mask is not None else []
        grown = [(self._specs[name], s.grows) for name, s in self._carried.items()]
        sizes += [spec.shape[dim] for spec, dim in grown if dim is not None]
        return {name for size in sizes if (name := bare_name(size)) is not None}

    def _state_shape(self, name: str) -> tuple[int, ...]:
        """Returns the local shape of a state; along the dim in which it grows, nothing is known."""
        spec, grows = self._specs[name], self._carried[name].grows
        sizes = {bare_name(spec.shape[grows]) or "": 0} if grows is not None else {}
        try:
            return spec.sharding(self.manifest.atoms, self.values | sizes).local_shape
        except ExpressionError as error:
            raise InputError(f"state {name!r}: its size is not known at first: {error}") from None

    def _sizes(self) -> dict[str, int]:
        """Returns the symbols that only the sizes of states give, at their present sizes."""
        lengths = {state.entry.input: state.length for state in self._states}
        return {
            symbol: lengths[name]
            for symbol, (name, dim) in self._sources.items()
            if name in lengths and self._carried[name].grows == dim
        }

    def run(self, feeds: Mapping[str, Array]) -> Array:
        """Runs the program on the global arrays of new tokens, mask and positions.

        Returns:
            This rank's shard of the logits, valid until the next run.

        Raises:
            InputError: An element is out of range, or sizes do not fit each other.
            SymbolValueError: A symbol's value violates its constraint.
            RankError: onnxruntime failed on this rank, or another rank did.
        """
        values = self.values
        values |= {
            symbol: feeds[name].shape[dim]
            for symbol, (name, dim) in self._sources.items()
            if name in feeds
        }
        values |= self._sizes()
        if self._runs < _COMPARED:
            check_symbols(self.manifest.symbols, values)
            check_equal_sizes(self.program, values)
        elif self._limited:
            check_symbols(self._limited, {name: values[name] for name in self._limited})
        local = {name: self._local(name, array) for name, array in feeds.items()}
        if self._ranges.index_ranges:
            check_index_ranges(self._ranges, local, values)
        for name, array in local.items():
            self._bind(name, array)
        for entry, memory in self._numbers:
            if entry.symbol is not None and memory[0] != values[entry.symbol]:
                memory[0] = values[entry.symbol]
                if entry.name in self._executor.on_gpu:
                    self._bind_number(entry, memory)
        new = feeds[self.roles.tokens.name].shape[1]
        lengths = self._bind_states(new)
        logits = self._bind_outputs()
        try:
            self._executor.session.run_with_iobinding(self._io, self._options)
        except Exception as error:
            raise RankError(self.rank.index, first_line(error)) from error
        self._loader.synchronize()
        for state, length in zip(self._states, lengths, strict=True):
            state.advance(length)
        self._runs += 1
        if logits is None:
            logits = to_host(self._io.get_outputs()[-1])
            atoms, values = self.manifest.atoms, self.values
            self.sharding = self.roles.logits.sharding(atoms, values, logits.shape)
        return logits

    def _bind_states(self, new: int) -> list[int]:
        """Binds the states and returns their lengths after the run."""
        known: dict[Any, int] = {}
        lengths = []
        for state in self._states:
            grows = state.entry.grows
            if grows is None or state.in_place:
                length = state.length
            else:
                size = self._outputs[state.entry.output].shape[grows]
                if size not in known:
                    try:
                        known[size] = evaluate(size, self.values)
                    except ExpressionError:
                        known[size] = state.length + new
                length = known[size]
            if not self._steady:
                state.bind(self._io, length)
            lengths.append(length)
        return lengths

    def _bind_outputs(self) -> Array | None:
        """Binds the other outputs, and returns the memory of the logits if their size is known."""
        for name in self._others:
            self._io.bind_output(name, "cpu")
        spec = self.roles.logits
        sizes = [self.values.get(name) for name in self._logits_symbols]
        if sizes != self._logits_sizes:
            self._logits_sizes, self._logits = sizes, None
            try:
                self.sharding = spec.sharding(self.manifest.atoms, self.values)
            except ExpressionError:
                self.sharding = None
            else:
                self._logits = np.zeros(self.sharding.local_shape, DTYPES[spec.dtype].dtype)
                self._io.bind_ortvalue_output(spec.name, to_ort(self._logits))
        if self._logits is None:
            self._io.bind_output(spec.name, "cpu")
        return self._logits

    def _local(self, name: str, array: Array) -> Array:
        """Returns this rank's shard of a global array, in the type of the input."""
        spec = self._specs[name]
        if name not in self._rows:
            self._rows[name] = self._rows_of(spec)
        rows = self._rows[name]
        if rows is None:
            sharding = sharding_of(self.manifest, spec, self.values)
            array = sharding.take(array, self.rank.index)
        elif rows.local != len(array):
            array = rows.take(array)
        return np.asarray(array, DTYPES[spec.dtype].dtype, order="C")

    def _rows_of(self, spec: TensorEntry) -> _Rows | None:
        """Returns the rank's rows of an input; None if another dim is sharded too."""
        if not spec.dims or len(spec.dims[0]) > 1 or any(a for d in spec.dims[1:] for _, a in d):
            return None
        sharding = TensorEntry(spec.name, spec.dtype, spec.shape[:1], spec.dims[:1])
        block = sharding_of(self.manifest, sharding, self.values).blocks(self.rank.index)[0]
        return _Rows(block.start, block.valid, block.local)

    def _bind(self, name: str, array: Array) -> None:
        """Binds an input; on the CPU it is written where it lies if its shape is the same."""
        if name not in self._executor.graph_inputs:
            return
        if name in self._executor.on_gpu:
            self._io.bind_cpu_input(name, array)
            return
        bound = self._bound.get(name)
        if bound is not None and bound.shape == array.shape:
            np.copyto(bound, array)
            return
        bound = np.array(array)
        self._bound[name] = bound
        self._io.bind_ortvalue_input(name, to_ort(bound))

    def _bind_number(self, entry: SystemInput, memory: Array) -> None:
        if entry.name in self._executor.on_gpu:
            self._io.bind_cpu_input(entry.name, memory)
        else:
            self._io.bind_ortvalue_input(entry.name, to_ort(memory))

    @property
    def state_bytes(self) -> int:
        """The bytes of the buffers of states on this rank."""
        return sum(state.bytes for state in self._states)

    def close(self) -> None:
        """Frees the session and the states."""
        self._states, self._io = [], None
        self._executor.close()
