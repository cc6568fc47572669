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
"""The domain of the operators of a partitioned program."""

GivenModel = ir.Model | onnx.ModelProto | str | Path
"""A model, its proto, or the path of its file."""


def own_model(model: GivenModel) -> ir.Model:
    """Returns a model that may be changed: read from its file, or a copy that shares its weights.

    Raises:
        ModelError: The file is missing or is not an ONNX model.
    """
    if isinstance(model, str | Path):
        return load(model)
    return ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model.clone()


def part(model: GivenModel, *patterns: str) -> ir.Model:
    """Returns the nodes of a model that match some patterns, as a model.

    Its inputs are the values that the nodes read and do not compute, in the order in which they are
    first read, with their inferred shapes. Initializers that the nodes read stay, with their names.
    The outputs are the values that other nodes read or that the model returns, in the order in
    which they are computed.

    Args:
        model: The model, its path or its proto. It is not changed.
        patterns: Names of nodes or patterns of them as in `fnmatch` (`*` matches `/` too), such as
            `/block1/*`; nodes without a name have that of the normalised model.

    Raises:
        ModelError: The model is not valid, a pattern matches no node, or a value leaves the part
            and comes back into it through other nodes.
    """
    source = normalise(own_model(model))
    inside = _inside(source.graph, patterns)
    _check_closed(source.graph, inside)
    chosen = set(inside)
    outside = [node for node in source.graph if node not in chosen]
    read = {v: None for node in inside for v in node.inputs if v is not None}
    made = {v for node in inside for v in node.outputs}
    results = {*source.graph.outputs, *(v for node in outside for v in node.inputs)}
    leaving = [v for node in inside for v in node.outputs if v in results]
    initializers = [v for v in source.graph.initializers.values() if v in read]
    entering = {
        v: ir.Value(name=v.name, shape=v.shape, type=v.type)
        for v in read
        if v not in made and not v.is_initializer()
    }
    # A node can be moved to another graph once it shares no value with the nodes that stay.
    for node in every_node(outside):
        _replace(node, dict.fromkeys(made))
    source.graph.outputs.clear()
    source.graph.remove(inside)
    for node in every_node(inside):
        _replace(node, entering)
    for value in initializers:
        del source.graph.initializers[value.name or ""]
    graph = ir.Graph(
        list(entering.values()),
        leaving,
        nodes=inside,
        initializers=initializers,
        opset_imports=source.graph.opset_imports,
        name=source.graph.name,
    )
    uncapture(graph)
    return ir.Model(graph, ir_version=source.ir_version)


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
                f"part: expected the name or a pattern of a node, got {pattern!r}, which matches "
                f"no node{nearest(pattern, names)}"
            )
    return [n for n in graph if any(fnmatchcase(n.name or "", p) for p in patterns)]


def _check_closed(graph: ir.Graph, inside: Sequence[ir.Node]) -> None:
    """Raises ModelError if a path leads out of the nodes and back into them."""
    chosen = set(inside)
    # For each value computed outside, a node inside on which it depends.
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
