"""`onnxpar.optimizer_state_dict`: moments for `load_state_dict` of PyTorch's Adam or AdamW."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from onnxpar.api import runtime
from onnxpar.api.pytorch.state_dict import read_states
from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar_format.manifest import StateKind

MOMENTS = {StateKind.MOMENT1: "exp_avg", StateKind.MOMENT2: "exp_avg_sq"}
"""PyTorch's names."""


def optimizer_state_dict(
    trained: str | Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> dict[str, Any]:
    """Returns an optimizer's `state_dict()` with the moments and the step of a checkpoint.

    `optimizer.load_state_dict(onnxpar.optimizer_state_dict("checkpoints", module, optimizer))` lets
    PyTorch continue. The settings are those of `optimizer`, such as its learning rate.

    Args:
        trained: A checkpoint, or a folder whose last complete checkpoint is used.
        module: The module that `onnxpar.from_torch` exported, or an equal one.
        optimizer: Adam or AdamW over parameters of `module`. It is not changed.

    Raises:
        ModelError: The optimizer is another than the one that trained, or does not have all
            parameters that were trained, in their shapes.
        OnnxparRuntimeError: The folder has no complete checkpoint, or a damaged one.
    """
    checkpoint = runtime.Checkpoint.last(trained)
    check_kind(optimizer, checkpoint.optimizer, str(trained))
    folder = checkpoint.directory
    moments = {name: read_states(folder, kind) for kind, name in MOMENTS.items()}
    left, state = set(moments["exp_avg"]), {}
    for number, (name, parameter) in enumerate(parameters_of(module, optimizer)):
        if name not in left:
            continue
        left.remove(name)
        own = {key: arrays[name] for key, arrays in moments.items()}
        if own["exp_avg"].shape != parameter.shape:
            raise ModelError(
                f"{name}: expected the module's shape {tuple(parameter.shape)}, got "
                f"{tuple(own['exp_avg'].shape)} in {trained}"
            )
        state[number] = {"step": torch.tensor(float(checkpoint.progress.updates)), **own}
    if left:
        first, names = min(left), [name for name, _ in parameters_of(module, optimizer)]
        raise ModelError(
            f"{type(optimizer).__name__}: expected all parameters that were trained, got none for "
            f"{first!r}{nearest(first, names)}"
        )
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def check_kind(optimizer: torch.optim.Optimizer, kind: str, where: str) -> None:
    """Raises ModelError unless PyTorch's optimizer is of the kind, in its plain form."""
    got = type(optimizer).__name__
    if kind not in ("adam", "adamw") or got.lower() != kind:
        raise ModelError(
            f"{where} has the optimizer {kind}: expected Adam or AdamW in both, got {got}"
        )
    for option in ("amsgrad", "maximize"):
        if any(group[option] for group in optimizer.param_groups):
            raise ModelError(f"{got}: expected {option}=False, got True")


def parameters_of(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and parameters of an optimizer, in the order of its groups."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise ModelError(
                    f"{type(optimizer).__name__}: expected parameters of {type(module).__name__}, "
                    f"got another one of shape {tuple(parameter.shape)}"
                )
            yield names[id(parameter)], parameter
