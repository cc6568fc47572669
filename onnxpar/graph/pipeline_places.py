"""The virtual stages of a pipeline in which the nodes of a program run, and copies of weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import onnx_ir as ir

from onnxpar.core.sharding import Sharding
from onnxpar.graph.metadata_keys import VIRTUAL_STAGE


def virtual_stage_of(node: ir.Node) -> int:
    """Returns the virtual stage that a node belongs to; 0 if the model is not cut into stages."""
    return int(node.metadata_props.get(VIRTUAL_STAGE, "0"))


class PlaceKind(StrEnum):
    """What the nodes of a place compute for a virtual stage; the value begins its program's name.

    A `WEIGHT` is the part of a backward for which no other stage waits. `FORWARD_BACKWARD` is the
    forward and, at once, the backward without that part.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT = "weight"
    FORWARD_BACKWARD = "forward_backward"


@dataclass(frozen=True)
class Places:
    """The place of each node and output of a program; a place is a program of a virtual stage.

    Attributes:
        virtual_stage: The virtual stage of each place.
        kinds: The kind of each place.
        nodes: The place of each node, by name.
        outputs: The place of each graph output, by name.
        stages: Number of stages; stage s has the virtual stages s, s + stages, ….
        sent: The sharding in which a value goes to other stages, by name, if it is not the one in
            which the value was made.
    """

    virtual_stage: tuple[int, ...]
    kinds: tuple[PlaceKind, ...]
    nodes: Mapping[str, int]
    outputs: Mapping[str, int]
    stages: int = 1
    sent: Mapping[str, Sharding] = field(default_factory=dict)

    def is_sent(self, source: int, target: int) -> bool:
        """Whether values go from one virtual stage to another by messages between ranks."""
        return (target - source) % self.stages != 0


ONE_PLACE = Places((0,), (PlaceKind.FORWARD,), {}, {})
"""The only place of a program that is not cut into stages."""


def with_added(places: Places, added: Mapping[str, str]) -> Places:
    """Returns the places with further nodes; `added` names the node whose place each one gets."""
    if not places.nodes:
        return places
    nodes = {name: places.nodes[beside] for name, beside in added.items()}
    return replace(places, nodes={**places.nodes, **nodes})


@dataclass(frozen=True)
class Copy:
    """An initializer that is the copy of another one in a further stage.

    Attributes:
        original: Name of the other one.
        stage: The stage of the copy.
    """

    original: str
    stage: int
