"""Elementwise operators: every dim is a parallel factor; they differ in their linear clauses."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import onnx_ir as ir

from onnxpar.core.rule import OpRule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.device.cuda_functions import itself
from onnxpar.ops.elementwise import elementwise_gradient as grad
from onnxpar.ops.elementwise.broadcast import broadcast_rule
from onnxpar.ops.folding import EXACT, INTEGERS, nonzero_divisor
from onnxpar.ops.grad_node import Gradient
from onnxpar.ops.local_helpers import BOOL, with_padding
from onnxpar.ops.local_node import LocalNode, copy_node
from onnxpar.ops.old_node import OldNode, Upgrade
from onnxpar.ops.operator import BY_BODY, LocalFn, NotDifferentiable, OpDef, RuleFn
from onnxpar.ops.parts import same_node
from onnxpar.ops.sizes.computed_sizes import (
    ABS,
    ADD,
    AND,
    CEIL,
    EQUAL,
    FLOOR,
    GREATER,
    GREATER_OR_EQUAL,
    LESS,
    LESS_OR_EQUAL,
    MAX,
    MIN,
    MUL,
    NEG,
    NOT,
    OR,
    POW,
    SUB,
    SUM,
    XOR,
    clipped,
    divided,
    remainder,
)
from onnxpar.ops.slots import FOLLOWS, IN_PLACE, Kernel, KernelCall, Roles


def _rule(linear: str = "") -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        return broadcast_rule(view, linear)

    clause = f"; linear: {linear}" if linear else ""
    rule.__doc__ = f"Every dim may be sharded; operands broadcast as in numpy{clause}."
    return rule


def _extrema(operands: Iterable[int]) -> str:
    """The clause that lets one operand be a partial max or min: the result grows with each."""
    return ", ".join(f"{reduction} {i}" for i in operands for reduction in ("max", "min"))


def _sum_rule(view: NodeView) -> OpRule:
    """Every dim may be sharded; operands broadcast as in numpy, and may all be partial sums."""
    everyone = "+".join(str(i) for i in range(view.arity))
    return broadcast_rule(view, f"sum {everyone}, {_extrema(range(view.arity))}")


def _mean(node: BodyNode | LocalNode, shape: Sequence[Dim]) -> Sequence[ir.Value]:
    operands = [node.input(i) for i in range(node.arity)]
    total = node.op("Sum", *operands, shape=shape)
    return [node.op("Div", total, node.number(len(operands), total))]


def _mean_body(node: BodyNode) -> Sequence[ir.Value]:
    """The sum of the operands, divided by their number."""
    return _mean(node, node.view.out_shape())


def _mean_local(node: LocalNode) -> Sequence[ir.Value]:
    """The sum of the operands, divided by their number: CUDA has no Mean."""
    return _mean(node, node.out_shape())


def _shrink_body(node: BodyNode) -> Sequence[ir.Value]:
    """Gives x + bias below -lambd, x - bias above lambd, and 0 between them."""
    x, view = node.input(0), node.view
    edge, bias = float(view.attr("lambd", 0.5)), node.number(view.attr("bias", 0.0), x)
    low = node.op("Less", x, node.number(-edge, x), dtype=BOOL)
    high = node.op("Greater", x, node.number(edge, x), dtype=BOOL)
    upper = node.op("Where", high, node.op("Sub", x, bias), node.number(0, x), dtype=x.dtype)
    return [node.op("Where", low, node.op("Add", x, bias), upper, dtype=x.dtype)]


def _extremum_rule(view: NodeView) -> OpRule:
    """Max: one operand may be a partial max or min, or all operands a partial max; Min likewise."""
    everyone = "+".join(str(i) for i in range(view.arity))
    joint = f", {view.op_type.lower()} {everyone}" if view.arity > 1 else ""
    return broadcast_rule(view, _extrema(range(view.arity)) + joint)


def _div_rule(view: NodeView) -> OpRule:
    """Div: every dim; linear in floats only, since quotients of integers are rounded."""
    return broadcast_rule(view, "sum 0" if view.has_floats else "")


def _quotient_local(node: LocalNode) -> Sequence[ir.Value]:
    """The same operator; padding of divisors becomes 1: dividing an integer by 0 ends the run."""
    if node.view.has_floats:
        return node.copy()
    return node.copy([node.input(0), with_padding(node, 1, 1)])


def _hard_sigmoid_rule(view: NodeView) -> OpRule:
    """Every dim; the operand may be a partial max or min if the slope alpha is not negative."""
    return broadcast_rule(view, _MONOTONE if view.attr("alpha", 0.2) >= 0 else "")


def _shrink_rule(view: NodeView) -> OpRule:
    """Every dim; the operand may be a partial max or min if no jump goes down (bias ≤ lambd)."""
    edge, bias = float(view.attr("lambd", 0.5)), float(view.attr("bias", 0.0))
    rises = bias <= edge if edge >= 0 else bias <= 0
    return broadcast_rule(view, _MONOTONE if rises else "")


# Operators that keep the order of elements may take a partial max or min. Sqrt and Log keep it too,
# but one device's term may be negative, and become NaN, where the greatest is not.
_MONOTONE = "max 0, min 0"

_STEPS = NotDifferentiable("its derivative is 0 except at jumps")
_TRUTH = NotDifferentiable("its result is a truth value or a bit pattern")


def _op(
    name: str,
    version: int,
    gradient: Gradient | NotDifferentiable,
    rule: RuleFn,
    local: LocalFn = copy_node,
    *,
    zero: bool = False,
    **slots: Any,
) -> OpDef:
    slots = {"on_part": same_node, **slots}
    return OpDef("", name, version, rule, local, gradient, keeps_zero=zero, **slots)


def _test(name: str, version: int, **slots: Any) -> OpDef:
    return OpDef("", name, version, _rule(), gradient=_TRUTH, on_part=same_node, **slots)


_exact = partial(_op, precision=FOLLOWS, folding=EXACT)
"""An operator whose results IEEE 754 rounds in one way, in the precision of its operands."""

# The bias of a product, or the scale of a composed normalisation, may be either operand.
_ROWS = Roles(row_vectors=(0, 1))


def _sum_kept(call: KernelCall) -> int:
    """After a bias: onnxruntime fuses both into one kernel, which keeps the sum."""
    return call.bytes(call.outputs[0]) if call.after_bias else 0


def _bounds_as_operands(old: OldNode) -> None:
    for index, name in enumerate(("min", "max"), 1):
        old.operand(name, index)
        old.like(index)


DEFS = (
    _op("Relu", 1, grad.relu, _rule(_MONOTONE), zero=True, memory=IN_PLACE, precision=FOLLOWS),
    _op("Tanh", 1, grad.tanh, _rule(_MONOTONE), zero=True, memory=IN_PLACE, precision=FOLLOWS),
    _op("Sigmoid", 1, grad.sigmoid, _rule(_MONOTONE), memory=IN_PLACE, precision=FOLLOWS),
    _op("Exp", 1, grad.exp, _rule(_MONOTONE)),
    _op("Ceil", 1, _STEPS, _rule(_MONOTONE), zero=True, values=CEIL, folding=EXACT),
    _op("Floor", 1, _STEPS, _rule(_MONOTONE), zero=True, values=FLOOR, folding=EXACT),
    _op("Round", 11, _STEPS, _rule(_MONOTONE), zero=True),
    _op("Erf", 9, grad.erf, _rule(_MONOTONE), zero=True, precision=FOLLOWS),
    _op("Softplus", 1, grad.softplus, _rule(_MONOTONE), memory=IN_PLACE),
    _op("Softsign", 1, grad.softsign, _rule(_MONOTONE), zero=True, memory=IN_PLACE),
    _op("Atan", 7, grad.atan, _rule(_MONOTONE), zero=True, device_function=itself("Atan")),
    _op("Sinh", 9, grad.sinh, _rule(_MONOTONE), zero=True, device_function=itself("Sinh")),
    _op("Asinh", 9, grad.asinh, _rule(_MONOTONE), zero=True, device_function=itself("Asinh")),
    _op("Acos", 7, grad.acos, _rule(), device_function=itself("Acos")),
    _op("Acosh", 9, grad.acosh, _rule(), device_function=itself("Acosh")),
    _op("Asin", 7, grad.asin, _rule(), zero=True, device_function=itself("Asin")),
    _op("Atanh", 9, grad.atanh, _rule(), zero=True, device_function=itself("Atanh")),
    *(
        _op(
            name,
            version,
            gradient,
            _rule(),
            zero=True,
            memory=IN_PLACE,
            precision=FOLLOWS,
            device_function=itself(name, alpha="float"),
        )
        for name, version, gradient in (("Celu", 12, grad.celu), ("Elu", 1, grad.elu))
    ),
    _op("Cos", 7, grad.cos, _rule()),
    _op("Cosh", 9, grad.cosh, _rule(), device_function=itself("Cosh")),
    _op(
        "Gelu", 20, grad.gelu, _rule(), zero=True, memory=Kernel(work=_sum_kept), precision=FOLLOWS
    ),
    _op("HardSwish", 14, grad.hard_swish, _rule(), zero=True, precision=FOLLOWS),
    _op("LeakyRelu", 1, grad.leaky_relu, _rule(), zero=True, memory=IN_PLACE, precision=FOLLOWS),
    _op("Log", 1, grad.log, _rule()),
    _op("Mish", 18, grad.mish, _rule(), zero=True, precision=FOLLOWS),
    _op("Reciprocal", 1, grad.reciprocal, _rule()),
    _op(
        "Selu",
        1,
        grad.selu,
        _rule(),
        zero=True,
        memory=IN_PLACE,
        precision=FOLLOWS,
        device_function=itself("Selu", alpha="float", gamma="float"),
    ),
    _op("Sin", 7, grad.sin, _rule(), zero=True),
    _op("Sqrt", 1, grad.sqrt, _rule(), zero=True, folding=EXACT),
    _op("Tan", 7, grad.tan, _rule(), zero=True, device_function=itself("Tan")),
    _op(
        "ThresholdedRelu",
        10,
        grad.thresholded_relu,
        _rule(),
        zero=True,
        memory=IN_PLACE,
        device_function=itself("ThresholdedRelu", alpha="float"),
    ),
    _test("IsNaN", 9),
    _test("IsInf", 10),
    _test("Not", 1, values=NOT, folding=EXACT),
    _test("BitwiseNot", 18, folding=INTEGERS),
    _test("And", 7, broadcasts=True, values=AND, folding=EXACT),
    _test("Or", 7, broadcasts=True, values=OR, folding=EXACT),
    _test("Xor", 7, broadcasts=True, values=XOR, folding=EXACT),
    _test("Equal", 7, broadcasts=True, values=EQUAL, folding=EXACT),
    _test("Less", 7, broadcasts=True, values=LESS, folding=EXACT),
    _test("Greater", 7, broadcasts=True, values=GREATER, folding=EXACT),
    _test("LessOrEqual", 12, broadcasts=True, values=LESS_OR_EQUAL, folding=EXACT),
    _test("GreaterOrEqual", 12, broadcasts=True, values=GREATER_OR_EQUAL, folding=EXACT),
    _test("BitwiseAnd", 18, broadcasts=True, folding=INTEGERS),
    _test("BitwiseOr", 18, broadcasts=True, folding=INTEGERS),
    _test("BitwiseXor", 18, broadcasts=True, folding=INTEGERS),
    _test("BitShift", 11, broadcasts=True, folding=INTEGERS),
    _op(
        "HardSigmoid", 1, grad.hard_sigmoid, _hard_sigmoid_rule, memory=IN_PLACE, precision=FOLLOWS
    ),
    # |xy| = |x||y|. This holds for sign and reciprocal too, but the product may vanish or overflow
    # where its factors do not.
    _exact("Abs", 1, grad.absolute, _rule("prod 0"), zero=True, values=ABS),
    _op("Sign", 9, _STEPS, _rule(_MONOTONE), zero=True, folding=EXACT),
    _exact("Neg", 6, grad.neg, _rule("sum 0"), zero=True, values=NEG),
    _exact(
        "Add",
        7,
        grad.sum_gradient,
        _sum_rule,
        zero=True,
        broadcasts=True,
        roles=replace(_ROWS, adds=True),
        values=ADD,
    ),
    _exact(
        "Sub",
        7,
        grad.sub_gradient,
        _rule(f"sum 0+1, {_extrema((0,))}"),
        zero=True,
        broadcasts=True,
        values=SUB,
    ),
    _exact(
        "Mul",
        7,
        grad.mul_gradient,
        _rule("sum 0, sum 1, prod 0+1"),
        zero=True,
        broadcasts=True,
        roles=_ROWS,
        values=MUL,
    ),
    _exact(
        "Div",
        7,
        grad.div_gradient,
        _div_rule,
        _quotient_local,
        broadcasts=True,
        values=divided,
        folding=replace(EXACT, defined=nonzero_divisor),
    ),
    _op("Pow", 7, grad.pow_gradient, _rule(), broadcasts=True, values=POW),
    _op(
        "Mod",
        10,
        grad.mod_gradient,
        _rule(),
        _quotient_local,
        broadcasts=True,
        values=remainder,
        folding=replace(INTEGERS, defined=nonzero_divisor),
    ),
    _op(
        "PRelu",
        7,
        grad.prelu_gradient,
        _rule(),
        zero=True,
        roles=Roles(vectors=(1,)),
        precision=FOLLOWS,
    ),
    _op("Sum", 6, grad.sum_gradient, _sum_rule, zero=True, broadcasts=True, values=SUM),
    OpDef("", "Shrink", 9, _shrink_rule, gradient=BY_BODY, body=_shrink_body, memory=IN_PLACE),
    OpDef("", "Swish", 24, _rule(), gradient=BY_BODY, keeps_zero=True, precision=FOLLOWS),
    OpDef(
        "",
        "Mean",
        6,
        _sum_rule,
        _mean_local,
        gradient=BY_BODY,
        keeps_zero=True,
        body=_mean_body,
        broadcasts=True,
    ),
    *(
        _exact(
            name,
            6,
            grad.extremum_gradient,
            _extremum_rule,
            zero=True,
            broadcasts=True,
            values=values,
        )
        for name, values in (("Max", MAX), ("Min", MIN))
    ),
    _exact(
        "Clip",
        6,
        grad.clip_gradient,
        _rule(_MONOTONE),
        memory=IN_PLACE,
        values=clipped,
        upgrades={11: Upgrade(_bounds_as_operands)},
    ),
)
