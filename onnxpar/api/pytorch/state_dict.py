"""`onnxpar.state_dict`: trained parameters for `load_state_dict` of the module they came from."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from onnxpar.api import runtime
from onnxpar.api.pytorch.export_module import first_names
from onnxpar.core.errors import DirectoryError, ModelError
from onnxpar.core.name_patterns import SHOWN, nearest
from onnxpar_format.manifest import FROM_FILES


def state_dict(trained: str | Path, module: torch.nn.Module) -> dict[str, Any]:
    """Returns all entries of a module's `state_dict()`, with trained tensors where there are some.

    `module.load_state_dict(onnxpar.state_dict("checkpoints", module))` then needs no
    `strict=False`: each name of a tied weight has the trained tensor, and what was not trained,
    such as a frozen or unused parameter, is that of `module`.

    Args:
        trained: A checkpoint, a folder whose last complete checkpoint is used, or a `.safetensors`
            file that `onnxpar train --save` or `onnxpar checkpoint export` wrote.
        module: The module that `onnxpar.from_torch` exported, or an equal one. It is not changed.

    Raises:
        DirectoryError: The file cannot be read.
        ModelError: A trained tensor is none of the module's, or has another shape.
        OnnxparRuntimeError: The folder has no complete checkpoint, or a damaged one.
    """
    path = Path(trained)
    tensors = read_states(path) if path.is_dir() else _read(path)
    own, names = module.state_dict(), first_names(module)
    unknown = [name for name in tensors if name not in own]
    if unknown:
        raise ModelError(
            f"{type(module).__name__} is not the module that was trained: it has no "
            f"{', '.join(map(repr, unknown[:SHOWN]))}{nearest(unknown[0], list(own))}"
        )
    found = {}
    for name, tensor in own.items():
        new = tensors.get(names[name], tensor)
        if new.shape != tensor.shape:
            raise ModelError(
                f"{name}: expected the module's shape {tuple(tensor.shape)}, got "
                f"{tuple(new.shape)} in {trained}"
            )
        found[name] = new.to(tensor.dtype)
    return found


def read_states(checkpoint: Path, *kinds: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a checkpoint of these kinds, by parameter; by default the weights.

    Raises:
        OnnxparRuntimeError: The folder has no complete checkpoint, or a damaged one.
    """
    with TemporaryDirectory(prefix="onnxpar-state-dict-") as folder:
        file = Path(folder, "states.safetensors")
        runtime.export_weights(checkpoint, file, kinds or FROM_FILES)
        return _read(file)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise DirectoryError(
            f"{path}: expected a .safetensors file or a checkpoint: {error}"
        ) from None
