"""Reads files of `torch.save` that others may have made: no code is run, nothing is unpacked."""

import os
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch

from onnxpar.core.errors import DirectoryError
from onnxpar_format.regular_file import open_regular


def read_state_file(path: Path) -> Any:
    """Returns the content of a file of `torch.save`.

    Raises:
        DirectoryError: It cannot be read, is damaged, or is no such file.
    """
    try:
        with open_regular(path) as stream:
            return read_saved(stream)
    except OSError as error:
        raise DirectoryError(f"{path}: cannot be read: {error.strerror or error}") from None
    except EOFError:
        raise DirectoryError(
            f"{path}: expected a file of torch.save, got a truncated one or another file"
        ) from None
    except Exception as error:  # a damaged file raises anything, such as UnicodeDecodeError
        text = str(error) or type(error).__name__
        raise DirectoryError(f"{path}: expected a file of torch.save: {text:.500}") from None


def read_saved(stream: IO[bytes]) -> Any:
    """Returns what `torch.save` has written to a stream.

    PyTorch neither compares checksums of records nor bounds what compressed ones become.

    Raises:
        Exception: It is damaged, or was not written by `torch.save`; of any kind.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if not size:
        raise ValueError("got an empty file")
    if is_zipfile(stream):
        with ZipFile(stream) as archive:
            records = archive.infolist()
            for record in records:
                if record.compress_type != ZIP_STORED:
                    raise ValueError(f"record {record.filename!r} is compressed")
            if sum(record.file_size for record in records) > size:
                raise ValueError("its records are larger than the file")
            damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"record {damaged!r} is damaged")
        stream.seek(0)
    try:
        return torch.load(stream, map_location="cpu", weights_only=True)
    except UnpicklingError:
        # PyTorch's message advises how to run the code of the file.
        raise ValueError("it has other objects than tensors, which may run code") from None
