"""How long ranks wait for one another (`ONNXPAR_TIMEOUT`)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from onnxpar_format.place import find_place
from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.library import load_library

DEFAULT_TIMEOUT_S = 60.0
LEAST_START_S = 10.0
"""Ranks wait at least this long for one another to start: MPI takes seconds on a busy machine."""


@contextmanager
def limited_start() -> Iterator[None]:
    """Ends the process, with a message, if the block takes longer than ranks wait to start.

    Raises:
        LaunchError: As `timeout`.
    """
    seconds, place = timeout(), find_place()
    if not seconds or place is None:
        yield
        return
    seconds = max(seconds, LEAST_START_S)
    text = (
        f"r{place.rank} | waited {seconds:g} s for all {place.size} ranks to start; a rank or its "
        "machine hangs, or the limit ONNXPAR_TIMEOUT is too short\n"
    )
    limit = load_library().onnxpar_begin_limit(seconds, text.encode())
    try:
        yield
    finally:
        load_library().onnxpar_end_limit(limit)


def timeout() -> float:
    """Returns for how many seconds a call waits for other ranks; 0 means without a limit.

    Raises:
        LaunchError: `ONNXPAR_TIMEOUT` is not a number.
    """
    text = os.environ.get("ONNXPAR_TIMEOUT") or str(DEFAULT_TIMEOUT_S)
    try:
        return max(float(text), 0.0)
    except ValueError:
        raise LaunchError(f"ONNXPAR_TIMEOUT: expected seconds, got {text!r}") from None
