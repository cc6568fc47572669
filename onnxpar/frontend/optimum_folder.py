"""A model folder as Hugging Face's Optimum exports it, with its usual file names.

A decoder alone is `model.onnx`, which takes a cache that may be empty. An encoder-decoder has
`encoder_model.onnx`, and the decoder twice: `decoder_model.onnx` computes the first token from the
encoder's result and makes all keys and values, and `decoder_with_past_model.onnx` continues. The
two may be branches of one If in `decoder_model_merged.onnx`, which `use_cache_branch` chooses.

The first step of a decoder is a step with an empty cache, so the decoder that continues can run all
steps. The keys and values of the encoder's result are inputs of it. The decoder of the first step
computes these from the encoder's result alone, so this part of it is appended to the encoder, whose
outputs are then inputs of the decoder.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.frontend.given_model import GivenModel
from onnxpar.frontend.load import in_memory, read
from onnxpar.graph.body_captures import inline_constant_branches
from onnxpar.graph.new_nodes import constant
from onnxpar.ops.control.decided import decided_body
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY

_ALONE, _ENCODER = "model.onnx", "encoder_model.onnx"
_FIRST, _NEXT, _MERGED = (
    "decoder_model.onnx",
    "decoder_with_past_model.onnx",
    "decoder_model_merged.onnx",
)
_CHOICE, _READ, _MADE = "use_cache_branch", "encoder_hidden_states", "last_hidden_state"
_TOKENS, _LOGITS, _OF_ENCODER = "input_ids", "logits", "encoder_"
_OTHER = "else_branch"  # that of the first step


@dataclass(frozen=True)
class _OptimumModel(GivenModel):
    """A folder of Optimum.

    Attributes:
        first: The ONNX file of a decoder's first step after an encoder.
    """

    first: Path | None = None

    def read(self) -> onnx.ModelProto:
        """Reads the decoder that continues, without external weights."""
        proto = read(self.path)
        graph = proto.graph
        _choose(proto, continues=True)
        if self.encoder is not None:
            # They repeat inputs, or are empty in a merged file.
            _remove(graph.output, [v.name for v in graph.output if _is_crossed(v.name)])
            if _READ not in _used(graph):
                _remove(graph.input, [_READ])
        scores = [v.type.tensor_type.shape.dim for v in graph.output if v.name == _LOGITS]
        one = any(len(d) == 3 and "1" in (d[1].dim_param, str(d[1].dim_value)) for d in scores)
        for value in graph.input:
            dims = value.type.tensor_type.shape.dim
            if value.name == _TOKENS and len(dims) == 2 and (one or self.encoder is not None):
                # It was traced with one token: what a mask would be for is missing.
                dims[1].dim_value = 1
        return proto

    def read_encoder(self) -> ir.Model:
        """Reads the encoder, with the decoder's projections of its result.

        Raises:
            ModelError: The files do not belong together.
        """
        assert self.encoder is not None and self.first is not None
        encoder = in_memory(read(self.encoder), self.encoder)
        proto = read(self.first)
        _choose(proto, continues=False)
        first = in_memory(proto, self.first)
        _inline(first)
        if encoder.opset_imports != first.opset_imports:
            raise ModelError(
                f"{self.first}: expected the opsets of the encoder, "
                f"{dict(encoder.opset_imports)}, got {dict(first.opset_imports)}"
            )
        kept = any(value.name == _READ for value in self.read().graph.input)
        _append_projections(encoder.graph, first.graph, self.first, kept=kept)
        return encoder

    def files(self, folder: Path) -> tuple[Path, Path | None]:
        """Writes the encoder, and the decoder if it is a branch of a merged file."""
        path, encoder = self.path, self.encoder
        if path.name == _MERGED:
            model = in_memory(self.read(), path)
            _inline(model)
            path = folder / _NEXT
            ir.save(model, path, external_data=f"{_NEXT}.data")
        if encoder is not None:
            encoder = folder / _ENCODER
            ir.save(self.read_encoder(), encoder, external_data=f"{_ENCODER}.data")
        return path, encoder


def optimum_model(path: Path) -> GivenModel:
    """Returns the model of a folder that Optimum exported.

    Raises:
        ModelError: The folder has no files of these names, or none of a decoder with a cache.
    """
    following = [path / name for name in (_NEXT, _MERGED) if (path / name).is_file()]
    starting = [path / name for name in (_FIRST, _MERGED) if (path / name).is_file()]
    encoder = path / _ENCODER
    if not encoder.is_file():
        alone = [path / _ALONE] if (path / _ALONE).is_file() else following
        if alone:
            return _OptimumModel(alone[0])
        raise ModelError(
            f"the model {str(path)!r} is a directory without genai_config.json, {_ALONE}, or "
            f"{_ENCODER} with {_NEXT} or {_MERGED}"
        )
    if not (following and starting):
        raise ModelError(
            f"the model {str(path)!r}: expected {_FIRST} and {_NEXT}, or {_MERGED}, beside "
            f"{_ENCODER} (optimum-cli writes them for a task that ends in -with-past), got "
            f"{sorted(found.name for found in path.glob('*.onnx'))}"
        )
    crossed = ((_READ, _MADE),)
    return _OptimumModel(following[0], encoder=encoder, crossed=crossed, first=starting[0])


def _is_crossed(name: str) -> bool:
    return name.startswith("present.") and ".encoder." in name


def _choose(proto: onnx.ModelProto, *, continues: bool) -> None:
    """Makes the input that chooses between the branches of a merged file constant."""
    graph = proto.graph
    if any(value.name == _CHOICE for value in graph.input):
        _remove(graph.input, [_CHOICE])
        graph.initializer.append(
            onnx.helper.make_tensor(_CHOICE, onnx.TensorProto.BOOL, [1], [continues])
        )


def _inline(model: ir.Model, registry: Registry = REGISTRY) -> None:
    """Replaces the If of a merged file by the branch that `_choose` has chosen."""
    inline_constant_branches(model, partial(decided_body, registry=registry))


def _used(graph: onnx.GraphProto) -> set[str]:
    """Returns the names of the values that nodes of a decoder that continues read."""
    names: set[str] = set()
    for node in graph.node:
        names.update(node.input)
        for attribute in node.attribute:
            if attribute.name == _OTHER and list(node.input) == [_CHOICE]:
                continue
            names |= _used(attribute.g)
            names |= {value.name for value in attribute.g.output}
    return names


def _remove(values: "Collection[onnx.ValueInfoProto]", names: Collection[str]) -> None:
    kept = [value for value in values if value.name not in names]
    del values[:]  # type: ignore[attr-defined]
    values.extend(kept)  # type: ignore[attr-defined]


def _append_projections(graph: ir.Graph, first: ir.Graph, path: Path, *, kept: bool) -> None:
    """Moves what computes a decoder's keys and values of an encoder's result behind the encoder.

    Shapes in it may follow from the tokens, of which there is one in each row then. Its elements
    do not: they are keys and values of the encoder's result.

    Args:
        graph: The encoder; it is changed.
        first: The decoder of the first step; it is used up.
        path: Its file.
        kept: Whether the encoder's result remains an output.
    """
    made = {value.name: value for value in graph.outputs}
    wanted = [value for value in first.outputs if _is_crossed(value.name or "")]
    if _MADE not in made or not wanted:
        raise ModelError(
            f"{path}: expected outputs such as present.0.encoder.key, and the output {_MADE} of "
            f"the encoder, got {[v.name for v in first.outputs]} and {list(made)}"
        )
    result = made[_MADE]
    _rename(graph, first)
    given = {value.name: value for value in graph.inputs}
    for value in first.inputs:
        name = value.name or ""
        other = given.get(name.removeprefix(_OF_ENCODER))
        if name == _READ:
            other = result
        elif name == _TOKENS:
            other = _token(graph, result)
        if other is not None:
            value.replace_all_uses_with(other)
    nodes = _ancestors(wanted, graph)
    read = {value for node in nodes for value in node.inputs}
    open_inputs = [value.name or "" for value in first.inputs if value in read]
    if open_inputs:
        raise ModelError(
            f"{path}: expected keys and values that follow from {_READ}, got ones that need "
            f"{open_inputs}"
        )
    weights = {v for node in nodes for v in node.inputs if v is not None and v.is_initializer()}
    first.outputs.clear()
    # The rest reads some of their results.
    first.remove([node for node in first if node not in nodes], safe=False)
    first.remove(nodes)
    graph.extend(nodes)
    for value in [v for v in first.initializers.values() if v in weights]:
        first.initializers.pop(value.name or "")
        graph.register_initializer(value)
    graph.outputs[:] = [*([result] if kept else []), *wanted]


def _ancestors(values: Collection[ir.Value], stop: ir.Graph) -> list[ir.Node]:
    """Returns the nodes that compute values, in their order, but for those of a graph."""
    found: set[ir.Node] = set()
    todo = [value.producer() for value in values]
    while todo:
        node = todo.pop()
        if node is None or node in found or node.graph is stop:
            continue
        found.add(node)
        todo += [value.producer() for value in node.inputs if value is not None]
    (owner,) = {node.graph for node in found}
    assert isinstance(owner, ir.Graph)
    return [node for node in owner if node in found]


def _token(graph: ir.Graph, result: ir.Value) -> ir.Value:
    """Appends nodes that compute a token 0 for each row of a value, and returns the tokens."""
    one, zero = constant(f"{_TOKENS}.one", [1]), constant(f"{_TOKENS}.zero", [0])
    for value in (one, zero):
        graph.register_initializer(value)
    size = ir.node("Shape", [result])
    rows = ir.node("Gather", [size.outputs[0], zero])
    shape = ir.node("Concat", [rows.outputs[0], one], {"axis": 0})
    fill = ir.tensor([0], ir.DataType.INT64)
    tokens = ir.node("ConstantOfShape", [shape.outputs[0]], {"value": fill})
    graph.extend([size, rows, shape, tokens])
    return tokens.outputs[0]


def _rename(graph: ir.Graph, first: ir.Graph) -> None:
    """Gives new names to values and nodes of `first` whose names `graph` has as well."""
    results = [value for node in graph for value in node.outputs]
    taken = {value.name for value in (*graph.inputs, *graph.initializers.values(), *results)}
    nodes = {node.name for node in graph}
    for node in first:
        node.name = _free(node.name, nodes)
    made = [value for node in first for value in node.outputs]
    for value in (*first.initializers.values(), *made):
        value.name = _free(value.name, taken)


def _free(name: str | None, taken: Collection[str | None]) -> str | None:
    while name and name in taken:
        name = f"decoder.{name}"
    return name
