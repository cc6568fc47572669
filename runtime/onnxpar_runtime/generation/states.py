"""Buffers for the states of a forward program, which outputs fill and the next run reads.

A growing state is written anew by every run, longer than before: two buffers take turns, so that a
run never writes what it reads. They are allocated ahead, and replaced by larger ones when the state
has outgrown them. A state that the kernel extends in place has one buffer, long enough for the
whole sequence.
"""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import replace
from math import prod
from typing import Any

from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES, onnx_code
from onnxpar_format.entries import CarriedEntry, TensorEntry
from onnxpar_runtime.generation.buffers import Grid, Memory, allocate

Array = NDArray[Any]
_LEAST = 64
"""Elements along the growing dim for which memory is allocated at first."""


class State:
    """The buffers of one state on one rank.

    Args:
        entry: The state.
        spec: Its input.
        shape: The local shape of the input in the first run; along the growing dim it is ignored.
        device: Name of the device.
        index: Its number.
        capacity: The length of the buffer along the growing dim if the kernel extends it in place.
        held: Whether this rank's stage has it. Otherwise the buffers are empty; only the length is
            known, which symbols may follow from.

    Attributes:
        entry: The state.
        spec: Its input.
        in_place: Whether input and output are one buffer.
        length: The length along the growing dim; 0 for a state that does not grow.
    """

    def __init__(
        self,
        entry: CarriedEntry,
        spec: TensorEntry,
        shape: tuple[int, ...],
        device: str,
        index: int,
        capacity: int,
        *,
        held: bool = True,
    ) -> None:
        """Allocates the buffers."""
        self.entry, self.spec, self._place = entry, spec, (device, index)
        dtype = DTYPES[spec.dtype].dtype
        self.code, self._shape = onnx_code(dtype), shape
        self.in_place = entry.appends and entry.grows is not None
        self.length = 0
        self._line = dtype.itemsize if held else 0
        if entry.grows is not None:
            self._line *= prod(n for dim, n in enumerate(shape) if dim != entry.grows)
        if self.in_place:
            self.length = capacity
        lines = self._lines(self.length)
        self._read = allocate(lines, device, index)
        self._write = self._read if self.in_place else allocate(lines, device, index)

    def _lines(self, length: int) -> int:
        """Returns the bytes of the state at a length."""
        if self.entry.grows is None:
            return self._line * prod(self._shape)
        return self._line * length

    def _shape_at(self, length: int) -> tuple[int, ...]:
        grows = self.entry.grows
        if grows is None:
            return self._shape
        return (*self._shape[:grows], length, *self._shape[grows + 1 :])

    def rows(self, first: int, count: int) -> "State":
        """Returns some rows of a state that is extended in place; they share its memory."""
        part, all_rows = copy(self), self._shape[0]
        part._shape = (count, *self._shape[1:])
        part._line = self._line // all_rows * count
        size = self._read.bytes // all_rows
        held = replace(self._read, pointer=self._read.pointer + first * size, bytes=count * size)
        part._read = part._write = held
        return part

    def lengthen(self, length: int) -> None:
        """Makes the state of zeros, of this length."""
        self.length = length
        self._read = allocate(self._lines(capacity(length)), *self._place)

    def copy_row(self, row: int, other: "State", from_row: int, kept: int) -> None:
        """Copies the end of a row of another state to the end of one of this state.

        Args:
            row: The row.
            other: The other state.
            from_row: Its row.
            kept: Elements along the growing dim; a state that does not grow is copied complete.
        """
        self.copy(row, self.length - kept, other, from_row, other.length - kept, kept)

    def copy(
        self, row: int, at: int, other: "State", from_row: int, from_at: int, count: int
    ) -> None:
        """Copies a part of a row of another state on the same device to a row of this one.

        Args:
            row: The row.
            at: The place along the growing dim at which it is written.
            other: The other state, which may have other rows and another length.
            from_row: Its row.
            from_at: The place at which it is read.
            count: Elements along the growing dim; a state that does not grow is copied complete.
        """
        if self.entry.grows is None:
            at, from_at, count = 0, 0, 1
        self._grid(self._read).copy(row, at, other._grid(other._read), from_row, from_at, count)

    def permute(self, rows: Array, used: int) -> None:
        """Makes each row what another row is now; nothing leaves the device.

        Args:
            rows: For each row, the other one.
            used: Elements along the growing dim that count, if the state is extended in place.
        """
        places = rows.tolist()
        changed = [row for row, other in enumerate(places) if row != other]
        if not changed:
            return
        now = self._grid(self._read)
        if not self.in_place:
            if self._write.bytes < self._lines(self.length):
                self._write = allocate(self._lines(capacity(self.length)), *self._place)
            later = self._grid(self._write)
            for row, other in enumerate(places):
                later.copy(row, 0, now, other, 0, now.columns)
            self._read, self._write = self._write, self._read
            return
        # The buffer is bound, and so must stay.
        size = len(changed) * now.lines * used * now.bytes
        spare = Grid(allocate(size, *self._place), now.lines, used, now.bytes)
        for place, row in enumerate(changed):
            spare.copy(place, 0, now, places[row], 0, used)
        for place, row in enumerate(changed):
            now.copy(row, 0, spare, place, 0, used)

    def _grid(self, memory: Memory) -> Grid:
        """Returns memory as rows; its columns are the growing dim, their bytes the inner ones."""
        grows, shape = self.entry.grows, self._shape
        itemsize = DTYPES[self.spec.dtype].dtype.itemsize if self._line else 0
        if grows is None:
            return Grid(memory, 1, 1, prod(shape[1:]) * itemsize)
        inner = prod(shape[grows + 1 :]) * itemsize
        return Grid(memory, prod(shape[1:grows]), self.length, inner)

    def bind(self, io: Any, length: int) -> None:
        """Binds the input at its present length, and the output at a new one."""
        if self._write.bytes < self._lines(length):
            self._write = allocate(self._lines(capacity(length)), *self._place)
        place, code, entry = self._place, self.code, self.entry
        io.bind_input(entry.input, *place, code, self._shape_at(self.length), self._read.pointer)
        io.bind_output(entry.output, *place, code, self._shape_at(length), self._write.pointer)

    def advance(self, length: int) -> None:
        """Makes the output of the last run, of this length, the input of the next."""
        self.length = length
        self._read, self._write = self._write, self._read

    @property
    def bytes(self) -> int:
        """The bytes of the buffers."""
        return self._read.bytes + (0 if self.in_place else self._write.bytes)


def capacity(length: int) -> int:
    """Returns the length for which a growing state is allocated."""
    return max(_LEAST, 1 << (length - 1).bit_length())


def states_of(
    carried: Mapping[str, CarriedEntry],
    specs: Mapping[str, TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
    place: tuple[str, int],
    capacity: int,
    held: Collection[str],
) -> list[State]:
    """Returns buffers for the states, in their order.

    Args:
        carried: The states.
        specs: Their inputs.
        shapes: Their local shapes in the first run.
        place: Name and number of the device.
        capacity: The length of a sequence for which states that grow in place are allocated.
        held: The inputs of the states that this rank's stage has.
    """
    return [
        State(entry, specs[name], shapes[name], *place, capacity, held=name in held)
        for name, entry in carried.items()
    ]
