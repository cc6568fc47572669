"""Files of tokens: numbers one after another, as `numpy.ndarray.tofile` writes them."""

import mmap
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.regular_file import open_regular
from onnxpar_format.texts import whole
from onnxpar_runtime.errors import InputError

Array = NDArray[Any]
_DTYPES = ("uint8", "uint16", "uint32")
_FORM = f"FILE,seq=N[,dtype={'|'.join(_DTYPES)}]"


def token_windows(name: str, text: str) -> tuple[Array, Array]:
    """Returns windows of a token file, and for each token the next one: two arrays [count, seq].

    The windows follow one another; the last tokens may be left out. The arrays are views of the
    file, mapped into memory, so only what is used of them is read.

    Args:
        name: Name for messages.
        text: `FILE,seq=N[,dtype=TYPE]`; the type is uint16 unless it is given.

    Raises:
        InputError: The text is malformed, or the file cannot be read or has too few tokens.
    """
    path, *parts = text.split(",")
    options = dict(part.partition("=")[::2] for part in parts)
    twice = len(options) < len(parts)
    dtype, seq = options.pop("dtype", "uint16"), options.pop("seq", "")
    length = whole(seq) or 0
    if not path or options or twice or dtype not in _DTYPES or length < 1:
        raise InputError(f"{name}: expected tokens:{_FORM}")
    try:
        with open_regular(Path(path)) as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        # Otherwise the system reads some 128 KiB around each window.
        mapped.madvise(mmap.MADV_RANDOM)
        tokens = np.frombuffer(mapped, dtype)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: expected a file of {dtype} numbers: {error}") from None
    count = (len(tokens) - 1) // length
    if count < 1:
        raise InputError(f"{name}: expected at least {length + 1} tokens, got {len(tokens)}")
    used = tokens[: count * length + 1]
    return used[:-1].reshape(count, length), used[1:].reshape(count, length)
