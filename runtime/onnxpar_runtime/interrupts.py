"""An interrupt of mpirun, as its ranks see it.

Ctrl-C goes to mpirun, which sends its ranks SIGTERM, forwards no more of what they print, and says
nothing itself. So the first rank tells it, straight to where mpirun writes its errors. It has to do
so while the main thread computes or waits in a collective, where Python gets no turn to run a
signal's handler.

mpirun ends the ranks in the same way when one of them has failed, which is already reported. So a
rank that fails sends the first a word before. One that dies without a word cannot be told from an
interrupt here; the message says both, and mpirun names the rank.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np

from onnxpar_runtime.collectives import Rank

MESSAGE = "onnxpar: error: stopped by mpirun (interrupted, or another rank died)\n"
_CLEAN = "\r\x1b[2K\x1b[?25h"
"""Clears the line and shows the cursor, which a progress bar may have hidden."""


@contextmanager
def told_when_terminated(rank: Rank) -> Iterator[None]:
    """Ends the process at SIGTERM within the block, after the first of the ranks has told it.

    Every rank of the world must enter it. It does nothing but under Open MPI on one Linux machine,
    and nothing outside the main thread, where no signal's handler can be installed.
    """
    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    main = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or rank.world.size == 1 or local != str(rank.world.size) or not main:
        yield
        return
    own = os.getpid() if rank.index == 0 else 0
    # A name without a file, which ends with its owner.
    address = f"\0onnxpar-{int(rank.all_reduce(np.array([own], np.int64))[0])}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as words:
        words.setblocking(False)
        if rank.index == 0:
            words.bind(address)
        try:
            with _errors_of_mpirun() as errors, _ended_by_sigterm(rank.index, words, errors):
                yield
        except BaseException:
            if rank.index != 0:
                with suppress(OSError):
                    words.sendto(b"failed", address)
            raise


@contextmanager
def _errors_of_mpirun() -> Iterator[int | None]:
    """Gives a descriptor of where mpirun, the parent, writes its errors; None if it is closed."""
    try:
        # Appended, since it may be a file. Opened now, since mpirun does not wait for its ranks.
        errors = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    except OSError:
        yield None
        return
    try:
        yield errors
    finally:
        os.close(errors)


@contextmanager
def _ended_by_sigterm(rank: int, words: socket.socket, errors: int | None) -> Iterator[None]:
    """Ends the process at SIGTERM; the first rank tells it unless it has words of a failure."""
    read, write = os.pipe()
    os.set_blocking(write, False)

    def watch() -> None:
        while number := os.read(read, 1):
            if number[0] == signal.SIGTERM:
                if rank == 0 and errors is not None:
                    _tell(words, errors)
                os._exit(128 + signal.SIGTERM)

    watcher = threading.Thread(target=watch, daemon=True)
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
        os.close(read)


def _tell(words: socket.socket, errors: int) -> None:
    try:
        words.recv(16)
    except BlockingIOError:
        with suppress(OSError):
            os.write(errors, ((_CLEAN if os.isatty(errors) else "") + MESSAGE).encode())
