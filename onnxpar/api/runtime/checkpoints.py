"""Other files of a checkpoint: for another mesh, for another program."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar.core.errors import ArtifactError
from onnxpar_runtime.checkpoint import reshard
from onnxpar_runtime.checkpoint.reshard import SAFETENSORS, Made

ONNX = ".onnx"


def reshard_checkpoint(source: Path, target: Path, to: Path, *, verify: bool) -> str:
    """Writes a checkpoint as the ranks of an artifact directory hold it; returns what to tell.

    Args:
        source: The checkpoint, or a folder of them.
        target: The checkpoint to write.
        to: The artifact directory.
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.checkpoint.reshard.reshard`.
    """
    return _told(reshard.reshard(source, target, to, verify=verify))


def merge_checkpoint(source: Path, target: Path, *, verify: bool) -> str:
    """Writes a checkpoint with every tensor whole; returns what to tell.

    Args:
        source: The checkpoint, or a folder of them.
        target: The checkpoint to write.
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        OnnxparRuntimeError: As `onnxpar_runtime.checkpoint.reshard.merge`.
    """
    return _told(reshard.merge(source, target, verify=verify))


def export_checkpoint(
    source: Path, output: Path, model: Path | None, ties: Sequence[str] = (), *, verify: bool
) -> str:
    """Writes the trained parameters, by name or in their model; returns what to tell.

    Args:
        source: The checkpoint, or a folder of them.
        output: A `.safetensors` or `.onnx` file.
        model: The model that was cut and trained, for a `.onnx` file.
        ties: `A=B` each, as the model was cut (`--tie`).
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        ArtifactError: The file is of neither kind, or a model is missing or too many.
        OnnxparError: As `onnxpar.api.export.put_weights`.
        OnnxparRuntimeError: As `onnxpar_runtime.checkpoint.reshard.export_weights`.
    """
    if output.suffix not in (ONNX, SAFETENSORS):
        raise ArtifactError(f"{output}: expected a file named *{ONNX} or *{SAFETENSORS}")
    if (output.suffix == ONNX) != (model is not None):
        need = "needs" if model is None else "takes no"
        raise ArtifactError(f"{output}: {output.suffix[1:]} {need} --model, the one that was cut")
    if model is None:
        return _told(reshard.export_weights(source, output, verify=verify))
    if not output.absolute().parent.is_dir():
        raise ArtifactError(f"{output}: the folder does not exist")
    # The transformer takes a second to load, which the rest does without.
    from onnxpar.api.export import put_weights

    try:
        with TemporaryDirectory(prefix=".onnxpar-export-", dir=output.absolute().parent) as folder:
            weights = Path(folder, "weights.safetensors")
            made = reshard.export_weights(source, weights, verify=verify)
            return f"{put_weights(model, weights, output, ties)}; after step {made.step}"
    except OSError as error:
        raise ArtifactError(f"{output}: cannot be written: {error.strerror or error}") from None


def _told(made: Made) -> str:
    files = "1 file" if made.files == 1 else f"{made.files} files"
    return (
        f"{made.path}: {made.tensors} tensors in {files}, {made.bytes:,} bytes; after step "
        f"{made.step}"
    )
