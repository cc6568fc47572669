"""Gradients of elementwise operators.

At a kink, each takes the derivative that PyTorch takes. Results of the forward node replace
exponentials if they already contain them. Where a textbook formula overflows or cancels although
the derivative does not, another formula is used.
"""

import math
from collections.abc import Callable, Sequence

import onnx_ir as ir

from onnxpar.ops.fused.activation_gradients import (
    GELU_GRAD,
    GELU_TANH_GRAD,
    RELU_GRAD,
    SIGMOID_GRAD,
    TANH_GRAD,
)
from onnxpar.ops.fused.written_gradients import (
    gated_gradient,
    rms_norm_gradient,
    rotary_gradient,
    silu_gradient,
)
from onnxpar.ops.grad_node import Gradient, GradNode, Through

_BOOL = ir.DataType.BOOL
Cotangents = Sequence[ir.Value | None]
Results = Sequence[ir.Value | Through | None]
# Returns the cotangent of the operand, given the node and the cotangent of its result.
Unary = Callable[[GradNode, ir.Value], ir.Value]


def unary(derive: Unary) -> Gradient:
    """Returns the gradient of an operator with one differentiable operand and one result."""

    def gradient(node: GradNode) -> Cotangents:
        return [derive(node, node.cotangent())]

    gradient.__doc__ = derive.__doc__
    return gradient


# -- pieces ------------------------------------------------------------------------------------


def _value(node: GradNode, x: ir.Value | float, like: ir.Value) -> ir.Value:
    """`x`; a number as a scalar of the type of `like`."""
    return x if isinstance(x, ir.Value) else node.number(x, like)


def _binary(node: GradNode, op_type: str, a: ir.Value, b: ir.Value | float) -> ir.Value:
    """The operator on `a` and `b`, which has the shape of `a` or broadcasts to it."""
    return node.op(op_type, a, _value(node, b, a))


def _from(node: GradNode, number: float, b: ir.Value) -> ir.Value:
    """The difference number - b."""
    return node.op("Sub", node.number(number, b), b, shape=node.shape(b))


def _where(node: GradNode, test: ir.Value, yes: ir.Value, no: ir.Value | float) -> ir.Value:
    """`yes` where the test holds; both have one shape, or one is a scalar."""
    return node.op("Where", test, yes, _value(node, no, yes), dtype=yes.dtype)


def _test(node: GradNode, op_type: str, a: ir.Value, b: ir.Value | float) -> ir.Value:
    return node.op(op_type, a, _value(node, b, a), dtype=_BOOL)


def _one_minus_square(node: GradNode, x: ir.Value) -> ir.Value:
    """1 - x² as (1 - x)(1 + x), which does not cancel near |x| = 1."""
    return node.op("Mul", _from(node, 1, x), _binary(node, "Add", x, 1))


# -- unary -------------------------------------------------------------------------------------


@unary
def relu(node: GradNode, dy: ir.Value) -> ir.Value:
    """Passes dy where y > 0."""
    return node.fused(RELU_GRAD, dy, node.output())


