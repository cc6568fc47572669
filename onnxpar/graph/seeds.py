"""The part of a plan that the user fixed, in terms of the mesh and the nodes of one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.graph.plan import NodePlan

SPREAD = "mindspore"
"""How nodes without a strategy get one: as MindSpore's sharding propagation spreads strategies."""


@dataclass(frozen=True)
class NodeSeed:
    """A strategy for one node.

    Attributes:
        node: Name of the node.
        factors: Components of each sharded factor of its rule; all others are replicated.
        out: For each output, the sharding into which it is resharded after the node; None: it stays
            as the node computes it.
        where: Where the user gave the strategy, `file:line`, for messages.
        carried: For operands that stay partial: their atoms and reduction.
        pinned: Whether the user gave it; else it followed from what the user gave before.
    """

    node: str
    factors: Mapping[str, DimSharding]
    out: tuple[Sharding | None, ...] = ()
    where: str = ""
    carried: Mapping[int, tuple[Atoms, str]] = field(default_factory=dict)
    pinned: bool = True


@dataclass(frozen=True)
class Seeds:
    """The part of a plan that the user fixed.

    Attributes:
        mesh: The device mesh, fine enough for every strategy.
        nodes: Strategies of nodes, by node name.
        inputs: Sharding of graph inputs, by name; others are replicated.
        parameters: Sharding of initializers, by name; others get what their readers need.
        parameter_axes: Runs of atoms that shard parameters and what follows from them (tensor
            parallelism), never the batch.
        outputs: Sharding of graph outputs, by name; it may be partial. Others have the sharding in
            which they are computed, reduced.
        plans: Plans of nodes of another program of the same model, by node name; a plan is kept if
            the node has the same rule here.
        rest: What happens to nodes without a strategy: "propagate", "replicate" or `SPREAD`.
        held: Graph inputs whose layout the user fixed, so that propagation does not change it.
    """

    mesh: Mesh
    nodes: Mapping[str, NodeSeed] = field(default_factory=dict)
    inputs: Mapping[str, Sharding] = field(default_factory=dict)
    parameters: Mapping[str, Sharding] = field(default_factory=dict)
    parameter_axes: tuple[Atoms, ...] = ()
    rest: str = "propagate"
    outputs: Mapping[str, Sharding] = field(default_factory=dict)
    plans: Mapping[str, NodePlan] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
