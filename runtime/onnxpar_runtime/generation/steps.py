"""Runs a decoder step by step on one rank, with as little as possible between two runs.

All that stays the same stays bound: system inputs and inputs of one shape are written where they
lie, states that grow in place are bound once. What grows is bound anew: the mask, and states that
are written anew. Symbols follow from shapes by a look-up; sizes are compared with each other only
in the first runs of a batch, since later ones differ from these in what grows alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import SizedSharding
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.entries import TensorEntry
from onnxpar_format.expressions import ExpressionError, evaluate
from onnxpar_runtime.agree import together
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.bound_graph import BoundGraph
from onnxpar_runtime.generation.candidates import Share
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import NOTHING, Supply
from onnxpar_runtime.generation.states import State, states_of
from onnxpar_runtime.inputs import sharding_of
from onnxpar_runtime.symbol_checks import (
    check_equal_sizes,
    check_index_ranges,
    check_symbols,
)

Array = NDArray[Any]
_COMPARED = 2
"""The runs of a batch in which sizes are compared with each other: a prompt and a step."""


@dataclass(frozen=True)
class Rows:
    """A rank's share of arrays of which only dim 0 is sharded.

    Attributes:
        start: Its first row.
        valid: The number of its rows.
        local: The same, padding included.
    """

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


@dataclass
class _Runs:
    """A rank's graphs, bound for runs of one kind.

    Attributes:
        graphs: The graphs.
        sizes: The values of the symbols in the shape of the logits; None before the first run.
        logits: Memory for the logits; None if only a run shows their size.
        sharding: How the logits are sharded; None likewise.
    """

    graphs: list[BoundGraph]
    sizes: list[int | None] | None = None
    logits: Array | None = None
    sharding: SizedSharding | None = None


def begin(
    decoder: Decoder,
    tokens: Array,
    capacity: int,
    constants: Mapping[str, Array] | None = None,
    supply: Supply = NOTHING,
) -> "Batch":
    """Returns a batch with empty states.

    Args:
        decoder: The program.
        tokens: The tokens of the first run.
        capacity: The length of a sequence at most, for states that grow in place.
        constants: Whole arrays of inputs that stay the same in all runs.
        supply: What another program gives it.

    Raises:
        InputError: An input is missing, or what another program gives has other sizes.
    """
    constants = {**(constants or {}), **supply.given}
    shapes = {name: array.shape for name, array in constants.items()} | dict(supply.shapes)
    values = decoder.values({**shapes, decoder.roles.tokens.name: tokens.shape})
    _check_supply(decoder, values, supply)
    states = states_of(
        decoder.carried,
        decoder.specs,
        {name: decoder.state_shape(name, values) for name in decoder.carried},
        decoder.place,
        capacity,
        decoder.held,
    )
    return Batch(decoder, values, states, constants, supply.values)


def _check_supply(decoder: Decoder, values: Mapping[str, int], supply: Supply) -> None:
    """Raises InputError unless the sizes of what another program gives are those of this batch."""
    for pair in decoder.program.supplied:
        if pair.input not in supply.shapes:
            raise InputError(
                f"program {decoder.program.name!r}: expected the inputs of the program "
                f"{pair.source!r} as well, which computes {pair.input!r}, got none"
            )
        expected = tuple(evaluate(size, values) for size in decoder.specs[pair.input].shape)
        if supply.shapes[pair.input] != expected:
            raise InputError(
                f"input {pair.input!r}: expected the shape {expected} of this "
                f"batch, got {supply.shapes[pair.input]} of program "
                f"{pair.source!r} (it needs a row for each prompt)"
            )


class Batch:
    """Rows that run side by side, with their states bound from run to run.

    Args:
        decoder: The program.
        values: Values of the symbols, as far as they are known.
        states: The states.
        constants: Whole arrays of inputs that stay the same in all runs.
        supplied: Shards of such inputs on the device, OrtValues.

    Attributes:
        states: The states.
        values: Values of the symbols in the last run.
        sharding: How the logits of the last run are sharded.

    Raises:
        InputError: An input is missing.
    """

    def __init__(
        self,
        decoder: Decoder,
        values: Mapping[str, int],
        states: Sequence[State],
        constants: Mapping[str, Array],
        supplied: Mapping[str, Any] | None = None,
    ) -> None:
        """Binds the values that are the same in every step."""
        self._decoder, self.states = decoder, states
        self._program, self._manifest = decoder.program, decoder.manifest
        self._rank = decoder.loader.rank
        missing = [spec.name for spec in decoder.roles.rest if spec.name not in constants]
        if missing:
            raise InputError(
                f"program {self._program.name!r}: expected values of the inputs {missing} in "
                "`constants`, got none"
            )
        self.values = dict(values)
        self.sharding: SizedSharding | None = None
        self._rows: dict[str, Rows | None] = {}
        self._runs = 0
        given = {spec.name for spec in decoder.roles.given}
        sources = decoder.sources.items()
        # The symbols whose values a run changes: by a dim of an input, or by the length of a state.
        self._read = [(symbol, *place) for symbol, place in sources if place[0] in given]
        self._grown = [
            (symbol, state)
            for state in states
            for symbol, place in sources
            if place == (state.entry.input, state.entry.grows)
        ]
        self._after: Mapping[str, int] = {}
        logits = decoder.roles.logits.name
        self._bound = [_Runs([BoundGraph(e, states, logits) for e in decoder.executors])]
        if decoder.captures:
            # A captured step needs memory that runs of other sizes do not replace.
            graphs = [BoundGraph(e, states, logits, repeats=True) for e in decoder.executors]
            self._bound.append(_Runs(graphs))
        for now in self._bound:
            self._now = now
            for name, array in constants.items():
                self._bind(name, self._local(name, array))
            for name, value in (supplied or {}).items():
                for graph in now.graphs:
                    graph.bind_value(name, value)

    def run(self, feeds: Mapping[str, Array]) -> Array:
        """Runs the program on the whole arrays of new tokens, mask and positions.

        Returns:
            As `result`.

        Raises:
            InputError: As `prepare`.
            SymbolValueError: As `prepare`.
            RankError: As `prepare` and `execute`.
        """
        self.prepare(feeds)
        self.execute()
        return self.result()

    def prepare(self, feeds: Mapping[str, Array]) -> None:
        """Checks and binds the whole arrays of new tokens, mask and positions for a run.

        All ranks must call it at the same place among other collectives.

        Raises:
            InputError: An element is out of range, or sizes do not fit each other.
            SymbolValueError: A symbol's value violates its constraint.
            RankError: Another rank cannot go on.
        """
        new = feeds[self._decoder.roles.tokens.name].shape[1]
        self._now = self._bound[-1 if self._runs and new == 1 else 0]
        # Later runs differ in nothing that could be wrong on one rank alone.
        if self.fresh:
            together(self._rank, partial(self._prepare, feeds))
        else:
            self._prepare(feeds)
        self._runs += 1
        self._after = self._lengths(new)
        for graph in self._now.graphs:
            graph.bind_symbols(self.values)
            graph.bind_states(self._after)
        self._bind_logits()

    def execute(self) -> None:
        """Runs what is prepared; the ranks of a stage must call it at the same place.

        Raises:
            RankError: onnxruntime failed on some rank.
        """
        if self._decoder.stages is None:
            self._now.graphs[0].run({})
        else:
            self._decoder.stages.run(self._now.graphs, self.values)
        for state in self.states:
            state.advance(self._after[state.entry.input])

    def result(self) -> Array:
        """Returns this rank's shard of the logits, valid until the next run.

        It is nothing, of shape (0, 0), on ranks of other stages than the one that makes them. All
        ranks must call it at the same place among other collectives.
        """
        return self._found() if self._now.logits is None else self._now.logits

    def _prepare(self, feeds: Mapping[str, Array]) -> None:
        """Finds the values of symbols, and checks and binds the inputs."""
        values = self.values
        for symbol, name, dim in self._read:
            values[symbol] = feeds[name].shape[dim]
        for symbol, state in self._grown:
            values[symbol] = state.length
        if self.fresh:
            check_symbols(self._manifest.symbols, values)
            check_equal_sizes(self._program, values)
        elif self._decoder.limited:
            check_symbols(
                self._decoder.limited, {name: values[name] for name in self._decoder.limited}
            )
        local = {name: self._local(name, array) for name, array in feeds.items()}
        if self._decoder.checked.index_ranges:
            check_index_ranges(self._decoder.checked, local, values)
        for name, array in local.items():
            self._bind(name, array)

    def _lengths(self, new: int) -> dict[str, int]:
        """Returns the lengths of the states after a run, by input."""
        known: dict[Any, int] = {}
        lengths = {}
        for state in self.states:
            grows, length = state.entry.grows, state.length
            if grows is not None and not state.in_place:
                size = self._decoder.outputs[state.entry.output].shape[grows]
                if size not in known:
                    try:
                        known[size] = evaluate(size, self.values)
                    except ExpressionError:
                        known[size] = length + new
                length = known[size]
            lengths[state.entry.input] = length
        return lengths

    def _bind_logits(self) -> None:
        """Binds the logits to memory of the batch if their size is known."""
        spec = self._decoder.roles.logits
        sizes = [self.values.get(name) for name in self._decoder.logits_symbols]
        now = self._now
        if sizes != now.sizes:
            now.sizes, now.logits = sizes, None
            try:
                now.sharding = spec.sharding(self._manifest.atoms, self.values)
            except ExpressionError:
                now.sharding = None
            else:
                shape = now.sharding.local_shape if self._decoder.scores else (0, 0)
                now.logits = np.zeros(shape, DTYPES[spec.dtype].dtype)
                self._bind_scores()
        if now.logits is None:
            self._bind_scores()
        self.sharding = now.sharding

    def _bind_scores(self) -> None:
        for graph in self._now.graphs:
            if graph.scores:
                graph.bind_logits(self._now.logits)

    def _found(self) -> Array:
        """Returns logits whose size only the run has shown, and finds how they are sharded."""
        spec = self._decoder.roles.logits
        found = [graph.logits() for graph in self._now.graphs if graph.scores]
        logits = found[0] if found else np.zeros((0, 0), DTYPES[spec.dtype].dtype)
        shape = logits.shape
        if self._decoder.stages is not None:
            # The other stages have not seen them.
            sizes = np.array(shape if found else [0] * len(spec.shape), np.int64)
            shape = tuple(self._rank.all_reduce(sizes, op="max").tolist())
        self.sharding = spec.sharding(self._manifest.atoms, self.values, shape)
        return logits

    def _local(self, name: str, array: Array) -> Array:
        """Returns this rank's shard of a whole array, in the type of the input."""
        spec = self._decoder.specs[name]
        if name not in self._rows:
            self._rows[name] = self._rows_of(spec)
        rows = self._rows[name]
        if rows is None:
            sharding = sharding_of(self._manifest, spec, self.values)
            array = sharding.take(array, self._rank.index)
        elif rows.local != len(array):
            array = rows.take(array)
        return np.asarray(array, DTYPES[spec.dtype].dtype, order="C")

    def _rows_of(self, spec: TensorEntry) -> Rows | None:
        """Returns the rank's rows of an input; None if another dim is sharded too."""
        if not spec.dims or len(spec.dims[0]) > 1 or any(a for d in spec.dims[1:] for _, a in d):
            return None
        sharding = TensorEntry(spec.name, spec.dtype, spec.shape[:1], spec.dims[:1])
        block = sharding_of(self._manifest, sharding, self.values).blocks(self._rank.index)[0]
        return Rows(block.start, block.valid, block.local)

    def _bind(self, name: str, array: Array) -> None:
        for graph in self._now.graphs:
            graph.bind(name, array)

    def lengthen(self, length: int) -> None:
        """Makes states that each run writes anew as long as a number of tokens, with zeros."""
        for state in self.states:
            if not state.in_place and state.entry.grows is not None:
                state.lengthen(length)

    def take(self, other: "Batch", rows: Array, used: int) -> None:
        """Makes the states of each row those of a row of another batch of the same program.

        Args:
            other: The other batch.
            rows: For each row of this rank, its row there.
            used: The number of tokens in the cache.
        """
        self.lengthen(other.length)
        for state, source in zip(self.states, other.states, strict=True):
            kept = used if state.in_place else source.length
            for row, from_row in enumerate(rows):
                state.copy(row, 0, source, from_row, 0, kept)

    def permute(self, rows: Array, used: int) -> None:
        """Makes the states of each row those of another row of this batch.

        Args:
            rows: For each row of this rank, the other one.
            used: The number of tokens in the cache.
        """
        for state in self.states:
            state.permute(rows, used)

    @property
    def rows(self) -> Rows | None:
        """This rank's sequences; None if another dim of the tokens is sharded."""
        return self._rows_of(self._decoder.roles.tokens)

    def restart(self) -> None:
        """Makes the states empty; only for states that are extended in place."""
        self._runs = 0

    @property
    def fresh(self) -> bool:
        """Whether the next run compares sizes, and may find that they do not fit."""
        return self._runs < _COMPARED

    @property
    def length(self) -> int:
        """The length of the states that grow."""
        return next((s.length for s in self.states if s.entry.grows is not None), 0)

    def scored(self) -> SizedSharding:
        """Returns how the logits of one position are sharded, [batch, vocabulary], after a run.

        Raises:
            InputError: The sequence is sharded.
        """
        spec, sharding = self._decoder.roles.logits, self.sharding
        assert sharding is not None, "the program has run"
        if any(atoms for dim in sharding.dims[1:-1] for _, atoms in dim):
            raise InputError(
                f"output {spec.name!r}: expected a sequence that is not sharded, got {spec.dims[1]}"
            )
        return SizedSharding(sharding.atoms, (sharding.dims[0], sharding.dims[-1]))

    def share(self) -> Share:
        """Returns this rank's share of the logits of one position, after a run.

        Raises:
            InputError: As `scored`.
        """
        return Share.of(self.scored(), self._rank.index, held=self._decoder.scores)

    @property
    def state_bytes(self) -> int:
        """The bytes of the buffers of states on this rank."""
        return sum(state.bytes for state in self.states)


def last_scores(local: Array, last: Array, share: Share) -> Array:
    """Returns the logits of each sequence's last token, [rows, tokens of the shard]."""
    rows = local[: share.rows]
    if rows.ndim == 2:
        return rows
    if rows.shape[1] == 1:
        return rows[:, 0]
    column = last[share.first : share.first + share.rows]
    found: Array = rows[np.arange(share.rows), column]
    return found
