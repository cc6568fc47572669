"""Gives readers files that are damaged at random, and reports what they should not do.

A reader may succeed, or raise one of the project's errors with a message of a reasonable length. It
may take 10 s of this process's time, 60 s in all, and 2 GiB. It may write only to the folder of the
case, and may not start programs, load pickled classes or open connections. A process that dies is
a finding too: the cases of a reader run in a process of their own.

A case is a reader and a number. `tools/fuzz READER --case N` repeats one and keeps its files.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

SECONDS, WALL_SECONDS, BYTES = 10, 60, 2 << 30
LONGEST = 4_200
"""Characters of a message, with the remark that it was shortened."""
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
    """

    name: str
    seeds: Callable[[Path, Path], list[Files]]
    change: Callable[[Files, Random], Files]
    read: Callable[[Path], object]
    commands: tuple[Callable[[Path], list[str]], ...]


class Hang(BaseException):
    """A case took too long; no `except Exception` may hide it."""


class Escape(BaseException):
    """A case did what reading must not do."""


_FORBIDDEN = (
    "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn",
    "subprocess.Popen",
    "pickle.find_class", "socket.connect", "socket.bind", "os.kill"
)  # fmt: skip
_WRITES = {
    "os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "os.mkdir": (0,), "os.symlink": (1,),
    "os.link": (1,), "os.truncate": (0,), "os.chmod": (0,), "shutil.rmtree": (0,),
}  # fmt: skip
_guarded: Path | None = None
_thread = 0
_escaped: list[str] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _guarded is None or threading.get_ident() != _thread:
        return
    if event in _FORBIDDEN:
        _escape(f"{event} {arguments!r:.200}")
    elif event == "open" and isinstance(arguments[0], str | bytes):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            _check_place(event, arguments[0])
    elif event in _WRITES:
        for index in _WRITES[event]:
            _check_place(event, arguments[index])


@cache
def _listen() -> None:
    """Adds the hook, once, because it cannot be removed."""
    sys.addaudithook(_audit)


def _check_place(event: str, path: Any) -> None:
    if isinstance(path, int):
        return
    name = os.fsdecode(path)
    real = os.path.realpath(name)
    # `shutil.rmtree` removes by names in a folder that it has open.
    inside = Path(real).is_relative_to(_guarded or "/") or "/" not in name
    if not inside and real != "/dev/null":
        _escape(f"{event} {real}")


def _escape(what: str) -> None:
    _escaped.append(what)
    raise Escape(what)


def _hang(number: int, frame: Any) -> None:
    raise Hang(f"more than {SECONDS} s, or {WALL_SECONDS} s in all")


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Applies the limits to the block, which may write to the folder alone."""
    global _guarded, _thread
    _listen()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = [(n, signal.signal(n, _hang)) for n in (signal.SIGALRM, signal.SIGPROF)]
    _escaped.clear()
    _guarded, _thread = folder.resolve(), threading.get_ident()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + BYTES, hard))
        signal.setitimer(signal.ITIMER_REAL, WALL_SECONDS)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _guarded = None
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for number, handler in previous:
            signal.signal(number, handler)


class Attack:
    """The cases of one reader, in a folder of its own."""

    def __init__(self, reader: Reader, folder: Path) -> None:
        """Makes the undamaged inputs."""
        self.reader, self.folder = reader, folder
        (folder / "seeds").mkdir()
        (folder / "case").mkdir()
        self._seeds = reader.seeds(folder / "seeds", folder / "case")
        self._kept = {path.name for path in (folder / "case").iterdir()}
        self._clean: Files = self._seeds[0]

    def files(self, number: int) -> Files:
        """Returns the files of a case."""
        draw = Random(f"{self.reader.name} {number}")
        found = dict(draw.choice(self._seeds))
        for _ in range(draw.choice((1, 1, 1, 2, 4))):
            found = self.reader.change(found, draw)
        return found

    def run(self, files: Files, command: Callable[[Path], list[str]] | None) -> str | None:
        """Runs a case; returns what is wrong with what it did, None if nothing is.

        Args:
            files: The files that are damaged.
            command: Reads them by the command line; None reads them by the reader's function.
        """
        case = self.folder / "case"
        for entry in list(case.iterdir()):
            if entry.name not in self._kept:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for name, data in files.items():
            (case / name).parent.mkdir(parents=True, exist_ok=True)
            (case / name).write_bytes(data)
        (case / "tmp").mkdir()
        tempfile.tempdir = str(case / "tmp")
        try:
            with guarded(case):
                if command is not None:
                    return _command(command(case))
                self.reader.read(case)
        except (Hang, Escape, Exception) as error:
            found = None if _ours(error) else error
            if found is not None:
                return _described(found)
            return None if str(error).strip() else "an error without a message"
        finally:
            tempfile.tempdir = None
        return f"Escape: {_escaped[0]}" if _escaped else None


def _ours(error: BaseException) -> bool:
    return isinstance(getattr(error, "exit_code", None), int)


def _described(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/onnxpar" in f.filename] or frames
    last = own[-1]
    place = f"{Path(last.filename).name}:{last.lineno} {last.name}"
    return f"{type(error).__name__} at {place}: {str(error)[:200]!r}"


def _bad_message(message: str) -> str | None:
    if not message.strip():
        return "an error without a message"
    if len(message) > LONGEST:
        return f"a message of {len(message)} characters: {message[:100]!r}"
    try:
        message.encode()
    except UnicodeEncodeError:
        return f"a message that cannot be printed: {message[:200]!r}"
    return None


def _command(arguments: list[str]) -> str | None:
    from onnxpar.cli import main

    printed, written = io.BytesIO(), io.BytesIO()
    output, errors = (io.TextIOWrapper(s, "utf-8", write_through=True) for s in (printed, written))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(arguments)
    text = written.getvalue().decode()
    what = f"onnxpar {arguments[0]}"
    if code not in (0, 1, 2):
        return f"{what}: exit code {code}"
    if "internal error" in text or "Traceback" in text:
        return f"{what}: {text[:300]!r}"
    if code == 2 and "error" not in text:
        return f"{what}: no message: {text[:200]!r}"
    return _bad_message(text) if code == 2 else None


def _work(reader: Reader, folder: Path, numbers: range, commands: bool, mark: Path) -> None:
    """Runs cases, and prints a line of JSON for each finding; `mark` has the case under way."""
    attack = Attack(reader, folder)
    for number in numbers:
        set_mark(mark, number)
        draw = Random(f"command {number}")
        command = draw.choice(reader.commands) if commands else None
        found = attack.run(attack.files(number), command)
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
    stop = start + options.count if options.count else sys.maxsize
    begun, number = time.monotonic(), start
    while number < stop:
        left = options.seconds - (time.monotonic() - begun) if options.seconds else None
        if left is not None and left <= 0:
            break
        with tempfile.TemporaryDirectory(prefix="onnxpar-fuzz-") as folder:
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
    print(f"{name}: {number - start} inputs {how}, {len(alike)} kinds of findings", flush=True)
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
    if options.case is not None:
        folder = Path(tempfile.mkdtemp(prefix="onnxpar-fuzz-"))
        for name in names:
            (folder / name).mkdir()
            attack = Attack(known[name], folder / name)
            files = attack.files(options.case)
            draw = Random(f"command {options.case}")
            command = draw.choice(known[name].commands) if options.commands else None
            os.environ["ONNXPAR_TRACEBACK"] = "1" if command else "0"
            print(f"{name}: {attack.run(files, command)}; files in {folder / name / 'case'}")
            if command is None:
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
