"""The sum over pipeline stages that optimizers need for norms and for tied weights."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, OpDef
from onnxpar.resharding.routes import moved_bytes

STAGE_SUM = "StageSum"
"""Operator of the undivided program: a sum over the stages in its attribute `stages`."""


def stage_sum_rule(view: NodeView) -> OpRule:
    """StageSum: every dim; counterparts in all stages hold the same shard."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names} -> {names}")


def stage_sum_local(node: LocalNode) -> Sequence[ir.Value]:
    """An all-reduce over the counterparts of a rank in these stages."""
    stages = tuple(node.attr("stages"))
    x, shape = node.input(0), node.in_shape(0)
    size: Dim = int(x.dtype.itemsize) if x.dtype is not None else 0
    for d in shape:
        size = size * d
    source = node.view.node.inputs[0]
    return (
        node.builder.collective(
            "AllReduce",
            x,
            (),
            shape=shape,
            moved=moved_bytes("all_reduce", size, len(stages)),
            value=source.name or "" if source is not None else "",
            reason=f"{node.name} sums over stages {', '.join(map(str, stages))}",
            stages=stages,
            reduction="sum",
        ),
    )


DEFS = (
    OpDef(
        DOMAIN,
        STAGE_SUM,
        1,
        stage_sum_rule,
        stage_sum_local,
        gradient=NOT_DIFFERENTIABLE,
        keeps_zero=True,
    ),
)
