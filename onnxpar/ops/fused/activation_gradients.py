"""Fused gradients of activations, and gated linear units with their gradients.

A gated linear unit is the activation of a gate times another tensor, `up` (Shazeer, GLU Variants
Improve Transformer, 2020). One operator has the gradients of the activation and of the product. It
computes the activation again, so that the backward pass does not read it.
"""

from math import log, pi, sqrt

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.function import VERSION, Function
from onnxpar.ops.operator import Missing, OpDef, for_ranks
from onnxpar.ops.slots import IN_PLACE, Kernel

ITSELF = Missing("it is already a gradient")

# A cast to bool: y, a result of Relu, is never negative, and CUDA has no Greater for bfloat16.
RELU_GRAD = Function("""
    ReluGrad (dy, y) => (dx) {
        number = Constant<value = float {0.0}>()
        zero = CastLike(number, dy)
        positive = Cast<to = 9>(y)
        dx = Where(positive, dy, zero)
    }
""")

_ONE = """
    number = Constant<value = float {1.0}>()
    one = CastLike(number, dy)
"""

TANH_GRAD = Function(f"""
    TanhGrad (dy, y) => (dx) {{
        {_ONE}
        square = Mul(y, y)
        slope = Sub(one, square)
        dx = Mul(dy, slope)
    }}
""")

SIGMOID_GRAD = Function(f"""
    SigmoidGrad (dy, y) => (dx) {{
        {_ONE}
        part = Mul(dy, y)
        rest = Sub(one, y)
        dx = Mul(part, rest)
    }}
""")

# Each text computes the derivative `slope` of an activation of x. Behind it, the text whose name
# ends in ITSELF computes the activation `active`.

# Φ(x) + x φ(x); 2 φ(x) = exp(log √(2/π) - x²/2), and the sum is halved instead of each term.
_GELU = f"""
        number1 = Constant<value = double {{{sqrt(0.5)!r}}}>()
        number2 = Constant<value = double {{{log(sqrt(2 / pi))!r}}}>()
        number3 = Constant<value = double {{1.0}}>()
        number4 = Constant<value = double {{0.5}}>()
        root = CastLike(number1, x)
        top = CastLike(number2, x)
        one = CastLike(number3, x)
        half = CastLike(number4, x)
        t = Mul(x, root)
        square = Mul(t, t)
        power = Sub(top, square)
        density = Exp(power)
        distribution = Erf(t)
        rise = Mul(x, density)
        sum = Add(distribution, rise)
        double_slope = Add(sum, one)
        slope = Mul(double_slope, half)
"""
_GELU_ITSELF = """
        double_share = Add(distribution, one)
        share = Mul(double_share, half)
        active = Mul(x, share)
"""

# (1 + t + x (1 - t²) u')/2, t = tanh u, u = √(2/π) (x + 0.044715 x³). Beyond ±10 the derivative is
# 0 or 1 to the last bit, and u' overflows in 16 bits.
_ROOT, _CUBIC = sqrt(2 / pi), sqrt(2 / pi) * 0.044715
_GELU_TANH = f"""
        number1 = Constant<value = double {{{_ROOT!r}}}>()
        number2 = Constant<value = double {{{_CUBIC!r}}}>()
        number3 = Constant<value = double {{{3 * _CUBIC!r}}}>()
        number4 = Constant<value = double {{1.0}}>()
        number5 = Constant<value = double {{0.5}}>()
        number6 = Constant<value = double {{-10.0}}>()
        number7 = Constant<value = double {{10.0}}>()
        root = CastLike(number1, x)
        cubic = CastLike(number2, x)
        steep = CastLike(number3, x)
        one = CastLike(number4, x)
        half = CastLike(number5, x)
        low = CastLike(number6, x)
        high = CastLike(number7, x)
        v = Clip(x, low, high)
        square = Mul(v, v)
        bent = Mul(square, cubic)
        factor = Add(bent, root)
        u = Mul(v, factor)
        t = Tanh(u)
        steeper = Mul(square, steep)
        rise = Add(steeper, root)
        v_rise = Mul(v, rise)
        t_square = Mul(t, t)
        rest = Sub(one, t_square)
        bend = Mul(rest, v_rise)
        double_share = Add(t, one)
        double_slope = Add(double_share, bend)
        slope = Mul(double_slope, half)
"""
_GELU_TANH_ITSELF = """
        share = Mul(double_share, half)
        active = Mul(x, share)
"""

