"""A directory that appears whole or not at all."""

import errno
import json
import os
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from onnxpar.errors import ArtifactError

MANIFEST = "manifest.json"
GENERATOR = "onnxpar"


@contextmanager
def new_directory(out: Path, *, force: bool, need: int = 0) -> Iterator[Path]:
    """Gives an empty directory that becomes `out` when the block ends without an exception.

    It lies beside `out` under a hidden name until then, and is removed where the block fails or is
    interrupted, by Ctrl-C or SIGTERM too. Against a loss of power nothing is promised: files are
    not flushed to the disk.

    Args:
        out: The directory to make. It must not exist, unless it is empty.
        force: Replace `out` where it is an artifact directory: one that has a manifest of ours and
            nothing but the files that this manifest names.
        need: Bytes that will be written.

    Raises:
        ArtifactError: `out` may not be replaced, its parent is missing or read-only, or the disk is
            too small or becomes full.
    """
    out = Path(os.path.realpath(out))
    replaced = _may_become(out, force)
    temporary = _make_beside(out)
    try:
        with _sigterm_raises():
            try:
                free = shutil.disk_usage(temporary).free
                if free < need:
                    raise ArtifactError(
                        f"{out}: not enough room on its disk: expected {need} bytes, got {free}"
                    )
                yield temporary
                _swap(temporary, out, replaced)
            except OSError as error:
                raise _cannot_write(out, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_target(out: Path, *, force: bool) -> None:
    """Checks what `new_directory` checks before it writes, so that a mistake shows early.

    Raises:
        ArtifactError: As `new_directory`.
    """
    out = Path(os.path.realpath(out))
    _may_become(out, force)
    _make_beside(out).rmdir()


def _may_become(out: Path, force: bool) -> bool:
    """Returns whether `out` is there and is to be replaced."""
    if not os.path.lexists(out):
        return False
    if not out.is_dir():
        raise ArtifactError(f"{out}: expected a directory to write to, got a file")
    try:
        present = {entry.name for entry in os.scandir(out)}
    except OSError as error:
        raise _cannot_write(out, error) from error
    if not present:
        return True
    if not force:
        raise ArtifactError(
            f"{out}: exists and is not empty; --force replaces an artifact directory"
        )
    foreign = sorted(present - _own_files(out))
    if foreign:
        raise ArtifactError(
            f"{out}: --force replaces only artifact directories that hold nothing else; "
            f"{foreign[0]!r} is not of one"
            + (f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else "")
        )
    return True


def _own_files(out: Path) -> set[str]:
    """Returns the names in `out` that its manifest, if it is ours, accounts for."""
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        if str(manifest["generator"]).split()[0] == GENERATOR:
            return {MANIFEST, *manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        pass
    return set()


def _make_beside(out: Path) -> Path:
    if not out.parent.is_dir():
        raise ArtifactError(f"{out}: its parent directory {out.parent} does not exist")
    temporary = out.parent / f".{out.name}.{secrets.token_hex(6)}.partial"
    try:
        temporary.mkdir()
    except OSError as error:
        raise _cannot_write(out, error) from error
    return temporary


def _swap(temporary: Path, out: Path, replaced: bool) -> None:
    if not replaced:
        # Another process may have made it meanwhile: rename refuses a directory with contents.
        temporary.rename(out)
        return
    old = temporary.with_suffix(".old")
    out.rename(old)
    try:
        temporary.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _cannot_write(out: Path, error: OSError) -> ArtifactError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ArtifactError(f"{out}: the disk is full ({error.strerror}); nothing was written")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return ArtifactError(f"{out}: {out.parent} cannot be written to ({error.strerror})")
    return ArtifactError(f"{out}: cannot be written: {error.strerror or error}")


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Makes SIGTERM an exception meanwhile, so that what was begun is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGTERM)
    if previous is not signal.SIG_DFL:
        yield  # The program has a handler of its own, which decides.
        return

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