@unary
def tanh(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·(1 - y²)."""
    return node.fused(TANH_GRAD, dy, node.output())


@unary
def sigmoid(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·y·(1 - y)."""
    return node.fused(SIGMOID_GRAD, dy, node.output())


@unary
def exp(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·y."""
    return node.op("Mul", dy, node.output())


@unary
def log(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / x."""
    return node.op("Div", dy, node.input(0))


@unary
def sqrt(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / 2y."""
    return node.op("Div", _binary(node, "Mul", dy, 0.5), node.output())


@unary
def reciprocal(node: GradNode, dy: ir.Value) -> ir.Value:
    """-dy·y²."""
    y = node.output()
    return node.op("Neg", node.op("Mul", dy, node.op("Mul", y, y)))


@unary
def neg(node: GradNode, dy: ir.Value) -> ir.Value:
    """-dy."""
    return node.op("Neg", dy)


@unary
def absolute(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·sign x."""
    return node.op("Mul", dy, node.op("Sign", node.input(0)))


@unary
def erf(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·2/√π·exp(-x²), with the factor inside the exponential."""
    x = node.input(0)
    power = _from(node, math.log(2 / math.sqrt(math.pi)), node.op("Mul", x, x))
    return node.op("Mul", dy, node.op("Exp", power))


@unary
def softplus(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·sigmoid x."""
    return node.op("Mul", dy, node.op("Sigmoid", node.input(0)))


@unary
def softsign(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / (1 + |x|)²."""
    base = _binary(node, "Add", node.op("Abs", node.input(0)), 1)
    return node.op("Div", dy, node.op("Mul", base, base))


@unary
def sin(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·cos x."""
    return node.op("Mul", dy, node.op("Cos", node.input(0)))


@unary
def cos(node: GradNode, dy: ir.Value) -> ir.Value:
    """-dy·sin x."""
    return node.op("Neg", node.op("Mul", dy, node.op("Sin", node.input(0))))


@unary
def tan(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·(1 + y²)."""
    y = node.output()
    return node.op("Mul", dy, _binary(node, "Add", node.op("Mul", y, y), 1))


@unary
def sinh(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·cosh x."""
    return node.op("Mul", dy, node.op("Cosh", node.input(0)))


@unary
def cosh(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·sinh x."""
    return node.op("Mul", dy, node.op("Sinh", node.input(0)))


@unary
def asin(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / √(1 - x²)."""
    return node.op("Div", dy, node.op("Sqrt", _one_minus_square(node, node.input(0))))


@unary
def acos(node: GradNode, dy: ir.Value) -> ir.Value:
    """-dy / √(1 - x²)."""
    root = node.op("Sqrt", _one_minus_square(node, node.input(0)))
    return node.op("Neg", node.op("Div", dy, root))


@unary
def atan(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / (1 + x²)."""
    x = node.input(0)
    return node.op("Div", dy, _binary(node, "Add", node.op("Mul", x, x), 1))


@unary
def asinh(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / √(x² + 1)."""
    x = node.input(0)
    return node.op("Div", dy, node.op("Sqrt", _binary(node, "Add", node.op("Mul", x, x), 1)))


@unary
def acosh(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / √(x² - 1), as (x - 1)(x + 1)."""
    x = node.input(0)
    square = node.op("Mul", _binary(node, "Sub", x, 1), _binary(node, "Add", x, 1))
    return node.op("Div", dy, node.op("Sqrt", square))


@unary
def atanh(node: GradNode, dy: ir.Value) -> ir.Value:
    """Gives dy / (1 - x²)."""
    return node.op("Div", dy, _one_minus_square(node, node.input(0)))


@unary
def elu(node: GradNode, dy: ir.Value) -> ir.Value:
    """Passes dy where x > 0, else dy·αeˣ, which is dy·(y + α)."""
    alpha = node.attr("alpha", 1.0)
    y = node.output()
    test = _test(node, "Greater", y if alpha > 0 else node.input(0), 0)
    return _where(node, test, dy, node.op("Mul", dy, _binary(node, "Add", y, alpha)))


@unary
def celu(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·exp(min(x, 0)/α), the exponential being min(y, 0)/α + 1."""
    below = _binary(node, "Min", node.output(), 0)
    slope = _binary(node, "Div", below, node.attr("alpha", 1.0))
    return node.op("Mul", dy, _binary(node, "Add", slope, 1))


@unary
def selu(node: GradNode, dy: ir.Value) -> ir.Value:
    """γ·dy where x > 0, else dy·γαeˣ, which is dy·(y + γα)."""
    alpha = node.attr("alpha", 1.67326319217681884765625)
    gamma = node.attr("gamma", 1.05070102214813232421875)
    y = node.output()
    test = _test(node, "Greater", y if alpha > 0 and gamma > 0 else node.input(0), 0)
    low = _binary(node, "Add", y, gamma * alpha)
    slope = node.op("Where", test, node.number(gamma, y), low, shape=node.shape(y), dtype=y.dtype)
    return node.op("Mul", dy, slope)


@unary
def gelu(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·(Φ(x) + x·φ(x)), or the derivative of its approximation by tanh."""
    exact = node.attr("approximate", "none") == "none"
    return node.fused(GELU_GRAD if exact else GELU_TANH_GRAD, dy, node.input(0))


@unary
def mish(node: GradNode, dy: ir.Value) -> ir.Value:
    """dy·(t + x·sigmoid(x)·(1 - t²)), t = tanh softplus x."""
    x = node.input(0)
    t = node.op("Tanh", node.op("Softplus", x))
    bend = node.op("Mul", _from(node, 1, node.op("Mul", t, t)), node.op("Sigmoid", x))
    return node.op("Mul", dy, node.op("Add", t, node.op("Mul", x, bend)))


@unary
def hard_sigmoid(node: GradNode, dy: ir.Value) -> ir.Value:
    """α·dy where 0 < y < 1."""
    y = node.output()
    inside = node.op("And", _test(node, "Greater", y, 0), _test(node, "Less", y, 1))
    return _where(node, inside, _binary(node, "Mul", dy, node.attr("alpha", 0.2)), 0)


@unary
def hard_swish(node: GradNode, dy: ir.Value) -> ir.Value:
    """0 up to -3, dy from 3, dy·(x/3 + 1/2) between."""
    x = node.input(0)
    slope = _binary(node, "Add", _binary(node, "Mul", x, 1 / 3), 0.5)
    slope = _where(node, _test(node, "Less", x, 3), slope, 1)
    slope = _where(node, _test(node, "Greater", x, -3), slope, 0)
    return node.op("Mul", dy, slope)


@unary
def leaky_relu(node: GradNode, dy: ir.Value) -> ir.Value:
    """Passes dy where x > 0, else α·dy."""
    alpha = node.attr("alpha", 0.01)
    test = _test(node, "Greater", node.output() if alpha >= 0 else node.input(0), 0)
    return _where(node, test, dy, _binary(node, "Mul", dy, alpha))


@unary
def thresholded_relu(node: GradNode, dy: ir.Value) -> ir.Value:
    """Passes dy where x > α."""
    test = _test(node, "Greater", node.input(0), node.attr("alpha", 1.0))
    return _where(node, test, dy, 0)


# -- several operands --------------------------------------------------------------------------


def sum_gradient(node: GradNode) -> Results:
    """Add and Sum: dy for each operand, or what the gradient of several nodes gives."""
    found = rotary_gradient(node)
    if found is not None:
        return found
    dy = node.cotangent()
    return [node.unbroadcast(dy, i) if node.wants(i) else None for i in range(node.arity)]


def sub_gradient(node: GradNode) -> Cotangents:
    """Gives dy and -dy."""
    dy = node.cotangent()
    left = node.unbroadcast(dy, 0) if node.wants(0) else None
    right = node.op("Neg", node.unbroadcast(dy, 1)) if node.wants(1) else None
    return [left, right]


def mul_gradient(node: GradNode) -> Results:
    """Gives dy·b and dy·a, or what the gradient of several nodes gives."""
    for of_several in (silu_gradient, gated_gradient, rms_norm_gradient):
        found = of_several(node)
        if found is not None:
            return found
    dy, factors = node.cotangent(), (node.input(0), node.input(1))
    if factors[0] is factors[1]:
        part = node.op("Mul", dy, factors[0])
        return [part, part]
    return [
        node.unbroadcast(node.op("Mul", dy, factors[1 - i]), i) if node.wants(i) else None
        for i in (0, 1)
    ]


def div_gradient(node: GradNode) -> Cotangents:
    """Gives dy / b and -(dy / b)·y."""
    part = node.op("Div", node.cotangent(), node.input(1))
    left = node.unbroadcast(part, 0) if node.wants(0) else None
    if not node.wants(1):
        return [left]
    right = node.unbroadcast(node.op("Mul", part, node.output()), 1)
    return [left, node.op("Neg", right)]


def mod_gradient(node: GradNode) -> Cotangents:
    """Gives dy and -dy·q, q = (a - y) / b being the integer quotient."""
    dy, y = node.cotangent(), node.output()
    left = node.unbroadcast(dy, 0) if node.wants(0) else None
    if not node.wants(1):
        return [left]
    multiple = node.op("Sub", node.input(0), y, shape=node.shape(y))
    part = node.op("Mul", dy, node.op("Round", node.op("Div", multiple, node.input(1))))
    return [left, node.op("Neg", node.unbroadcast(part, 1))]


def prelu_gradient(node: GradNode) -> Cotangents:
    """For x, dy where x > 0, else slope·dy; for the slope, x·dy where x ≤ 0, else 0."""
    dy, x, slope = node.cotangent(), node.input(0), node.input(1)
    test = _test(node, "Greater", x, 0)
    left = _where(node, test, dy, node.op("Mul", dy, slope)) if node.wants(0) else None
    if not node.wants(1):
        return [left]
    zero = node.number(0, dy)
    part = node.op("Where", test, zero, node.op("Mul", dy, x), shape=node.shape(dy), dtype=dy.dtype)
    return [left, node.unbroadcast(part, 1)]


def extremum_gradient(node: GradNode) -> Cotangents:
    """Max and Min: dy to the operand that equals the result, in equal shares if several do."""
    dy, y = node.cotangent(), node.output()
    if node.arity == 1:
        return [dy]
    shape = node.shape(y)
    taken = [
        node.op("Equal", node.input(i), y, shape=shape, dtype=_BOOL) for i in range(node.arity)
    ]
    hits = [node.builder.cast(hit, dy.dtype) if dy.dtype else hit for hit in taken]
    count = node.op("Add" if len(hits) == 2 else "Sum", *hits)
    share = node.op("Div", dy, count)
    return [
        node.unbroadcast(_where(node, hit, share, 0), i) if node.wants(i) else None
        for i, hit in enumerate(taken)
    ]


def where_gradient(node: GradNode) -> Cotangents:
    """Gives dy to the chosen operand, zero to the other."""
    dy, test = node.cotangent(), node.input(0)
    zero, shape = node.number(0, dy), node.shape(dy)
    branches = ((1, (dy, zero)), (2, (zero, dy)))
    parts = [
        node.unbroadcast(node.op("Where", test, *pair, shape=shape, dtype=dy.dtype), i)
        if node.wants(i)
        else None
        for i, pair in branches
    ]
    return [None, *parts]


def clip_gradient(node: GradNode) -> Cotangents:
    """For x, dy where x equals the result, bounds included; elsewhere dy goes to the bound."""
    dy, x = node.cotangent(), node.input(0)
    dx = _where(node, _test(node, "Equal", x, node.output()), dy, 0) if node.wants(0) else None
    low, high = (node.input(i) if node.has(i) else None for i in (1, 2))
    found = [dx, None, None]
    # If the bounds cross, the result is the upper bound everywhere.
    if low is not None and node.wants(1):
        test = _test(node, "Less", x, low)
        if high is not None:
            crossed = node.op("Greater", low, high, dtype=_BOOL)
            test = node.op("And", test, node.op("Not", crossed), shape=node.shape(x))
        found[1] = node.unbroadcast(_where(node, test, dy, 0), 1)
    if high is not None and node.wants(2):
        raised = x if low is None else _binary(node, "Max", x, low)
        found[2] = node.unbroadcast(_where(node, _test(node, "Greater", raised, high), dy, 0), 2)
    return found


def pow_gradient(node: GradNode) -> Cotangents:
    """dy·p·x^(p - 1), zero where p = 0; and dy·y·log x, zero where x = 0 and p ≥ 0."""
    base = _pow_base(node) if node.wants(0) else None
    return [base, _pow_exponent(node)] if node.wants(1) else [base]


def _pow_base(node: GradNode) -> ir.Value | None:
    dy, x, y, p = node.cotangent(), node.input(0), node.output(), node.input(1)
    shape = node.shape(y)
    power = None if p.const_value is None or p.const_value.size != 1 else p.const_value.numpy()
    constant = None if power is None else float(power.item())
    assert x.dtype is not None
    if constant == 0:
        return None
    if constant == 1:
        slope = dy
    elif constant == 2:
        slope = node.op("Mul", dy, node.op("Mul", x, node.number(2, x)), shape=shape)
    elif constant == 0.5:
        slope = node.op("Div", _binary(node, "Mul", dy, 0.5), y)
    elif constant is not None:
        less = node.op("Pow", x, node.number(constant - 1, x))
        slope = node.op("Mul", dy, _binary(node, "Mul", less, constant), shape=shape)
    else:
        wide = node.builder.cast(p, x.dtype)
        less = node.op("Pow", x, _binary(node, "Sub", wide, 1), shape=shape)
        slope = node.op("Mul", dy, node.op("Mul", less, wide))
        zero = _test(node, "Equal", wide, 0)
        slope = node.op("Where", zero, node.number(0, dy), slope, shape=shape, dtype=dy.dtype)
    return node.unbroadcast(slope, 0)


def _pow_exponent(node: GradNode) -> ir.Value:
    dy, x, y, p = node.cotangent(), node.input(0), node.output(), node.input(1)
    shape = node.shape(y)
    part = node.op("Mul", node.op("Mul", dy, y), node.op("Log", x), shape=shape)
    above = node.op("Not", _test(node, "Less", p, 0))
    flat = node.op("And", _test(node, "Equal", x, 0), above, shape=shape)
    part = node.op("Where", flat, node.number(0, part), part, shape=shape, dtype=part.dtype)
    assert p.dtype is not None
    return node.unbroadcast(node.builder.cast(part, p.dtype), 1)
