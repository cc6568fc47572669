"""Runs mpirun, and runs it again from the last complete checkpoint when a rank has died.

mpirun ends all ranks when one of them dies. The supervisor decides from the exit code whether to
start again: an error that all ranks agreed on would come again. Success also needs a mark of each
rank that it finished (`onnxpar_runtime.marks`); ranks of another program need one only if they have
called `init`. The supervisor ends mpirun if it outlives a rank that failed, and ranks of this
machine whose mpirun has died (on other machines, Open MPI's daemons do so). It also passes signals
on to mpirun: as SIGUSR2 if the command has `--grace`, so that the ranks can write a last
checkpoint.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory, gettempdir
from types import FrameType

from onnxpar_format.manifest import FILE_NAME
from onnxpar_format.texts import numbered_ranks, ranks_in_words
from onnxpar_runtime.checkpoint.folder import complete_steps, resolve
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.hosts import hosts_of
from onnxpar_runtime.launch import (
    AGREED,
    crowd_options,
    find_mpirun,
    is_open_mpi,
    mpirun_environment,
)
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.marks import SUPERVISED, Marks
from onnxpar_runtime.placement import placed

COMMANDS = ("run", "generate", "serve", "train", "eval")
"""The commands of which every rank is a process. `verify` runs all ranks in one."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_GRACE_S = 8.0
_POLL_S = 0.05
_MOST_RETRIES = 1000
# What ended a short run, such as a link that is down, may last: wait longer before each restart.
_SHORT_S = 10.0
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
# From Linux's prctl.h.
_SET_PARENT_DEATH_SIGNAL = 1
_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Job:
    """A command to run under mpirun, and how often to restart it.

    Attributes:
        program: The command that starts one rank, without its arguments.
        arguments: A command of `COMMANDS` and its directory: `train DIR …`; or another program and
            its arguments, which are started without `program`.
        ranks: Number of ranks; None for that of the directory.
        retries: How often the run of a directory, or another program, is restarted.
        fallbacks: Directories with which the run continues, one after another, when no retries are
            left: the same training, sharded for fewer ranks.
        options: Further options of mpirun.
        keep_placement: Whether ranks stay on the machines where mpirun places them by itself.
    """

    program: Sequence[str]
    arguments: Sequence[str]
    ranks: int | None = None
    retries: int = 0
    fallbacks: Sequence[Path] = ()
    options: Sequence[str] = ()
    keep_placement: bool = False

    @property
    def is_own(self) -> bool:
        """Whether the ranks run a command of onnxpar."""
        return bool(self.arguments) and self.arguments[0] in COMMANDS


@dataclass(frozen=True)
class _End:
    """How an mpirun ended.

    Attributes:
        code: Its exit code.
        interrupted: The signal that this process got, if any.
        why: Why the run failed, though mpirun's code is 0 or this process ended it; else empty.
        missing: Which ranks kept the others from starting, for people; else empty.
        started: Whether a rank was seen to start, or the program need not say so.
    """

    code: int
    interrupted: int | None = None
    why: str = ""
    missing: str = ""
    started: bool = True


