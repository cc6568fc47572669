"""Reads and writes the arrays of a program: numpy's `.npz` files, and conversion to its inputs."""

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.lib.npyio import NpzFile
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES, lossless
from onnxpar_format.entries import TensorEntry
from onnxpar_format.new_file import new_file
from onnxpar_format.regular_file import open_regular
from onnxpar_runtime.errors import InputError

Array = NDArray[Any]


def convert(specs: Sequence[TensorEntry], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays in the inputs' order, C-contiguous and of the inputs' dtypes.

    Only lossless conversions are made: integers widen to integers, floats to floats.

    Raises:
        InputError: A name is missing or unknown, or a dtype or number of dims does not fit.
    """
    names = [spec.name for spec in specs]
    missing = [n for n in names if n not in feeds]
    unknown = sorted(set(feeds) - set(names))
    if missing or unknown:
        parts = [f"missing {missing}"] if missing else []
        parts += [f"unknown {unknown}"] if unknown else []
        raise InputError(f"inputs: expected {names}, got {sorted(feeds)}: {', '.join(parts)}")
    result = {}
    for spec in specs:
        array = np.asarray(feeds[spec.name])
        converted = lossless(array, DTYPES[spec.dtype].dtype)
        if converted is None:
            raise InputError(
                f"input {spec.name!r}: expected {spec.dtype}, got {array.dtype}, which is not "
                f"converted implicitly (use `.astype({spec.dtype!r})`)"
            )
        if array.ndim != len(spec.dims):
            raise InputError(
                f"input {spec.name!r}: expected {len(spec.dims)} dims, got shape {array.shape}"
            )
        result[spec.name] = np.ascontiguousarray(converted).reshape(array.shape)
    return result


def read_npz(path: str | Path) -> dict[str, Array]:
    """Returns the arrays of an `.npz` file by name.

    Raises:
        InputError: The file is missing, is not an `.npz` file, or holds pickled objects.
    """
    try:
        with open_regular(path) as stream:
            start = stream.read(len(_NPY))
            if start == _NPY:
                raise InputError(f"{path}: expected an .npz file with named arrays, got one array")
            if not start.startswith(_ZIP):
                raise _unreadable(path, "it is not a zip file, or it is truncated")
            stream.seek(0)
            with np.load(stream, allow_pickle=False) as archive:
                return {name: _member(path, archive, name) for name in archive.files}
    except InputError:  # It is a RuntimeError, which zipfile raises too.
        raise
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except Exception as error:  # numpy and zipfile raise of all kinds where a file is damaged
        raise _unreadable(path, str(error) or type(error).__name__) from None


# The first bytes of numpy's format for one array, and of zip files with and without members.
_NPY = b"\x93NUMPY"
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")


def _member(path: str | Path, archive: NpzFile, name: str) -> Array:
    try:
        _check_size(archive, name)
        array: Array = archive[name]
    except Exception as error:
        # numpy's message suggests to allow pickled objects, which may run any code.
        text = str(error) or type(error).__name__
        reason = "it contains Python objects" if "pickle" in text else text
        raise _unreadable(path, f"array {name!r}: {reason}") from None
    return array


def _check_size(archive: NpzFile, name: str) -> None:
    """Raises ValueError if a member is no array, or has fewer bytes than its header says.

    numpy finds this once it has unpacked all of them: a small file may have gigabytes of zeros.
    """
    assert archive.zip is not None
    member = archive.zip.getinfo(name if name in archive.zip.namelist() else f"{name}.npy")
    with archive.zip.open(member) as stream:
        if stream.read(len(_NPY)) != _NPY:
            raise ValueError("it is not an array")
        stream.seek(0)
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(stream)
        needed = stream.tell() + prod(shape) * dtype.itemsize
    if member.file_size < needed and not dtype.hasobject:
        raise ValueError(f"expected {needed} bytes by its header, got {member.file_size}")


def _unreadable(path: str | Path, reason: str) -> InputError:
    return InputError(f"{path}: not a readable .npz file: {reason}")


def write_npz(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Writes an `.npz` file; it appears complete under its name, or not at all.

    bfloat16, which numpy's format lacks, is stored as two opaque bytes for each element.

    Raises:
        InputError: The folder does not exist or cannot be written, or the disk is full.
    """
    with new_file(path, InputError) as file, file.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]
