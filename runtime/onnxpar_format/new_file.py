"""A file that appears complete or not at all."""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


@contextmanager
def new_file(out: str | Path, error: Callable[[str], Exception]) -> Iterator[Path]:
    """Yields a path to write to that becomes `out` when the block ends without an exception.

    Until then it is in a hidden folder beside `out`. Other files in that folder, such as the
    weights of a model, are moved beside `out` before. If the block writes nothing, nothing changes.
    For a device such as /dev/null, `out` itself is yielded.

    Args:
        out: The file to make, or to replace.
        error: Makes the exception that is raised, from its message.

    Raises:
        error: `out` is a directory, a pipe (which would wait for a reader), a socket or a disk, or
            it cannot be written.
    """
    out = Path(out)
    # A link stays a link: the file that it points to is replaced.
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise error(f"{out}: expected a file to write to, got a directory")
    if target.exists() and not target.is_file():
        if not target.is_char_device():
            raise error(f"{out}: expected a file to write to, got {_kind(target)}")
        try:
            yield out
        except OSError as failed:
            raise error(cannot_write(out, failed)) from failed
        return
    if not target.parent.is_dir():
        raise error(f"{out}: its folder {target.parent} does not exist")
    try:
        with TemporaryDirectory(
            dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True
        ) as folder:
            made = Path(folder, target.name)
            yield made
            for file in sorted(Path(folder).iterdir(), key=made.__eq__):
                os.replace(file, target if file == made else out.parent / file.name)
    except OSError as failed:
        raise error(cannot_write(target, failed)) from failed


def _kind(path: Path) -> str:
    if path.is_fifo():
        return "a pipe"
    return "a socket" if path.is_socket() else "a block device"


def check_file(out: str | Path, error: Callable[[str], Exception]) -> None:
    """Makes the checks of `new_file` early, before anything is computed.

    Raises:
        error: As `new_file`.
    """
    with new_file(out, error):
        pass


def cannot_write(out: Path, error: OSError) -> str:
    """Returns the message for a directory or a file that could not be written."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{out}: the disk is full ({reason}); nothing was written"
    if error.errno == errno.EFBIG:
        return (
            f"{out}: a file would be larger than the process may write (`ulimit -f`) or the file "
            f"system can hold ({reason}); nothing was written"
        )
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{out}: {out.parent} cannot be written to ({reason})"
    return f"{out}: cannot be written: {reason}"
