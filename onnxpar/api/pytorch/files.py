"""PyTorch's files of state dicts: `onnxpar checkpoint export --state-dict`, `checkpoint import`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onnxpar.api import runtime
from onnxpar.api.pytorch.optimizer_state import optimizer_state_dict
from onnxpar.api.pytorch.state_dict import state_dict
from onnxpar.api.pytorch.state_file import read_state_file
from onnxpar.api.pytorch.write_checkpoint import write_checkpoint
from onnxpar.core.errors import DirectoryError, ModelError
from onnxpar.core.name_patterns import SHOWN
from onnxpar_format.new_file import check_file, new_file

if TYPE_CHECKING:
    from onnxpar.api.runtime import Made

_MODULE = "--module {}"
_FORMS = "module:function, a function that returns an nn.Module, or one and its optimizer"


def export_files(
    source: Path, module: str, weights: Path, optimizer_state: Path | None, *, verify: bool
) -> int:
    """Writes a checkpoint as files of state dicts; returns the number of steps of its run.

    Args:
        source: The checkpoint, or a folder of them.
        module: `module:function`, for the module and, if its state is wanted, the optimizer.
        weights: The file for the module's `load_state_dict`.
        optimizer_state: The file for the optimizer's `load_state_dict`.
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        ModelError: As `state_dict` and `optimizer_state_dict`; or the function returns another
            result.
        DirectoryError: A file cannot be written.
        OnnxparRuntimeError: The checkpoint cannot be read, or the function fails.
    """
    for path in filter(None, (weights, optimizer_state)):
        check_file(path, DirectoryError)
    checkpoint = runtime.Checkpoint.last(source)
    for name in checkpoint.files if verify else ():
        checkpoint.verify_file(name)
    net, optimizer = _made(module, optimizer_state is not None)
    files = {weights: state_dict(checkpoint.directory, net)}
    if optimizer_state is not None:
        files[optimizer_state] = optimizer_state_dict(checkpoint.directory, net, optimizer)
    for path, content in files.items():
        with new_file(path, DirectoryError) as file:
            _save(content, file)
    return checkpoint.progress.step


def _save(content: Any, file: Path) -> None:
    try:
        with file.open("wb") as stream:
            torch.save(content, stream)
    except RuntimeError as error:
        # PyTorch's own error does not say why a stream cannot be written, such as a full disk.
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def import_files(
    target: Path, directory: Path, module: str, weights: Path, optimizer_state: Path | None
) -> "Made":
    """Writes a checkpoint from files of state dicts.

    Args:
        target: The checkpoint.
        directory: The training directory that it is for.
        module: As `export_files`.
        weights: The module's state dict, a file or a folder of `torch.distributed.checkpoint`.
        optimizer_state: The optimizer's state dict, likewise.

    Raises:
        ModelError: As `write_checkpoint`; or a state dict does not fit, or the function returns
            another result.
        DirectoryError: A file cannot be read.
        OnnxparRuntimeError: As `write_checkpoint`; or the function fails.
    """
    net, optimizer = _made(module, optimizer_state is not None)
    if weights.is_dir():
        # Loads `torch.distributed.checkpoint`, which takes a second.
        from onnxpar.api.pytorch.distributed_folder import weights_in

        _fill(net, weights, weights_in(weights, net))
    else:
        load_state(net, weights)
    if optimizer_state is None:
        return _written(target, directory, net, None, str(weights))
    if optimizer_state.is_dir():
        from onnxpar.api.pytorch.distributed_folder import optimizer_in

        _fill(optimizer, optimizer_state, optimizer_in(optimizer_state, net, optimizer))
    else:
        load_state(optimizer, optimizer_state)
    return _written(target, directory, net, optimizer, f"{weights} and {optimizer_state}")


def _written(target: Path, directory: Path, net: Any, optimizer: Any, sources: str) -> "Made":
    try:
        return write_checkpoint(target, directory, net, optimizer)
    except ModelError as error:
        raise ModelError(f"{sources}: {error}") from None


def load_state(into: torch.nn.Module | torch.optim.Optimizer, path: Path) -> None:
    """Loads a file of a state dict into a module or an optimizer; runs no code of the file.

    Raises:
        DirectoryError: It cannot be read, is damaged, or is no file of `torch.save`.
        ModelError: It is no state dict, or another module's or optimizer's.
    """
    content = read_state_file(path)
    if isinstance(into, torch.nn.Module):
        _check_weights(path, content, into.state_dict())
    else:
        _check_optimizer_state(path, content)
    _fill(into, path, content)


def _check_weights(path: Path, content: Any, own: Mapping[str, Any]) -> None:
    """Raises ModelError if a file's content does not have the form of a module's state dict."""
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise _other(path, "a module's state dict, tensors by name", content)
    for name, value in content.items():
        wanted = own.get(name)
        if not isinstance(wanted, torch.Tensor) or not isinstance(value, torch.Tensor):
            continue  # PyTorch names these
        if value.is_complex() and not wanted.is_complex():
            raise ModelError(f"{path}, {name!r}: expected {wanted.dtype}, got {value.dtype}")


def _check_optimizer_state(path: Path, content: Any) -> None:
    """Raises ModelError if a file's content does not have the form of an optimizer's state dict."""
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if (
        not isinstance(groups, list)
        or not all(isinstance(one, dict) and isinstance(one.get("params"), list) for one in groups)
        or not isinstance(content.get("state"), dict)
        or not all(isinstance(one, dict) for one in content["state"].values())
    ):
        wanted = "an optimizer's state dict, with 'state' by number and a list of 'param_groups'"
        raise _other(path, wanted, content)
    for number, state in content["state"].items():
        for key, value in state.items():
            if not isinstance(value, torch.Tensor | float | int):
                got = type(value).__name__
                raise ModelError(f"{path}, state {number}, {key}: expected a tensor, got {got}")


def _other(path: Path, expected: str, content: Any) -> ModelError:
    got = type(content).__name__
    if isinstance(content, dict):
        got = f"a dict with {', '.join(map(repr, list(content)[:SHOWN])) or 'nothing'}"
    return ModelError(f"{path}: expected {expected}, got {got}")


def _made(text: str, with_optimizer: bool) -> tuple[torch.nn.Module, Any]:
    """Returns the module and the optimizer, or None, that the user's function makes."""
    where = _MODULE.format(text)
    function = runtime.named_function(text, where, _FORMS)
    with runtime.users_code(where):
        made = function()
    module, optimizer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, torch.nn.Module):
        raise ModelError(f"{where}: expected {_FORMS}, got {type(module).__name__}")
    if with_optimizer and not isinstance(optimizer, torch.optim.Optimizer):
        raise ModelError(
            f"{where}: expected a module and its optimizer, for --optimizer-state, got "
            f"{'no optimizer' if optimizer is None else type(optimizer).__name__}"
        )
    return module, optimizer


def _fill(into: Any, path: Path, content: Any) -> None:
    """Loads a state dict into a module or an optimizer."""
    try:
        into.load_state_dict(content)
    except Exception as error:  # PyTorch checks little of the content before it uses it
        kind = type(into).__name__
        raise ModelError(
            f"{path}: expected a state dict of {kind}: {type(error).__name__}: {error}"
        ) from None
