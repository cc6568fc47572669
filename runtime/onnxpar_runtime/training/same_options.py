"""Ranks compare the options of a training: different ones would train replicas apart."""

import hashlib
from dataclasses import fields

import numpy as np

from onnxpar_format.options import TrainingRun
from onnxpar_runtime.agree import Reducer
from onnxpar_runtime.errors import LaunchError

_OF_ONE_RANK = (
    *("data", "eval_data", "parameters", "resume"),  # paths, which machines may name differently
    *("log", "save", "tensorboard", "print_every"),  # of rank 0 only
)


def check_same_options(rank: Reducer, wanted: TrainingRun) -> None:
    """Compares options in one small reduction. Every rank must call it.

    Raises:
        LaunchError: An option differs between ranks; all raise it.
    """
    if rank.world.size == 1:
        return
    names = [one.name for one in fields(wanted) if one.name not in _OF_ONE_RANK]
    numbers = np.array([_number(getattr(wanted, name)) for name in names], np.int64)
    highest = rank.all_reduce(np.concatenate([numbers, -numbers]), op="max")
    for name, high, low in zip(names, highest[: len(names)], -highest[len(names) :], strict=True):
        if high != low:
            raise LaunchError(
                f"--{name.replace('_', '-')}: expected the same value on all ranks, got "
                f"{getattr(wanted, name)!r} on rank {rank.index}"
            ).as_agreed()


def _number(value: object) -> int:
    """Returns 56 bits of a hash of a value."""
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
