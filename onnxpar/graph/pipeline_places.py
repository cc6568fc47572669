"""Where the nodes of a program run in a pipeline: virtual stages, places, copies of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.graph.metadata_keys import VIRTUAL_STAGE


def virtual_stage_of(node: ir.Node) -> int:
    """Returns the virtual stage that a node belongs to; 0 where the model is not cut."""
    return int(node.metadata_props.get(VIRTUAL_STAGE, "0"))


@dataclass(frozen=True)
class Places:
    """Where each node and output of a program runs: places are programs of virtual stages.

    Attributes:
        virtual_stage: That of each place.
        nodes: The place of each node, by name.
        outputs: The place of each graph output, by name.
    """

    virtual_stage: tuple[int, ...]
    nodes: Mapping[str, int]
    outputs: Mapping[str, int]


ONE_PLACE = Places((0,), {}, {})
"""The only place of a program that is not cut."""


def with_added(places: Places, added: Mapping[str, str]) -> Places:
    """Returns the places of a program with further nodes, each with the node beside it."""
    if not places.nodes:
        return places
    nodes = {name: places.nodes[beside] for name, beside in added.items()}
    return replace(places, nodes={**places.nodes, **nodes})


@dataclass(frozen=True)
class Copy:
    """An initializer that stands for another one in a further stage.

    Attributes:
        original: Name of that other one.
        stage: The stage.
    """

    original: str
    stage: int
