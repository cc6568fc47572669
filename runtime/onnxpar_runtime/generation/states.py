"""Buffers for the states of a forward program, which outputs fill and the next run reads.

A growing state is written anew by every run, longer than before: two buffers take turns, so that a
run never writes what it reads. They are allocated ahead, and replaced by larger ones when the state
has outgrown them. A state that the kernel extends in place has one buffer, long enough for the
whole sequence.
"""

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES, onnx_code
from onnxpar_format.entries import CarriedEntry, TensorEntry
from onnxpar_runtime.cuda import copy_in

Array = NDArray[Any]
_LEAST = 64
"""Elements along the growing dim for which memory is allocated at first."""


@dataclass(frozen=True)
class Memory:
    """Memory on a device.

    Attributes:
        pointer: Its address.
        owner: What keeps it.
        bytes: Its size.
    """

    pointer: int
    owner: Any
    bytes: int


def allocate(size: int, device: str, index: int) -> Memory:
    """Returns memory of zeros: kernels may read, and then ignore, what nobody has written."""
    if device == "cpu":
        array = np.zeros(max(size, 1), np.uint8)
        return Memory(array.ctypes.data, array, size)
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
        (max(size, 1),), onnx_code(np.dtype(np.uint8)), device, index
    )
    copy_in(value.data_ptr(), np.zeros(max(size, 1), np.uint8))
    return Memory(value.data_ptr(), value, size)


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
        self.entry, self._place = entry, (device, index)
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
        held = Memory(self._read.pointer + first * size, self._read.owner, count * size)
        part._read = part._write = held
        return part

    def lengthen(self, length: int) -> None:
        """Makes the state of zeros, of this length."""
        self.length = length
        self._read = allocate(self._lines(capacity(length)), *self._place)

    def copy_row(self, row: int, other: "State", from_row: int, kept: int) -> None:
        """Copies the end of a row of another state, on the CPU, to the end of one of this state.

        Args:
            row: The row.
            other: The other state.
            from_row: Its row.
            kept: Elements along the growing dim; a state that does not grow is copied complete.
        """
        target, source = self._elements()[row], other._elements()[from_row]
        if self.entry.grows is None:
            target[:] = source
        else:
            target[:, self.length - kept :] = source[:, other.length - kept :]

    def _elements(self) -> Array:
        """Returns the bytes of the input: [rows, outer, length, bytes of all inner dims]."""
        grows, size = self.entry.grows, self._lines(self.length)
        shape = self._shape_at(self.length)
        dim = 1 if grows is None else grows
        outer = prod(shape[1:dim])
        middle = self.length if grows is not None else 1
        flat: Array = self._read.owner[:size]
        # Sizes may be 0, so that none can be left to be found.
        count = shape[0] * outer * middle
        return flat.reshape(shape[0], outer, middle, size // count if count else 0)

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
