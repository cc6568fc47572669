"""Reads and writes the arrays of a program: numpy's `.npz` files, and conversion to its inputs."""

import os
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.dtypes import DTYPES, lossless
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.manifest import TensorSpec

Array = NDArray[Any]


def convert(specs: Sequence[TensorSpec], feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays in the inputs' order, C-contiguous and of the inputs' dtypes.

    Only conversions that lose nothing are made: integers widen to integers, floats to floats.

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
                f"converted silently (use `.astype({spec.dtype!r})`)"
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
        InputError: The file is missing, is no `.npz`, or holds pickled objects.
    """
    try:
        with open(path, "rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise InputError(f"{path}: expected an .npz file with named arrays, got one array")
            with archive:
                return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise InputError(f"{path}: not a readable .npz file: {error}") from None


def write_npz(path: str | Path, arrays: Mapping[str, Array]) -> None:
    """Writes an `.npz` file; it appears whole under its name, or not at all.

    bfloat16, which numpy's format lacks, is stored as two opaque bytes an element.

    Raises:
        InputError: The folder does not exist or cannot be written.
    """
    target = Path(path)
    temporary = ""
    try:
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", suffix=".tmp", delete=False
        ) as stream:
            temporary = stream.name
            np.savez(stream, **{k: v for k, v in arrays.items()})  # type: ignore[arg-type]
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise InputError(f"{target}: cannot be written: {error.strerror or error}") from None
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
