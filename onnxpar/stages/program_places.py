"""The places of nodes in a pipeline: the forwards, then the backwards from the last stage on."""

from collections.abc import Collection, Mapping

import onnx_ir as ir

from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.pipeline_places import PlaceKind, Places, virtual_stage_of


def forward_places(graph: ir.Graph, virtual_stages: int, stages: int) -> Places:
    """Returns the places of a program without a backward: one for each virtual stage."""
    nodes = {node.name or "": virtual_stage_of(node) for node in graph}
    kinds = (PlaceKind.FORWARD,) * virtual_stages
    return Places(tuple(range(virtual_stages)), kinds, nodes, _made(graph, nodes), stages)


def training_places(
    graph: ir.Graph,
    virtual_stages: int,
    stages: int,
    links: Mapping[str, tuple[str, ...]],
    gradients: Collection[str],
    variables: Collection[str],
    *,
    split: bool,
    joined: bool,
) -> Places:
    """Returns the places of forward and backward: all forwards, then backwards from the last.

    Args:
        graph: Forward, loss and backward.
        virtual_stages: Number of virtual stages.
        stages: Number of stages.
        links: For each cotangent its primals.
        gradients: The outputs that are gradients of parameters.
        variables: Names of the parameters that are trained.
        split: Whether a backward has two places: first what earlier stages wait for, then the
            rest, the gradients of weights (Qi et al., 2023, "Zero bubble pipeline parallelism").
        joined: Whether the forward of the last virtual stage has no place of its own, but that of
            its backward.
    """
    backward = (PlaceKind.BACKWARD, PlaceKind.WEIGHT)[: 1 + split]
    forwards, per = virtual_stages - joined, len(backward)
    virtual = [*range(forwards), *(v for v in reversed(range(virtual_stages)) for _ in backward)]
    kinds = [PlaceKind.FORWARD] * forwards + list(backward) * virtual_stages
    if joined:
        kinds[forwards] = PlaceKind.FORWARD_BACKWARD
    late = late_nodes(graph, links, variables) if split else frozenset()
    nodes = {}
    for node in graph:
        stage = virtual_stage_of(node)
        if GRADIENT_OF not in node.metadata_props:
            # That of the last one is the first backward, if they are joined.
            nodes[node.name or ""] = stage
            continue
        place = forwards + per * (virtual_stages - 1 - stage)
        nodes[node.name or ""] = place + (node.name in late)
    outputs = _made(graph, nodes)
    for name in gradients:
        outputs[name] = forwards + per * (virtual_stages - virtual[outputs[name]]) - 1
    return Places(tuple(virtual), tuple(kinds), nodes, outputs, stages)


def _made(graph: ir.Graph, nodes: Mapping[str, int]) -> dict[str, int]:
    """The place of each output: where it is made; the first if an input is passed through."""
    found = {}
    for value in graph.outputs:
        maker = value.producer()
        found[value.name or ""] = 0 if maker is None else nodes[maker.name or ""]
    return found


def late_nodes(
    graph: ir.Graph, links: Mapping[str, tuple[str, ...]], variables: Collection[str]
) -> frozenset[str]:
    """Returns the names of the backward nodes that contribute to no cotangent of an activation.

    Args:
        graph: Forward, loss and backward.
        links: For each cotangent its primals.
        variables: Names of the parameters that are trained.
    """
    known = frozenset(variables)
    found: set[str] = set()
    wanted: set[ir.Value] = set()
    for node in reversed(graph):
        if GRADIENT_OF not in node.metadata_props:
            continue
        activation = any(not known.issuperset(links.get(v.name or "", ())) for v in node.outputs)
        if activation or any(v in wanted for v in node.outputs):
            wanted.update(v for v in node.inputs if v is not None)
        else:
            found.add(node.name or "")
    return frozenset(found)
