"""Gives readers files that are damaged at random, and reports what they should not do.

A reader may succeed, or raise one of the project's errors with a message of a reasonable length. It
may take 10 s of this process's time, 60 s in all, and 2 GiB. It may write only to the folder of the
case, and may not start programs, load pickled classes or open connections. A process that dies is
a finding too: the cases of a reader run in a process of their own.

With `--commands` each case is a call of the command line in a fork of a process that has loaded it,
which has all these limits. Each hundredth case starts `onnxpar` itself, under limits of the system.

A case is a reader and a number. `tools/fuzz READER --case N` repeats one and keeps its files.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.hostile.commands import Outcome, called, described, forked, load, started
from tests.fuzz.hostile.guard import Escape, Hang, escape, guarded

STARTED = 100
"""Of so many cases by commands, one starts a process of its own."""
_MEMORY = Path("/dev/shm")
"""A file system in memory: disks take milliseconds to remove a folder."""
Files = dict[str, bytes]


@dataclass(frozen=True)
class Reader:
    """What reads a kind of file.

    Attributes:
        name: Its name on the command line.
        seeds: Returns the undamaged inputs. Each is the files of a folder, by name; gets a folder
            to work in, and the folder of the cases, in which files that are never damaged are put.
        change: Returns a damaged input.
        read: Reads the folder of a case.
        commands: The arguments of `onnxpar` that read it; one of them is drawn.
        prepare: Makes what only the commands need, in the folder of the cases.
    """

    name: str
    seeds: Callable[[Path, Path], list[Files]]
    change: Callable[[Files, Random], Files]
    read: Callable[[Path], object]
    commands: tuple[Callable[[Path], list[str]], ...]
    prepare: Callable[[Path], None] = lambda case: None


class Attack:
    """The cases of one reader, in a folder of its own."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        """Makes the undamaged inputs."""
        self.reader, self.folder = reader, folder
        (folder / "seeds").mkdir()
        (folder / "case").mkdir()
        self._seeds = reader.seeds(folder / "seeds", folder / "case")
        self._keep()

    def files(self, number: int) -> Files:
        """Returns the files of a case."""
        draw = Random(f"{self.reader.name} {number}")
        found = dict(draw.choice(self._seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            found = self.reader.change(found, draw)
        return found

    def run(
        self,
        files: Files,
        command: Callable[[Path], list[str]] | None,
        through: Callable[[list[str], Path], Outcome] = called,
    ) -> str | None:
        """Runs a case; returns what is wrong with what it did, None if nothing is.

        Args:
            files: The files that are damaged.
            command: Reads them by the command line; None reads them by the reader's function.
            through: How the command line is run.
        """
        case = self._write(files)
        tempfile.tempdir = str(case / "tmp")
        try:
            if command is not None:
                arguments = command(case)
                return through(arguments, case).fault(arguments[0])
            with guarded(case):
                self.reader.read(case)
        except (Hang, Escape, Exception) as error:
            if not _ours(error):
                return described(error)
            if not str(error).strip():
                return "an error without a message"
        finally:
            tempfile.tempdir = None
        found = escape()
        return None if found is None else f"Escape: {found}"

    def case(self, number: int, commands: bool) -> str | None:
        """Runs the case of a number; returns what is wrong, None if nothing is."""
        command = Random(f"command {number}").choice(self.reader.commands) if commands else None
        through = forked if number % STARTED else started
        return self.run(self.files(number), command, through)

    def prepare(self) -> None:
        """Makes what the commands need."""
        self.reader.prepare(self.folder / "case")
        self._keep()

    def load(self) -> None:
        """Loads what the commands load."""
        for command in self.reader.commands:
            load(command, map(self._write, self._seeds))

    def _keep(self) -> None:
        self._kept = {path.name for path in (self.folder / "case").iterdir()}

    def _write(self, files: Files) -> Path:
        """Makes the folder of a case."""
        case = self.folder / "case"
        for entry in list(case.iterdir()):
            if entry.name not in self._kept:
                _remove(entry)
        for name, data in files.items():
            (case / name).parent.mkdir(parents=True, exist_ok=True)
            (case / name).write_bytes(data)
        (case / "tmp").mkdir(exist_ok=True)
        return case


def _remove(entry: Path) -> None:
    if not entry.is_dir() or entry.is_symlink():
        entry.unlink()
    elif entry.name != "tmp" or any(entry.iterdir()):
        shutil.rmtree(entry)


def _ours(error: BaseException) -> bool:
    return isinstance(getattr(error, "exit_code", None), int)


def _work(reader: Reader, folder: Path, numbers: range, commands: bool, mark: Path) -> None:
    """Runs cases, and prints a line of JSON for each finding; `mark` has the case under way."""
    attack = Attack(reader, folder)
    if commands:
        attack.prepare()
        attack.load()
    for number in numbers:
        set_mark(mark, number)
        found = attack.case(number, commands)
        if found is not None:
            sys.__stdout__.write(json.dumps({"case": number, "found": found}) + "\n")
            sys.__stdout__.flush()
    set_mark(mark, numbers.stop)


def set_mark(mark: Path, number: int) -> None:
    """Writes the case under way over that before, so that the file has a number at any moment."""
    file = os.open(mark, os.O_WRONLY | os.O_CREAT, 0o600)
    os.pwrite(file, b"%020d" % number, 0)
    os.close(file)


def _attack(name: str, start: int, options: argparse.Namespace) -> int:
    """Runs a reader's cases in processes; prints the findings, each kind once."""
    kinds: dict[str, list[int]] = {}
    place = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    stop = start + options.count if options.count else sys.maxsize
    begun, number = time.monotonic(), start
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    while number < stop:
        left = options.seconds - (time.monotonic() - begun) if options.seconds else None
        if left is not None and left <= 0:
            break
        with tempfile.TemporaryDirectory(prefix="onnxpar-fuzz-", dir=place) as folder:
            mark = Path(folder, "mark")
            command = [sys.executable, "-m", "tests.fuzz.hostile.attack", name]
            command += ["--start", str(number), "--count", str(min(stop - number, 10**9))]
            command += ["--worker", folder, *(["--commands"] if options.commands else [])]
            child = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=None if options.verbose else subprocess.DEVNULL,
                text=True,
            )
            try:
                printed, _ = child.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                child.kill()
                printed, _ = child.communicate()
            reached = int(mark.read_text() or number) if mark.exists() else number
            for line in printed.splitlines():
                entry = json.loads(line)
                kinds.setdefault(entry["found"], []).append(entry["case"])
            if left is not None and time.monotonic() - begun >= options.seconds:
                number = reached
                break
            if child.returncode == 0:
                number = stop
                break
            if not mark.exists():
                raise SystemExit(f"{name}: its inputs could not be made (try --verbose)")
            kinds.setdefault(f"the process ended with {child.returncode}", []).append(reached)
            number = reached + 1
    alike: dict[str, list[tuple[str, list[int]]]] = {}
    for text, cases in kinds.items():
        alike.setdefault(text.split(": ")[0] if " at " in text else text, []).append((text, cases))
    for group in alike.values():
        text, cases = group[0]
        total = sum(len(c) for _, c in group)
        print(f"  {name} --case {cases[0]} ({total} alike): {text}", flush=True)
    how = "by commands" if options.commands else "in process"
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    text = f"{number - start} inputs {how}, {len(alike)} kinds of findings"
    print(f"{name}: {text}, {spent:.0f} s of CPU", flush=True)
    return len(alike)


