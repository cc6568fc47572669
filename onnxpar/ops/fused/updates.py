"""The fused updates of optimizers: element by element over a parameter and its states."""

from collections.abc import Callable

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.onnxpar_functions import (
    ADAM_STEP,
    ADAMW_STEP,
    MOMENTUM_STEP,
    SGD_STEP,
    SQUARE_SUM,
    VERSION,
    Function,
)
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, OpDef
from onnxpar.ops.slots import IN_PLACE, Kernel


def _update_rule(function: Function, tensors: int) -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        dims = " ".join(axis_names(len(view.shape(0))))
        operands = [dims] * tensors + ["."] * (len(function.inputs) - tensors)
        return parse_rule(f"{', '.join(operands)} -> {', '.join([dims] * len(function.outputs))}")

    rule.__doc__ = "Every dim of the parameter and its states; scalars whole."
    return rule


def square_sum_rule(view: NodeView) -> OpRule:
    """SquareSum: every dim is summed."""
    dims = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{dims} -> ; sum: {dims}" if dims else " -> ")


def _op(function: Function, tensors: int, memory: Kernel, *, zero: bool = False) -> OpDef:
    return OpDef(
        DOMAIN,
        function.name,
        VERSION,
        _update_rule(function, tensors),
        gradient=NOT_DIFFERENTIABLE,
        keeps_zero=zero,
        memory=memory,
    )


_ADAM = Kernel(over=((0, 0), (2, 1), (3, 2)))

DEFS = (
    _op(SGD_STEP, 2, IN_PLACE, zero=True),
    _op(MOMENTUM_STEP, 3, Kernel(over=((0, 0), (2, 1))), zero=True),
    # Zero over zero where eps is zero.
    _op(ADAM_STEP, 4, _ADAM),
    _op(ADAMW_STEP, 4, _ADAM),
    OpDef(
        DOMAIN,
        SQUARE_SUM.name,
        VERSION,
        square_sum_rule,
        gradient=NOT_DIFFERENTIABLE,
        keeps_zero=True,
    ),
)
