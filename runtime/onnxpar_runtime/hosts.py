"""The machines that the options of an mpirun name, their slots, and which of them answer.

mpirun starts a daemon on every machine that it is given, whether a rank runs there or not, and ends
if one cannot be reached.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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

    def _answers(self, entry: str) -> bool:
        mpirun = find_mpirun()
        line = [mpirun, *Hosts((entry,), self.others).options(mpirun), "-n", "1", "true"]
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
                return False
        return done.returncode == 0


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
