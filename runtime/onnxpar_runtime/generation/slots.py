"""Slots: the rows of a cache, one for each request while others enter and leave.

A cache that is extended in place has one buffer with a row for each slot. A request is filled in
its own row, as a batch of one, and then runs in a batch with the rows before it: both batches are
views of the buffer, so nothing is copied. A cache that grows is written anew by each run anyway: a
request is filled in buffers of its own, and copied into those of the others when it joins them. Its
rows end in the same column, so the mask leaves out what lies before the shorter ones.

If the batch is sharded, each shard has slots of its own, and a run has as many rows for each shard.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.boxes import coordinates
from onnxpar_format.dtypes import DTYPES
from onnxpar_format.expressions import bare_name, names_of
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.generation.decoder import Decoder
from onnxpar_runtime.generation.encoder import Encoder, Supply
from onnxpar_runtime.generation.prefixes import Prefixes
from onnxpar_runtime.generation.read_rows import ReadRows, Slot
from onnxpar_runtime.generation.states import State, capacity, states_of
from onnxpar_runtime.generation.steps import Batch
from onnxpar_runtime.symbol_checks import check_symbols

Array = NDArray[Any]
_LONGEST = 2048
"""Tokens of a request at most, unless another number is given."""
_SLOTS, _MOST = 8, 64
"""Slots, unless another number is given; and if the memory of the cache is given."""
_BATCHES = 8
"""Numbers of rows for which a batch is kept."""
_SPARE = 64
"""Columns that a cache may be too long before it is copied to a shorter one."""


@dataclass(frozen=True)
class Window:
    """The new tokens of rows side by side, and what they see of the cache.

    Attributes:
        past: The number of tokens in the cache of each row, [rows].
        new: The number of new tokens of each row.
        total: The columns of the mask.
        left: Whether rows end in the last column; otherwise they begin in the first.
    """

    past: Array
    new: int
    total: int
    left: bool

    @property
    def padded(self) -> bool:
        """Whether the rows differ in length."""
        return bool((self.past != self.past[0]).any())

    def mask(self) -> Array:
        """Returns which columns count, bool [rows, total]."""
        column, lengths = np.arange(self.total), self.past[:, None] + self.new
        return np.asarray(column >= self.total - lengths if self.left else column < lengths)

    def positions(self, new: int) -> Array:
        """Returns the places of the new tokens in their sequences, [rows, new]."""
        return np.asarray(self.past[:, None] + np.arange(new))


@dataclass(frozen=True)
class RowSize:
    """Memory for the states of a row, on the device that needs most.

    Attributes:
        token: Bytes for each token.
        fixed: Bytes that do not depend on tokens.
        read: Bytes for each token that an encoder has read.
    """

    token: int
    fixed: int
    read: int

    def at(self, length: int, read: int) -> int:
        """Returns the bytes for a number of tokens, and of tokens that were read."""
        return self.token * length + self.fixed + self.read * read


def row_size(decoder: Decoder) -> RowSize:
    """Returns the memory for a row; every rank must call it.

    Raises:
        InputError: The size of a state is not known.
    """
    shards, _ = batch_shards(decoder)
    values = decoder.values({decoder.roles.tokens.name: (shards, 1)})
    sizes = np.zeros(3, np.int64)
    for name in decoder.held:
        grows = decoder.carried[name].grows
        shape = [n for dim, n in enumerate(decoder.state_shape(name, values)) if dim != grows]
        sizes[int(grows is None)] += DTYPES[decoder.specs[name].dtype].dtype.itemsize * prod(shape)
    for pair in decoder.program.supplied:
        spec = decoder.specs[pair.input]
        # Of one token.
        open_sizes = {n: 1 for size in spec.shape for n in names_of(size) if n not in values}
        local = spec.sharding(decoder.manifest.atoms, values | open_sizes).local_shape
        kind = 2 if open_sizes else 1
        sizes[kind] += DTYPES[spec.dtype].dtype.itemsize * prod(local)
    token, fixed, read = decoder.loader.rank.all_reduce(sizes, op="max").tolist()
    return RowSize(token, fixed, read)


@dataclass(frozen=True)
class Room:
    """How many requests may run side by side, and how long they may be.

    Attributes:
        slots: The largest number of requests, in all shards of the batch; None for 8, or for as
            many as the memory admits, 64 at most.
        length: Tokens of a request at most, prompt included; None for as many as the program
            admits, 2048 at most.
        memory: Bytes of caches on a device at most; None if only slots are counted.
        prefixes: Tokens of prompts at most whose caches are kept for prompts that begin alike, in
            memory besides these caches; None for one slot's tokens, or for none if the memory is
            given.
        groups: The number of groups of requests that share slots and memory.
        waits: Why one group runs through all stages of a pipeline, which then wait for one another;
            empty if all stages compute at the same time.
    """

    slots: int | None = None
    length: int | None = None
    memory: int | None = None
    prefixes: int | None = None
    groups: int = 1
    waits: str = ""


def in_turns(decoder: Decoder, room: Room) -> Room:
    """Returns the room with a group of requests for each stage of a pipeline, if that is possible.

    There is one group if ranks have several virtual stages, if a run has a fixed number of tokens,
    or if the slots cannot be divided.
    """
    pipeline = decoder.manifest.pipeline
    if decoder.stages is None or pipeline is None:
        return room
    shards, _ = batch_shards(decoder)
    each = pipeline.stages * shards
    if pipeline.chunks > 1:
        return replace(room, waits="each rank has several virtual stages")
    if decoder.roles.width:
        return replace(room, waits=f"each run takes {decoder.roles.width} tokens of a prompt")
    if room.slots is not None and room.slots % each:
        return replace(room, waits=f"slots: expected a multiple of {each}, got {room.slots}")
    return replace(room, groups=pipeline.stages)


class Slots(ABC):
    """The caches of requests on one rank.

    Args:
        decoder: The program.
        room: How many requests may run, and how long they may be; the length is given.
        size: The memory for a row.
        encoder: What reads the prompts of requests; None if the decoder does.

    Attributes:
        shards: The number of shards of the batch.
        rows: The number of slots of each.
        length: Tokens of a request at most.
        prefixes: What is kept of prompts.

    Raises:
        InputError: Requests cannot share the program's batch, or the numbers do not fit.
    """

    def __init__(
        self,
        decoder: Decoder,
        room: Room,
        length: int,
        size: RowSize,
        encoder: Encoder | None = None,
    ) -> None:
        """Finds how the batch is sharded."""
        self._decoder, self.length = decoder, length
        self._read = ReadRows(decoder, encoder)
        self._reads = encoder is not None
        self._size = size
        self._memory = None if room.memory is None else room.memory // room.groups
        self.shards, self._own = batch_shards(decoder)
        count = room.slots
        if count is None:
            count = (_SLOTS if room.memory is None else _MOST) // room.groups
            count = max(count // self.shards, 1) * self.shards
        else:
            count //= room.groups
        if count < 1 or length < 2:
            raise InputError(
                f"slots: expected at least 1 slot with at least 2 tokens, got {count} with {length}"
            )
        if count % self.shards:
            raise InputError(
                f"slots: expected a multiple of {self.shards}, the number of shards of the batch, "
                f"got {count}"
            )
        self.rows = count // self.shards
        least = self._needed(1, length, length if self._reads else 0, 1)
        if self._memory is not None and least > self._memory:
            each = "" if room.groups == 1 else f" in each of {room.groups} groups"
            raise InputError(
                f"cache memory: expected at least {least * room.groups} bytes on a device for a "
                f"request of {length} tokens{each}, got {room.memory}"
            )
        self._check()
        self._open()
        kept = room.prefixes
        if kept is None:
            kept = length if room.memory is None and not self._reads else 0
        if kept < 0:
            raise InputError(f"prefixes: expected at least 0 tokens, got {kept}")
        self.prefixes = Prefixes(decoder, self._states, 0 if self._reads else kept)
        self._taken: dict[Slot, tuple[int, int]] = {}
        self._free = {Slot(s, row) for s in range(self.shards) for row in range(self.rows)}

    def _check(self) -> None:
        """Checks that rows of different lengths can run beside one another, in any number."""
        decoder, roles = self._decoder, self._decoder.roles
        where = decoder.manifest.directory
        if roles.mask is None:
            raise InputError(f"{where}: requests of different lengths need an attention mask")
        if roles.positions is not None and len(roles.positions.shape) == 1:
            raise InputError(
                f"{where}: requests of different lengths need positions for each, but "
                f"{roles.positions.name!r} has one for all requests"
            )
        others = {pair.input for pair in decoder.program.supplied if not self._reads}
        if roles.rest or others:
            names = [spec.name for spec in roles.rest] + sorted(others)
            raise InputError(
                f"{where}: expected only tokens, mask, positions and states as inputs, got {names}"
            )
        values = self._values(1)
        decoder.check_length(values, self.length, self.length)
        for count in range(1, self.rows + 1):
            check_symbols(decoder.manifest.symbols, self._values(count))

    def _values(
        self, rows: int, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, int]:
        """Returns the values of symbols for a number of rows of each shard."""
        return row_values(self._decoder, self.shards * rows, shapes)

    def _states(self, rows: int, length: int) -> list[State]:
        """Returns empty states with a number of rows in this shard."""
        return row_states(self._decoder, self.shards, rows, length)

    def take(self, length: int, read: int) -> Slot | None:
        """Returns a slot for a request, if one is free and the caches have room; else None.

        Args:
            length: The tokens of the complete request in the cache.
            read: The tokens that the encoder reads.
        """
        if not self._free:
            return None
        # The lowest row, since a run has all rows up to the highest one in use.
        slot = min(self._free, key=lambda slot: (slot.row, slot.shard))
        if self._memory is not None:
            rows = 1 + max(s.row for s in (slot, *self._taken))
            needs = [(length, read), *self._taken.values()]
            longest, most = (max(each) for each in zip(*needs, strict=True))
            if self._needed(rows, longest, most, 1 + self._joining()) > self._memory:
                return None
        self._free.remove(slot)
        self._taken[slot] = length, read
        return slot

    def leave(self, slot: Slot) -> None:
        """Frees the slot of a request."""
        del self._taken[slot]
        self._free.add(slot)
        self._read.drop(slot)

    @abstractmethod
    def _needed(self, rows: int, longest: int, read: int, joining: int) -> int:
        """Returns the bytes of caches on the device that needs most.

        Args:
            rows: Rows of a shard up to the highest one in use.
            longest: Tokens of the longest request.
            read: Tokens that the encoder reads for the one with most.
            joining: Requests that have not run with the others yet.
        """

    @abstractmethod
    def _joining(self) -> int:
        """Returns the number of requests that have a slot and have not run with the others."""

    @abstractmethod
    def _open(self) -> None:
        """Makes what the slots need before the first request."""

    @abstractmethod
    def window(self, batch: Batch, past: Array, new: int) -> Window:
        """Returns the window of new tokens of a batch.

        Args:
            batch: From `filling` or `running`.
            past: The number of tokens in the cache of each row; 0 for rows without a request.
            new: The number of new tokens.
        """

    @abstractmethod
    def filling(self, slot: Slot, supply: Supply) -> Batch:
        """Returns a batch of one row for each shard, for the prompt of a request.

        All shards compute the prompt; that of the slot keeps the states.

        Args:
            slot: The slot.
            supply: What the encoder has read for the request, in one row for each shard.
        """

    @abstractmethod
    def running(self, lengths: Mapping[Slot, int]) -> tuple[Batch, int]:
        """Returns the batch of all requests that run, and the rows of each shard in it.

        Args:
            lengths: The number of tokens in the cache of each.
        """

    @property
    @abstractmethod
    def bytes(self) -> int:
        """The bytes of the states on this rank."""


class SharedSlots(Slots):
    """Slots in a cache that is extended in place."""

    def _needed(self, rows: int, longest: int, read: int, joining: int) -> int:
        """Returns the bytes of the slots, which have one length."""
        del longest, joining
        return (rows + (self.shards > 1)) * self._size.at(self.length, read)

    def _joining(self) -> int:
        return 0

    def _open(self) -> None:
        """Allocates the slots."""
        if self._reads:
            raise InputError(
                f"{self._decoder.manifest.directory}: with an encoder, requests need a cache that "
                "each run writes anew, got one that is extended in place"
            )
        if self._memory is not None:
            while self._needed(self.rows, self.length, 0, 0) > self._memory:
                self.rows -= 1
        # One more takes what other shards compute while they wait.
        self._held = self._states(self.rows + (self.shards > 1), self.length)
        self._batches: dict[int, Batch] = {}

    def window(self, batch: Batch, past: Array, new: int) -> Window:
        """Returns the window of new tokens of a batch."""
        del batch
        # A first run sees only itself, as it would alone; later the shape stays the same.
        return Window(past, new, self.length if past.any() else new, left=False)

    def filling(self, slot: Slot, supply: Supply) -> Batch:
        """Returns a batch of the slot's own row."""
        del supply
        row = slot.row if slot.shard == self._own else self.rows
        states = [state.rows(row, 1) for state in self._held]
        return Batch(self._decoder, self._values(1), states, {})

    def running(self, lengths: Mapping[Slot, int]) -> tuple[Batch, int]:
        """Returns a batch of the first rows of each shard, with all requests among them."""
        rows = 1 + max(slot.row for slot in lengths)
        if self._decoder.captures:
            # Few numbers of rows, each of which is captured once.
            rows = min(1 << (rows - 1).bit_length(), self.rows)
        if rows not in self._batches:
            states = [state.rows(0, rows) for state in self._held]
            self._batches[rows] = Batch(self._decoder, self._values(rows), states, {})
        # The last one used is the last one forgotten: each has memory for logits.
        self._batches[rows] = batch = self._batches.pop(rows)
        if len(self._batches) > _BATCHES:
            del self._batches[next(iter(self._batches))]
        return batch, rows

    @property
    def bytes(self) -> int:
        """The bytes of the states on this rank."""
        return sum(state.bytes for state in self._held) + self.prefixes.bytes


