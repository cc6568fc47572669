"""Temporary folders that are also removed when a signal ends the process at once."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

_TRIES = 5
_folders: set[str] = set()


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Yields a new folder, which is removed after the block, or by `remove_folders`."""
    with TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        _folders.add(folder)
        try:
            yield Path(folder)
        finally:
            _folders.discard(folder)


def remove_folders() -> None:
    """Removes the temporary folders of this process, which is about to end."""
    for folder in list(_folders):
        # Another thread may still write to it.
        for _ in range(_TRIES):
            shutil.rmtree(folder, ignore_errors=True)
            if not os.path.exists(folder):
                break
