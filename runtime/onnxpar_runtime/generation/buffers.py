"""Memory of states on a device, and copies within the device."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from onnxpar_format.dtypes import onnx_code
from onnxpar_runtime.cuda import copy_in, copy_lines

Array = NDArray[Any]


@dataclass(frozen=True)
class Memory:
    """Memory on a device.

    Attributes:
        pointer: Its address.
        owner: What keeps it; on the CPU, its bytes as an array.
        bytes: Its size.
        gpu: The number of the GPU; None on the CPU.
    """

    pointer: int
    owner: Any
    bytes: int
    gpu: int | None = None


def allocate(size: int, device: str, index: int) -> Memory:
    """Returns memory of zeros: kernels may read, and then ignore, what nobody has written."""
    if device == "cpu":
        array = np.zeros(max(size, 1), np.uint8)
        return Memory(array.ctypes.data, array, size)
    value = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
        (max(size, 1),), onnx_code(np.dtype(np.uint8)), device, index
    )
    copy_in(value.data_ptr(), np.zeros(max(size, 1), np.uint8))
    return Memory(value.data_ptr(), value, size, index)


@dataclass(frozen=True)
class Grid:
    """Memory as rows of a number of lines, each of equally many columns.

    Attributes:
        memory: The memory.
        lines: The lines of a row.
        columns: The columns of a line.
        bytes: The bytes of a column in a line.
    """

    memory: Memory
    lines: int
    columns: int
    bytes: int

    def copy(
        self, row: int, at: int, source: "Grid", from_row: int, from_at: int, count: int
    ) -> None:
        """Copies columns of a row of another grid on the same device to a row of this one.

        Args:
            row: The row.
            at: Its first column that is written.
            source: The other grid, with as many lines and bytes of a column.
            from_row: The other row.
            from_at: Its first column that is read.
            count: The number of columns.
        """
        if not count * self.lines * self.bytes:
            return
        if self.memory.gpu is None:
            self._row(row)[:, at : at + count] = source._row(from_row)[:, from_at : from_at + count]
            return
        copy_lines(
            self.memory.gpu,
            self.memory.pointer + self._place(row, at),
            self.columns * self.bytes,
            source.memory.pointer + source._place(from_row, from_at),
            source.columns * source.bytes,
            count * self.bytes,
            self.lines,
        )

    def _place(self, row: int, at: int) -> int:
        return (row * self.lines * self.columns + at) * self.bytes

    def _row(self, row: int) -> Array:
        """Returns a row on the CPU, [lines, columns, bytes]."""
        size = self.lines * self.columns * self.bytes
        # The memory of some rows of a state begins within that of all.
        begin = self.memory.pointer - self.memory.owner.ctypes.data + row * size
        found: Array = self.memory.owner[begin : begin + size]
        return found.reshape(self.lines, self.columns, self.bytes)


def repeat_rows(value: Any, count: int, place: tuple[str, int]) -> Any:
    """Returns an OrtValue with equal rows, side by side, for each row of another.

    Args:
        value: The other one.
        count: The number of equal rows.
        place: Name and number of the device of both.
    """
    rows, *rest = value.shape()
    made = onnxruntime.OrtValue.ortvalue_from_shape_and_type(
        (rows * count, *rest), value.element_type(), *place
    )
    size = value.tensor_size_in_bytes() // max(rows, 1)
    source, target = (Grid(_memory_of(one, place), 1, 1, size) for one in (value, made))
    for row in range(rows * count):
        target.copy(row, 0, source, row // count, 0, 1)
    return made


def _memory_of(value: Any, place: tuple[str, int]) -> Memory:
    """Returns the memory of an OrtValue, which must outlive it."""
    size, (device, index) = value.tensor_size_in_bytes(), place
    if device != "cpu":
        return Memory(value.data_ptr(), value, size, index)
    raw = (ctypes.c_uint8 * size).from_address(value.data_ptr())
    return Memory(value.data_ptr(), np.frombuffer(raw, np.uint8), size)
