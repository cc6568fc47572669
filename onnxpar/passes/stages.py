"""Puts a global graph into pipeline parts: every node gets its part, before anything else is done.

What is not cut (masks and positions, which depend on no weight; what is made of weights alone) is
computed in each part that reads it, by a copy of its nodes, instead of being sent there. A weight
that several stages read becomes one initializer for each, a *copy*, whose gradients the optimizer
adds up over the stages once a step (Megatron-LM does so with the embedding that is the head, too;
Narayanan et al., 2021).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.analysis.graph import read_by
from onnxpar.analysis.shapes import PART
from onnxpar.analysis.stages import Chain, Places, part_of_node


@dataclass(frozen=True)
class Copy:
    """An initializer that stands for another one in a further stage.

    Attributes:
        original: Name of that other one.
        stage: The stage.
    """

    original: str
    stage: int


def put_stages(
    graph: ir.Graph,
    chain: Chain,
    part_of: Mapping[ir.Node, int],
    weights: Collection[str],
    stages: int,
) -> dict[str, Copy]:
    """Gives every node its part, in metadata; the graph is changed.

    Args:
        graph: The graph.
        chain: The nodes that have a part.
        part_of: Their parts.
        weights: Names of the initializers of which each stage has its own.
        stages: Number of stages; part p runs on stage `p % stages`.

    Returns:
        The copies made, by name.
    """
    for node in chain.nodes:
        node.metadata_props[PART] = str(part_of[node])
    _spread(graph, frozenset(chain.nodes))
    return _copies(graph, weights, stages)


def order_by_place(graph: ir.Graph, places: Places) -> None:
    """Puts the nodes of a graph in the order of their places, and within each as they stand."""
    nodes = sorted(graph, key=lambda node: places.nodes[node.name or ""])
    graph.remove(nodes)
    graph.extend(nodes)


def parts_by_name(graph: ir.Graph) -> dict[str, int]:
    """Returns the part of each node by name."""
    return {node.name or "": part_of_node(node) for node in graph}


def _spread(graph: ir.Graph, chain: frozenset[ir.Node]) -> None:
    """Puts a copy of every other node into each part that reads it."""
    taken = {node.name for node in graph}
    outputs = set(graph.outputs)
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node in graph:
        for value in read_by(node):
            readers.setdefault(value, []).append(node)
    for node in reversed(list(graph)):
        if node in chain:
            continue
        users = [(reader, v) for v in node.outputs for reader in readers.get(v, ())]
        parts = {part_of_node(reader) for reader, _ in users}
        if any(v in outputs for v in node.outputs):
            parts.add(0)
        first, *others = sorted(parts) or [0]
        node.metadata_props[PART] = str(first)
        for part in others:
            twin = _twin(node, f"{node.name}@{part}", taken)
            twin.metadata_props[PART] = str(part)
            graph.insert_after(node, twin)
            for value in read_by(twin):
                readers.setdefault(value, []).append(twin)
            for old, new in zip(node.outputs, twin.outputs, strict=True):
                moved = [r for r in readers.get(old, ()) if part_of_node(r) == part]
                for reader in moved:
                    replace_reads(reader, {old: new})
                    readers[old].remove(reader)
                    readers.setdefault(new, []).append(reader)


def _twin(node: ir.Node, name: str, taken: set[str | None]) -> ir.Node:
    """A copy of a node without bodies, with outputs of its own."""
    while name in taken:
        name += "'"
    taken.add(name)
    twin = ir.Node(
        node.domain,
        node.op_type,
        list(node.inputs),
        list(node.attributes.values()),
        overload=node.overload,
        num_outputs=len(node.outputs),
        name=name,
    )
    twin.metadata_props.update(node.metadata_props)
    suffix = name.removeprefix(node.name or "")
    for old, new in zip(node.outputs, twin.outputs, strict=True):
        new.name = f"{old.name}{suffix}" if old.name else ""
        new.type, new.shape = old.type, old.shape
        new.metadata_props.update(old.metadata_props)
    return twin


def replace_reads(node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> None:
    """Makes a node read other values in place of some, its bodies included."""
    for index, value in enumerate(node.inputs):
        if value is not None and value in values:
            node.replace_input_with(index, values[value])
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        body = attribute.as_graph()
        for inner in body:
            replace_reads(inner, values)
        for index, value in enumerate(body.outputs):
            if value in values:
                body.outputs[index] = values[value]


def _copies(graph: ir.Graph, weights: Collection[str], stages: int) -> dict[str, Copy]:
    readers: dict[str, dict[int, list[ir.Node]]] = {}
    for node in graph:
        for value in read_by(node):
            name = value.name or ""
            if name in weights and graph.initializers.get(name) is value:
                users = readers.setdefault(name, {}).setdefault(part_of_node(node) % stages, [])
                users.append(node)
    found = {}
    for name, by_stage in readers.items():
        value = graph.initializers[name]
        for stage in sorted(by_stage)[1:]:
            title = f"{name}@{stage}"
            while title in graph.initializers:
                title += "'"
            copy = ir.Value(
                name=title, type=value.type, shape=value.shape, const_value=value.const_value
            )
            copy.metadata_props.update(value.metadata_props)
            graph.register_initializer(copy)
            for node in by_stage[stage]:
                replace_reads(node, {value: copy})
            found[title] = Copy(name, stage)
    return found
