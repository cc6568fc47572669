"""What the networks of `zoo.py` have in common: their sizes, and their training data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from onnxpar.api.pytorch.export_module import Example

VOCAB = 96
WIDTH = 32
CLASSES = 10
BATCH = 3
SEQ = 7

Traced = tuple[dict[str, torch.Tensor], dict[str, dict[int, str]]]
"""Inputs to trace a module with, and their open dims."""


@dataclass(frozen=True)
class Network(Example):
    """An example with what is needed to run and train it on random numbers.

    Attributes:
        loss: The value of `shard --train --loss`.
        labels: Labels of softmax cross-entropy are below this.
        integers: Range of each integer input: the least value, and one more than the greatest.
        perturbed: Whether random numbers are added to parameters with at most one dim, which begin
            equal in many layers.
    """

    loss: str = "softmax_cross_entropy"
    labels: int = CLASSES
    integers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    perturbed: bool = True


FIRST_TOKEN = 3
"""Tokens before this are special, such as padding."""

TOKENS = (FIRST_TOKEN, VOCAB)


def ids() -> dict[str, int]:
    """Special tokens within the small vocabulary."""
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def tokens(*names: str, seq: int = SEQ, fixed: bool = False) -> Traced:
    """Inputs of token ids, and their open dims; `seq` is not one of them if it is fixed."""
    dims = {0: "batch"} if fixed else {0: "batch", 1: "seq"}
    inputs = {name: torch.zeros((BATCH, seq), dtype=torch.int64) for name in names}
    return inputs, {name: dims for name in names}


def images(size: int, channels: int = 3) -> Traced:
    """One input of square images."""
    traced = torch.zeros(BATCH, channels, size, size)
    return {"pixel_values": traced}, {"pixel_values": {0: "batch"}}


def language(module: nn.Module, *, seq: int = SEQ, fixed: bool = False) -> Network:
    """A model whose only input is token ids."""
    inputs, dims = tokens("input_ids", seq=seq, fixed=fixed)
    return Network(module, inputs, dims, integers={"input_ids": TOKENS})


def vision(module: nn.Module, size: int, **options: Any) -> Network:
    """A model whose only input is square images."""
    return Network(module, *images(size), **options)
