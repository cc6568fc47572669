"""What ranks do at signals: they report an interrupt of mpirun, write their last calls, or stop.

Ctrl-C goes to mpirun, which sends its ranks SIGTERM, stops forwarding their output, and prints
nothing itself. So rank 0 writes the message directly to mpirun's stderr. It must do so while the
main thread computes or waits in a collective, where Python does not run signal handlers.

mpirun also ends the ranks with SIGTERM when one of them has failed, which is already reported. So a
rank that fails sends rank 0 a message before it ends. A rank that dies without this message looks
like an interrupt; the report names both causes, and mpirun names the rank.

A training with a grace time stops in order where there is time for it. Open MPI's mpirun leaves its
ranks half a second after SIGTERM, so there they are asked by SIGUSR2, which mpirun passes on.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from onnxpar_format.calls import ASKED, TERMINATED
from onnxpar_runtime.collectives import Rank
from onnxpar_runtime.errors import OnnxparRuntimeError, first_line
from onnxpar_runtime.stop import Stop
from onnxpar_runtime.temporary import remove_folders

MESSAGE = "onnxpar: error: stopped by mpirun (interrupted, or another rank died)\n"
_CLEAN = "\r\x1b[2K\x1b[?25h"
"""Clears the line and shows the cursor, which a progress bar may have hidden."""
_LINGER = 0.2
"""Seconds that a rank stays after SIGTERM, for the others to do what they have to.

Open MPI's mpirun kills them as soon as one has ended, or a quarter of a second after SIGTERM."""


@contextmanager
def reporting_termination(rank: Rank, stop: Stop | None = None) -> Iterator[None]:
    """Ends the process at SIGTERM within the block, after rank 0 has reported it.

    With `stop`, SIGUSR2 asks the rank to stop. Without Open MPI's mpirun so do SIGTERM and, for a
    single rank, Ctrl-C.

    At SIGTERM and at SIGUSR1 every rank writes its last calls (`Rank.calls_file`). Every rank of
    the world must enter it. It only has an effect on Linux, and in the main thread, because signal
    handlers cannot be installed in other threads. Rank 0 only reports under Open MPI on one
    machine.
    """
    main = threading.current_thread() is threading.main_thread()
    alone = rank.world.size == 1
    if sys.platform != "linux" or not main or (alone and stop is None):
        yield
        return

    def end(
        report: Callable[[], None] | None = None, number: signal.Signals = signal.SIGTERM
    ) -> None:
        if report is not None:
            report()
        rank.write_calls(TERMINATED)
        remove_folders()
        if not alone:
            time.sleep(_LINGER)
        os._exit(128 + number)

    def asking(*numbers: signal.Signals) -> dict[signal.Signals, Callable[[], None]]:
        if stop is None:
            return {}
        codes = {signal.SIGINT: signal.SIGINT}
        ends = {n: partial(end, None, codes.get(n, signal.SIGTERM)) for n in numbers}
        return {n: partial(stop.ask, n, ends[n]) for n in numbers}

    local = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if local != str(rank.world.size) or alone:
        at_once: dict[signal.Signals, Callable[[], None]] = {signal.SIGTERM: end}
        asks = asking(signal.SIGUSR2, *((signal.SIGTERM,) if local is None else ()))
        if alone:
            asks |= asking(signal.SIGINT)
        with writing_calls(rank, at_once | asks):
            yield
        return
    own = os.getpid() if rank.index == 0 else 0
    # An abstract socket, without a file; it ends with its owner.
    address = f"\0onnxpar-{int(rank.all_reduce(np.array([own], np.int64))[0])}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as words:
        words.setblocking(False)
        if rank.index == 0:
            words.bind(address)
        try:
            with _errors_of_mpirun() as errors:
                # Only rank 0 reports, if mpirun's stderr is open.
                report = None if rank.index or errors is None else partial(_report, words, errors)
                terminated = {signal.SIGTERM: partial(end, report)}
                with writing_calls(rank, terminated | asking(signal.SIGUSR2)):
                    yield
        except BaseException:
            if rank.index != 0:
                with suppress(OSError):
                    words.sendto(b"failed", address)
            raise


@contextmanager
def _errors_of_mpirun() -> Iterator[int | None]:
    """Yields a descriptor of the stderr of mpirun, the parent; None if it is closed."""
    try:
        # Append, because it may be a file. Open now, because mpirun does not wait for its ranks.
        errors = os.open(f"/proc/{os.getppid()}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    except OSError:
        yield None
        return
    try:
        yield errors
    finally:
        os.close(errors)


@contextmanager
def writing_calls(rank: Rank, at: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Writes the rank's last calls at SIGUSR1, and when the block raises an error of this rank.

    Args:
        rank: The rank.
        at: What other signals do. It is called in a thread of its own, also while the main thread
            computes or waits in a collective.

    Raises:
        ValueError: This is not the main thread.
    """
    with at_signals({**at, signal.SIGUSR1: lambda: rank.write_calls(ASKED)}):
        try:
            yield
        except BaseException as error:
            # From here on another rank's failure may end this one at once.
            if not (isinstance(error, OnnxparRuntimeError) and error.agreed):
                rank.write_calls(first_line(error))
            raise


@contextmanager
def leaving_no_folders() -> Iterator[None]:
    """Ends the process at SIGTERM and SIGHUP at once, but removes its temporary folders.

    It only has an effect in the main thread.
    """

    def end(number: int) -> None:
        remove_folders()
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN
    ]
    with at_signals({number: partial(end, number) for number in numbers}):
        yield


@contextmanager
def at_signals(actions: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Does something at signals, also while the main thread computes or waits in a collective.

    Args:
        actions: What the signals do. It is called in a thread of its own.

    Raises:
        ValueError: This is not the main thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    of_number = {int(number): action for number, action in actions.items()}

    def watch() -> None:
        while number := os.read(read, 1):
            # Signals with handlers of others are announced, too.
            if action := of_number.get(number[0]):
                action()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    # Python's C-level handler writes the signal's number to the pipe at once; the Python handler,
    # which runs in the main thread later, has nothing to do.
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in actions}
    wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(write)
        watcher.join()
        os.close(read)


def _report(words: socket.socket, errors: int) -> None:
    try:
        words.recv(16)
    except BlockingIOError:
        with suppress(OSError):
            os.write(errors, ((_CLEAN if os.isatty(errors) else "") + MESSAGE).encode())
