"""Reads files that others may have made: a pipe would be waited for, and a device may not end."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

MOST = 512 << 20
"""Bytes of a file of text: the manifest of a large model has tens of MiB."""


def open_regular(path: str | Path) -> BufferedReader:
    """Opens a file to be read.

    Raises:
        OSError: It cannot be opened, or is a directory, a pipe or a device.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return open(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_regular(path: str | Path, most: int = MOST) -> bytes:
    """Returns the content of a file that is read into memory.

    Args:
        path: The file.
        most: The most bytes that it may have.

    Raises:
        OSError: As `open_regular`; or the file is larger.
    """
    with open_regular(path) as stream:
        found = stream.read(most + 1)
    if len(found) > most:
        raise OSError(errno.EFBIG, f"expected at most {most} bytes, got more", str(path))
    return found
