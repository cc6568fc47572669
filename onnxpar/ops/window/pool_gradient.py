"""Gradients of the pools.

The cotangent of a maximum goes to the first element that has this value (as in PyTorch), that of a
mean to all elements that it counts. Both gradients are operators of the undivided graph, so that
they exchange halos over sharded spatial dims, like the pool.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.reduce.reduce_gradient import spread_extremum, spread_mean
from onnxpar.ops.window.geometry import pool_dims
from onnxpar.ops.window.gradient_windows import window_attributes

MAX_POOL_GRAD, SUM_POOL_GRAD = "MaxPoolGrad", "SumPoolGrad"


def max_pool_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """The cotangent of the image; indices have no gradient."""
    x, dy = node.input(0), node.cotangent()
    return [node.op(MAX_POOL_GRAD, dy, x, shape=node.shape(x), domain=DOMAIN, **_attributes(node))]


def average_pool_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """The cotangent of the image: each counted element gets its share."""
    return [_spread(node, node.cotangent(), mean=1)]


def lp_pool_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives sign(x) |x|^(p-1) Σ dy y^(1-p) over the results that read x; 0 where y is 0."""
    x, y, dy = node.input(0), node.output(), node.cotangent()
    p = int(node.attr("p", 2))
    if p == 1:
        return [node.op("Mul", node.op("Sign", x), _spread(node, dy, mean=0))]
    total = _spread(node, node.op("Div", dy, _root_power(node, y, p)), mean=0)
    return [_powers(node, x, total, p)]


def max_unpool_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives each element the cotangent of the place that it was moved to."""
    dy, index = node.cotangent(), node.input(1)
    flat = node.op("Reshape", dy, node.builder.const([-1]), shape=[prod(node.shape(dy))])
    dx = node.op("Gather", flat, index, shape=node.shape(index), axis=0)
    return [dx, *[None] * (node.arity - 1)]


def global_average_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dy / count to every element."""
    return [spread_mean(node, _space(node), node.cotangent())]


def global_max_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dy to the greatest element, in equal shares if there are several."""
    return [spread_extremum(node, _space(node), node.cotangent())]


def global_lp_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dy y^(1-p) sign(x) |x|^(p-1), and 0 where y is 0."""
    x, y, dy = node.input(0), node.output(), node.cotangent()
    p = int(node.attr("p", 2))
    if p == 1:
        return [node.op("Mul", node.op("Sign", x), dy)]
    return [_powers(node, x, node.op("Div", dy, _root_power(node, y, p)), p)]


def _space(node: GradNode) -> tuple[int, ...]:
    return tuple(range(2, len(node.shape(node.input(0)))))


def _root_power(node: GradNode, y: ir.Value, p: int) -> ir.Value:
    """y^(p-1), but 1 where y is 0: every x read there is 0, and so is the product with it."""
    zero = node.op("Equal", y, node.number(0, y), dtype=ir.DataType.BOOL)
    safe = node.op("Where", zero, node.number(1, y), y, dtype=y.dtype, shape=node.shape(y))
    return safe if p == 2 else node.op("Pow", safe, node.number(p - 1, y))


def _powers(node: GradNode, x: ir.Value, total: ir.Value, p: int) -> ir.Value:
    """sign(x) |x|^(p-1) times a cotangent."""
    if p == 2:
        return node.op("Mul", x, total)
    slope = node.op("Pow", node.op("Abs", x), node.number(p - 1, x))
    return node.op("Mul", node.op("Mul", node.op("Sign", x), slope), total)


def _spread(node: GradNode, dy: ir.Value, mean: int) -> ir.Value:
    include = int(node.attr("count_include_pad", 0))
    return node.op(
        SUM_POOL_GRAD,
        dy,
        shape=node.shape(node.input(0)),
        domain=DOMAIN,
        mean=mean,
        count_include_pad=include,
        **_attributes(node),
    )


def _attributes(node: GradNode) -> dict[str, Any]:
    ceil_mode = int(node.view.attr("ceil_mode", 0))
    return {**window_attributes(node, pool_dims(node.view)), "ceil_mode": ceil_mode}
