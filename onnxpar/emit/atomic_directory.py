"""A directory that appears complete or not at all."""

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from onnxpar.core.errors import DirectoryError
from onnxpar_format.new_file import cannot_write

MANIFEST = "manifest.json"
GENERATOR = "onnxpar"


@contextmanager
def new_directory(out: Path, *, force: bool, need: int = 0) -> Iterator[Path]:
    """Yields an empty directory that becomes `out` when the block ends without an exception.

    Until then it is beside `out` under a hidden name. It is removed if the block fails or is
    interrupted by Ctrl-C, SIGTERM or SIGHUP; a second interrupt does not stop the removal. The
    leftovers of killed writers of `out` are removed first. Files are not flushed to the disk, so
    the directory may be incomplete after a loss of power.

    Args:
        out: The directory to make. It must not exist, unless it is empty.
        force: Replace `out` if it is a directory: it has a manifest of ours, and only
            files that this manifest names.
        need: Bytes that will be written.

    Raises:
        DirectoryError: `out` may not be replaced, its parent is missing or read-only, or the disk
            does not have enough space.
    """
    out = Path(os.path.realpath(out))
    replaced = _may_become(out, force)
    _remove_stale(out)
    with _HeldSignals() as interrupts:
        temporary, lock = _make_beside(out)
        try:
            interrupts.release()
            try:
                free = shutil.disk_usage(temporary).free
                if free < need:
                    raise DirectoryError(
                        f"{out}: not enough space on its disk: expected {need} bytes, got {free}"
                    )
                yield temporary
                interrupts.hold()
                _swap(temporary, out, replaced)
            except OSError as error:
                raise DirectoryError(cannot_write(out, error)) from error
        finally:
            interrupts.hold()
            shutil.rmtree(temporary, ignore_errors=True)
            os.close(lock)


def check_target(out: Path, *, force: bool) -> None:
    """Makes the checks of `new_directory` early, before anything is computed.

    Raises:
        DirectoryError: As `new_directory`.
    """
    out = Path(os.path.realpath(out))
    _may_become(out, force)
    temporary, lock = _make_beside(out)
    temporary.rmdir()
    os.close(lock)


def _may_become(out: Path, force: bool) -> bool:
    """Returns whether `out` exists and will be replaced."""
    if not os.path.lexists(out):
        return False
    if not out.is_dir():
        raise DirectoryError(f"{out}: expected a directory to write to, got a file")
    try:
        present = {entry.name for entry in os.scandir(out)}
    except OSError as error:
        raise DirectoryError(cannot_write(out, error)) from error
    if present and not force:
        raise DirectoryError(
            f"{out}: exists and is not empty; use --force to replace a directory that "
            "`onnxpar shard` wrote"
        )
    foreign = sorted(present - _own_files(out)) if present else []
    if foreign:
        raise DirectoryError(
            f"{out}: --force only replaces a directory that contains nothing but the files "
            f"that `onnxpar shard` writes, and {foreign[0]!r} is not one of them"
            + (f" (and {len(foreign) - 1} more)" if len(foreign) > 1 else "")
        )
    # To rename `out` needs only the permissions of its parent, and fails late if it is immutable.
    if not os.access(out, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise DirectoryError(f"{out}: cannot be replaced: it is read-only")
    return True


def _own_files(out: Path) -> set[str]:
    """Returns the files in `out` that its manifest names, or none if the manifest is not ours."""
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
        if str(manifest["generator"]).split()[0] == GENERATOR:
            return {MANIFEST, *manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        pass
    return set()


def _prefix(out: Path) -> str:
    """Returns a prefix for hidden directories, with the machine: locks work on one machine only."""
    machine = hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]
    return f".{out.name}.{machine}-"


def _make_beside(out: Path) -> tuple[Path, int]:
    """Returns a new directory and its locked descriptor; the lock ends with the process."""
    if not out.parent.is_dir():
        raise DirectoryError(f"{out}: its parent directory {out.parent} does not exist")
    for _ in range(8):
        temporary = out.parent / f"{_prefix(out)}{secrets.token_hex(6)}.partial"
        try:
            temporary.mkdir()
        except OSError as error:
            raise DirectoryError(cannot_write(out, error)) from error
        lock = _lock(temporary)
        if lock is not None:
            return temporary, lock
        # It cannot be opened, or another writer took it for a stale one.
        with suppress(OSError):
            temporary.rmdir()
    raise DirectoryError(f"{out}: a new directory in {out.parent} cannot be opened")


def _lock(folder: Path) -> int | None:
    """Returns a locked descriptor of the folder, or None if it is locked already, or gone.

    If the file system has no locks, the descriptor is not locked.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        return descriptor
    # The last holder may have removed or renamed the folder before it released the lock.
    try:
        same = os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(descriptor))
    except OSError:
        same = False
    if same:
        return descriptor
    os.close(descriptor)
    return None


def _remove_stale(out: Path) -> None:
    """Removes the leftovers of killed writers of `out`; running writers hold locks."""
    name = re.compile(re.escape(_prefix(out)) + r"[0-9a-f]{12}\.partial")
    with suppress(OSError):
        for entry in list(os.scandir(out.parent)):
            if name.fullmatch(entry.name) is None:
                continue
            lock = _lock(Path(entry.path))
            if lock is not None:
                shutil.rmtree(entry.path, ignore_errors=True)
                os.close(lock)


def _swap(temporary: Path, out: Path, replaced: bool) -> None:
    if not replaced:
        # If another process has made it meanwhile, rename refuses, unless it is empty.
        temporary.rename(out)
        return
    old = temporary.with_suffix(".old")
    try:
        out.rename(old)
    except OSError as error:
        raise DirectoryError(f"{out}: cannot be replaced: {error.strerror or error}") from error
    try:
        temporary.rename(out)
    except BaseException:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _HeldSignals:
    """Turns the first SIGINT, SIGTERM or SIGHUP into an exception, and ignores later ones.

    While signals are held, as they are at first, the exception waits. The program's own handler (on
    the command line, that of `onnxpar.cli`) decides what is raised. A signal that the program
    ignores stays ignored.
    """

    def __init__(self) -> None:
        self._held = True
        self._seen: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "_HeldSignals":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                previous = signal.getsignal(number)
                if previous not in (signal.SIG_IGN, None):
                    self._previous[number] = previous
                    signal.signal(number, self._receive)
        return self

    def hold(self) -> None:
        """Makes signals wait."""
        self._held = True

    def release(self) -> None:
        """Lets signals raise; a signal that waits raises at once."""
        self._held = False
        self._deliver()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._seen is None:
            self._seen = number
            if not self._held:
                self._deliver()

    def _deliver(self) -> None:
        number = self._seen
        if number is None:
            return
        if not callable(self._previous[number]):
            raise SystemExit(128 + number)
        self._previous[number](number, None)
        self._seen = None  # It raised nothing, so the program goes on and may get another one.

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        if kind is None:
            self._deliver()  # It waited, or its exception was caught inside.
