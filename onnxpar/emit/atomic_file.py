"""A file that appears complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from onnxpar.core.errors import DirectoryError
from onnxpar.emit.atomic_directory import cannot_write


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Yields a path to write to that becomes `out` when the block ends without an exception.

    Until then it is beside `out` under a hidden name. For a device or a pipe, `out` itself is
    yielded.

    Args:
        out: The file to make, or to replace.

    Raises:
        DirectoryError: `out` is a directory, or it cannot be written.
    """
    # A link stays a link: the file that it points to is replaced.
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise DirectoryError(f"{out}: expected a file to write to, got a directory")
    if target.exists() and not target.is_file():
        yield out
        return
    try:
        temporary = _make_beside(target)
        try:
            yield temporary
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except FileNotFoundError as error:
        if target.parent.is_dir():
            raise cannot_write(target, error) from error
        raise DirectoryError(f"{out}: its folder {target.parent} does not exist") from None
    except OSError as error:
        raise cannot_write(target, error) from error


def check_file(out: Path) -> None:
    """Makes the checks of `new_file` early, before anything is computed.

    Raises:
        DirectoryError: As `new_file`.
    """
    with suppress(_Checked), new_file(out):
        raise _Checked


class _Checked(Exception):
    """Ends the block of `new_file` without a file."""


def _make_beside(out: Path) -> Path:
    with NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
        name = Path(file.name)
    # Temporary files are private; the result gets the permissions of other new files.
    mask = os.umask(0)
    os.umask(mask)
    name.chmod(0o666 & ~mask)
    return name