class GrowingSlots(Slots):
    """Slots in a cache that each run writes anew."""

    def _needed(self, rows: int, longest: int, read: int, joining: int) -> int:
        """Returns the bytes of two buffers, and of what is copied when requests join."""
        # The old buffers and the first new one, and two of each request that joins. What was read
        # is there for each request, and in the old and the new batch.
        return (3 * rows + 2 * joining) * self._size.at(capacity(longest), read)

    def _joining(self) -> int:
        return len(self._filled)

    def leave(self, slot: Slot) -> None:
        """Frees the slot of a request."""
        super().leave(slot)
        self._filled.pop(slot, None)

    def _open(self) -> None:
        """Holds nothing yet."""
        self._filled: dict[Slot, list[State]] = {}
        self._now: list[State] = []
        self._batch: Batch | None = None
        self._rows = 0

    def window(self, batch: Batch, past: Array, new: int) -> Window:
        """Returns the window of new tokens of a batch."""
        return Window(past, new, batch.length + new, left=True)

    def filling(self, slot: Slot, supply: Supply) -> Batch:
        """Returns a batch with buffers of its own, which the next `running` takes."""
        self._filled[slot] = self._states(1, 0)
        self._read.keep(slot, supply)
        values = self._values(1, supply.shapes)
        return Batch(self._decoder, values, self._filled[slot], supply.given, supply.values)

    def running(self, lengths: Mapping[Slot, int]) -> tuple[Batch, int]:
        """Returns the batch of all requests, with those that have been filled."""
        rows = 1 + max(slot.row for slot in lengths)
        longest = max(lengths.values())
        batch = self._batch
        if (
            batch is None
            or rows != self._rows
            or any(slot in lengths for slot in self._filled)
            or batch.length > 2 * longest + _SPARE
            or batch.length >= max(self._taken[slot][0] for slot in lengths)
        ):
            batch = self._arranged(lengths, rows, longest)
        return batch, rows

    def _arranged(self, lengths: Mapping[Slot, int], rows: int, longest: int) -> Batch:
        """Returns a new batch with the states of all requests."""
        states = self._states(rows, 0)
        for number, state in enumerate(states):
            state.lengthen(longest)
            for slot, length in lengths.items():
                if slot.shard == self._own:
                    filled = self._filled.get(slot)
                    source, row = (self._now, slot.row) if filled is None else (filled, 0)
                    state.copy_row(slot.row, source[number], row, length)
        self._filled = {s: kept for s, kept in self._filled.items() if s not in lengths}
        self._now, self._rows = states, rows
        supply = self._read.beside(lengths, self._own, rows, self.shards)
        values = self._values(rows, supply.shapes)
        self._batch = Batch(self._decoder, values, states, supply.given, supply.values)
        return self._batch

    @property
    def bytes(self) -> int:
        """The bytes of the states on this rank, of prompts, and of what was read for requests."""
        filled = [state for states in self._filled.values() for state in states]
        held = sum(state.bytes for state in [*self._now, *filled])
        return held + self.prefixes.bytes + self._read.bytes


