"""Barrier: an identity that keeps apart what comes before it and what after (domain `onnxpar`).

onnxruntime merges equal nodes of standard operators, and so would undo recomputation; a node that
reads a Barrier's result is equal to none that reads its operand. Its further operands are read for
their being there: what reads the result cannot run before them, wherever onnxruntime's own order
puts it.
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
    """Barrier: every dim, replicated or sharded, and whatever its operand waits for."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names}{', *' * (view.arity - 1)} -> {names}; linear: any 0")


def barrier_node(name: str, operand: ir.Value, after: ir.Value, result: ir.Value) -> ir.Node:
    """Returns a Barrier between two values of one type and shape, behind a third value."""
    return ir.Node(DOMAIN, BARRIER, [operand, after], outputs=[result], name=name)


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
