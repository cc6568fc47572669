"""Elementwise operators: every dim is a parallel factor; they differ in what they are linear in."""

from collections.abc import Callable

from onnxpar.analysis.shapes import NodeView
from onnxpar.ops.broadcast import broadcast_rule
from onnxpar.ops.registry import NOT_DIFFERENTIABLE, OpDef
from onnxpar.ops.rule import OpRule


def _rule(linear: str = "") -> Callable[[NodeView], OpRule]:
    return lambda view: broadcast_rule(view, linear)


def _variadic(linear_of: Callable[[str], str]) -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        return broadcast_rule(view, linear_of("+".join(str(i) for i in range(view.arity))))

    return rule


def _mul_rule(view: NodeView) -> OpRule:
    return broadcast_rule(view, "sum 0, sum 1, prod 0+1")


# Operators that keep the order of their operand may be applied before a pending max or min.
_MONOTONE = "max 0, min 0"
_MONOTONE_UP = (
    ("Relu", 1, True),
    ("Tanh", 1, True),
    ("Sigmoid", 1, False),
    ("Exp", 1, False),
    ("Sqrt", 1, True),
    ("Log", 1, False),
    ("Ceil", 1, True),
    ("Floor", 1, True),
    ("Erf", 9, True),
    ("Softplus", 1, False),
)
_PLAIN_UNARY = (
    ("Gelu", 20, True),
    ("Abs", 1, True),
    ("Reciprocal", 1, False),
    ("Sin", 7, True),
    ("Cos", 7, False),
)
_LOGIC = (("And", 7), ("Or", 7), ("Xor", 7), ("Equal", 1), ("Less", 1), ("Greater", 1))
_COMPARE = (("LessOrEqual", 12), ("GreaterOrEqual", 12))

DEFS = (
    *(OpDef("", n, v, _rule(_MONOTONE), keeps_zero=z) for n, v, z in _MONOTONE_UP),
    *(OpDef("", n, v, _rule(), keeps_zero=z) for n, v, z in _PLAIN_UNARY),
    *(OpDef("", n, v, _rule(), gradient=NOT_DIFFERENTIABLE) for n, v in (*_LOGIC, *_COMPARE)),
    OpDef("", "Not", 1, _rule(), gradient=NOT_DIFFERENTIABLE),
    OpDef("", "Neg", 1, _rule("sum 0"), keeps_zero=True),
    OpDef("", "Add", 7, _rule("sum 0+1"), keeps_zero=True),
    OpDef("", "Sub", 7, _rule("sum 0+1"), keeps_zero=True),
    OpDef("", "Mul", 7, _mul_rule, keeps_zero=True),
    OpDef("", "Div", 7, _rule("sum 0")),
    OpDef("", "Pow", 7, _rule()),
    OpDef("", "Mod", 10, _rule(), gradient=NOT_DIFFERENTIABLE),
    OpDef("", "Sum", 8, _variadic(lambda g: f"sum {g}"), keeps_zero=True),
    OpDef("", "Max", 8, _variadic(lambda g: f"max {g}"), keeps_zero=True),
    OpDef("", "Min", 8, _variadic(lambda g: f"min {g}"), keeps_zero=True),
    OpDef("", "Clip", 6, lambda v: broadcast_rule(v, _MONOTONE)),
)
