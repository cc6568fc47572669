"""A rank's graph without the nodes that set padding, for sizes of which no shard has any."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from onnxpar_format.padding_mark import KEY, PaddingMark
from onnxpar_runtime.errors import DirectoryError
from onnxpar_runtime.exposed_graph import DOMAIN, read_graph

Values = Mapping[str, int]


@dataclass(frozen=True)
class LeanGraph:
    """A graph without nodes that set padding.

    Attributes:
        model: The model, serialised.
        marks: Those of the nodes that it lacks. It may be run with values with which all of them
            are needless.
    """

    model: bytes
    marks: frozenset[PaddingMark]

    def fits(self, values: Values) -> bool:
        """Whether the graph may be run with these values of symbols."""
        return all(mark.needless(values) for mark in self.marks)


def lean_graph(path: Path, runs: Sequence[Values]) -> LeanGraph | None:
    """Returns a graph without the nodes that set padding of which no run has any.

    Args:
        path: The file.
        runs: The values of symbols in each run.

    Returns:
        None if all nodes are needed.

    Raises:
        DirectoryError: The file cannot be read, or a mark is malformed.
    """
    model = read_graph(path)
    left_out = set()
    for node, mark in _marks(path, model.graph):
        if all(mark.needless(values) for values in runs):
            operand = node.input[mark.operand]
            del node.input[:], node.attribute[:]
            # onnxruntime removes it, and keeps the name of the result if that is an output.
            node.op_type, node.domain = "Identity", ""
            node.input.append(operand)
            left_out.add(mark)
    if not left_out:
        return None
    _remove_unread(model.graph)
    return LeanGraph(model.SerializeToString(), frozenset(left_out))


def _marks(path: Path, graph: onnx.GraphProto) -> Iterator[tuple[onnx.NodeProto, PaddingMark]]:
    for node in graph.node:
        for entry in node.metadata_props:
            if entry.key == KEY:
                try:
                    mark = PaddingMark.read(entry.value)
                except ValueError as error:
                    raise DirectoryError(f"{path}: node {node.name!r}: {KEY}: {error}") from None
                if mark.operand >= len(node.input) or len(node.output) != 1:
                    raise DirectoryError(
                        f"{path}: node {node.name!r}: {KEY}: expected an operand below "
                        f"{len(node.input)} and one result, got {mark.operand} and "
                        f"{len(node.output)}"
                    )
                yield node, mark


def _remove_unread(graph: onnx.GraphProto) -> None:
    """Removes nodes whose results nobody reads, such as masks; onnxruntime would run them."""
    read = {value.name for value in graph.output}
    kept = []
    for node in reversed(graph.node):
        if node.domain == DOMAIN or read.intersection(node.output):
            kept.append(node)
            read.update(_operands(node))
    kept.reverse()
    del graph.node[:]
    graph.node.extend(kept)


def _operands(node: onnx.NodeProto) -> Iterator[str]:
    """Returns what a node reads, in its bodies too."""
    yield from node.input
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            yield from (value.name for value in body.output)
            for inner in body.node:
                yield from _operands(inner)
