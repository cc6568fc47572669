"""Limits for a block of code: time, memory, where it writes, what it may do at all."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

SECONDS, WALL_SECONDS, BYTES = 10, 60, 2 << 30


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


def address_space() -> int:
    """Bytes that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def escape() -> str | None:
    """The first thing that the last guarded block did and must not do, also if it was caught."""
    return _escaped[0] if _escaped else None


@contextmanager
def guarded(folder: Path) -> Iterator[None]:
    """Applies the limits to the block, which may write to the folder alone."""
    global _guarded, _thread
    _listen()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    previous = [(n, signal.signal(n, _hang)) for n in (signal.SIGALRM, signal.SIGPROF)]
    _escaped.clear()
    _guarded, _thread = folder.resolve(), threading.get_ident()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + BYTES, hard))
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
