"""Opens files that others may have made: a pipe would be waited for, and a device may not end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: str | Path) -> BinaryIO:
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
