"""The cores of this machine."""

import os
from pathlib import Path

_CPUS, _SIBLINGS = Path("/sys/devices/system/cpu"), "topology/thread_siblings_list"


def cores() -> int:
    """Returns the number of cores that this process may use; hardware threads of one count once."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
    try:
        return len({(_CPUS / f"cpu{cpu}" / _SIBLINGS).read_text() for cpu in allowed})
    except OSError:
        return len(allowed)
