"""Barrier: an identity that separates the nodes before it from those after (domain `onnxpar`).

onnxruntime merges equal nodes of standard operators, which would undo recomputation. A node that
reads a Barrier's result never equals one that reads its operand. The elements of its further
operands are not read; what reads the result runs after them, whatever order onnxruntime chooses.
"""

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.slots import IN_PLACE

BARRIER = "Barrier"
VERSION = 1


def barrier_rule(view: NodeView) -> OpRule:
    """Barrier: every dim; its operand may be partial in any way."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names}{', *' * (view.arity - 1)} -> {names}; linear: any 0")


def barrier_node(name: str, operand: ir.Value, after: ir.Value, result: ir.Value) -> ir.Node:
    """Returns a Barrier from `operand` to `result`, which is computed after the value `after`."""
    return ir.Node(DOMAIN, BARRIER, [operand, after], outputs=[result], name=name)


def is_barrier(node: ir.Node) -> bool:
    """Returns whether a node is a Barrier."""
    return node.domain == DOMAIN and node.op_type == BARRIER


DEFS = (
    OpDef(
        DOMAIN,
        BARRIER,
        VERSION,
        barrier_rule,
        gradient=Missing("it is inserted only after differentiation"),
        keeps_zero=True,
        memory=IN_PLACE,
    ),
)
