"""Marks by which `onnxpar launch` sees which ranks started, and which of them finished.

mpirun's exit code does not tell: Open MPI's returns 0 if the daemon of another machine dies, and
waits for as long as the link to it is down. So each rank that runs on the supervisor's machine, or
shares its folder for temporary files, leaves a file there when it starts and when it has finished.
"""

import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SUPERVISED = "ONNXPAR_SUPERVISED"
"""The variable with the supervisor's folder for marks, set for the ranks that it started."""
_STARTED = ".started"
_FINISHED = ".finished"
_SEGMENTS = ".segments"
_SEGMENT = "sm_segment."
"""How the names of Open MPI's shared memory begin; the rest names machine, user, job and rank."""


def mark_started(rank: int) -> None:
    """Leaves the mark of a rank that starts, with its machine and process."""
    _mark(rank, _STARTED, f"{socket.gethostname()} {os.getpid()}")


def mark_segments(rank: int) -> None:
    """Leaves the names of the shared memory that Open MPI has made for the ranks of this job.

    If mpirun and the ranks are killed, nothing removes it. Its names have a number of the job that
    only its ranks know, so they say which files they have.
    """
    if SUPERVISED not in os.environ:
        return
    with suppress(OSError):
        mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        found = sorted(path for path in mapped if Path(path).name.startswith(_SEGMENT))
        _mark(rank, _SEGMENTS, "\n".join(found))


def mark_finished(rank: int) -> None:
    """Leaves the mark of a rank that has done all its work."""
    _mark(rank, _FINISHED, "")


def _mark(rank: int, kind: str, text: str) -> None:
    folder = os.environ.get(SUPERVISED)
    # On another machine the folder does not exist.
    if folder is not None:
        with suppress(OSError):
            (Path(folder) / f"rank{rank:04d}{kind}").write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Marks:
    """The marks of one run of mpirun.

    Attributes:
        folder: Where they are.
    """

    folder: Path

    def failed(self) -> list[int]:
        """Returns the ranks of this machine whose process has ended before they finished."""
        here = self._processes_here()
        return [rank for rank in self.unfinished() if rank in here and not _lives(here[rank])]

    def elsewhere(self, count: int) -> list[int]:
        """Returns those of `count` ranks that have left no mark of this machine."""
        here = self._processes_here()
        return [rank for rank in range(count) if rank not in here]

    def unfinished(self) -> list[int]:
        """Returns the ranks that left a mark when they started, and none when they finished."""
        return sorted(self._ranks(_STARTED) - self._ranks(_FINISHED))

    def stopped(self) -> list[int]:
        """Returns the ranks of this machine whose process is stopped, as by SIGSTOP (Linux)."""
        return [rank for rank, process in self._processes_here().items() if _is_stopped(process)]

    @property
    def joined(self) -> bool:
        """Whether ranks have started together."""
        return bool(self._ranks(_SEGMENTS))

    @property
    def empty(self) -> bool:
        """Whether no rank has left a mark."""
        return not self._ranks(_STARTED)

    def remove_segments(self) -> None:
        """Removes the shared memory that Open MPI left of this job, when none of its ranks runs."""
        for mark in self.folder.glob(f"rank*{_SEGMENTS}"):
            for name in mark.read_text(encoding="utf-8").splitlines():
                with suppress(OSError):
                    # The system refuses to remove files of others there, unless this is root.
                    status = os.lstat(name)
                    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                        os.unlink(name)

    def _processes_here(self) -> dict[int, int]:
        """Returns the processes on this machine, by rank."""
        found = {}
        for rank in sorted(self._ranks(_STARTED)):
            words = (self.folder / f"rank{rank:04d}{_STARTED}").read_text(encoding="utf-8").split()
            # A file that has just been made may still be empty.
            if len(words) == 2 and words[0] == socket.gethostname():
                found[rank] = int(words[1])
        return found

    def _ranks(self, kind: str) -> set[int]:
        return {int(path.name.removesuffix(kind)[4:]) for path in self.folder.glob(f"rank*{kind}")}


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_stopped(process: int) -> bool:
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    # The name of the program is in parentheses, and may contain some itself.
    return text.rpartition(")")[2].split()[0] == "T"
