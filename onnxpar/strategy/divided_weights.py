"""Entries for fused weights that were divided (see `onnxpar.frontend.fused_weights`).

The user's entries name the nodes and weights of the file. They apply to all parts alike; an entry
for one part wins.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

import onnx_ir as ir

from onnxpar.core.name_patterns import match
from onnxpar.graph.metadata_keys import GRADIENT_OF, PART_OF, PART_RESULT
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.tensor_parts import part_of
from onnxpar.strategy.schema import NodeEntry

T = TypeVar("T")
Found = dict[str, tuple[str, T]]


def match_parameters(
    entries: Mapping[str, T], graph: ir.Graph, where: Mapping[str, str]
) -> Found[T]:
    """Returns the entry that applies to each initializer, as `name_patterns.match`.

    Args:
        entries: The user's entries.
        graph: The graph with the initializers.
        where: Place of each key, for messages.

    Raises:
        StrategyError: As for `match`.
    """
    tensors = {
        name: part.tensor
        for name, value in graph.initializers.items()
        if (part := part_of(value)) is not None
    }
    found = match(entries, [*graph.initializers, *tensors.values()], "parameter", where)
    return _spread(found, tensors)


def divided_nodes(nodes: Iterable[ir.Node]) -> dict[str, str]:
    """Returns the nodes that compute a part of a node of the file, each with that node's name."""
    return {
        node.name or "": node.metadata_props[PART_OF]
        for node in nodes
        if PART_OF in node.metadata_props and GRADIENT_OF not in node.metadata_props
    }


def match_nodes(
    entries: Mapping[str, T], nodes: Collection[ir.Node], where: Mapping[str, str]
) -> Found[T]:
    """Returns the entry that applies to each node, as `name_patterns.match`.

    Args:
        entries: The user's entries.
        nodes: The nodes.
        where: Place of each key, for messages.

    Raises:
        StrategyError: As for `match`.
    """
    divided = divided_nodes(nodes)
    names = [node.name or "" for node in nodes]
    return _spread(match(entries, [*names, *divided.values()], "node", where), divided)


def spread_nodes(
    found: Found[NodeEntry], divided: Mapping[str, str], views: Mapping[str, NodeView]
) -> Found[NodeEntry]:
    """Gives the entries of nodes that were divided to the nodes of their parts."""
    return {
        name: (key, _fitting(entry, views[name].node) if name in divided else entry)
        for name, (key, entry) in _spread(found, divided).items()
    }


def _spread(found: Found[T], parts: Mapping[str, str]) -> Found[T]:
    wholes = set(parts.values()) - set(parts)
    spread = {name: entry for name, entry in found.items() if name not in wholes}
    for name, whole in parts.items():
        if whole in found:
            spread.setdefault(name, found[whole])
    return spread


def _fitting(entry: NodeEntry, node: ir.Node) -> NodeEntry:
    """The entry for a node that takes one part, in place of a node such as Split or Slice."""
    inputs, out = entry.inputs, entry.out
    if inputs is not None and len(inputs) > len(node.inputs):
        inputs = inputs[: len(node.inputs)]
    index = node.metadata_props.get(PART_RESULT)
    if out is not None and index is not None and len(out) > 1:
        out = out[int(index) : int(index) + 1]
    return entry.model_copy(update={"inputs": inputs, "out": out})
