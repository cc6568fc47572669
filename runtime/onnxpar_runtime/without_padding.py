"""A rank's graph without the nodes that set padding, for sizes of which no shard has any."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import onnx

from onnxpar_format.padding_mark import KEY, PaddingMark
from onnxpar_runtime.errors import DirectoryError
from onnxpar_runtime.exposed_graph import DOMAIN

Values = Mapping[str, int]


def needless(path: Path, graph: onnx.GraphProto, runs: Sequence[Values]) -> frozenset[PaddingMark]:
    """Returns the marks of the nodes that set padding of which no run has any.

    Args:
        path: The file of the graph, for messages.
        graph: The graph.
        runs: The values of symbols in each run, at least one.

    Raises:
        DirectoryError: A mark is malformed.
    """
    marks = {mark for _, mark in _marks(path, graph)}
    return frozenset(m for m in marks if all(m.needless(values) for values in runs))


def leave_out(path: Path, graph: onnx.GraphProto, left_out: Collection[PaddingMark]) -> None:
    """Removes the nodes with these marks from a graph, and what only they read.

    Raises:
        DirectoryError: A mark is malformed.
    """
    for node, mark in list(_marks(path, graph)):
        if mark in left_out:
            operand = node.input[mark.operand]
            del node.input[:], node.attribute[:]
            # onnxruntime removes it, and keeps the name of the result if that is an output.
            node.op_type, node.domain = "Identity", ""
            node.input.append(operand)
    if left_out:
        _remove_unread(graph)


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
