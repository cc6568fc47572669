"""The machines that the options of an mpirun name, and those of them that answer.

mpirun starts a daemon on every machine that it is given, whether a rank runs there or not, and ends
if one cannot be reached.
"""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar_format.regular_file import read_regular
from onnxpar_runtime.launch import find_mpirun, mpirun_environment

_FILES = ("hostfile", "machinefile")
_LISTS = ("host", "H")
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

    @property
    def options(self) -> list[str]:
        """The options of an mpirun on these machines."""
        return [*self.others, *(("--host", ",".join(self.entries)) if self.entries else ())]

    def answering(self) -> "Hosts":
        """Returns the machines on which mpirun can start a program, tried all at once."""
        with ThreadPoolExecutor(max(len(self.entries), 1)) as pool:
            found = list(pool.map(self._answers, self.entries))
        kept = tuple(entry for entry, here in zip(self.entries, found, strict=True) if here)
        return Hosts(kept, self.others)

    def _answers(self, entry: str) -> bool:
        line = [find_mpirun(), *self.others, "--host", entry, "-n", "1", "true"]
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
    left = iter(options)
    for option in left:
        name, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or name not in (*_FILES, *_LISTS):
            others.append(option)
            continue
        value = value if equals else next(left, "")
        entries += _listed(Path(value)) if name in _FILES else value.split(",")
    return Hosts(tuple(filter(None, entries)), tuple(others))


def _listed(path: Path) -> list[str]:
    """Returns the machines of a hostfile; none if it cannot be read."""
    try:
        lines = read_regular(path).decode().splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    found = []
    for line in lines:
        words = line.partition("#")[0].split()
        slots = [word.removeprefix("slots=") for word in words if word.startswith("slots=")]
        if words:
            found.append(":".join([words[0], *slots[:1]]))
    return found
