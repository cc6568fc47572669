"""Reads the bytes of a model's weights in pieces, so that none of them need fit into memory."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.errors import ArtifactError
from onnxpar.passes.partitioned import Parameter

Bytes = NDArray[np.uint8]


class Reader(Protocol):
    """Gives the bytes of one tensor, little-endian and packed as in ONNX's `raw_data`."""

    def read(self, start: int, stop: int, into: Bytes) -> Bytes:
        """Returns bytes `[start, stop)`, in `into` (at least as long) or in memory of its own."""
        ...

    def scatter(self, start: int, into: Sequence[Bytes]) -> bool:
        """Fills several arrays, one after another, with the bytes from `start` on.

        Returns False where that is not possible in one step; then nothing is known of the arrays.
        """
        ...


@dataclass(frozen=True)
class Region:
    """A tensor's bytes in a file of external data.

    Attributes:
        path: The file. Links are followed, as the caches of model hubs are made of them.
        offset: Bytes before the tensor.
        length: Bytes of the tensor.
    """

    path: Path
    offset: int
    length: int


def check(parameters: Iterable[Parameter]) -> None:
    """Checks that every parameter's data is there, without reading it.

    Raises:
        ArtifactError: A tensor has no data, its file is missing or outside the model's folder, or
            has fewer bytes than the tensor.
    """
    sizes: dict[Path, int] = {}
    for parameter in parameters:
        tensor = _tensor(parameter)
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        region = _region(parameter.name, tensor)
        if region.path not in sizes:
            sizes[region.path] = _size(parameter.name, region.path)
        end = region.offset + region.length
        if sizes[region.path] < end:
            raise ArtifactError(
                f"tensor {parameter.name!r}: its data file {region.path} is truncated: expected at "
                f"least {end} bytes ({region.length} from byte {region.offset}), got "
                f"{sizes[region.path]}"
            )


@contextmanager
def reader(parameter: Parameter) -> Iterator[Reader]:
    """Opens a parameter's data; a tensor that is no external data is held in memory meanwhile.

    Raises:
        ArtifactError: As `check`.
    """
    tensor = _tensor(parameter)
    if not isinstance(tensor, ir.ExternalTensor):
        try:
            data = _bytes(tensor)
        except ValueError as error:
            raise ArtifactError(
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

    def read(self, start: int, stop: int, into: Bytes) -> Bytes:
        del into
        return self.data[start:stop]

    def scatter(self, start: int, into: Sequence[Bytes]) -> bool:
        del start, into
        return False


@dataclass(frozen=True)
class _InFile:
    name: str
    region: Region
    stream: FileIO

    def read(self, start: int, stop: int, into: Bytes) -> Bytes:
        piece = into[: stop - start]
        view = piece.data
        try:
            self.stream.seek(self.region.offset + start)
            done = 0
            while done < len(view):
                count = self.stream.readinto(view[done:])
                if not count:
                    raise ArtifactError(
                        f"tensor {self.name!r}: its data file {self.region.path} became shorter "
                        f"while it was read: expected {self.region.length} bytes from byte "
                        f"{self.region.offset}, got {start + done}"
                    )
                done += count
        except OSError as error:
            raise _unreadable(self.name, self.region.path, error) from error
        return piece

    def scatter(self, start: int, into: Sequence[Bytes]) -> bool:
        if not hasattr(os, "preadv"):
            return False
        try:
            done = os.preadv(
                self.stream.fileno(), [i.data for i in into], self.region.offset + start
            )
        except OSError as error:
            raise _unreadable(self.name, self.region.path, error) from error
        return done == sum(part.size for part in into)


def _tensor(parameter: Parameter) -> ir.TensorProtocol:
    tensor = parameter.source.const_value
    if tensor is None:
        raise ArtifactError(f"tensor {parameter.name!r}: the model has no data for it")
    return tensor


def _bytes(tensor: ir.TensorProtocol) -> Bytes:
    array = tensor.numpy()
    if tensor.dtype.bitwidth == 8 * array.dtype.itemsize and sys.byteorder == "little":
        return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return np.frombuffer(tensor.tobytes(), np.uint8)


def _region(name: str, tensor: ir.ExternalTensor) -> Region:
    base, location = os.fspath(tensor.base_dir), os.fspath(tensor.location)
    # A model from elsewhere must not make other files of this machine part of its weights.
    folder = os.path.abspath(base)
    path = os.path.abspath(os.path.join(base, location))
    if base and os.path.commonpath([folder, path]) != folder:
        raise ArtifactError(
            f"tensor {name!r}: expected its data file in the model's folder {base}, got {location}"
        )
    offset = tensor.offset or 0
    length = tensor.nbytes
    if offset < 0 or (tensor.length is not None and tensor.length != length):
        raise ArtifactError(
            f"tensor {name!r}: expected {length} bytes of external data for "
            f"{tensor.dtype.name.lower()}{list(tensor.shape)}, got {tensor.length} bytes from byte "
            f"{offset} of {location}"
        )
    return Region(Path(path), offset, length)


def _size(name: str, path: Path) -> int:
    try:
        with path.open("rb"):
            return path.stat().st_size
    except FileNotFoundError:
        raise ArtifactError(f"tensor {name!r}: its data file {path} is missing") from None
    except OSError as error:
        raise _unreadable(name, path, error) from error


def _unreadable(name: str, path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"tensor {name!r}: its data file {path} cannot be read: {error.strerror}")
