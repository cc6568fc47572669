"""Reads and writes safetensors files, one tensor in memory at a time.

The format (https://github.com/huggingface/safetensors, version 0.4 and later): the length of the
header as a little-endian 64-bit integer; the header, JSON with dtype, shape and byte range of each
tensor, padded with spaces to a multiple of 8; then the tensors, little-endian, C-contiguous, one
after another with no gap.
"""

import json
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_format.new_file import new_file
from onnxpar_format.regular_file import open_regular
from onnxpar_runtime.errors import InputError

Array = NDArray[Any]
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_NAMES = {code: name for name, code in _CODES.items()}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Entry:
    """A tensor of a file: its name, dtype name (`float32`) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Length of its data."""
        return prod(self.shape) * DTYPES[self.dtype].dtype.itemsize


def header(entries: Sequence[Entry]) -> bytes:
    """Returns the beginning of a file of these tensors, before their data in this order."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        offsets = [start, start + entry.bytes]
        table[entry.name] = {
            "dtype": _CODES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets,
        }  # fmt: skip
        start = offsets[1]
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def raw_bytes(array: Array) -> memoryview:
    """Returns the bytes of an array as in a file, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_tensors(path: str | Path, entries: Sequence[Entry], arrays: Iterable[Array]) -> None:
    """Writes tensors to a file, which appears complete under its name, or not at all.

    Args:
        path: The file.
        entries: Names, types and shapes of the tensors.
        arrays: The tensors, in the order of `entries`; taken one at a time.

    Raises:
        InputError: The file cannot be written.
        ValueError: An array does not match its entry.
    """
    with new_file(path, InputError) as file, file.open("wb") as stream:
        stream.write(header(entries))
        for entry, array in zip(entries, arrays, strict=True):
            wanted = DTYPES[entry.dtype].dtype
            if array.shape != entry.shape or array.dtype != wanted:
                raise ValueError(
                    f"{entry.name!r}: expected {wanted} {entry.shape}, got {array.dtype} "
                    f"{array.shape}"
                )
            stream.write(raw_bytes(array))


def stored_as(entry: Entry) -> tuple[str, list[int]] | None:
    """Returns type and shape of a tensor in a file's header; None for types not known here."""
    code = _CODES.get(entry.dtype)
    return None if code is None else (code, list(entry.shape))


def read_header(path: str | Path) -> tuple[dict[str, Any], int, int]:
    """Returns the header of a file, the number of bytes before the data, and that of the file.

    Raises:
        InputError: The file is missing, or is not a safetensors file.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, _MAX_HEADER):
                raise _malformed(path, "it has no header")
            header = json.loads(stream.read(length), object_pairs_hook=_once)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise _malformed(path, str(error)) from None
    if not isinstance(header, dict):
        raise _malformed(path, "its header is not an object")
    header.pop("__metadata__", None)
    return header, 8 + length, size


def read_tensors(path: str | Path) -> Mapping[str, Array]:
    """Returns the tensors of a file by name; they are read-only and stay on the disk until used.

    Raises:
        InputError: The file is missing, is not a safetensors file, or has an unknown type; or the
            tensors overlap, or leave bytes of the file out.
    """
    header, base, size = read_header(path)
    try:
        data = np.memmap(path, np.uint8, "r") if size > base else np.empty(0, np.uint8)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    found = {name: _view(path, name, entry, data, base) for name, entry in header.items()}
    end = 0
    for start, stop, name in sorted((*header[name]["data_offsets"], name) for name in header):
        if start != end:
            raise _malformed(path, f"{name!r} begins at byte {start}, expected {end}")
        end = stop
    if base + end != size:
        raise _malformed(path, f"{size} bytes, expected {base + end}")
    return found


def forget_pages(tensor: Array) -> None:
    """Lets the system have the memory of the file of a tensor of `read_tensors`.

    Its pages are read from the disk again if they are used again. Without this, they count as
    memory of the process as long as the file is mapped.
    """
    base: Any = tensor
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object; ValueError if it has a key twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} is there twice")
    return found


def _view(path: str | Path, name: str, raw: Any, data: Array, base: int) -> Array:
    try:
        code, shape = raw["dtype"], tuple(raw["shape"])
        start, stop = raw["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise _malformed(path, f"the header's entry of {name!r}") from None
    if not isinstance(code, str) or code not in _NAMES:
        raise InputError(f"{path}: {name!r} has the unknown type {code!r}")
    numbers = (*shape, start, stop)
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise _malformed(path, f"the header's entry of {name!r}")
    entry = Entry(name, _NAMES[code], shape)
    if stop - start != entry.bytes or (entry.bytes and base + stop > data.size):
        raise _malformed(path, f"the bytes of {name!r} are missing; the file may be truncated")
    if not entry.bytes:
        return np.empty(shape, DTYPES[entry.dtype].dtype)
    part: Array = np.asarray(data[base + start : base + stop])
    dtype = DTYPES[entry.dtype].dtype
    if (base + start) % dtype.itemsize:
        part = part.copy()
    return part.view(dtype).reshape(shape)


def _malformed(path: str | Path, reason: str) -> InputError:
    return InputError(f"{path}: not a readable safetensors file: {reason}")
