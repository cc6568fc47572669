"""Ranks compare what must be the same on all of them, and is made on each of them separately."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxpar_format.options import TrainingRun
from onnxpar_runtime.agree import Reducer
from onnxpar_runtime.errors import InputError, LaunchError

_OF_RANK_0 = ("log", "save", "tensorboard", "print_every")
_PATHS = ("data", "eval_data", "parameters", "resume")
"""Machines may name them differently; only whether they are given is compared."""
_LOOKED_AT = 1024
"""Elements of an array that are compared, evenly spaced, so that it takes microseconds."""


def check_same_options(rank: Reducer, wanted: TrainingRun) -> None:
    """Compares the options of a training in one small reduction. Every rank must call it.

    Raises:
        LaunchError: An option differs between ranks; all raise it.
    """
    names = [one.name for one in fields(wanted) if one.name not in _OF_RANK_0]
    values = [getattr(wanted, name) for name in names]
    texts = [
        str(value is None) if name in _PATHS else repr(value)
        for name, value in zip(names, values, strict=True)
    ]
    for index in _different(rank, [_number(text.encode()) for text in texts]):
        name, value = names[index], values[index]
        raise LaunchError(
            f"--{name.replace('_', '-')}: expected the same value on all ranks, got {value!r} on "
            f"rank {rank.index}, and another one elsewhere"
        ).as_agreed()


def check_same_batch(rank: Reducer, digest: int, where: str) -> None:
    """Compares a batch that each rank has made separately. Every rank must call it.

    Args:
        rank: This rank.
        digest: What `digest_of` returns for the batch.
        where: Which batch it is, for the message.

    Raises:
        InputError: Batches differ between ranks; all raise it.
    """
    if _different(rank, [digest]):
        raise InputError(
            f"{where}: expected the same batch on all ranks, got different ones; a loader that "
            "shuffles needs the same seed on all ranks, as in RandomSampler(data, "
            "generator=torch.Generator().manual_seed(0))"
        ).as_agreed()


def digest_of(parts_of_batch: Sequence[Mapping[str, NDArray[Any]]], names: Sequence[str]) -> int:
    """Returns a number that differs, almost certainly, between batches with different samples.

    Args:
        parts_of_batch: The batch: one dict, or one for each data rank.
        names: The arrays that are compared, where there are such.
    """
    parts = []
    for arrays in parts_of_batch:
        for name in filter(arrays.__contains__, names):
            array = np.asarray(arrays[name])
            some = array.flat[:: -(-array.size // _LOOKED_AT) or 1]
            parts += [f"{name} {array.dtype} {array.shape}".encode(), some.tobytes()]
    return _number(b"".join(parts))


def _different(rank: Reducer, numbers: list[int]) -> list[int]:
    """Returns the places at which ranks have different numbers, by one reduction."""
    if rank.world.size == 1:
        return []
    own = np.array(numbers, np.int64)
    most = rank.all_reduce(np.concatenate([own, -own]), op="max")
    return np.flatnonzero(most[: len(own)] != -most[len(own) :]).tolist()


def _number(content: bytes) -> int:
    """Returns 56 bits of a hash."""
    return int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
