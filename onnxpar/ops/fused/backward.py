"""Fused gradients, which gradient rules emit: one node instead of a chain of elementwise operators.

If rows that are normalised are sharded, the local form has standard operators and all-reduces one
number per row.
"""

from collections.abc import Sequence
from math import log, pi, sqrt

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.function import VERSION, Function
from onnxpar.ops.local_helpers import (
    copy_or,
    count_of,
    normal_axis,
    work_dtype,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.slots import IN_PLACE

_ITSELF = Missing("it is already a gradient")

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

# dy (Φ(x) + x φ(x)); 2 φ(x) = exp(log √(2/π) - x²/2), and dy is halved instead of each term.
GELU_GRAD = Function(f"""
    GeluGrad (dy, x) => (dx) {{
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
        slope = Add(sum, one)
        half_dy = Mul(dy, half)
        dx = Mul(half_dy, slope)
    }}
""")

# dy/2 (1 + t + x (1 - t²) u'), t = tanh u, u = √(2/π) (x + 0.044715 x³). Beyond ±10 the derivative
# is 0 or 1 to the last bit, and u' overflows in 16 bits.
_ROOT, _CUBIC = sqrt(2 / pi), sqrt(2 / pi) * 0.044715
GELU_TANH_GRAD = Function(f"""
    GeluTanhGrad (dy, x) => (dx) {{
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
        sum = Add(t, bend)
        slope = Add(sum, one)
        half_dy = Mul(dy, half)
        dx = Mul(half_dy, slope)
    }}
""")

# Of x p, p = sigmoid x: dy p (1 + x q) (Elfwing et al., 2018). 1 - p would lose the digits of q.
SILU_GRAD = Function(f"""
    SiluGrad (dy, x) => (dx) {{
        {_ONE}
        p = Sigmoid(x)
        opposite = Neg(x)
        q = Sigmoid(opposite)
        rise = Mul(x, q)
        sum = Add(rise, one)
        slope = Mul(p, sum)
        dx = Mul(dy, slope)
    }}
""")

_AXIS = """
    axis0 = Constant<value_int: int = @axis>()
    one_dim = Constant<value = int64[1] {-1}>()
    axes = Reshape(axis0, one_dim)
"""

SOFTMAX_GRAD = Function(f"""
    SoftmaxGrad <axis> (dy, y) => (dx) {{
        {_AXIS}
        part = Mul(dy, y)
        total = ReduceSum<keepdims = 1>(part, axes)
        share = Mul(y, total)
        dx = Sub(part, share)
    }}
""")

LOG_SOFTMAX_GRAD = Function(f"""
    LogSoftmaxGrad <axis> (dy, y) => (dx) {{
        {_AXIS}
        total = ReduceSum<keepdims = 1>(dy, axes)
        softmax = Exp(y)
        share = Mul(softmax, total)
        dx = Sub(dy, share)
    }}
""")

# The axis is negative: -1 if only the last dim is normalised. So all axes are constants in a
# graph, whatever the rank.
LAYER_NORMALIZATION_GRAD = Function("""
    LayerNormalizationGrad <axis> (dy, x, scale, mean, inv_std) => (dx, dscale, dbias) {
        zero = Constant<value = int64 {0}>()
        one = Constant<value = int64 {1}>()
        axis0 = Constant<value_int: int = @axis>()
        axes = Range(axis0, zero, one)
        leading = Constant<value = int64[1] {0}>()
        part = Shape(scale)
        mean_t = CastLike(mean, x)
        inverse = CastLike(inv_std, x)
        centred = Sub(x, mean_t)
        normal = Mul(centred, inverse)
        along = Mul(dy, normal)
        g = Mul(dy, scale)
        both = Mul(along, scale)
        mean_g = ReduceMean<keepdims = 1>(g, axes)
        mean_both = ReduceMean<keepdims = 1>(both, axes)
        rest = Sub(g, mean_g)
        bend = Mul(normal, mean_both)
        slope = Sub(rest, bend)
        dx = Mul(slope, inverse)
        along_rows = Flatten<axis: int = @axis>(along)
        dy_rows = Flatten<axis: int = @axis>(dy)
        along_sum = ReduceSum<keepdims = 0>(along_rows, leading)
        dy_sum = ReduceSum<keepdims = 0>(dy_rows, leading)
        dscale = Reshape(along_sum, part)
        dbias = Reshape(dy_sum, part)
    }
""")


def elementwise_rule(view: NodeView) -> OpRule:
    """Every dim; the cotangent may be a partial sum, the other operand may not."""
    dims = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{dims}, {dims} -> {dims}; linear: sum 0")


def _axis(view: NodeView) -> int:
    return normal_axis(view, view.attr("axis", -1), len(view.shape(0)))


def softmax_grad_rule(view: NodeView) -> OpRule:
    """Every dim; if the normalised one is sharded, the devices communicate; linear in dy."""
    names = axis_names(len(view.shape(0)))
    dims = " ".join(names)
    return parse_rule(f"{dims}, {dims} -> {dims}; special: {names[_axis(view)]}; linear: sum 0")


def _total(node: LocalNode, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    """Sums local `x`, laid out as operand 0, over axes that may be sharded; they get size 1."""
    split = node.split_factors("special")
    for factor in split:
        x = node.masked(x, 0, factor, 0)
    atoms = tuple(a for factor in split for a in node.atoms(factor))
    return node.all_reduce(node.builder.reduce("ReduceSum", x, axes, keepdims=True), atoms)


def softmax_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """y·(dy - Σ dy·y), with the sum all-reduced: one number per row."""
    shape, wide = node.in_shape(0), work_dtype(node.out_dtype())
    dy, y = (node.builder.cast(node.input(i), wide) for i in (0, 1))
    part = node.op("Mul", dy, y, shape=shape)
    total = _total(node, part, (_axis(node.view),))
    rest = node.op("Sub", dy, total, shape=shape)
    return (node.builder.cast(node.op("Mul", y, rest, shape=shape), node.out_dtype()),)


def log_softmax_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """The result is dy - exp(y)·Σ dy, with the sum all-reduced: one number per row."""
    shape, wide = node.in_shape(0), work_dtype(node.out_dtype())
    dy, y = (node.builder.cast(node.input(i), wide) for i in (0, 1))
    total = _total(node, dy, (_axis(node.view),))
    share = node.op("Mul", node.op("Exp", y, shape=shape), total, shape=shape)
    return (node.builder.cast(node.op("Sub", dy, share, shape=shape), node.out_dtype()),)


def layer_norm_grad_rule(view: NodeView) -> OpRule:
    """`a b c, a b c, c, a b 1, a b 1 -> a b c, c, c; sum: a b; special: c; linear: sum 0`."""
    names = axis_names(len(view.shape(0)))
    axis = _axis(view)
    dims, leading, normalised = (" ".join(n) for n in (names, names[:axis], names[axis:]))
    row = " ".join([*names[:axis], *["1"] * (len(names) - axis)])
    reads = [bool(out.name) for out in view.node.outputs]
    outputs = [dims, *(normalised if read else "." for read in reads[1:])]
    text = f"{dims}, {dims}, {normalised}, {row}, {row} -> {', '.join(outputs)}"
    summed = leading if any(reads[1:]) else ""
    return parse_rule(f"{text}; special: {normalised}; sum: {summed}; linear: sum 0")


def layer_norm_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """If rows are sharded, both means are all-reduced: two numbers for each row."""
    view, shape, wide = node.view, node.in_shape(0), work_dtype(node.out_dtype())
    axis = _axis(view)
    axes = tuple(range(axis, len(shape)))
    dy, x = (node.builder.cast(node.input(i), wide) for i in (0, 1))
    scale = node.builder.cast(node.input(2), wide)
    mean, inverse = (node.builder.cast(node.input(i), wide) for i in (3, 4))
    centred = node.op("Sub", x, mean, shape=shape)
    normal = node.op("Mul", centred, inverse, shape=shape)
    along = node.op("Mul", dy, normal, shape=shape)
    g = node.op("Mul", dy, scale, shape=shape)
    count = count_of(node, [view.shape(0)[a] for a in axes], wide)
    total_g = _total(node, g, axes)
    total_both = _total(node, node.op("Mul", along, scale, shape=shape), axes)
    mean_g = node.op("Div", total_g, count)
    mean_both = node.op("Div", total_both, count)
    rest = node.op("Sub", g, mean_g, shape=shape)
    rest = node.op("Sub", rest, node.op("Mul", normal, mean_both, shape=shape), shape=shape)
    outputs = [node.op("Mul", rest, inverse, shape=shape)]
    for x, index in ((along, 1), (dy, 2)):
        if not view.node.outputs[index].name:
            # A separate value, since it will lose its name; no node reads it.
            x = node.op("Identity", x, shape=shape)
        elif axis:
            x = node.builder.reduce("ReduceSum", x, range(axis), keepdims=True)
            x = node.builder.reshape(x, node.out_shape(index))
        outputs.append(x)
    return [node.builder.cast(value, node.out_dtype(index)) for index, value in enumerate(outputs)]


DEFS = (
    *(
        OpDef(
            DOMAIN,
            function.name,
            VERSION,
            elementwise_rule,
            gradient=_ITSELF,
            keeps_zero=True,
            memory=IN_PLACE,
            function=function,
        )
        for function in (RELU_GRAD, TANH_GRAD, SIGMOID_GRAD, GELU_GRAD, GELU_TANH_GRAD, SILU_GRAD)
    ),
    *(
        OpDef(
            DOMAIN,
            function.name,
            VERSION,
            rule,
            copy_or(local),
            gradient=_ITSELF,
            memory=IN_PLACE,
            function=function,
        )
        for function, rule, local in (
            (SOFTMAX_GRAD, softmax_grad_rule, softmax_grad_local),
            (LOG_SOFTMAX_GRAD, softmax_grad_rule, log_softmax_grad_local),
            (LAYER_NORMALIZATION_GRAD, layer_norm_grad_rule, layer_norm_grad_local),
        )
    ),
)
