"""The trained parameters of a checkpoint, by name or in their model."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxpar.api.export_model import Exported, put_weights
from onnxpar.core.errors import DirectoryError
from onnxpar_format.new_file import check_file
from onnxpar_runtime.checkpoint import reshard
from onnxpar_runtime.checkpoint.reshard import SAFETENSORS, Made

ONNX = ".onnx"


def export_checkpoint(
    source: Path, output: Path, model: Path | None, ties: Sequence[str] = (), *, verify: bool
) -> tuple[Made, Exported | None]:
    """Writes the trained parameters, by name or in their model.

    Returns what was written by name, and then what was written with the model, if one was.

    Args:
        source: The checkpoint, or a folder of them.
        output: A `.safetensors` or `.onnx` file.
        model: The model that was sharded and trained, for a `.onnx` file.
        ties: The values `A=B` that `shard --tie` was given.
        verify: Whether to compare SHA-256 of the source's files.

    Raises:
        DirectoryError: The file is of neither kind, or the model is missing or not needed.
        OnnxparError: As `onnxpar.api.export_model.put_weights`.
        OnnxparRuntimeError: As `onnxpar_runtime.checkpoint.reshard.export_weights`.
    """
    if output.suffix not in (ONNX, SAFETENSORS):
        raise DirectoryError(f"{output}: expected a file named *{ONNX} or *{SAFETENSORS}")
    if (output.suffix == ONNX) != (model is not None):
        need = "needs" if model is None else "takes no"
        raise DirectoryError(
            f"{output}: a {output.suffix} file {need} --model, the model that was sharded"
        )
    if model is None:
        return reshard.export_weights(source, output, verify=verify), None
    check_file(output, DirectoryError)
    try:
        with TemporaryDirectory(prefix=".onnxpar-export-", dir=output.absolute().parent) as folder:
            weights = Path(folder, "weights.safetensors")
            made = reshard.export_weights(source, weights, verify=verify)
            return made, put_weights(model, weights, output, ties)
    except OSError as error:
        raise DirectoryError(f"{output}: cannot be written: {error.strerror or error}") from None