def main() -> int:
    """Parses the command line of `tools/fuzz`."""
    from tests.fuzz.hostile.readers import READERS

    known = {reader.name: reader for reader in READERS}
    parser = argparse.ArgumentParser(prog="tools/fuzz", description=__doc__)
    parser.add_argument("readers", nargs="*", metavar="READER", help=f"of {', '.join(known)}")
    parser.add_argument("--count", type=int, help="inputs for each reader (default: 2000)")
    parser.add_argument("--seconds", type=float, help="time for each reader instead")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--commands", action="store_true", help="read by the command line")
    parser.add_argument("--case", type=int, help="repeat this case, and show its traceback")
    parser.add_argument("--verbose", action="store_true", help="show what libraries print")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    unknown = sorted({*options.readers} - {*known})
    if unknown:
        parser.error(f"no reader {unknown[0]!r}; there are {', '.join(known)}")
    names = options.readers or list(known)
    if options.commands:
        for name in [n for n in names if not known[n].commands]:
            print(f"{name}: no command reads it without more", flush=True)
            names.remove(name)
    if options.case is not None:
        folder = Path(tempfile.mkdtemp(prefix="onnxpar-fuzz-"))
        for name in names:
            (folder / name).mkdir()
            attack = Attack(known[name], folder / name)
            if options.commands:
                attack.prepare()
                attack.load()
            os.environ["ONNXPAR_TRACEBACK"] = "1" if options.commands else "0"
            found = attack.case(options.case, options.commands)
            print(f"{name}: {found}; files in {folder / name / 'case'}")
            if not options.commands:
                attack.reader.read(folder / name / "case")
        return 0
    if options.worker is not None:
        numbers = range(options.start, options.start + options.count)
        _work(known[names[0]], options.worker, numbers, options.commands, options.worker / "mark")
        return 0
    if options.count is None and options.seconds is None:
        options.count = 2000
    return int(any([_attack(name, options.start, options) for name in names]))


if __name__ == "__main__":
    raise SystemExit(main())
