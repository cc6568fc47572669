"""Fused gradients of what normalises rows, which gradient rules emit: one node instead of a chain.

If rows that are normalised are sharded, the local form has standard operators and all-reduces one
number per row.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.function import VERSION, Function
from onnxpar.ops.fused.activation_gradients import ITSELF
from onnxpar.ops.local_helpers import (
    copy_or,
    count_of,
    normal_axis,
    work_dtype,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import IN_PLACE

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
_NORM = """
    zero = Constant<value = int64 {0}>()
    one = Constant<value = int64 {1}>()
    axis0 = Constant<value_int: int = @axis>()
    axes = Range(axis0, zero, one)
    leading = Constant<value = int64[1] {0}>()
    part = Shape(scale)
"""

LAYER_NORMALIZATION_GRAD = Function(f"""
    LayerNormalizationGrad <axis> (dy, x, scale, mean, inv_std) => (dx, dscale, dbias) {{
        {_NORM}
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
    }}
""")

RMS_NORMALIZATION_GRAD = Function(f"""
    RMSNormalizationGrad <axis> (dy, x, scale, inv_std) => (dx, dscale) {{
        {_NORM}
        inverse = CastLike(inv_std, x)
        normal = Mul(x, inverse)
        along = Mul(dy, normal)
        g = Mul(dy, scale)
        both = Mul(along, scale)
        mean_both = ReduceMean<keepdims = 1>(both, axes)
        bend = Mul(normal, mean_both)
        slope = Sub(g, bend)
        dx = Mul(slope, inverse)
        along_rows = Flatten<axis: int = @axis>(along)
        along_sum = ReduceSum<keepdims = 0>(along_rows, leading)
        dscale = Reshape(along_sum, part)
    }}
""")


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
    return _norm_grad_rule(view)


def rms_norm_grad_rule(view: NodeView) -> OpRule:
    """`a b c, a b c, c, a b 1 -> a b c, c; sum: a b; special: c; linear: sum 0`."""
    return _norm_grad_rule(view)


def _norm_grad_rule(view: NodeView) -> OpRule:
    names = axis_names(len(view.shape(0)))
    axis = _axis(view)
    dims, leading, normalised = (" ".join(n) for n in (names, names[:axis], names[axis:]))
    row = " ".join([*names[:axis], *["1"] * (len(names) - axis)])
    reads = [bool(out.name) for out in view.node.outputs]
    outputs = [dims, *(normalised if read else "." for read in reads[1:])]
    statistics = [row] * (view.arity - 3)
    operands = [dims, dims, normalised, *statistics]
    text = f"{', '.join(operands)} -> {', '.join(outputs)}"
    summed = leading if any(reads[1:]) else ""
    return parse_rule(f"{text}; special: {normalised}; sum: {summed}; linear: sum 0")


def norm_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """If rows are sharded, their means are all-reduced: one or two numbers for each row."""
    view, shape, wide = node.view, node.in_shape(0), work_dtype(node.out_dtype())
    axis, centred = _axis(view), view.op_type == LAYER_NORMALIZATION_GRAD.name
    axes = tuple(range(axis, len(shape)))
    operands = [node.builder.cast(node.input(i), wide) for i in range(view.arity)]
    dy, x, scale, inverse = *operands[:3], operands[-1]
    if centred:
        x = node.op("Sub", x, operands[3], shape=shape)
    normal = node.op("Mul", x, inverse, shape=shape)
    along = node.op("Mul", dy, normal, shape=shape)
    rest = node.op("Mul", dy, scale, shape=shape)
    count = count_of(node, [view.shape(0)[a] for a in axes], wide)
    total = _total(node, rest, axes) if centred else None
    total_both = _total(node, node.op("Mul", along, scale, shape=shape), axes)
    if total is not None:
        rest = node.op("Sub", rest, node.op("Div", total, count), shape=shape)
    mean_both = node.op("Div", total_both, count)
    rest = node.op("Sub", rest, node.op("Mul", normal, mean_both, shape=shape), shape=shape)
    outputs = [node.op("Mul", rest, inverse, shape=shape)]
    for index, part in enumerate((along, dy)[: len(view.node.outputs) - 1], 1):
        if not view.node.outputs[index].name:
            # A separate value, since it will lose its name; no node reads it.
            part = node.op("Identity", part, shape=shape)
        elif axis:
            part = node.builder.reduce("ReduceSum", part, range(axis), keepdims=True)
            part = node.builder.reshape(part, node.out_shape(index))
        outputs.append(part)
    return [node.builder.cast(value, node.out_dtype(index)) for index, value in enumerate(outputs)]


DEFS = tuple(
    OpDef(
        DOMAIN,
        function.name,
        VERSION,
        rule,
        copy_or(local),
        gradient=ITSELF,
        memory=IN_PLACE,
        function=function,
    )
    for function, rule, local in (
        (SOFTMAX_GRAD, softmax_grad_rule, softmax_grad_local),
        (LOG_SOFTMAX_GRAD, softmax_grad_rule, log_softmax_grad_local),
        (LAYER_NORMALIZATION_GRAD, layer_norm_grad_rule, norm_grad_local),
        (RMS_NORMALIZATION_GRAD, rms_norm_grad_rule, norm_grad_local),
    )
)
