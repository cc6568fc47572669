"""A check for debugging: replicas of a state's shard are equal, bit for bit.

Replicas compute the same updates, or get them from one all-gather, so parameters, moments and
running statistics never differ. If they did (because a collective rounds differently on different
ranks, or because memory or a link is broken), training would continue with several models.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.manifest import TRANSIENT
from onnxpar_format.texts import numbered_ranks
from onnxpar_runtime.errors import LaunchError, ReplicaError
from onnxpar_runtime.training.step_trainer import StepTrainer

SAMPLE = 16
"""States that one check compares; the next check takes the next ones."""
SHOWN = 8
"""Ranks of a group that a message names."""


class ReplicaCheck:
    """Compares some states over the ranks from time to time.

    Args:
        trainer: This rank's trainer.
        every: Number of steps from one check to the next.
        sample: Number of states that one check compares.

    Raises:
        LaunchError: `every` is not positive.
    """

    def __init__(self, trainer: StepTrainer, every: int, sample: int = SAMPLE) -> None:
        """Has checked nothing yet."""
        if every < 1:
            raise LaunchError(f"--check-replicas: expected a number >= 1, got {every}")
        self._trainer, self._every = trainer, every
        states = trainer.training.states
        self._names = [n for n in sorted(states) if states[n].kind not in TRANSIENT]
        self._sample = min(sample, len(self._names))
        self._next = 0

    def after(self, step: int) -> None:
        """Checks the next states if it is time. Every rank must call it after each step.

        Args:
            step: Number of steps that are done.

        Raises:
            ReplicaError: Replicas differ; raised by all ranks.
        """
        if step % self._every:
            return
        count = len(self._names)
        chosen = [self._names[(self._next + i) % count] for i in range(self._sample)]
        self._next = (self._next + self._sample) % max(count, 1)
        check_replicas(self._trainer, chosen, f"step {step}")


def check_replicas(trainer: StepTrainer, names: Sequence[str], where: str) -> None:
    """Compares states over the ranks, bit for bit. Every rank must call it.

    Args:
        trainer: This rank's trainer.
        names: The states, the same on all ranks; not gradients, which may be partial.
        where: The step, for the message.

    Raises:
        ReplicaError: Replicas differ, with the state and the ranks; raised by all ranks.
    """
    rank = trainer.rank
    size: int = rank.world.size
    # Every rank fills a column, so that a sum brings all columns to all ranks.
    digests = np.zeros((len(names), size), np.int64)
    held = np.zeros((len(names), size), np.int64)
    for row, name in enumerate(names):
        if trainer.holds(name):
            digests[row, rank.index] = _digest(trainer.state(name))
            held[row, rank.index] = 1
    digests, held = rank.all_reduce(digests), rank.all_reduce(held)
    for name, found, holding in zip(names, digests, held, strict=True):
        holders: dict[Any, dict[int, list[int]]] = {}
        sharding = trainer.sharding(name)
        for other in map(int, np.flatnonzero(holding)):
            same = holders.setdefault(tuple(sharding.blocks(other)), {})
            same.setdefault(int(found[other]), []).append(other)
        for contents in holders.values():
            if len(contents) > 1:
                kind = trainer.training.states[name].kind
                raise ReplicaError(f"{where}: {kind} {name!r}: {_difference(contents)}").as_agreed()


def _difference(contents: Mapping[int, Sequence[int]]) -> str:
    groups = []
    for ranks in contents.values():
        more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
        groups.append(f"{numbered_ranks(ranks[:SHOWN])}{more}")
    return f"expected replicas that are equal bit for bit, but {' and '.join(groups)} differ"


def _digest(part: NDArray[Any]) -> int:
    """Returns a 64-bit hash of an array's bytes."""
    number = blake2b(np.ascontiguousarray(part).tobytes(), digest_size=8).digest()
    return int.from_bytes(number, "little", signed=True)
