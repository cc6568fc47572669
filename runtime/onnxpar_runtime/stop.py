"""A request to end a training in order: signals ask for it, and ranks find it between steps."""

import signal
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from onnxpar_runtime.collectives import Rank

_TWICE_S = 0.25


class Stop:
    """A request to stop after the current step, and the time that it leaves.

    Args:
        grace: Seconds between the request and the end of the process.

    Attributes:
        asked: The first signal that asked this rank to stop; None if there was none.
    """

    def __init__(self, grace: float) -> None:
        """Nobody has asked yet."""
        self._grace = grace
        self.asked: signal.Signals | None = None
        self._since = 0.0
        self._timer: threading.Timer | None = None

    def ask(self, number: signal.Signals, end: Callable[[], None]) -> None:
        """Asks this rank to stop; `end` ends the process when the time is over.

        It does so at once at a second request, unless that follows within a quarter of a second:
        a signal for a group of processes may come twice. It may be called in any thread.
        """
        now = time.monotonic()
        if self.asked is not None:
            if now - self._since < _TWICE_S:
                return
            sys.stderr.write(
                f"onnxpar: error: {number.name} again: no last checkpoint is written\n"
            )
            sys.stderr.flush()
            end()
            return
        self.asked, self._since = number, now

        def late() -> None:
            sys.stderr.write(
                f"onnxpar: error: {number.name}: the last checkpoint was not complete after "
                f"--grace {self._grace:g} s\n"
            )
            sys.stderr.flush()
            end()

        self._timer = threading.Timer(self._grace, late)
        self._timer.daemon = True
        self._timer.start()

    def close(self) -> None:
        """Cancels the end of the process, which may go on when the training has stopped."""
        if self._timer is not None:
            self._timer.cancel()

    def agreed(self, rank: Rank) -> signal.Signals | None:
        """Returns the signal that asked any rank to stop, if any. Every rank must call it."""
        mine = np.array([self.asked or 0], np.int64)
        asked = int(rank.all_reduce(mine, op="max")[0]) if rank.world.size > 1 else int(mine[0])
        return signal.Signals(asked) if asked else None
