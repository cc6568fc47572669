"""A trained model as one ONNX file: the model that was cut, with other weights.

The weights come in a safetensors file, named as the initializers. Where training undid what an
exporter had done to parameters (`onnxpar.parameters.recognise`), the file's own graph cannot hold
them: then what is written is the graph with that undone.
"""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import onnx_ir as ir
from google.protobuf.message import EncodeError

from onnxpar.core.errors import ArtifactError, ModelError
from onnxpar.core.name_patterns import SHOWN, nearest
from onnxpar.emit.manifest import dtype_name
from onnxpar.frontend.load import in_memory, read
from onnxpar.parameters.recognise import recognise

LARGEST = (1 << 31) - (1 << 24)
"""Bytes of weights from which on they stand in a file of their own: a message of protobuf has less
than 2 GiB, and the graph needs room too."""

_DTYPES = {
    "F64": ir.DataType.DOUBLE,
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The model.
        tensors: How many initializers have other weights.
        kept: How many have those of the file.
        untied: Whether the graph is no longer the file's, since what exporters did to parameters
            was undone.
        external: The file with the weights, where they are too many for one file.
    """

    path: Path
    tensors: int
    kept: int
    untied: bool
    external: Path | None

    def __str__(self) -> str:
        """What was written, for people."""
        text = f"{self.path}: {self.tensors} trained tensors, {self.kept} unchanged"
        if self.untied:
            text += (
                "; the graph is the one that was trained, with the parameters that the exporter "
                "had merged, folded or dropped restored"
            )
        return text + (f"; weights in {self.external.name}" if self.external else "")


def put_weights(model: Path, weights: Path, out: Path, ties: Sequence[str] = ()) -> Exported:
    """Writes a model with weights of a safetensors file in the place of its own.

    Args:
        model: The model that was made for training.
        weights: Tensors by the names of initializers, in the initializers' shapes.
        out: The file to write, which may be the model itself.
        ties: `A=B` each, as it was cut (`--tie`).

    Raises:
        ModelError: It is not the model that was trained, or cannot be read.
        ArtifactError: The file cannot be written; it is then complete or unchanged.
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
    except (OSError, EncodeError, ValueError) as error:
        raise ArtifactError(f"{out}: cannot be written: {error}") from error
    kept = sum(
        1 for n, v in initializers.items()
        if n not in tensors and v.dtype is not None and v.dtype.is_floating_point()
    )  # fmt: skip
    return Exported(out, len(tensors), kept, untied, external)


def _wiring(graph: ir.Graph) -> list[list[str | None]]:
    """Returns the names of what each node reads."""
    return [[None if v is None else v.name for v in node.inputs] for node in graph]


def _tensors(path: Path) -> Mapping[str, ir.ExternalTensor]:
    """Returns the tensors of a safetensors file, which stay there."""
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
    # Parameters of 16 bits are trained in 32: they are rounded to what the graph reads.
    rounded = tensor.numpy().astype(own.dtype.numpy())
    value.const_value = ir.Tensor(rounded, dtype=own.dtype, name=value.name)


def _save(model: ir.Model, out: Path) -> Path | None:
    """Writes a model, which appears whole; returns the file of its weights, if it has one."""
    size = sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value)
    data = f"{out.name}.data" if size > LARGEST else None
    folder = Path(mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
    try:
        if data is None:
            ir.external_data.load_to_model(model)
        ir.save(model, folder / out.name, external_data=data)
        for name in (data, out.name):
            if name is not None:
                os.replace(folder / name, out.parent / name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None if data is None else out.parent / data
