"""A range of a model's nodes as a model of its own."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import onnx
import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.name_patterns import nearest
from onnxpar.frontend.load import load, normalise
from onnxpar.graph.body_captures import every_node, uncapture

COLLECTIVES = "onnxpar"
"""The domain of the operators that a partitioned program has."""


def whole_model(model: ir.Model | onnx.ModelProto | str | Path) -> ir.Model:
    """Returns a model that may be used up: read from its file, or a copy that shares its weights.

    Raises:
        ModelError: The file is missing or is not an ONNX model.
    """
    if isinstance(model, str | Path):
        return load(model)
    return ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model.clone()


def part(model: ir.Model | onnx.ModelProto | str | Path, *patterns: str) -> ir.Model:
    """Returns the nodes of a model whose names fit, as a model: its inputs are what enters them.

    Initializers that the nodes read stay inside, under their names. Outputs are the values that
    other nodes read or that the model returns, in the order in which they are made; inputs are in
    the order in which they are read first, with the shapes inferred for them.

    Args:
        model: The model, its path or its proto. It is not changed.
        patterns: Names of nodes or patterns of them in the sense of `fnmatch` (`*` crosses `/`),
            such as `/block1/*`; nodes without a name have that of the normalised model.

    Raises:
        ModelError: The model is not valid, a pattern fits no node, or what the nodes need is made
            from what they make by nodes outside of the range.
    """
    whole = normalise(whole_model(model))
    inside = _inside(whole.graph, patterns)
    _check_closed(whole.graph, inside)
    chosen = set(inside)
    outside = [node for node in whole.graph if node not in chosen]
    read = {v: None for node in inside for v in node.inputs if v is not None}
    made = {v for node in inside for v in node.outputs}
    results = {*whole.graph.outputs, *(v for node in outside for v in node.inputs)}
    leaving = [v for node in inside for v in node.outputs if v in results]
    initializers = [v for v in whole.graph.initializers.values() if v in read]
    entering = {
        v: ir.Value(name=v.name, shape=v.shape, type=v.type)
        for v in read
        if v not in made and not v.is_initializer()
    }
    # A node may change its graph once no value ties it to those that stay.
    for node in every_node(outside):
        _replace(node, dict.fromkeys(made))
    whole.graph.outputs.clear()
    whole.graph.remove(inside)
    for node in every_node(inside):
        _replace(node, entering)
    for value in initializers:
        del whole.graph.initializers[value.name or ""]
    graph = ir.Graph(
        list(entering.values()),
        leaving,
        nodes=inside,
        initializers=initializers,
        opset_imports=whole.graph.opset_imports,
        name=whole.graph.name,
    )
    uncapture(graph)
    return ir.Model(graph, ir_version=whole.ir_version)


def _replace(node: ir.Node, by: Mapping[ir.Value, ir.Value | None]) -> None:
    for index, value in enumerate(node.inputs):
        if value is not None and value in by:
            node.replace_input_with(index, by[value])


def _inside(graph: ir.Graph, patterns: Sequence[str]) -> list[ir.Node]:
    names = [node.name or "" for node in graph]
    if not patterns:
        raise ModelError("part: expected names or patterns of nodes, got none")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(
                f"part: expected the name or a pattern of a node, got {pattern!r}, which no node "
                f"has{nearest(pattern, names)}"
            )
    return [n for n in graph if any(fnmatchcase(n.name or "", p) for p in patterns)]


def _check_closed(graph: ir.Graph, inside: Sequence[ir.Node]) -> None:
    """Raises ModelError where a way leads out of the nodes and back into them."""
    chosen = set(inside)
    # By value made outside, the node inside that it depends on.
    after: dict[ir.Value, ir.Node] = {}
    for node in graph:
        read = [v for v in node.inputs if v is not None]
        sources = [after[v] for v in read if v in after]
        if node in chosen:
            if sources:
                raise ModelError(
                    f"part: node {node.name!r} ({node.op_type}) reads a value that nodes outside "
                    f"of the part compute from {sources[0].name!r}, which is inside: expected the "
                    "nodes between them in the part"
                )
            continue
        sources += [n for v in read if (n := v.producer()) is not None and n in chosen]
        if sources:
            after.update(dict.fromkeys(node.outputs, sources[0]))
