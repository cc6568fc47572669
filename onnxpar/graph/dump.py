"""Writes the model after each stage, numbered, as `.onnx` and as ONNX text, for people to read."""

from pathlib import Path

import onnx
import onnx_ir as ir

from onnxpar.core.errors import DirectoryError
from onnxpar.graph.body_captures import close, uncapture
from onnxpar.graph.plan import Plan
from onnxpar_format.new_file import new_file

TEXT_ELEMENTS = 64


class Dumper:
    """Writes numbered files into one directory, which is created if it does not exist.

    Its methods raise DirectoryError if a file cannot be written; each file is complete or absent.
    """

    def __init__(self, folder: Path) -> None:
        """Creates the directory; DirectoryError if that is not possible."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DirectoryError(
                f"cannot make the dump directory {str(folder)!r}: {error}"
            ) from error
        self._folder = folder
        self._count = 0

    def _path(self, stage: str, suffix: str) -> Path:
        return self._folder / f"{self._count:02d}.{stage}{suffix}"

    def model(self, stage: str, model: ir.Model) -> None:
        """Writes a model; large initializers become inputs, so that weights are not copied."""
        proto = _without_weights(model)
        with new_file(self._path(stage, ".onnx"), DirectoryError) as file:
            onnx.save(proto, file)
        self._write(stage, onnx.printer.to_text(proto))
        self._count += 1

    def plan(self, stage: str, model: ir.Model, plan: Plan) -> None:
        """Writes a plan: one line for each operand and result of each node."""
        lines = []
        for node in model.graph:
            chosen = plan.nodes[node.name or ""]
            lines.append(f"{node.name} ({node.op_type}){'  pinned' if chosen.pinned else ''}")
            for value, sharding in zip(node.inputs, chosen.inputs, strict=False):
                if value is not None:
                    text = sharding.describe(plan.mesh) if sharding else "in its current layout"
                    lines.append(f"    in  {value.name}: {text}")
            for value, sharding in zip(node.outputs, chosen.outputs, strict=True):
                lines.append(f"    out {value.name}: {sharding.describe(plan.mesh)}")
        self._write(stage, "\n".join(lines) + "\n")
        self._count += 1

    def _write(self, stage: str, text: str) -> None:
        with new_file(self._path(stage, ".txt"), DirectoryError) as file:
            file.write_text(text, encoding="utf-8")


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    large = {
        name
        for name, value in model.graph.initializers.items()
        if value.const_value is None or value.const_value.size > TEXT_ELEMENTS
    }
    stored = model.graph.initializers
    order = list(stored)
    values = {name: stored.pop(name) for name in order if name in large}
    uncapture(model.graph)
    try:
        proto = ir.serde.serialize_model(model)
    finally:
        close(model.graph)
        # In their old order: rank graphs list parameters in it.
        every = {**stored, **values}
        stored.clear()
        stored.update({name: every.pop(name) for name in order if name in every} | every)
    named = {i.name for i in proto.graph.input}
    for name in sorted(large - named):
        proto.graph.input.append(ir.serde.serialize_value(values[name]))
    return proto
