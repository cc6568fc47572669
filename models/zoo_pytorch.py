"""Computes the outputs and training losses of a zoo network in PyTorch."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from _zoo import Network
from torch import nn

Arrays = dict[str, npt.NDArray[Any]]

DECAY = 1e-2
"""Weight decay of tensors with more than one dim."""

EPSILON = 1e-5
"""AdamW's. Its first step is lr g / (abs(g) + epsilon). With PyTorch's 1e-8, a gradient of rounding
noise, about 1e-7, gives a full step: in CLIP, one weight of 6144 then went the other way,
and the third loss was off by 1.6e-4. With this epsilon it gives a hundredth of a step."""

LABELS = "labels"


@dataclass(frozen=True)
class Trained:
    """The results of training.

    Attributes:
        losses: The loss of each step.
        statistics: Running statistics after the last step, by name.
        parameters: For each parameter with a gradient, the number of its elements and whether it
            has weight decay.
    """

    losses: Sequence[float]
    statistics: Mapping[str, npt.NDArray[Any]]
    parameters: Mapping[str, tuple[int, bool]]

    @property
    def elements(self) -> int:
        """Number of elements of all parameters."""
        return sum(count for count, _ in self.parameters.values())

    @property
    def decayed(self) -> int:
        """Number of elements with weight decay."""
        return sum(count for count, decays in self.parameters.values() if decays)


def random_inputs(made: Network, symbols: Mapping[str, int], rng: np.random.Generator) -> Arrays:
    """Returns inputs of these sizes: integers in their range, and normally distributed numbers."""
    feeds: Arrays = {}
    for name, traced in made.inputs.items():
        dims = made.dims.get(name, {})
        shape = [symbols[dims[i]] if i in dims else n for i, n in enumerate(traced.shape)]
        if traced.dtype == torch.int64:
            feeds[name] = rng.integers(*made.integers[name], shape)
        else:
            feeds[name] = rng.standard_normal(shape).astype(np.float32)
    return feeds


def random_batch(made: Network, symbols: Mapping[str, int], rng: np.random.Generator) -> Arrays:
    """Returns inputs, and labels if the loss needs them."""
    feeds = random_inputs(made, symbols, rng)
    if not made.loss.startswith("output:"):
        logits = outputs(made, feeds)[0]
        feeds[LABELS] = rng.integers(0, made.labels, logits.shape[:-1])
    return feeds


def outputs(made: Network, feeds: Mapping[str, Any]) -> list[npt.NDArray[Any]]:
    """Returns the outputs that the network names, as the module computes them."""
    with torch.no_grad():
        found = made.module(**{name: torch.tensor(array) for name, array in feeds.items()})
    return [tensor.numpy() for tensor in _named(found, made.outputs or ())]


def train(
    made: Network, batches: Sequence[Arrays], rate: float, dtype: torch.dtype = torch.float32
) -> Trained:
    """Trains a copy of the module with AdamW in this type, in training mode."""
    module = copy.deepcopy(made.module).to(dtype).train()
    norms = {n: m for n, m in module.named_modules() if isinstance(m, nn.BatchNorm2d)}
    used = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in used if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in used if p.ndim <= 1], "weight_decay": 0.0},
        ],
        rate,
        eps=EPSILON,
    )
    losses = []
    for batch in batches:
        tensors = dict(_tensors(batch, dtype))
        labels = tensors.pop(LABELS, None)
        optimizer.zero_grad()
        loss = _loss(made, module(**tensors), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    statistics = {
        f"{name}.{kind}": getattr(norm, kind).numpy()
        for name, norm in norms.items()
        for kind in ("running_mean", "running_var")
    }
    reached = {n: p for n, p in module.named_parameters() if p.grad is not None}
    return Trained(
        losses, statistics, {name: (p.numel(), p.ndim > 1) for name, p in reached.items()}
    )


def _tensors(batch: Arrays, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, array in batch.items():
        tensor = torch.tensor(array)
        yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def _loss(made: Network, found: Any, labels: torch.Tensor | None) -> torch.Tensor:
    first = _named(found, made.outputs or ())[0]
    if labels is None:
        return first
    return nn.functional.cross_entropy(first.flatten(0, -2), labels.flatten())


def _named(found: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """Returns the outputs with these names; a module that returns a tensor has only one."""
    return [found] if isinstance(found, torch.Tensor) else [found[name] for name in names]
