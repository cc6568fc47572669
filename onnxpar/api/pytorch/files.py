"""PyTorch's files of state dicts: `onnxpar checkpoint export --state-dict`, `checkpoint import`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from onnxpar.api import runtime
from onnxpar.api.pytorch.optimizer_state import optimizer_state_dict
from onnxpar.api.pytorch.state_dict import state_dict
from onnxpar.api.pytorch.write_checkpoint import write_checkpoint
from onnxpar.core.errors import DirectoryError, ModelError
from onnxpar_format.new_file import check_file, new_file
from onnxpar_format.regular_file import open_regular

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
            torch.save(content, file)
    return checkpoint.progress.step


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
        return write_checkpoint(target, directory, net)
    if optimizer_state.is_dir():
        from onnxpar.api.pytorch.distributed_folder import optimizer_in

        _fill(optimizer, optimizer_state, optimizer_in(optimizer_state, net, optimizer))
    else:
        load_state(optimizer, optimizer_state)
    return write_checkpoint(target, directory, net, optimizer)


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


def load_state(into: Any, path: Path) -> None:
    """Loads a file of a state dict into a module or an optimizer; runs no code of the file.

    Raises:
        DirectoryError: It cannot be read, or is no file of `torch.save`.
        ModelError: The state dict is another module's or optimizer's.
    """
    try:
        with open_regular(path) as stream:
            content = torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file raises anything, such as UnicodeDecodeError
        raise DirectoryError(f"{path}: expected a file of torch.save: {error}") from None
    _fill(into, path, content)


def _fill(into: Any, path: Path, content: Any) -> None:
    try:
        into.load_state_dict(content)
    except Exception as error:  # PyTorch checks little of the content before it uses it
        raise ModelError(f"{path}: {type(error).__name__}: {error}") from None
