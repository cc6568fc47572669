"""Writes a trained model as one ONNX file: the model that was sharded, with other weights.

The weights are in a safetensors file, by the names of initializers. If training undid what an
exporter had done to parameters (`onnxpar.parameters.recognise`), the original graph has no place
for them, and the new file has the graph with this undone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
from google.protobuf.message import EncodeError

from onnxpar.core.errors import DirectoryError, ModelError
from onnxpar.core.name_patterns import SHOWN, nearest
from onnxpar.emit.manifest import dtype_name
from onnxpar.emit.weight_layout import SAFETENSORS_DTYPES
from onnxpar.frontend.load import in_memory, read
from onnxpar.parameters.recognise import recognise
from onnxpar_format.new_file import new_file

LARGEST = (1 << 31) - (1 << 24)
"""Larger weights (in bytes) go to a separate file: a protobuf message has less than 2 GiB, and the
graph needs room, too."""

_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The model.
        tensors: Number of initializers with trained weights.
        kept: Number of floating-point initializers with their original weights.
        untied: Whether the graph has changed, because what exporters did to parameters was undone.
        external: The file with the weights, if they are too large for the model's own file.
    """

    path: Path
    tensors: int
    kept: int
    untied: bool
    external: Path | None

    def __str__(self) -> str:
        """Describes the file in one line."""
        text = f"{self.path}: {self.tensors} trained tensors, {self.kept} unchanged"
        if self.untied:
            text += (
                "; the graph is the one that was trained: parameters that the exporter had merged, "
                "folded or dropped are restored"
            )
        return text + (f"; weights in {self.external.name}" if self.external else "")


def put_weights(model: Path, weights: Path, out: Path, ties: Sequence[str] = ()) -> Exported:
    """Writes a model with the weights of a safetensors file in place of its own.

    Args:
        model: The model that was sharded.
        weights: Tensors by the names of initializers, in the initializers' shapes.
        out: The file to write; it may be the model itself.
        ties: The values `A=B` that `shard --tie` was given.

    Raises:
        ModelError: It is not the model that was trained, or cannot be read.
        DirectoryError: The file cannot be written; an existing file is then unchanged.
    """
    tensors = _tensors(weights)
    found = in_memory(read(model), model)
    before = _wiring(found.graph)
    recognise(found, ties)
    untied = _wiring(found.graph) != before
    initializers = found.graph.initializers
    missing = [name for name in tensors if name not in initializers]
    if missing:
        raise ModelError(
            f"{str(model)!r} is not the model that was trained: it has no initializers "
            f"{', '.join(map(repr, missing[:SHOWN]))}{nearest(missing[0], list(initializers))}"
        )
    for name, tensor in tensors.items():
        _replace(initializers[name], tensor, model)
    try:
        external = _save(found, out)
    except (EncodeError, ValueError) as error:
        raise DirectoryError(f"{out}: cannot be written: {error}") from error
    kept = sum(
        1 for n, v in initializers.items()
        if n not in tensors and v.dtype is not None and v.dtype.is_floating_point()
    )  # fmt: skip
    return Exported(out, len(tensors), kept, untied, external)


def _wiring(graph: ir.Graph) -> list[list[str | None]]:
    """Returns the names of the values that each node reads."""
    return [[None if v is None else v.name for v in node.inputs] for node in graph]


def _tensors(path: Path) -> Mapping[str, ir.ExternalTensor]:
    """Returns the tensors of a safetensors file, without reading their contents."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return {
        name: ir.ExternalTensor(
            path.name,
            8 + length + entry["data_offsets"][0],
            entry["data_offsets"][1] - entry["data_offsets"][0],
            _DTYPES[entry["dtype"]],
            shape=ir.Shape(entry["shape"]),
            name=name,
            base_dir=path.parent,
        )
        for name, entry in header.items()
    }


def _replace(value: ir.Value, tensor: ir.ExternalTensor, model: Path) -> None:
    assert value.const_value is not None
    own = value.const_value
    if tuple(own.shape) != tuple(tensor.shape) or not own.dtype.is_floating_point():
        raise ModelError(
            f"{str(model)!r} is not the model that was trained: initializer {value.name!r}: "
            f"expected {dtype_name(tensor.dtype)}{list(tensor.shape)}, got "
            f"{dtype_name(own.dtype)}{list(own.shape)}"
        )
    if own.dtype == tensor.dtype:
        value.const_value = tensor
        return
    # A 16-bit parameter is trained in float32: it is rounded to the type that the graph reads.
    rounded = tensor.numpy().astype(own.dtype.numpy())
    value.const_value = ir.Tensor(rounded, dtype=own.dtype, name=value.name)


def _save(model: ir.Model, out: Path) -> Path | None:
    """Writes a model, completely or not at all; returns the file of its weights, if it has one."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    data = f"{out.name}.data" if size > LARGEST else None
    if data is None:
        ir.external_data.load_to_model(model)
    with new_file(out, DirectoryError) as file:
        ir.save(model, file, external_data=data)
    return None if data is None else out.parent / data
