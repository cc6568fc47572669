"""How far the clocks of ranks are apart, measured by messages to and fro.

Processes of one Linux machine have one monotonic clock. A rank on another machine than rank 0
answers messages of rank 0 with its time. Of several, the one with the shortest round trip counts:
the answer's time is that of the middle, give or take half of the round trip (Cristian,
"Probabilistic clock synchronization", 1989).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onnxpar_runtime.collectives import Rank

_ROUNDS = 32
_TAG = 0x5054
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Offset:
    """How far a rank's clock is ahead of that of rank 0.

    Attributes:
        at: The time on the clock of rank 0 when it was measured, in nanoseconds.
        ahead: Nanoseconds.
        uncertainty: Half of the round trip, in nanoseconds; 0 if both have one clock.
    """

    at: int
    ahead: int = 0
    uncertainty: int = 0


def boot_id() -> int:
    """Returns a number that differs from machine to machine, and changes when one restarts."""
    try:
        return int(_BOOT.read_text().replace("-", "")[:15], 16)
    except (OSError, ValueError):
        return -1


def clock_offsets(
    rank: Rank, now: Callable[[], int] = time.monotonic_ns, machine: int | None = None
) -> list[Offset]:
    """Returns on rank 0 the offsets of all ranks; elsewhere nothing. Every rank must call it.

    Args:
        rank: This rank.
        now: Its clock, in nanoseconds.
        machine: The number of its machine; ranks with equal ones have one clock.

    Raises:
        RankError: A rank failed.
    """
    own = boot_id() if machine is None else machine
    machines = np.zeros(rank.world.size, np.int64)
    machines[rank.index] = own
    machines = rank.all_reduce(machines)
    found = [Offset(now())]
    for other in range(1, rank.world.size):
        if machines[other] == machines[0] and machines[0] != -1:
            found.append(Offset(now()))
        elif rank.index == 0:
            found.append(_ask(rank, other, now))
        elif rank.index == other:
            _answer(rank, now)
    return found if rank.index == 0 else []


def _ask(rank: Rank, other: int, now: Callable[[], int]) -> Offset:
    answer = np.zeros(1, np.int64)
    best: Offset | None = None
    for _ in range(_ROUNDS):
        begin = now()
        rank.send(np.array([begin], np.int64), other, _TAG, "the request for the time")
        rank.recv(answer, other, _TAG, "the time")
        end = now()
        half = (end - begin) // 2
        if best is None or half < best.uncertainty:
            best = Offset(begin + half, int(answer[0]) - (begin + half), half)
    assert best is not None
    return best


def _answer(rank: Rank, now: Callable[[], int]) -> None:
    question = np.zeros(1, np.int64)
    for _ in range(_ROUNDS):
        rank.recv(question, 0, _TAG, "the request for the time")
        rank.send(np.array([now()], np.int64), 0, _TAG, "the time")