# Of x p, p = sigmoid x: p (1 + x q) (Elfwing et al., 2018). 1 - p would lose the digits of q.
_SILU = """
        number = Constant<value = float {1.0}>()
        one = CastLike(number, x)
        p = Sigmoid(x)
        opposite = Neg(x)
        q = Sigmoid(opposite)
        rise = Mul(x, q)
        sum = Add(rise, one)
        slope = Mul(p, sum)
"""
_SILU_ITSELF = """
        active = Mul(x, p)
"""


def _alone(name: str, slope: str) -> Function:
    return Function(f"""
        {name}Grad (dy, x) => (dx) {{
            {slope}
            dx = Mul(dy, slope)
        }}
    """)


def _gated(name: str, nodes: str) -> Function:
    return Function(f"""
        Gated{name} (gate, up) => (y) {{
            {nodes}
            y = Mul(active, up)
        }}
    """)


def _gated_gradient(name: str, slope: str, activation: str) -> Function:
    return Function(f"""
        Gated{name}Grad (dy, gate, up) => (dgate, dup) {{
            x = Identity(gate)
            {slope}
            {activation}
            dactive = Mul(dy, up)
            dgate = Mul(dactive, slope)
            dup = Mul(dy, active)
        }}
    """)


GELU_GRAD = _alone("Gelu", _GELU)
GELU_TANH_GRAD = _alone("GeluTanh", _GELU_TANH)
SILU_GRAD = _alone("Silu", _SILU)
GATED_GELU = _gated("Gelu", "active = Gelu(gate)")
GATED_GELU_TANH = _gated("GeluTanh", 'active = Gelu<approximate = "tanh">(gate)')
GATED_SILU = _gated("Silu", "share = Sigmoid(gate)  active = Mul(gate, share)")
GATED_GELU_GRAD = _gated_gradient("Gelu", _GELU, _GELU_ITSELF)
GATED_GELU_TANH_GRAD = _gated_gradient("GeluTanh", _GELU_TANH, _GELU_TANH_ITSELF)
GATED_SILU_GRAD = _gated_gradient("Silu", _SILU, _SILU_ITSELF)

GATED = {
    GATED_GELU: GATED_GELU_GRAD,
    GATED_GELU_TANH: GATED_GELU_TANH_GRAD,
    GATED_SILU: GATED_SILU_GRAD,
}
"""The products of an activation of a gate with another tensor, and the gradient of each."""


def elementwise_rule(view: NodeView) -> OpRule:
    """Every dim; the cotangent may be a partial sum, the other operands may not."""
    dims = " ".join(axis_names(len(view.shape(0))))
    operands, outputs = (", ".join([dims] * n) for n in (view.arity, len(view.node.outputs)))
    return parse_rule(f"{operands} -> {outputs}; linear: sum 0")


_GRADIENTS = tuple(
    OpDef(
        DOMAIN,
        function.name,
        VERSION,
        elementwise_rule,
        gradient=ITSELF,
        keeps_zero=True,
        memory=memory,
        function=function,
    )
    for memory, functions in (
        (IN_PLACE, (RELU_GRAD, TANH_GRAD, SIGMOID_GRAD, GELU_GRAD, GELU_TANH_GRAD, SILU_GRAD)),
        (Kernel(over=((0, 0), (2, 1))), tuple(GATED.values())),
    )
    for function in functions
)
DEFS = (*_GRADIENTS, *(for_ranks(f.name, function=f, memory=IN_PLACE) for f in GATED))
