"""Gradients of reductions: the cotangent is spread over the reduced elements.

As much as possible is computed before that, on tensors of the size of the result.
"""

from collections.abc import Callable, Sequence
from math import inf, prod

import onnx_ir as ir

from onnxpar.graph.builder import INT64
from onnxpar.ops.grad_node import Gradient, GradNode
from onnxpar.ops.local_helpers import BOOL, reduced_axes, work_dtype

Cotangents = Sequence[ir.Value | None]
# Emits the cotangent of x, given the node, its axes and the cotangent of its result.
Spread = Callable[[GradNode, tuple[int, ...], ir.Value], ir.Value]


def reduction(spread: Spread) -> Gradient:
    """Returns the gradient of a reduction; axes that are an operand have none."""

    def gradient(node: GradNode) -> Cotangents:
        return [spread(node, reduced_axes(node.view) or (), node.cotangent())]

    return gradient


def _kept(node: GradNode, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """A value of the result's shape, with reduced dims as dims of size 1."""
    if not axes or node.attr("keepdims", 1):
        return value
    return node.builder.unsqueeze(value, axes)


def _sum(node: GradNode, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    return node.builder.reduce("ReduceSum", x, axes, keepdims=True) if axes else x


def _expand(node: GradNode, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """A value of the result's shape, broadcast to the shape of x."""
    x = node.input(0)
    if node.shape(value) == node.shape(x):
        return value
    # Missing leading dims are broadcast anyway.
    if tuple(axes) != tuple(range(len(axes))):
        value = _kept(node, value, axes)
    return node.op("Expand", value, node.builder.shape_value(x), shape=node.shape(x))


def _over_x(node: GradNode, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """An elementwise operator of the shape of x."""
    return node.op(op_type, a, b, shape=node.shape(node.input(0)))


def spread_sum(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy to every element."""
    return _expand(node, dy, axes)


def spread_mean(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy / count to every element."""
    sizes = [node.shape(node.input(0))[axis] for axis in axes]
    # Many counts are too large for 16-bit floats.
    wide = node.builder.cast(dy, work_dtype(dy.dtype))
    if all(isinstance(size, int) for size in sizes):
        count = node.number(prod(int(size) for size in sizes), wide)
    else:
        parts = [
            node.op("Size", value, dtype=INT64, shape=[])
            for value in (node.input(0), node.output())
        ]
        count = node.builder.cast(node.op("Div", *parts), wide.dtype)
    share = node.op("Div", wide, count)
    return _expand(node, node.builder.cast(share, dy.dtype), axes)


def spread_extremum(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy to the greatest (least) element, in equal shares if there are several."""
    x = node.input(0)
    taken = node.op("Equal", x, _kept(node, node.output(), axes), dtype=BOOL)
    hits = node.builder.cast(taken, x.dtype)
    share = node.op("Div", _kept(node, dy, axes), _sum(node, hits, axes))
    return _over_x(node, "Mul", hits, share)


def spread_product(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy times the product of the other elements, which y / x is not for zeros."""
    x = node.input(0)
    zero = node.op("Equal", x, node.number(0, x), dtype=BOOL)
    zeros = node.builder.cast(zero, x.dtype)
    safe = node.op("Where", zero, node.number(1, x), x, dtype=x.dtype)
    product = node.builder.reduce("ReduceProd", safe, axes, keepdims=True) if axes else safe
    others = _over_x(node, "Div", node.op("Mul", _kept(node, dy, axes), product), safe)
    # The number of other elements that are zero.
    left = _over_x(node, "Sub", _sum(node, zeros, axes), zeros)
    none_is = node.op("Equal", left, node.number(0, left), dtype=BOOL)
    return node.op("Where", none_is, others, node.number(0, x), dtype=x.dtype)


def spread_l1(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy·sign(x)."""
    return _over_x(node, "Mul", node.op("Sign", node.input(0)), _kept(node, dy, axes))


def spread_l2(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives x·dy / y, and zero where y is zero."""
    norm = node.output()
    flat = node.op("Equal", norm, node.number(0, norm), dtype=BOOL)
    ratio = node.op("Div", dy, norm)
    ratio = node.op("Where", flat, node.number(0, ratio), ratio, dtype=ratio.dtype)
    return _over_x(node, "Mul", node.input(0), _kept(node, ratio, axes))


def spread_sum_square(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives 2x·dy."""
    twice = node.op("Mul", dy, node.number(2, dy))
    return _over_x(node, "Mul", node.input(0), _kept(node, twice, axes))


def spread_log_sum(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy / Σx, where Σx = exp(y)."""
    return _expand(node, node.op("Div", dy, node.op("Exp", node.output())), axes)


def spread_log_sum_exp(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy·exp(x - y); 0 stands for an infinite y, such as that of a fully masked row."""
    y = node.output()
    infinite = node.op("Equal", node.op("Abs", y), node.number(inf, y), dtype=BOOL)
    top = node.op("Where", infinite, node.number(0, y), y, dtype=y.dtype)
    powers = node.op("Exp", _over_x(node, "Sub", node.input(0), _kept(node, top, axes)))
    return _over_x(node, "Mul", powers, _kept(node, dy, axes))


def cumsum_gradient(node: GradNode) -> Cotangents:
    """CumSum: the sum in the opposite direction."""
    view = node.view
    flags = {"exclusive": view.attr("exclusive", 0), "reverse": 1 - view.attr("reverse", 0)}
    return [node.op("CumSum", node.cotangent(), node.input(1), **flags)]
