"""The machines that the options of an mpirun name, their slots, and which of them answer.

mpirun starts a daemon on every machine that it is given, whether a rank runs there or not, and ends
if one cannot be reached.
"""

import re
import socket
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar_format.regular_file import read_regular
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.launch import find_mpirun, is_open_mpi, mpirun_environment

_FILES = ("hostfile", "machinefile", "f")
_LISTS = ("host", "H", "hosts")
"""The names of options: all but the last of each are of both MPIs, and that is MPICH's."""
_NAME = re.compile(r"[\w.-]+", re.ASCII)
"""A machine. Open MPI's files also exclude some, and pick some of a larger list."""
_ANSWERS_S = 20.0
"""Within this time a machine has started and ended a program."""
_ABSENT = 77
"""An exit code that neither mpirun nor a shell has by itself."""


@dataclass(frozen=True)
class Hosts:
    """The machines in the options of an mpirun.

    Attributes:
        entries: The machines as mpirun's `--host` takes them: `name` or `name:slots`.
        others: The other options.
    """

    entries: tuple[str, ...]
    others: tuple[str, ...]

    def options(self, mpirun: str) -> list[str]:
        """Returns the options of an mpirun on these machines."""
        name = "--host" if is_open_mpi(mpirun) else "-hosts"
        return [*self.others, *((name, ",".join(self.entries)) if self.entries else ())]

    def answering(self) -> "Hosts":
        """Returns the machines on which mpirun can start a program, tried all at once."""
        with ThreadPoolExecutor(max(len(self.entries), 1)) as pool:
            found = list(pool.map(self._answers, self.entries))
        kept = tuple(entry for entry, here in zip(self.entries, found, strict=True) if here)
        return Hosts(kept, self.others)

    def see(self, folder: Path) -> bool:
        """Returns whether ranks may find a folder of this machine on the machines.

        They do if one may be this machine. Otherwise, the first is asked.
        """
        if any(_may_be_here(name) for name in {e.partition(":")[0] for e in self.entries}):
            return True
        code = self._code(
            self.entries[0], "sh", "-c", f'test -d "$0" || exit {_ABSENT}', str(folder)
        )
        return code != _ABSENT

    def _answers(self, entry: str) -> bool:
        return self._code(entry, "true") == 0

    def _code(self, entry: str, *program: str) -> int | None:
        """Returns the exit code of a program on a machine; None if it does not end."""
        mpirun = find_mpirun()
        line = [mpirun, *Hosts((entry,), self.others).options(mpirun), "-n", "1", *program]
        with TemporaryDirectory(prefix="onnxpar-launch-") as folder:
            try:
                done = subprocess.run(
                    line,
                    env=mpirun_environment(folder=Path(folder)),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=_ANSWERS_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return None
        return done.returncode


def hosts_of(options: Sequence[str]) -> Hosts:
    """Returns the machines that options of mpirun name, in files and in lists."""
    entries: list[str] = []
    others: list[str] = []
    for name, values in _parts(options):
        if name in _FILES:
            entries += _listed(Path(values[0]))
        elif name in _LISTS:
            entries += values[0].split(",")
        else:
            others += values
    return Hosts(tuple(filter(None, entries)), tuple(others))


def slots_of(options: Sequence[str], open_mpi: bool) -> dict[str, int]:
    """Returns how many ranks each machine takes that options of mpirun name, in their order.

    Nothing is returned if a number is not known: Open MPI counts the cores of a machine that a file
    names without `slots=`.
    """
    kinds = {name for name, _ in _parts(options) if name in (*_FILES, *_LISTS)}
    found: dict[str, int] = {}
    if len(kinds) != 1:
        return {}
    unstated = "" if open_mpi and kinds <= {*_FILES} else "1"
    for entry in hosts_of(options).entries:
        name, _, text = entry.partition(":")
        number = text or unstated
        # Open MPI adds the numbers of a machine that is named twice; to MPICH, it is two machines.
        if not number.isdecimal() or not _NAME.fullmatch(name) or (name in found and not open_mpi):
            return {}
        found[name] = found.get(name, 0) + int(number)
    return found


def _may_be_here(name: str) -> bool:
    """Whether a name is of this machine; or is none that the system knows, as those of ssh."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, _, _, address in found:
        # Only addresses of this machine can be bound.
        with suppress(OSError), socket.socket(family, kind) as bound:
            bound.bind((address[0], 0, *address[2:]))
            return True
    return False


def _parts(options: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each option that names machines with its value; others as ("", the option itself)."""
    left = iter(options)
    for option in left:
        name, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or name not in (*_FILES, *_LISTS):
            yield "", [option]
        else:
            yield name, [value if equals else next(left, "")]


def _listed(path: Path) -> list[str]:
    """Returns the machines of a hostfile; raises LaunchError if it cannot be read."""
    try:
        lines = read_regular(path).decode().splitlines()
    except OSError as error:
        raise LaunchError(f"hostfile {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise LaunchError(f"hostfile {path}: expected text") from None
    found = []
    for line in lines:
        words = line.partition("#")[0].split()
        slots = [word.removeprefix("slots=") for word in words if word.startswith("slots=")]
        if words:
            found.append(":".join([words[0], *slots[:1]]))
    return found