def supervise(job: Job) -> int:
    """Runs a job to its end, and reports restarts on stderr.

    Returns:
        0 after success; 1 or 2 if the ranks agreed on an error, as for `train`; 1 if ranks died and
        no retries are left; 128 plus the number of a signal that ended it.

    Raises:
        LaunchError: The command starts no ranks, a directory is for another number of ranks,
            there are retries and no checkpoints, a program is not found, or ranks would all be
            where this process cannot see their marks.
        DirectoryError: A directory cannot be read.
    """
    if job.is_own and "--help" in job.arguments:
        return subprocess.call([*job.program, *job.arguments])
    plan = list(_attempts(job) if job.is_own else _attempts_of_program(job))
    folder = option(job.arguments, "--checkpoint") if job.is_own else None
    if len(plan) > 1 and folder is None and job.is_own:
        raise LaunchError("--retries and --fallback: expected --checkpoint in the command as well")
    _adopt_orphans()
    if job.is_own:
        _check_marks_arrive(job)
    for number, (directory, ranks) in enumerate(plan):
        arguments = list(job.arguments)
        if isinstance(directory, Path):
            arguments = _arguments(job, directory, folder if number else None)
        start = time.monotonic()
        end = _run(job, ranks, arguments)
        if end.interrupted is not None:
            return 128 + end.interrupted
        agreed = end.code - AGREED
        if not end.why and (end.code in (0, 2) or agreed in (1, 2)):
            return agreed if agreed > 0 else end.code
        elapsed = time.monotonic() - start
        failed = "a rank failed" if end.started else "no rank was seen to start"
        why = end.why or f"{failed}, and mpirun ended {_how(end.code)}"
        _report(f"{why} after {elapsed:.1f} s{end.missing}")
        if number + 1 < len(plan):
            again, count = plan[number + 1]
            restart = f"(restart {number + 1} of {len(plan) - 1})"
            where = f"{_where(folder)} " if job.is_own else "restarting "
            _report(f"{where}on {ranks_in_words(count)}, with {again} {restart}")
            if elapsed < _SHORT_S:
                time.sleep(min(_PAUSE_S * 2 ** min(number, 10), _LONGEST_PAUSE_S))
            if again != directory:
                job = _on_answering_machines(job)
    if job.arguments[0] == "train" or job.retries:
        _report("giving up: no retries are left" if len(plan) > 1 else "use --retries to restart")
    return 1


def _check_marks_arrive(job: Job) -> None:
    hosts = hosts_of(job.options)
    with TemporaryDirectory(prefix="onnxpar-launch-") as folder:
        if hosts.entries and not hosts.see(Path(folder)):
            raise LaunchError(
                f"launch: none of the machines {', '.join(hosts.entries)} is this one, and they do "
                f"not share its folder {gettempdir()}, so it cannot be seen whether ranks finish: "
                "start launch on one of them, or set TMPDIR to a folder that all share"
            )


def _on_answering_machines(job: Job) -> Job:
    """Returns a job without the machines that do not answer, if others do."""
    hosts = hosts_of(job.options)
    left = hosts.answering()
    gone = [entry.partition(":")[0] for entry in hosts.entries if entry not in left.entries]
    if not gone or not left.entries:
        return job
    _report(f"without machines that do not answer: {', '.join(gone)}")
    return replace(job, options=left.options(find_mpirun()))


