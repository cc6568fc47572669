"""Images for image classifiers: scikit-learn's handwritten digits, IDX files, and their resize."""

import gzip
import importlib.util
import zlib
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_runtime.errors import InputError

Array = NDArray[Any]
SIDE = 8
"""Height and width of scikit-learn's digits."""
LEVELS = 16
"""scikit-learn's digits count up to 16 dots of ink for each pixel."""

# MNIST's names; some copies of the files have a dot before the number of dims.
_IDX_NAMES = {
    "train": ("train-images{}idx3-ubyte", "train-labels{}idx1-ubyte"),
    "test": ("t10k-images{}idx3-ubyte", "t10k-labels{}idx1-ubyte"),
}
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_PART = 1 << 24
_MOST_DIMS = 8
"""Bytes that are read at once."""


def resize(images: Array, height: int, width: int | None = None) -> Array:
    """Bilinear resize of images [count, h, w] to [count, height, width], square if no width.

    Pixel centres are aligned (`half_pixel` in ONNX's Resize) and the border is extended outwards.
    """
    rows = _interpolation(images.shape[1], height)
    columns = _interpolation(images.shape[2], height if width is None else width)
    resized: Array = np.einsum("ai,nij,bj->nab", rows, images, columns, optimize=True)
    return resized


def _interpolation(old: int, new: int) -> NDArray[np.float32]:
    """Returns a matrix [new, old]: each row has the weights of the two nearest old pixels."""
    place = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    low = np.minimum(place.astype(np.int64), max(old - 2, 0))
    high = np.minimum(low + 1, old - 1)
    matrix = np.zeros((new, old), dtype=np.float32)
    rows = np.arange(new)
    np.add.at(matrix, (rows, low), 1 - (place - low))
    np.add.at(matrix, (rows, high), place - low)
    return matrix


def handwritten_digits() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns images [1797, 8, 8] from 0 (paper) to 1 (ink), and their digits [1797].

    They come with scikit-learn (Alpaydin & Kaynak, 1998, the test half of the UCI set); nothing is
    downloaded.

    Raises:
        InputError: scikit-learn is not installed, or has no such file.
    """
    # Importing the package takes a second for each rank of the machine, so only its file is read.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise InputError(
            "the handwritten digits come with scikit-learn, which is not installed "
            "(pip install 'onnxpar[examples]')"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        rows = np.loadtxt(path, np.float32, delimiter=",")
    except (OSError, ValueError) as error:
        raise InputError(f"the handwritten digits of scikit-learn: {error}") from None
    images = rows[:, :-1].reshape(-1, SIDE, SIDE) / np.float32(LEVELS)
    return images, rows[:, -1].astype(np.int64)


def mnist_files(folder: str | Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Returns images [count, h, w] from 0 to 1 and labels [count] of a folder of MNIST's files.

    Args:
        folder: Has `train-images-idx3-ubyte` and its companions, plain or as `.gz`.
        part: `train` or `test` (MNIST's `t10k`).

    Raises:
        InputError: A file is missing or malformed, or there are not as many labels as images.
    """
    paths = [_idx_path(Path(folder), name) for name in _IDX_NAMES[part]]
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.ndim != 1 or images.dtype != np.uint8 or labels.dtype.kind == "f":
        raise InputError(
            f"{folder}: expected images uint8 [count, height, width] and integer labels [count], "
            f"got {images.dtype} {list(images.shape)} and {labels.dtype} {list(labels.shape)}"
        )
    if len(images) != len(labels):
        raise InputError(
            f"{folder}: expected one label for each image, got {len(labels)} for {len(images)}"
        )
    return images.astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _idx_path(folder: Path, pattern: str) -> Path:
    names = [pattern.format(dash) + packed for dash in "-." for packed in ("", ".gz")]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"{folder}: none of the files {', '.join(names)} exists")


def _read(stream: Any) -> bytes:
    """Returns what the header says that there is, and one byte more if there is more."""
    head: bytes = stream.read(4)
    if len(head) < 4 or head[2] not in _IDX_TYPES:
        return head
    sizes: bytes = stream.read(4 * head[3])
    shape = [int.from_bytes(sizes[i : i + 4], "big") for i in range(0, len(sizes), 4)]
    wanted = prod(shape) * np.dtype(_IDX_TYPES[head[2]]).itemsize + 1
    found = [head, sizes]
    # In parts, because the header may ask for more than there is memory.
    while wanted and (part := stream.read(min(wanted, _PART))):
        found.append(part)
        wanted -= len(part)
    return b"".join(found)


def read_idx(path: Path) -> Array:
    """Returns the array of an IDX file, as described with MNIST (LeCun, Cortes & Burges, 1998).

    Two zero bytes, a type code, the number of dims, each size as a big-endian 32-bit integer, then
    the elements, big-endian, in C order. A file that ends in `.gz` is decompressed.

    Raises:
        InputError: The file cannot be read, or its length is not what its header says.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as stream:
            data = _read(stream)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _IDX_TYPES:
        raise InputError(f"{path}: not an IDX file, it begins with {data[:4].hex(' ')}")
    if data[3] > _MOST_DIMS:
        raise InputError(f"{path}: expected at most {_MOST_DIMS} dims, got {data[3]}")
    dtype, start = np.dtype(_IDX_TYPES[data[2]]), 4 + 4 * data[3]
    shape = [int.from_bytes(data[i : i + 4], "big") for i in range(4, start, 4)]
    expected = start + prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InputError(f"{path}: expected {expected} bytes for {shape}, got {len(data)} bytes")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))
