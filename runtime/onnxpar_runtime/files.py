"""Checks the files of a directory against the sizes and checksums of its manifest."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

from onnxpar_format.entries import FileEntry
from onnxpar_format.file_sizes import size_fault
from onnxpar_format.records import FormatError
from onnxpar_format.regular_file import open_regular
from onnxpar_runtime.errors import OnnxparRuntimeError


class _Contents(Protocol):
    @property
    def files(self) -> Mapping[str, FileEntry]:
        """The files by name."""


C = TypeVar("C", bound=_Contents)


def read_whole(
    read: Callable[[Path], C], directory: Path, owner: str, error: type[OnnxparRuntimeError]
) -> C:
    """Returns the record of a folder, after a check of its files' sizes.

    Args:
        read: Reads the record.
        directory: The folder.
        owner: The record, for the message.
        error: The class of the error.
    """
    try:
        contents = read(directory)
    except FormatError as failed:
        raise error(str(failed)) from None
    check_sizes(directory, contents.files, owner, error)
    return contents


def check_sizes(
    directory: Path, files: Mapping[str, FileEntry], owner: str, error: type[OnnxparRuntimeError]
) -> None:
    """Raises `error` unless every file exists and has its size.

    Args:
        directory: The folder of the files.
        files: The files by name.
        owner: The record that lists them, for the message.
        error: The class of the error.
    """
    fault = size_fault(directory, {name: entry.bytes for name, entry in files.items()}, owner)
    if fault is not None:
        raise error(fault)


def check_sum(path: Path, entry: FileEntry, error: type[OnnxparRuntimeError]) -> None:
    """Raises `error` unless a file has its SHA-256; reads every byte."""
    try:
        with open_regular(path) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as failed:
        raise error(f"{path}: cannot be read: {failed.strerror or failed}") from None
    if digest != entry.sha256:
        raise error(
            f"{path}: its content has changed: expected SHA-256 {entry.sha256}, got {digest}"
        )
