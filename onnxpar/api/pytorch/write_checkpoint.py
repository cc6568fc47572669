"""`onnxpar.write_checkpoint`: a run begins with what PyTorch has trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import torch

from onnxpar.api import runtime
from onnxpar.api.pytorch.export_module import first_names
from onnxpar.api.pytorch.optimizer_state import MOMENTS, check_kind, parameters_of
from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar_format.checkpoint import Progress
from onnxpar_format.manifest import StateKind

if TYPE_CHECKING:
    from onnxpar.api.runtime import Made

_SETTINGS = ("lr", "betas", "eps", "weight_decay")
_MOST_STEPS = 1 << 24
"""PyTorch counts steps in float32, which has all whole numbers up to this."""


def write_checkpoint(
    target: str | Path,
    directory: str | Path,
    module: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
) -> "Made":
    """Writes a checkpoint with the parameters of a module and the moments of its optimizer.

    `onnxpar train DIR --resume TARGET` begins a run with them. The run begins at its step 1; the
    optimizer goes on from the step that it had reached in PyTorch.

    Args:
        target: The checkpoint to write, which must not exist.
        directory: Output of `onnxpar shard --train` for the model that `onnxpar.from_torch`
            exported of the module.
        module: The module.
        optimizer: Adam or AdamW over parameters of `module`. Without one, moments are zero.

    Raises:
        ModelError: The module lacks a parameter that the directory trains, or a tensor that is not
            trained differs from the directory's; or the optimizer is another than the directory's,
            or its parameters have done different numbers of steps; or a parameter or moment is not
            finite.
        DirectoryError: The directory cannot be read, or is not for training.
        CheckpointError: A tensor has another shape or type, or the checkpoint cannot be written.
    """
    manifest = runtime.Manifest.load(directory)
    own, first = module.state_dict(), first_names(module)
    weights = {first[name]: tensor for name, tensor in own.items()}
    trained = manifest.trained()
    states: dict[str, dict[str, Any]] = {}
    if optimizer is not None:
        check_kind(optimizer, trained.optimizer, str(directory))
        states = _states(module, optimizer)
    wanted = runtime.kept_tensors(manifest)
    arrays, steps = {}, {}
    for name, tensor in wanted.items():
        parameter = tensor.parameter
        if parameter not in weights:
            raise ModelError(
                f"{type(module).__name__}: expected the {tensor.kind} {parameter!r} of "
                f"{directory}, got none{nearest(parameter, list(weights))}"
            )
        value = weights[parameter]
        if tensor.kind in MOMENTS:
            state = states.get(parameter, {"step": 0})
            steps[parameter] = int(state["step"])
            value = state.get(MOMENTS[StateKind(tensor.kind)], torch.zeros_like(value))
        arrays[name] = _array(parameter, value)
        if not bool(value.isfinite().all()):
            raise ModelError(
                f"{tensor.kind} {parameter!r}: expected finite numbers, got NaN or Inf"
            )
        if tensor.kind == StateKind.MOMENT2 and bool((value < 0).any()):
            raise ModelError(f"{tensor.kind} {parameter!r}: expected no number below 0")
    if len(set(steps.values())) > 1:
        low, high = min(steps, key=steps.__getitem__), max(steps, key=steps.__getitem__)
        raise ModelError(
            f"{type(optimizer).__name__}: expected the same number of steps for all parameters, "
            f"got {steps[low]} for {low!r} and {steps[high]} for {high!r}"
        )
    for name in weights.keys() - {tensor.parameter for tensor in wanted.values()}:
        runtime.check_weight(manifest, name, _array(name, weights[name]))
    progress = Progress(earlier=max(steps.values(), default=0))
    return runtime.write_whole(manifest, Path(target), arrays, progress, _settings(optimizer))


def _states(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """Returns the state of each parameter by name; those without a state are left out."""
    names = dict(enumerate(name for name, _ in parameters_of(module, optimizer)))
    states = {}
    for number, state in optimizer.state_dict()["state"].items():
        keys = ("step", *MOMENTS.values())
        tensors = [isinstance(state.get(key), torch.Tensor) for key in keys]
        if number not in names or not all(tensors) or state["step"].numel() != 1:
            raise ModelError(
                f"{type(optimizer).__name__}: state {number}: expected a parameter's tensors "
                f"{', '.join(keys)}, and one step, got {', '.join(map(str, state))}"
            )
        step = float(state["step"])
        if not step.is_integer() or not 0 <= step <= _MOST_STEPS:
            raise ModelError(
                f"{type(optimizer).__name__}: state {number}: expected a whole number of steps "
                f"from 0 to {_MOST_STEPS}, got {step:g}"
            )
        states[names[number]] = state
    return states


def _array(name: str, tensor: torch.Tensor) -> Any:
    """Returns a tensor as an array of the same type."""
    if hasattr(tensor, "full_tensor"):
        raise ModelError(
            f"{name}: expected a complete tensor, got a {type(tensor).__name__}; save module and "
            "optimizer with torch.distributed.checkpoint, and read that folder with `onnxpar "
            "checkpoint import`"
        )
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _settings(optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Returns the settings that a run is compared with: those that are equal in all groups.

    Groups without weight decay are those that `shard` makes, too.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    found = {}
    for key in _SETTINGS:
        values = {group[key] for group in groups} - ({0.0} if key == "weight_decay" else set())
        if len(values) == 1:
            (value,) = values
            found[key] = list(value) if isinstance(value, tuple) else value
    return found
