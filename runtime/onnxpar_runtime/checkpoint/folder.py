"""The folder of a run's checkpoints: names, complete checkpoints, and how one becomes complete.

A checkpoint is a folder `step-00000012`. It is written as `.step-00000012.partial`, and gets its
name when all of its files are on the disk. So every folder with such a name is complete. The rest
of a run that was killed is removed by the next run.
"""

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxpar_format.checkpoint import FILE_NAME, CheckpointContents
from onnxpar_format.entries import FileEntry
from onnxpar_format.new_file import cannot_write as cannot_write_file
from onnxpar_runtime.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-\d{8,}\.(partial|removed)")
_LOCK = ".lock"
# Linux's ext4 took six times as long to write the same bytes in calls of 32 MiB.
_WRITE_BYTES = 1 << 17
_SYNC_BYTES = 1 << 26


def step_name(step: int) -> str:
    """Returns the name of the folder of a step's checkpoint."""
    return f"step-{step:08d}"


def partial_name(step: int) -> str:
    """Returns the name of the folder while it is written."""
    return f".{step_name(step)}.partial"


def complete_steps(root: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending."""
    try:
        names = [entry.name for entry in os.scandir(root) if entry.is_dir()]
    except OSError:
        return []
    found = [_STEP.fullmatch(name) for name in names]
    return sorted(int(match[1]) for match in found if match)


def resolve(path: str | Path) -> Path:
    """Returns the checkpoint that a path means: itself, or the last complete one in the folder.

    Raises:
        CheckpointError: There is none.
    """
    root = Path(path)
    if (root / FILE_NAME).exists():
        return root
    steps = complete_steps(root)
    if not steps:
        what = "has no complete checkpoint" if root.is_dir() else "no such checkpoint or folder"
        raise CheckpointError(f"{root}: {what}")
    return root / step_name(steps[-1])


@contextmanager
def owned(root: Path) -> Iterator[None]:
    """Locks the folder for this process, and removes incomplete checkpoints.

    Raises:
        CheckpointError: It cannot be written to or locked, or another run writes there.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise cannot_write(root, error) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{root}: another run is writing checkpoints there") from None
        except OSError as error:
            # Without the lock, two runs would remove each other's incomplete checkpoints.
            raise CheckpointError(
                f"{root}: expected a file system whose files can be locked, since only one run may "
                f"write checkpoints there, got: {error.strerror or error}"
            ) from None
        for entry in list(os.scandir(root)):
            if _HIDDEN.fullmatch(entry.name):
                shutil.rmtree(entry.path, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a file to the disk (fsync); returns its checksum and size.

    Raises:
        CheckpointError: It cannot be written.
    """
    digest, size, unsynced = hashlib.sha256(), 0, 0
    synced: Future[None] | None = None
    try:
        with open(path, "wb", buffering=0) as stream, ThreadPoolExecutor(2) as pool:
            for piece in pieces:
                # Hashing and writing take about as long, and both release the interpreter's lock.
                hashed = pool.submit(digest.update, piece)
                rest = memoryview(piece)
                while rest:
                    rest = rest[stream.write(rest[:_WRITE_BYTES]) :]
                size += len(piece)
                unsynced += len(piece)
                if unsynced >= _SYNC_BYTES and (synced is None or synced.done()):
                    # The disk works while more is written, so that the last sync is short.
                    synced, unsynced = pool.submit(os.fdatasync, stream.fileno()), 0
                hashed.result()
            if synced is not None:
                synced.result()
            os.fsync(stream.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise cannot_write(path, error) from None
    return FileEntry(digest.hexdigest(), size)


def make_partial(partial: Path, *, shared: bool) -> None:
    """Makes the folder of an incomplete checkpoint.

    Args:
        partial: The folder.
        shared: Whether another rank may have made it already.

    Raises:
        CheckpointError: It cannot be made. Its name can be guessed, so it may be a link that
            somebody else has put there; files would then be written to another place.
    """
    try:
        partial.mkdir()
    except FileExistsError:
        if not shared or partial.is_symlink() or not partial.is_dir():
            raise CheckpointError(
                f"{partial}: expected no such file, since a checkpoint is written there; remove it"
            ) from None
    except OSError as error:
        raise cannot_write(partial, error) from None


@contextmanager
def new_checkpoint(target: Path) -> Iterator[Path]:
    """Yields a folder for the files of a checkpoint, which `finish` gives its name.

    Raises:
        CheckpointError: The name is taken, or the folder cannot be made.
    """
    if os.path.lexists(target):
        raise CheckpointError(
            f"{target}: already exists; expected a new path (a checkpoint is never overwritten)"
        )
    partial = target.parent / f".{target.name}.partial"
    # A run that was killed may have left it.
    shutil.rmtree(partial, ignore_errors=True)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(target, error) from None
    make_partial(partial, shared=False)
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def finish(partial: Path, contents: CheckpointContents, target: Path) -> None:
    """Writes the manifest of a folder whose files are complete, and gives the folder its name.

    Raises:
        CheckpointError: It cannot be written, or the name is taken.
    """
    write_file(partial / FILE_NAME, [contents.text().encode()])
    try:
        sync_folder(partial)
        partial.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise cannot_write(target, error) from None


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(root: Path, keep: int, best: int | None = None) -> None:
    """Removes all complete checkpoints but the last `keep` and that of the step `best`."""
    for step in complete_steps(root)[:-keep]:
        if step == best:
            continue
        # A folder with this name must be complete, so it loses the name first.
        old = root / step_name(step)
        hidden = root / f".{step_name(step)}.removed"
        with suppress(OSError):
            old.rename(hidden)
            shutil.rmtree(hidden, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> CheckpointError:
    """Returns the error for a path that cannot be written."""
    return CheckpointError(cannot_write_file(path, error))