def slots_of(decoder: Decoder, room: Room, size: RowSize, encoder: Encoder | None = None) -> Slots:
    """Returns slots of the kind that a program's cache needs.

    Args:
        decoder: As `Slots`.
        room: As `Slots`.
        size: As `Slots`.
        encoder: As `Slots`.

    Raises:
        InputError: As `Slots`; or some states are extended in place and others grow.
    """
    anew = [state.input for state in decoder.carried.values() if not state.appends]
    if decoder.in_place and anew:
        raise InputError(
            f"{decoder.manifest.directory}: expected states of one kind, got some that are "
            f"extended in place and {anew[0]!r}, which is written anew"
        )
    length = room.length
    if length is None:
        limit = decoder.longest({})
        length = _LONGEST if limit is None else min(limit, _LONGEST)
    kind = SharedSlots if decoder.in_place else GrowingSlots
    return kind(decoder, room, length, size, encoder)


def row_values(
    decoder: Decoder, rows: int, shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, int]:
    """Returns the values of symbols for a number of rows, as far as they give them.

    Args:
        decoder: The program.
        rows: The number, of all shards.
        shapes: The shapes of what an encoder has read.
    """
    tokens = decoder.roles.tokens
    values = decoder.values({**(shapes or {}), tokens.name: (rows, 1)})
    sequence = bare_name(tokens.shape[1])
    return {name: size for name, size in values.items() if name != sequence}


