"""Runs the command line on a case: in this process, in a fork of it, or in a process of its own.

To start Python and to load the transformer takes seconds. A fork has loaded everything, and else
is a process like any other: its arguments, folder, files for output, limits and exit code are its
own. What happens before `main` and after it is left to the few cases with a process of their own.
"""

import contextlib
import gc
import importlib
import io
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.hostile.guard import BYTES, SECONDS, WALL_SECONDS, address_space, escape, guarded

LONGEST = 4_200
"""Characters of a message, with the remark that it was shortened."""
_UNCAUGHT = 120
_LOADING = 5
"""Seconds of time that a process of its own may take to load, on a busy machine."""


@dataclass(frozen=True)
class Outcome:
    """What the command line left: its exit code (minus the signal that ended it) and its stderr."""

    code: int
    text: str

    def fault(self, command: str) -> str | None:
        """Says what is wrong with it, None if nothing is."""
        what = f"onnxpar {command}"
        if self.code not in (0, 1, 2):
            return f"{what}: exit code {self.code}: {self.text[-300:]!r}"
        if "internal error" in self.text or "Traceback" in self.text:
            return f"{what}: {self.text[:300]!r}"
        if self.code == 2 and "error" not in self.text:
            return f"{what}: no message: {self.text[:200]!r}"
        return _bad_message(self.text) if self.code == 2 else None


def _bad_message(message: str) -> str | None:
    if len(message) > LONGEST:
        return f"a message of {len(message)} characters: {message[:100]!r}"
    try:
        message.encode()
    except UnicodeEncodeError:
        return f"a message that cannot be printed: {message[:200]!r}"
    return None


def described(error: BaseException) -> str:
    """An error and the place in our code where it came from, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "/onnxpar" in f.filename] or frames
    last = own[-1]
    place = f"{Path(last.filename).name}:{last.lineno} {last.name}"
    return f"{type(error).__name__} at {place}: {str(error)[:200]!r}"


def called(arguments: Sequence[str], case: Path) -> Outcome:
    """Calls the command line in this process.

    Raises:
        Hang, Escape: It took too long, or did what it must not do.
    """
    from onnxpar.cli import main

    printed, written = io.BytesIO(), io.BytesIO()
    output, errors = (io.TextIOWrapper(s, "utf-8", write_through=True) for s in (printed, written))
    with guarded(case), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(arguments)
    return Outcome(code, written.getvalue().decode())


def forked(arguments: Sequence[str], case: Path) -> Outcome:
    """Calls the command line in a fork of this process, whose folder is `case/tmp`."""
    return _forked(arguments, case)[0]


def load(command: Callable[[Path], Sequence[str]], cases: Iterable[Path]) -> None:
    """Loads what a command loads, so that forks need not do it.

    It runs in a fork, with undamaged files, and says what it has loaded: this process must not
    start what onnxruntime starts, since a fork has no threads but its own.

    Args:
        command: Returns the arguments of `onnxpar` for a folder.
        cases: Undamaged folders; what refuses all of them would attack nothing.
    """
    for case in cases:
        arguments = command(case)
        outcome, modules = _forked(arguments, case)
        if outcome.code == 0:
            break
    else:
        raise AssertionError(f"undamaged files: onnxpar {arguments[0]}: {outcome}")
    for name in modules.split():
        # To import the bindings of MPI starts MPI.
        if name not in sys.modules and not name.startswith("mpi4py"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    # A collection would touch, so copy, every page that a fork shares with this process.
    gc.collect()
    gc.freeze()


def _forked(arguments: Sequence[str], case: Path) -> tuple[Outcome, str]:
    """Returns the outcome, and the names of the modules that the fork has loaded in the end."""
    files = [os.memfd_create(name) for name in ("stdout", "stderr", "modules")]
    try:
        child = os.fork()
        if child == 0:
            _be_program(arguments, case, *files)
        waiting = os.pidfd_open(child)
        try:
            ended, _, _ = select.select([waiting], [], [], WALL_SECONDS + _LOADING)
            if not ended:
                signal.pidfd_send_signal(waiting, signal.SIGKILL)
        finally:
            os.close(waiting)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = "" if ended else f"Hang: more than {WALL_SECONDS} s in all\n"
        return Outcome(code, text + _content(files[1])), _content(files[2])
    finally:
        for file in files:
            os.close(file)


def _content(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode("utf-8", "replace")


def _be_program(
    arguments: Sequence[str], case: Path, output: int, errors: int, modules: int
) -> None:
    """Does in a fork what the script `onnxpar` does, and ends the process."""
    code = _UNCAUGHT
    try:
        for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (errors, 2)):
            os.dup2(source, target)
        sys.stdin, sys.stdout, sys.stderr = (
            io.TextIOWrapper(io.FileIO(n, mode, closefd=False), "utf-8", line_buffering=n == 2)
            for n, mode in ((0, "rb"), (1, "wb"), (2, "wb"))
        )
        os.chdir(case / "tmp")
        sys.argv = ["onnxpar", *arguments]
        from onnxpar.cli import main

        with guarded(case):
            code = main()
        if (found := escape()) is not None:
            sys.stderr.write(f"Escape: {found}\n")
            code = _UNCAUGHT
    except BaseException as error:
        code = _UNCAUGHT
        sys.stderr.write(f"{described(error)}\n")
    finally:
        with contextlib.suppress(BaseException):
            os.write(modules, "\n".join(sys.modules).encode())
            sys.stdout.flush()
            sys.stderr.flush()
        # Nothing that belongs to the parent may be cleaned up here.
        os._exit(code)


def started(arguments: Sequence[str], case: Path) -> Outcome:
    """Starts the command line in a process of its own, whose folder is `case/tmp`.

    The system enforces the limits of time and memory; nothing watches what it writes or starts.
    """
    room = address_space() + BYTES
    program = subprocess.Popen(
        [str(Path(sys.executable).with_name("onnxpar")), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=case / "tmp",
        env={**os.environ, "TMPDIR": str(case / "tmp")},
        preexec_fn=lambda: _limit(room),
    )
    try:
        text = program.communicate(timeout=WALL_SECONDS + _LOADING)[1]
    except subprocess.TimeoutExpired:
        program.kill()
        text = b"Hang: more than %d s in all\n" % WALL_SECONDS + program.communicate()[1]
    return Outcome(program.returncode, text.decode("utf-8", "replace"))


def _limit(room: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS + _LOADING, SECONDS + _LOADING + 1))
