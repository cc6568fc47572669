"""A file that appears complete or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from onnxpar.core.errors import ArtifactError
from onnxpar.emit.atomic_directory import cannot_write


@contextmanager
def new_file(out: Path) -> Iterator[Path]:
    """Gives a path to write to that becomes `out` when the block ends without an exception.

    It lies beside `out` under a hidden name until then. A device or a pipe is not a file that could
    be
    half written: it is given as it is.

    Args:
        out: The file to make, or to replace.

    Raises:
        ArtifactError: `out` is a directory, or it cannot be written.
    """
    # A link stays one: what it leads to is replaced.
    target = Path(os.path.realpath(out))
    if target.is_dir():
        raise ArtifactError(f"{out}: expected a file to write to, got a directory")
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
        raise ArtifactError(f"{out}: its folder {target.parent} does not exist") from None
    except OSError as error:
        raise cannot_write(target, error) from error


def check_file(out: Path) -> None:
    """Checks what `new_file` checks before it writes, so that a mistake shows early.

    Raises:
        ArtifactError: As `new_file`.
    """
    with suppress(_Checked), new_file(out):
        raise _Checked


class _Checked(Exception):
    """Ends the block of `new_file` before there is anything to keep."""


def _make_beside(out: Path) -> Path:
    with NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as file:
        name = Path(file.name)
    # Temporary files are the user's alone; what is written is as open as other files.
    mask = os.umask(0)
    os.umask(mask)
    name.chmod(0o666 & ~mask)
    return name
