"""How the backward of a node is divided where that node has a strategy: as the node itself.

What a forward node reads whole it has a whole cotangent of, what it reads split a split one, and a
factor that an operand lacks is summed away in the operand's cotangent, which is then partial. This
duality (Megatron-LM's f and g, Shoeybi et al., 2019) is what a search counts a strategy's backward
by, so a plan that follows from its strategies has to keep it: node by node the least traffic may be
elsewhere, and lead the rest of the backward pass away from its parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.sharding import Sharding
from onnxpar.graph.plan import NodePlan


@dataclass(frozen=True)
class Dual:
    """The layout of a backward node by its forward node's plan.

    Attributes:
        inputs: The layout of each operand; None where the forward node says nothing of it.
        outputs: The same of the outputs.
        adds: Whether it adds up several readers' shares of a cotangent. Shares that are partial
            over the same devices may be one sum before they are reduced.
    """

    inputs: tuple[Sharding | None, ...]
    outputs: tuple[Sharding | None, ...]
    adds: bool


def dual(
    node: ir.Node, forward: ir.Node, plan: NodePlan, links: Mapping[str, tuple[str, ...]]
) -> Dual | None:
    """Returns the layout of a backward node by its forward node's plan; None if there is none.

    Args:
        node: The backward node.
        forward: The node that it is of the gradient of.
        plan: How that one is sharded.
        links: Of each cotangent, and each contribution to one, its primals, by name.
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
    # What fills a cotangent with zeros reads nothing of the forward node.
    return Dual(inputs, outputs, adds) if any(s is not None for s in (*inputs, *outputs)) else None