def option(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of the last option with a name in a command; None if it has none."""
    found = None
    for index, argument in enumerate(arguments):
        if argument == name and index + 1 < len(arguments):
            found = arguments[index + 1]
        elif argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
    return found


def _attempts(job: Job) -> Iterator[tuple[Path, int]]:
    """Returns directory and number of ranks of each attempt."""
    retries = _checked_retries(job)
    command = list(job.arguments)
    # The directory says how many ranks to start, so it stands in a known place.
    if len(command) < 2 or command[1].startswith("-"):
        got = " ".join(command[:2])
        raise LaunchError(f"launch: expected `-- {command[0]} DIR …`, got `-- {got}`")
    if not Path(command[1]).exists():
        raise LaunchError(f"launch: {command[1]} does not exist")
    if not _is_directory(command[1]):
        raise LaunchError(
            f"launch: expected the output of `onnxpar shard` after `-- {command[0]}`, got "
            f"{command[1]}, which has no {FILE_NAME}"
        )
    trains = command[0] == "train"
    if not trains and (job.retries or job.fallbacks):
        raise LaunchError(
            f"--retries and --fallback: expected `-- train DIR …`, got `-- {command[0]}`, which "
            "has no checkpoints to resume from"
        )
    for place, directory in enumerate((Path(command[1]), *job.fallbacks)):
        manifest = Manifest.load(directory)
        if trains:
            manifest.trained()
        if not place and job.ranks not in (None, manifest.devices):
            raise LaunchError(
                f"-n {job.ranks}: {directory} was made for "
                f"{ranks_in_words(manifest.devices)}; leave out -n"
            )
        for _ in range(1 + retries):
            yield directory, manifest.devices


def _attempts_of_program(job: Job) -> Iterator[tuple[str, int]]:
    """Returns program and number of ranks of each attempt."""
    program = job.arguments[0] if job.arguments else ""
    why = ""
    if program == "verify":
        why = ": verify runs all ranks in one process, so start it without launch"
    elif job.ranks is None:
        why = ": a program of your own needs -n N"
    elif which(program) is None:
        place = "" if "/" in program else " on the PATH"
        why = f": there is no program {program!r} that can be executed{place}"
    if why:
        raise LaunchError(
            f"launch: expected `-- COMMAND DIR …` with a command of {', '.join(COMMANDS)}, or "
            f"`-n N -- PROGRAM …`, got `-- {' '.join(job.arguments[:2])}`{why}"
        )
    if job.fallbacks:
        raise LaunchError(f"--fallback: expected `-- train DIR …`, got `-- {program}`")
    assert job.ranks is not None
    return ((program, job.ranks) for _ in range(1 + _checked_retries(job)))


def _checked_retries(job: Job) -> int:
    if not 0 <= job.retries <= _MOST_RETRIES:
        raise LaunchError(f"--retries: expected 0 to {_MOST_RETRIES}, got {job.retries}")
    return job.retries


def _is_directory(path: str) -> bool:
    return (Path(path) / FILE_NAME).is_file()


def _arguments(job: Job, directory: Path, folder: str | None) -> list[str]:
    """Returns the command of an attempt, which resumes from the last checkpoint of `folder`."""
    arguments = [job.arguments[0], str(directory), *job.arguments[2:]]
    if folder is not None and complete_steps(Path(folder)):
        # The last of two options counts.
        arguments += ["--resume", folder]
    return arguments


def _where(folder: str | None) -> str:
    if folder is None or not complete_steps(Path(folder)):
        return "restarting from the beginning, because no checkpoint is complete,"
    return f"resuming from {resolve(folder)}"


def _how(code: int) -> str:
    """Says how a program ended, for people."""
    number = -code if code < 0 else code - 128
    try:
        return f"with {signal.Signals(number).name} (code {code})"
    except ValueError:
        return f"with code {code}"


def _run(job: Job, ranks: int, arguments: Sequence[str]) -> _End:
    """Runs mpirun once, until none of its ranks is left."""
    mpirun = find_mpirun()
    # With --oversubscribe, Open MPI would start all ranks on the first machine.
    more = [] if hosts_of(job.options).entries else crowd_options(mpirun, ranks)
    if is_open_mpi(mpirun):
        # Ranks on other machines only get the variables that are exported to them.
        more += ["-x", SUPERVISED]
    known = set(_children())
    with TemporaryDirectory(prefix="onnxpar-launch-") as folder, _handed_on() as signals:
        options = job.options
        if job.is_own and not job.keep_placement:
            manifest = Manifest.load(Path(arguments[1]))
            options, notice = placed(mpirun, options, manifest, Path(folder))
            if notice:
                _report(notice)
        program = job.program if job.is_own else ()
        command = [mpirun, *more, *options, "-n", str(ranks), *program, *arguments]
        marks, stop = Marks(Path(folder)), _Stop(signals, _grace(arguments) if job.is_own else None)
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**mpirun_environment(folder=Path(folder)), SUPERVISED: folder},
            start_new_session=True,  # The terminal's Ctrl-C comes to this process alone.
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            while process.poll() is None:
                stop.look(process, marks)
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            _end_orphans(known)
            if process.returncode:
                marks.remove_segments()
        why = stop.why
        if process.returncode == 0 and not why:
            why = _why_unfinished(marks, ranks, job.is_own)
        missing = "" if marks.joined else _missing(stop.stopped, marks.elsewhere(ranks), ranks)
        started = not (marks.empty and job.is_own)
    return _End(process.returncode, signals.seen, why, missing, started)


def _missing(stopped: Collection[int], unseen: Sequence[int], ranks: int) -> str:
    """Says which ranks did not start with the others, if that is known of some."""
    if stopped:
        return f"; stopped before all had started: {numbered_ranks(sorted(stopped))}"
    if unseen and len(unseen) < ranks:
        return f"; not seen to start: {numbered_ranks(unseen)}"
    return ""


def _why_unfinished(marks: Marks, ranks: int, is_own: bool) -> str:
    """Says why a run did not finish, though mpirun reported success; empty if it did."""
    if marks.empty and not is_own:
        return ""  # no rank has called `init`
    if marks.empty:
        return (
            "mpirun ended with code 0, but no rank reported that it finished: expected a rank on "
            "this machine, or a folder TMPDIR that all machines share"
        )
    left, elsewhere = marks.unfinished(), marks.elsewhere(ranks)
    if not left:
        return ""
    text = f"{numbered_ranks(left)} did not finish, but mpirun ended with code 0"
    if not elsewhere:
        return text
    which = "the machine" if len(elsewhere) == 1 else "a machine"
    return f"{text}: it lost {which} of {numbered_ranks(elsewhere)}"


def _grace(arguments: Sequence[str]) -> float | None:
    """Returns the seconds that ranks may take to stop; the ranks report a malformed number."""
    with suppress(TypeError, ValueError):
        return float(option(arguments, "--grace") or "")
    return None


class _Stop:
    """Ends mpirun after a signal, and when it outlives a rank that failed.

    mpirun ends by itself after a failure, unless it cannot reach another machine.

    Attributes:
        why: Why it had to be ended, if a rank failed; else empty.
        stopped: The ranks that were seen stopped before all had started.
    """

    def __init__(self, signals: "_Signals", grace: float | None) -> None:
        self.why = ""
        self.stopped: set[int] = set()
        self._signals, self._grace = signals, grace
        self._asked: float | None = None
        self._failed_since: float | None = None
        self._terminated: float | None = None

    def look(self, process: "subprocess.Popen[bytes]", marks: Marks) -> None:
        """Sends mpirun SIGTERM if it should end, and SIGKILL if that does not end it in time."""
        now = time.monotonic()
        if not marks.joined:
            self.stopped.update(marks.stopped())
        if self._terminated is not None:
            if now - self._terminated > _GRACE_S:
                process.kill()
            return
        if self._signals.seen is not None:
            if self._grace is None or self._signals.count > 1:
                self._terminate(process, now)
            elif self._asked is None:
                # mpirun passes it on. At SIGTERM it would leave its ranks half a second.
                self._asked = now
                process.send_signal(signal.SIGUSR2)
            elif now - self._asked > self._grace + _GRACE_S:
                self._terminate(process, now)
            return
        failed = marks.failed()
        if not failed:
            self._failed_since = None
        elif self._failed_since is None:
            self._failed_since = now
        elif now - self._failed_since > _GRACE_S:
            self.why = f"{numbered_ranks(failed)} failed, and mpirun did not end"
            self._terminate(process, now)

    def _terminate(self, process: "subprocess.Popen[bytes]", now: float) -> None:
        self._terminated = now
        process.terminate()


class _Signals:
    """The first signal that this process got, and the number of all."""

    def __init__(self) -> None:
        self.seen: int | None = None
        self.count = 0

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Keeps the first signal."""
        del frame
        self.count += 1
        if self.seen is None:
            self.seen = number


@contextmanager
def _handed_on() -> Iterator[_Signals]:
    """Keeps signals within the block, instead of handling them as before."""
    signals = _Signals()
    previous = {n: signal.getsignal(n) for n in _SIGNALS}
    for number, handler in previous.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, signals.receive)
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# -- processes that lost their parent -------------------------------------------------------------


