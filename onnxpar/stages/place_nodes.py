"""Writes the virtual stage of each node into its metadata, and copies what several stages read.

Nodes outside the chain (masks and positions, which depend on no weight; nodes that depend only on
weights) are computed by a copy in each virtual stage that reads them, so that nothing is sent. A
weight that several stages read becomes one initializer for each stage, a *copy*. The optimizer adds
up the gradients of copies over the stages once per step, as Megatron-LM does with an embedding that
is also the head (Narayanan et al., 2021).
"""

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxpar.graph.body_captures import read_by
from onnxpar.graph.metadata_keys import VIRTUAL_STAGE
from onnxpar.graph.names import Names
from onnxpar.graph.new_nodes import twin
from onnxpar.graph.pipeline_places import Copy, Places, virtual_stage_of


def put_stages(
    graph: ir.Graph,
    computed_in: Mapping[ir.Node, tuple[int, ...]],
    weights: Collection[str],
    stages: int,
) -> dict[str, Copy]:
    """Gives every node its virtual stage, in metadata.

    Args:
        graph: The graph; it is changed.
        computed_in: The virtual stages that compute each node; each gets a copy. The nodes are in
            topological order.
        weights: Names of the initializers that are copied if several stages read them.
        stages: Number of stages; virtual stage v runs on stage `v % stages`.

    Returns:
        The copies made, by name.
    """
    _spread(graph, computed_in)
    return _copies(graph, weights, stages)


def order_by_place(graph: ir.Graph, places: Places) -> None:
    """Sorts the nodes of a graph by place; within a place they keep their order."""
    nodes = sorted(graph, key=lambda node: places.nodes[node.name or ""])
    graph.remove(nodes)
    graph.extend(nodes)


def virtual_stages_by_name(graph: ir.Graph) -> dict[str, int]:
    """Returns the virtual stage of each node by name."""
    return {node.name or "": virtual_stage_of(node) for node in graph}


def _spread(graph: ir.Graph, computed_in: Mapping[ir.Node, tuple[int, ...]]) -> None:
    """Puts a copy of every node into each further virtual stage that computes it."""
    names = Names(node.name for node in graph)
    versions: dict[int, dict[ir.Value, ir.Value]] = {}
    for node, (first, *others) in computed_in.items():
        node.metadata_props[VIRTUAL_STAGE] = str(first)
        for virtual in others:
            name = names.fresh(f"{node.name}@{virtual}")
            copy = twin(node, node.inputs, name.removeprefix(node.name or ""))
            copy.metadata_props[VIRTUAL_STAGE] = str(virtual)
            graph.insert_after(node, copy)
            replace_reads(copy, versions.get(virtual, {}))
            made = versions.setdefault(virtual, {})
            made.update(zip(node.outputs, copy.outputs, strict=True))
        replace_reads(node, versions.get(first, {}))


def replace_reads(node: ir.Node, values: Mapping[ir.Value, ir.Value]) -> None:
    """Makes a node and its bodies read other values in place of the keys of `values`."""
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
                users = readers.setdefault(name, {}).setdefault(virtual_stage_of(node) % stages, [])
                users.append(node)
    found = {}
    titles = Names(graph.initializers)
    for name, by_stage in readers.items():
        value = graph.initializers[name]
        for stage in sorted(by_stage)[1:]:
            title = titles.fresh(f"{name}@{stage}")
            copy = ir.Value(
                name=title, type=value.type, shape=value.shape, const_value=value.const_value
            )
            copy.metadata_props.update(value.metadata_props)
            graph.register_initializer(copy)
            for node in by_stage[stage]:
                replace_reads(node, {value: copy})
            found[title] = Copy(name, stage)
    return found