def row_states(decoder: Decoder, shards: int, rows: int, length: int) -> list[State]:
    """Returns empty states.

    Args:
        decoder: The program.
        shards: The number of shards of the batch.
        rows: The rows of this shard.
        length: The length of states that are extended in place.
    """
    values = row_values(decoder, shards)
    shapes = {name: (rows, *decoder.state_shape(name, values)[1:]) for name in decoder.carried}
    return states_of(decoder.carried, decoder.specs, shapes, decoder.place, length, decoder.held)


def batch_shards(decoder: Decoder) -> tuple[int, int]:
    """Returns the number of shards of the batch, and this rank's.

    Raises:
        InputError: States differ in it, or their first dim is not the batch.
    """
    where, batch = decoder.manifest.directory, bare_name(decoder.roles.tokens.shape[0])
    found = set()
    for name in decoder.carried:
        spec = decoder.specs[name]
        if not spec.shape or bare_name(spec.shape[0]) != batch or batch is None:
            raise InputError(
                f"{where}: expected the batch as the first dim of each state, "
                f"got {list(spec.shape)} for {name!r}"
            )
        found.add(tuple(atom for _, atoms in spec.dims[0] for atom in atoms))
    if len(found) > 1:
        raise InputError(f"{where}: expected one sharding of the batch in all states, got several")
    sizes = decoder.manifest.atoms
    places = coordinates(decoder.loader.rank.index, sizes)
    shard, shards = 0, 1
    for atom in found.pop():
        shard = shard * sizes[atom] + places[atom]
        shards *= sizes[atom]
    return shards, shard
