"""Reads a rank's graph, and makes values outputs of it, to read them after a run."""

from collections.abc import Collection
from pathlib import Path

import onnx

from onnxpar_runtime.errors import DirectoryError, first_line

KEPT = "kept:"
"""Prefix of the name under which an input or a new state is exposed."""
DOMAIN = "onnxpar"
_VALUE = "value"


def read_graph(path: Path) -> onnx.ModelProto:
    """Returns a rank's graph without its weights.

    Raises:
        DirectoryError: The file cannot be read.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except Exception as error:  # protobuf has its own classes
        raise DirectoryError(f"{path}: cannot be read: {first_line(error)}") from None


def add_outputs(
    graph: onnx.GraphProto, names: Collection[str], states: Collection[str], *, inputs: bool
) -> None:
    """Makes values outputs of a graph; those that already are states, and inputs, by a copy.

    Args:
        graph: The graph, which is changed.
        names: The values. Results of collectives are exposed besides, under the names of their
            nodes.
        states: The outputs that are states.
        inputs: Whether to expose the inputs, under their names after `KEPT`. They are copied before
            any other node runs, since states may be updated in their memory.
    """
    known = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    outputs = {value.name for value in graph.output}
    wanted = [name for node in graph.node for name in node.output if name in names]
    copied = {name: name for name in wanted if name in states}
    copied |= {
        node.name: node.output[0]
        for node in graph.node
        if node.domain == DOMAIN and any(p.key == _VALUE for p in node.metadata_props)
    }
    for name, value in copied.items():
        graph.node.append(_copy(value, name))
        graph.output.append(_described(known.get(value), KEPT + name))
    for number, value in enumerate(graph.input if inputs else ()):
        graph.node.insert(number, _copy(value.name, value.name))
        graph.output.append(_described(value, KEPT + value.name))
    for name in dict.fromkeys(wanted):
        if name not in outputs:
            graph.output.append(_described(known.get(name), name))


def _copy(value: str, name: str) -> onnx.NodeProto:
    return onnx.helper.make_node("Identity", [value], [KEPT + name])


def _described(value: onnx.ValueInfoProto | None, name: str) -> onnx.ValueInfoProto:
    """Returns an output with the type of a value, as far as it is known."""
    found = onnx.ValueInfoProto()
    if value is not None:
        found.CopyFrom(value)
    found.name = name
    return found
