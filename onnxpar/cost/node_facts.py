"""What one device computes for the nodes of a program; nodes that are alike share it."""

from dataclasses import dataclass, field
from math import prod

import onnx_ir as ir

from onnxpar.cost.cost_model import CostModel, Work
from onnxpar.facts.program import Program
from onnxpar.graph.plan import NodePlan
from onnxpar.graph.shapes import itemsize
from onnxpar.ops.kernel_memory import call, kernel
from onnxpar.ops.slots import Kernel


@dataclass(frozen=True)
class NodeFacts:
    """What a device computes for a node.

    Attributes:
        work: Its arithmetic and memory traffic.
        shapes: The local shapes of its results.
        itemsizes: Bytes of an element of each result.
        sizes: Bytes of each result.
        masked: For each operand, whether its padding must be overwritten before the node reads it.
        kernel: How its kernel uses memory.
        workspace: Bytes that it needs while it runs.
    """

    work: Work
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    sizes: tuple[int, ...]
    masked: tuple[bool, ...]
    kernel: Kernel
    workspace: int


@dataclass
class FactsOfNodes:
    """What a device computes for each node under a plan.

    Attributes:
        program: The program.
        cost: The cost model, on the mesh of the plan.
    """

    program: Program
    cost: CostModel
    # By the kind of the node and the identity of its plan, which is kept so that it stays unique.
    _known: dict[tuple[int, int], tuple[NodePlan, NodeFacts]] = field(default_factory=dict)

    def of(self, node: ir.Node, chosen: NodePlan) -> NodeFacts:
        """Returns what a device computes for a node.

        Args:
            node: The node.
            chosen: Its plan.
        """
        key = self.program.kinds[node.name or ""], id(chosen)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = chosen, self._of(node, chosen)
        return known[1]

    def _of(self, node: ir.Node, chosen: NodePlan) -> NodeFacts:
        cost, rules, name = self.cost, self.program.rules, node.name or ""
        registry = self.program.registry
        shapes = tuple(cost.local_shape(s) for s in chosen.outputs)
        widths = tuple(map(itemsize, node.outputs))
        operands = [None if s is None else cost.local_shape(s) for s in chosen.inputs]
        memory = kernel(node, registry)
        seen = call(node, operands, shapes, widths[0] if widths else 0, registry)
        return NodeFacts(
            cost.node(rules.by_node[name], rules.views[name], chosen, rules.costs.get(name)),
            shapes,
            widths,
            tuple(prod(shape) * width for shape, width in zip(shapes, widths, strict=True)),
            tuple(
                want is not None and cost.masks(chosen.rule, chosen, index)
                for index, want in enumerate(chosen.inputs)
            ),
            memory,
            memory.work(seen),
        )
