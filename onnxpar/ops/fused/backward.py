"""The fused gradients that gradient rules emit: one node for a chain of elementwise operators.

Their bodies in standard operators are in `onnxpar.ops.onnxpar_functions`. Where what is normalised
together is split, a form of standard operators stands for the node, in which one number a row
travels.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import (
    copy_or,
    count_of,
    normal_axis,
    reduced,
    work_dtype,
)
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.onnxpar_functions import (
    GELU_GRAD,
    LAYER_NORMALIZATION_GRAD,
    LOG_SOFTMAX_GRAD,
    RELU_GRAD,
    SIGMOID_GRAD,
    SOFTMAX_GRAD,
    TANH_GRAD,
    VERSION,
)
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.slots import IN_PLACE

_ITSELF = Missing("it is a gradient itself")


def elementwise_rule(view: NodeView) -> OpRule:
    """Every dim; the cotangent may be a partial sum, the other operand not."""
    dims = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{dims}, {dims} -> {dims}; linear: sum 0")


def _axis(view: NodeView) -> int:
    return normal_axis(view, view.attr("axis", -1), len(view.shape(0)))


def softmax_grad_rule(view: NodeView) -> OpRule:
    """Every dim, that of the normalised axis by the communicating form; linear in the cotangent."""
    names = axis_names(len(view.shape(0)))
    dims = " ".join(names)
    return parse_rule(f"{dims}, {dims} -> {dims}; special: {names[_axis(view)]}; linear: sum 0")


def _total(
    node: LocalNode, x: ir.Value, axes: Sequence[int], shape: Sequence[Dim]
) -> tuple[ir.Value, list[Dim]]:
    """Sums local `x`, laid out as operand 0, over axes that devices hold parts of."""
    split = node.split_factors("special")
    for factor in split:
        x = node.masked(x, 0, factor, 0)
    kept = reduced(shape, axes)
    atoms = tuple(a for factor in split for a in node.atoms(factor))
    return node.all_reduce(node.builder.reduce("ReduceSum", x, axes, keepdims=True), atoms), kept


def softmax_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Forms y (dy - Σ dy y), the sum all-reduced: one number a row."""
    shape, wide = node.in_shape(0), work_dtype(node.out_dtype())
    dy, y = (node.builder.cast(node.input(i), wide) for i in (0, 1))
    part = node.op("Mul", dy, y, shape=shape)
    total, _ = _total(node, part, (_axis(node.view),), shape)
    rest = node.op("Sub", dy, total, shape=shape)
    return (node.builder.cast(node.op("Mul", y, rest, shape=shape), node.out_dtype()),)


def log_softmax_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Forms dy - exp(y) Σ dy, the sum all-reduced: one number a row."""
    shape, wide = node.in_shape(0), work_dtype(node.out_dtype())
    dy, y = (node.builder.cast(node.input(i), wide) for i in (0, 1))
    total, _ = _total(node, dy, (_axis(node.view),), shape)
    share = node.op("Mul", node.op("Exp", y, shape=shape), total, shape=shape)
    return (node.builder.cast(node.op("Sub", dy, share, shape=shape), node.out_dtype()),)


def layer_norm_grad_rule(view: NodeView) -> OpRule:
    """`a b c, a b c, c, a b 1, a b 1 -> a b c, c, c; sum: a b; special: c`.

    The cotangent is needed replicated: its sum comes before the node, once, and not after it for
    each of the results (Megatron-LM's two sums a layer of the backward pass, Shoeybi et al., 2019).
    """
    names = axis_names(len(view.shape(0)))
    axis = _axis(view)
    dims, leading, normalised = (" ".join(n) for n in (names, names[:axis], names[axis:]))
    row = " ".join([*names[:axis], *["1"] * (len(names) - axis)])
    reads = [bool(out.name) for out in view.node.outputs]
    outputs = [dims, *(normalised if read else "." for read in reads[1:])]
    text = f"{dims}, {dims}, {normalised}, {row}, {row} -> {', '.join(outputs)}"
    text += f"; special: {normalised}"
    if leading and any(reads[1:]):
        text += f"; sum: {leading}"
    return parse_rule(text)


def layer_norm_grad_local(node: LocalNode) -> Sequence[ir.Value]:
    """Of a split row both means are all-reduced: two numbers for each row."""
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
    total_g, kept = _total(node, g, axes, shape)
    total_both, _ = _total(node, node.op("Mul", along, scale, shape=shape), axes, shape)
    mean_g = node.op("Div", total_g, count, shape=kept)
    mean_both = node.op("Div", total_both, count, shape=kept)
    rest = node.op("Sub", g, mean_g, shape=shape)
    rest = node.op("Sub", rest, node.op("Mul", normal, mean_both, shape=shape), shape=shape)
    outputs = [node.op("Mul", rest, inverse, shape=shape)]
    for x, index in ((along, 1), (dy, 2)):
        if not view.node.outputs[index].name:
            # A value of its own, since it loses its name; nobody reads it.
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
        )
        for function in (RELU_GRAD, TANH_GRAD, SIGMOID_GRAD, GELU_GRAD)
    ),
    OpDef(
        DOMAIN,
        SOFTMAX_GRAD.name,
        VERSION,
        softmax_grad_rule,
        copy_or(softmax_grad_local),
        gradient=_ITSELF,
        memory=IN_PLACE,
    ),
    OpDef(
        DOMAIN,
        LOG_SOFTMAX_GRAD.name,
        VERSION,
        softmax_grad_rule,
        copy_or(log_softmax_grad_local),
        gradient=_ITSELF,
        memory=IN_PLACE,
    ),
    OpDef(
        DOMAIN,
        LAYER_NORMALIZATION_GRAD.name,
        VERSION,
        layer_norm_grad_rule,
        copy_or(layer_norm_grad_local),
        gradient=_ITSELF,
        memory=IN_PLACE,
    ),
)
