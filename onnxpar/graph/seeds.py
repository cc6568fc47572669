"""What the user fixed before propagation, resolved to the mesh and the nodes of one model."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import DimSharding, Sharding
from onnxpar.graph.plan import NodePlan


@dataclass(frozen=True)
class NodeSeed:
    """A strategy for one node.

    Attributes:
        node: Name of the node.
        factors: Components of each factor of its rule that is split; all others are replicated.
        out: For each output, the sharding to bring it into after it is made; None: as it is made.
        where: Where the user said so, `file:line`, for messages.
        carried: For operands that stay partial: their atoms and reduction.
        pinned: Whether it is the user's word; else it is what followed from the user's word before.
    """

    node: str
    factors: Mapping[str, DimSharding]
    out: tuple[Sharding | None, ...] = ()
    where: str = ""
    carried: Mapping[int, tuple[Atoms, str]] = field(default_factory=dict)
    pinned: bool = True


@dataclass(frozen=True)
class Seeds:
    """What the user fixed.

    Attributes:
        mesh: The device mesh, fine enough for every strategy.
        nodes: Strategies of nodes, by node name.
        inputs: Sharding of graph inputs, by name; those not named are whole.
        parameters: Sharding of initializers, by name; those not named follow their users.
        parameter_axes: Runs of atoms that split parameters and what follows from them (tensor
            parallelism), never the batch.
        outputs: Sharding in which graph outputs leave, by name, which may be partial. Those not
            named leave as they are made, reduced.
        plans: Plans of nodes that another program of the same model was given, by node name; kept
            where the node has the same rule here.
        rest: What happens to nodes without a strategy: "propagate" or "replicate".
        held: Graph inputs whose layout is the user's word: they enter in no other.
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
