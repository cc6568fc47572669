"""Gradients of reductions: the cotangent is spread over the elements that were reduced.

What can be computed before it is spread, is: on tensors of the size of the result.
"""

from collections.abc import Callable, Sequence
from math import inf, prod

import onnx_ir as ir

from onnxpar.graph.builder import INT64
from onnxpar.ops.grad_node import Gradient, GradNode
from onnxpar.ops.local_helpers import reduced_axes, work_dtype

_BOOL = ir.DataType.BOOL
Cotangents = Sequence[ir.Value | None]
# From the node, its axes and the cotangent of its result to that of x.
Spread = Callable[[GradNode, tuple[int, ...], ir.Value], ir.Value]


def reduction(spread: Spread) -> Gradient:
    """Returns the gradient of a reduction; axes that are an operand have none."""

    def gradient(node: GradNode) -> Cotangents:
        axes = reduced_axes(node.view) or ()
        return [spread(node, axes, node.cotangent())]

    gradient.__doc__ = spread.__doc__
    return gradient


def _kept(node: GradNode, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """A value of the result's shape with the reduced dims as dims of size 1."""
    if not axes or node.attr("keepdims", 1):
        return value
    return node.builder.unsqueeze(value, axes)


def _sum(node: GradNode, x: ir.Value, axes: Sequence[int]) -> ir.Value:
    return node.builder.reduce("ReduceSum", x, axes, keepdims=True) if axes else x


def _expand(node: GradNode, value: ir.Value, axes: Sequence[int]) -> ir.Value:
    """A value of the result's shape in the shape of x."""
    x = node.input(0)
    if node.shape(value) == node.shape(x):
        return value
    # Leading dims that are not there are broadcast as they are.
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
    # 16-bit floats end before many counts do.
    wide = node.builder.cast(dy, work_dtype(dy.dtype))
    if all(isinstance(size, int) for size in sizes):
        count = node.number(prod(int(size) for size in sizes), wide)
    else:
        parts = [
            node.op("Size", value, dtype=INT64, shape=[])
            for value in (node.input(0), node.output())
        ]
        count = node.builder.cast(node.op("Div", *parts), work_dtype(dy.dtype))
    share = node.op("Div", wide, count)
    return _expand(node, node.builder.cast(share, dy.dtype or work_dtype(None)), axes)


def spread_extremum(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy to the greatest (least) element, in even shares where several are."""
    x = node.input(0)
    assert x.dtype is not None
    taken = node.op("Equal", x, _kept(node, node.output(), axes), dtype=_BOOL)
    hits = node.builder.cast(taken, x.dtype)
    share = node.op("Div", _kept(node, dy, axes), _sum(node, hits, axes))
    return _over_x(node, "Mul", hits, share)


def spread_product(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy times the product of the others, which is not y / x where one is zero."""
    x = node.input(0)
    assert x.dtype is not None
    zero = node.op("Equal", x, node.number(0, x), dtype=_BOOL)
    zeros = node.builder.cast(zero, x.dtype)
    safe = node.op("Where", zero, node.number(1, x), x, dtype=x.dtype)
    whole = node.builder.reduce("ReduceProd", safe, axes, keepdims=True) if axes else safe
    others = _over_x(node, "Div", node.op("Mul", _kept(node, dy, axes), whole), safe)
    # How many of the others are zero.
    left = _over_x(node, "Sub", _sum(node, zeros, axes), zeros)
    none_is = node.op("Equal", left, node.number(0, left), dtype=_BOOL)
    return node.op("Where", none_is, others, node.number(0, x), dtype=x.dtype)


def spread_l1(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """dy·sign x."""
    return _over_x(node, "Mul", node.op("Sign", node.input(0)), _kept(node, dy, axes))


def spread_l2(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """x·dy / y, zero where y is."""
    norm = node.output()
    flat = node.op("Equal", norm, node.number(0, norm), dtype=_BOOL)
    ratio = node.op("Div", dy, norm)
    ratio = node.op("Where", flat, node.number(0, ratio), ratio, dtype=ratio.dtype)
    return _over_x(node, "Mul", node.input(0), _kept(node, ratio, axes))


def spread_sum_square(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """2x·dy."""
    twice = node.op("Mul", dy, node.number(2, dy))
    return _over_x(node, "Mul", node.input(0), _kept(node, twice, axes))


def spread_log_sum(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """Gives dy / Σx, the sum read off y."""
    return _expand(node, node.op("Div", dy, node.op("Exp", node.output())), axes)


def spread_log_sum_exp(node: GradNode, axes: tuple[int, ...], dy: ir.Value) -> ir.Value:
    """dy·exp(x - y); of an infinite y, as of a row that is masked whole, nothing is taken off."""
    y = node.output()
    infinite = node.op("Equal", node.op("Abs", y), node.number(inf, y), dtype=_BOOL)
    top = node.op("Where", infinite, node.number(0, y), y, dtype=y.dtype)
    powers = node.op("Exp", _over_x(node, "Sub", node.input(0), _kept(node, top, axes)))
    return _over_x(node, "Mul", powers, _kept(node, dy, axes))


def cumsum_gradient(node: GradNode) -> Cotangents:
    """CumSum: the sum runs the other way."""
    view = node.view
    flags = {"exclusive": view.attr("exclusive", 0), "reverse": 1 - view.attr("reverse", 0)}
    return [node.op("CumSum", node.cotangent(), node.input(1), **flags)]
