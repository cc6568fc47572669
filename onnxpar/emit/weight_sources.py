"""Reads the bytes of a model's weights in parts, so that weights may be larger than memory."""

import mmap
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import DirectoryError
from onnxpar.partition.partitioned_model import Parameter

Bytes = NDArray[np.uint8]

MADV_POPULATE_READ = 22
"""Advice to read all pages, or fail; from mman-common.h of Linux 5.14."""

WINDOW = 1 << 25
"""Bytes of a file that are mapped at once, aligned to this size, so that large pages fit."""


class Reader(Protocol):
    """Reads the bytes of one tensor, little-endian and packed as in ONNX's `raw_data`."""

    def read(self, start: int, stop: int) -> Bytes:
        """Returns bytes `[start, stop)`, which must not be changed."""
        ...


@dataclass(frozen=True)
class Region:
    """A tensor's bytes in a file of external data.

    Attributes:
        path: The file. Links are followed, because the caches of model hubs consist of links.
        offset: Bytes before the tensor.
        length: Bytes of the tensor.
    """

    path: Path
    offset: int
    length: int


def check(parameters: Iterable[Parameter]) -> None:
    """Checks that every parameter's data is there, without reading it.

    Raises:
        DirectoryError: A tensor has no data, or as `check_tensors`.
    """
    check_tensors((parameter.name, _tensor(parameter)) for parameter in parameters)


def check_tensors(tensors: Iterable[tuple[str, ir.TensorProtocol]]) -> None:
    """Checks that the data of tensors, given with their names, is there, without reading it.

    Raises:
        DirectoryError: A tensor's file is missing or outside the model's folder, or has fewer bytes
            than the tensor.
    """
    sizes: dict[Path, int] = {}
    for name, tensor in tensors:
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        region = _region(name, tensor)
        if region.path not in sizes:
            sizes[region.path] = _size(name, region.path)
        end = region.offset + region.length
        if sizes[region.path] < end:
            raise DirectoryError(
                f"tensor {name!r}: its data file {region.path} is truncated: expected at "
                f"least {end} bytes ({region.length} from byte {region.offset}), got "
                f"{sizes[region.path]}"
            )


@contextmanager
def reader(parameter: Parameter) -> Iterator[Reader]:
    """Opens a parameter's data; a tensor that is not external data is held in memory.

    Raises:
        DirectoryError: As `check`.
    """
    tensor = _tensor(parameter)
    if not isinstance(tensor, ir.ExternalTensor):
        try:
            data = tensor_bytes(tensor)
        except ValueError as error:
            raise DirectoryError(
                f"tensor {parameter.name!r}: its data does not fit its shape: {error}"
            ) from error
        yield _InMemory(data)
        return
    region = _region(parameter.name, tensor)
    try:
        stream = FileIO(os.fspath(region.path), "rb")
    except OSError as error:
        raise _unreadable(parameter.name, region.path, error) from error
    with stream:
        yield _InFile(parameter.name, region, stream)


@dataclass(frozen=True)
class _InMemory:
    data: Bytes

    def read(self, start: int, stop: int) -> Bytes:
        return self.data[start:stop]


class _InFile:
    def __init__(self, name: str, region: Region, stream: FileIO) -> None:
        self._name = name
        self._region = region
        self._stream = stream
        self._begin = 0
        self._window: mmap.mmap | None = None

    def read(self, start: int, stop: int) -> Bytes:
        mapped = self._mapped(start, stop)
        return self._copied(start, stop) if mapped is None else mapped

    def _mapped(self, start: int, stop: int) -> Bytes | None:
        """Returns bytes in mapped memory, or None if that is impossible or unsafe.

        If a file has become shorter, a process that touches a missing page is killed. So pages are
        requested before they are touched; if that fails, `_copied` finds the reason.
        """
        if sys.platform != "linux":
            return None
        region = self._region
        first, last = region.offset + start, region.offset + stop
        try:
            window = self._window
            if window is None or not self._begin <= first <= last <= self._begin + len(window):
                self._begin = first - first % WINDOW
                end = min(max(self._begin + WINDOW, last), region.offset + region.length)
                window = self._window = mmap.mmap(
                    self._stream.fileno(),
                    end - self._begin,
                    flags=mmap.MAP_PRIVATE,
                    prot=mmap.PROT_READ,
                    offset=self._begin,
                )
            at = first - self._begin
            page = at - at % mmap.PAGESIZE
            window.madvise(MADV_POPULATE_READ, page, at + stop - start - page)
        except (OSError, ValueError):
            return None
        return np.frombuffer(window, np.uint8, stop - start, at)

    def _copied(self, start: int, stop: int) -> Bytes:
        piece = np.empty(stop - start, np.uint8)
        view = piece.data
        try:
            self._stream.seek(self._region.offset + start)
            done = 0
            while done < len(view):
                count = self._stream.readinto(view[done:])
                if not count:
                    raise DirectoryError(
                        f"tensor {self._name!r}: its data file {self._region.path} became shorter "
                        f"while it was read: expected {self._region.length} bytes from byte "
                        f"{self._region.offset}, got {start + done}"
                    )
                done += count
        except OSError as error:
            raise _unreadable(self._name, self._region.path, error) from error
        return piece


def _tensor(parameter: Parameter) -> ir.TensorProtocol:
    tensor = parameter.source.const_value
    if tensor is None:
        raise DirectoryError(f"tensor {parameter.name!r}: the model has no data for it")
    return tensor


def tensor_bytes(tensor: ir.TensorProtocol) -> Bytes:
    """Returns the bytes of a tensor's elements, as ONNX stores them."""
    array = tensor.numpy()
    if tensor.dtype.bitwidth == 8 * array.dtype.itemsize and sys.byteorder == "little":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.frombuffer(tensor.tobytes(), np.uint8)


def _region(name: str, tensor: ir.ExternalTensor) -> Region:
    base, location = os.fspath(tensor.base_dir), os.fspath(tensor.location)
    # A foreign model must not make other files of this machine part of its weights.
    folder = os.path.abspath(base)
    path = os.path.abspath(os.path.join(base, location))
    if base and os.path.commonpath([folder, path]) != folder:
        raise DirectoryError(
            f"tensor {name!r}: expected its data file in the model's folder {base}, got {location}"
        )
    offset = tensor.offset or 0
    length = tensor.nbytes
    if offset < 0 or (tensor.length is not None and tensor.length != length):
        raise DirectoryError(
            f"tensor {name!r}: expected {length} bytes of external data for "
            f"{tensor.dtype.name.lower()}{list(tensor.shape)}, got {tensor.length} bytes from byte "
            f"{offset} of {location}"
        )
    return Region(Path(path), offset, length)


def _size(name: str, path: Path) -> int:
    try:
        # Opening a pipe would wait for somebody who writes to it.
        if path.exists() and not path.is_file():
            raise DirectoryError(f"tensor {name!r}: its data file {path} is not a regular file")
        with path.open("rb"):
            return path.stat().st_size
    except FileNotFoundError:
        raise DirectoryError(f"tensor {name!r}: its data file {path} is missing") from None
    except OSError as error:
        raise _unreadable(name, path, error) from error


def _unreadable(name: str, path: Path, error: OSError) -> DirectoryError:
    return DirectoryError(f"tensor {name!r}: its data file {path} cannot be read: {error.strerror}")
