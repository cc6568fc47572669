"""Compares the files of a folder with the record that lists them, without reading them."""

import stat
from collections.abc import Mapping
from pathlib import Path


def size_fault(directory: Path, sizes: Mapping[str, int], owner: str) -> str | None:
    """Returns what is wrong with the first file that is missing or has another size, or None.

    Args:
        directory: The folder of the files.
        sizes: The bytes of each file, by name.
        owner: The record that lists them, for the message.
    """
    for name, expected in sizes.items():
        path = directory / name
        try:
            status = path.stat()
        except OSError:
            return f"{path}: missing, though the {owner} names it"
        if not stat.S_ISREG(status.st_mode):
            return f"{path}: expected a regular file, as the {owner} names it"
        size = status.st_size
        if size != expected:
            state = "truncated" if size < expected else "changed"
            return f"{path}: {state}, expected {expected} bytes, got {size} bytes"
    return None