def _prctl(name: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(name, value, 0, 0, 0)


def _end_with_parent() -> None:
    """Runs in mpirun's process before mpirun: SIGTERM, if this process dies, ends the ranks."""
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _adopt_orphans() -> None:
    """Makes ranks whose mpirun died children of this process."""
    _prctl(_SET_CHILD_SUBREAPER, 1)


def _end_orphans(known: set[int]) -> None:
    """Ends and collects ranks that mpirun left behind because it was killed.

    Args:
        known: Processes that were already children of this one; they are not ranks.
    """
    for sent in (None, signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + (1.0 if sent is None else _GRACE_S)
        for child in set(_children()) - known:
            if sent is not None:
                with suppress(ProcessLookupError):
                    os.kill(child, sent)
        while left := set(_children()) - known:
            for child in left:
                with suppress(ChildProcessError):
                    os.waitpid(child, os.WNOHANG)
            if time.monotonic() > until:
                break
            time.sleep(_POLL_S)


def _children() -> list[int]:
    """Returns the children of this process (on Linux; elsewhere none)."""
    own = os.getpid()
    found = []
    for task in Path(f"/proc/{own}/task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def _report(text: str) -> None:
    sys.stderr.write(f"onnxpar: launch: {text}\n")
    sys.stderr.flush()
