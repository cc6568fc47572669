"""An interrupt of mpirun, as its ranks see it.

Ctrl-C goes to mpirun, which sends its ranks SIGTERM, forwards no more of what they print, and says
nothing itself. So the first rank tells it, straight to where mpirun writes its errors. It has to be
done while the main thread computes or waits in a collective, where Python gets no turn to run a
signal's handler.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.launch import mpirun_place

MESSAGE = "onnxpar: error: interrupted\n"
_CLEAN = "\r\x1b[2K\x1b[?25h"
"""Clears the line and shows the cursor, which a progress bar may have hidden."""


@contextmanager
def told_when_terminated(rank: Rank) -> Iterator[None]:
    """Ends the process at SIGTERM within the block, after the first of several ranks has told it.

    Does nothing for a lone rank, or outside the main thread, where no handlers can be installed.
    """
    if rank.world.size == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    watcher = threading.Thread(target=_watch, args=(read, rank.index), daemon=True)
    watcher.start()
    # Python's own handler writes the signal's number to the pipe at once; what is run in the main
    # thread's next turn need not do anything.
    handler = signal.signal(signal.SIGTERM, lambda number, frame: None)
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        os.close(write)
        watcher.join()


def _watch(pipe: int, rank: int) -> None:
    """Ends the process when SIGTERM's number comes through the pipe, and itself when it closes."""
    while number := os.read(pipe, 1):
        if number[0] == signal.SIGTERM:
            if rank == 0:
                _tell()
            os._exit(128 + signal.SIGTERM)
    os.close(pipe)


def _tell() -> None:
    with suppress(OSError):
        if mpirun_place() is not None and sys.platform == "linux":
            # Appended, since it may be a file.
            with open(f"/proc/{os.getppid()}/fd/2", "a", encoding="utf-8") as errors:
                errors.write((_CLEAN if errors.isatty() else "") + MESSAGE)
            return
    with suppress(OSError):
        os.write(2, MESSAGE.encode())
