"""How the backward of a node with a strategy is sharded: like the node itself.

The cotangent of an operand is replicated or sharded like the operand. A factor that the operand
lacks is summed in its cotangent, which is then partial. The search prices the backward of a
strategy by this duality (Megatron-LM's f and g, Shoeybi et al., 2019), so a plan that follows from
its strategies must keep it. The choice by the least traffic of each node could differ, and lead the
rest of the backward pass to other layouts than those of the parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.sharding import Sharding
from onnxpar.graph.plan import NodePlan


@dataclass(frozen=True)
class Dual:
    """The layout of a backward node that follows from the plan of its forward node.

    Attributes:
        inputs: The layout of each operand; None if the forward node does not determine it.
        outputs: The same for the outputs.
        adds: Whether it adds the terms of a cotangent from several readers. Terms that are partial
            over the same atoms may be added before they are reduced.
    """

    inputs: tuple[Sharding | None, ...]
    outputs: tuple[Sharding | None, ...]
    adds: bool


def dual(
    node: ir.Node, forward: ir.Node, plan: NodePlan, links: Mapping[str, tuple[str, ...]]
) -> Dual | None:
    """Returns the layout of a backward node from its forward node's plan; None if there is none.

    Args:
        node: The backward node.
        forward: The node whose gradient it computes.
        plan: The plan of the forward node.
        links: For each cotangent, and each term of one, its primals, by name.
    """
    read = {v.name: s for v, s in zip(forward.inputs, plan.inputs, strict=False) if v is not None}
    made = {v.name: s.with_partial(()) for v, s in zip(forward.outputs, plan.outputs, strict=True)}

    def layout_of(
        value: ir.Value | None, found: Mapping[str | None, Sharding | None]
    ) -> Sharding | None:
        primals = () if value is None else links.get(value.name or "", ())
        return next((found[p] for p in primals if p in found), None)

    known = {**read, **made}
    inputs = tuple(
        None if v is None else known[v.name] if v.name in known else layout_of(v, made)
        for v in node.inputs
    )
    sums = [layout_of(v, made) for v in node.outputs]
    adds = sums[0] is not None and all(layout_of(v, made) is not None for v in node.inputs)
    outputs = tuple(sums if adds else (layout_of(v, read) for v in node.outputs))
    # A node that fills a cotangent with zeros does not depend on the forward node.
    return Dual(inputs, outputs, adds) if any(s is not None for s in (*inputs, *outputs)) else None
