"""The gradient of BatchNormalization (Ioffe & Szegedy, 2015), in inference and in training form."""

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.grad_node import GradNode

BATCH_NORM_GRAD = "BatchNormalizationGrad"
"""Operator of the global graph: (dy, x, scale, mean, variance) -> (dx, dscale, dbias)."""


def batch_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dbias = Σ dy and dscale = Σ dy x̂; dx depends on the form of the node.

    In inference form dx = dy · scale · inverse, and mean and variance have gradients like other
    operands. In training form they depend on x:
    dx = scale · inverse (dy - mean(dy) - x̂ mean(dy x̂)).
    """
    if node.attr("training_mode", 0):
        return _training(node)
    return _by_constants(node, node.input(3), node.input(4), node.wanted)


def _by_constants(
    node: GradNode, mean: ir.Value, variance: ir.Value, wanted: frozenset[int]
) -> list[ir.Value | None]:
    """The gradient where mean and variance do not depend on x."""
    x, dy = node.input(0), node.cotangent()
    result: list[ir.Value | None] = [None] * 5
    if not wanted:
        return result
    total = step = slope = None
    if wanted & {2, 3}:
        total = node.builder.reduce("ReduceSum", dy, _axes(node), keepdims=True)
    if wanted != {2}:
        inverse = _inverse(node, _aside(node, variance))
        if wanted & {0, 3, 4}:
            step = node.op("Mul", _aside(node, node.input(1)), inverse)
        if wanted & {1, 4}:
            along = node.op("Mul", dy, node.op("Sub", x, _aside(node, mean)))
            along = node.builder.reduce("ReduceSum", along, _axes(node), keepdims=True)
            slope = node.op("Mul", along, inverse)
        if 4 in wanted:
            # The derivative of inverse by variance is -inverse³ / 2; slope contains one inverse.
            bend = node.op("Mul", node.op("Mul", slope, step), inverse)
            result[4] = node.op("Mul", bend, node.number(-0.5, bend))
    if 0 in wanted:
        result[0] = node.op("Mul", dy, step)
    if 3 in wanted:
        result[3] = node.op("Neg", node.op("Mul", total, step))
    result[1], result[2] = slope, total
    return [
        None if made is None or i not in wanted else made if i == 0 else _like(node, made, i)
        for i, made in enumerate(result)
    ]


def _like(node: GradNode, made: ir.Value, index: int) -> ir.Value:
    """Brings one number for each channel to the shape and type of operand `index`."""
    operand = node.input(index)
    return node.builder.cast(node.builder.reshape_like(made, operand), operand.dtype)


def _axes(node: GradNode) -> tuple[int, ...]:
    return (0, *range(2, len(node.shape(node.input(0)))))


def _aside(node: GradNode, value: ir.Value) -> ir.Value:
    """Brings one number for each channel to the type of x and a shape that broadcasts to x."""
    x = node.input(0)
    shape = node.shape(x)
    dims = [1 if axis != 1 else size for axis, size in enumerate(shape)]
    if len(dims) == 2:
        dims = dims[1:]
    value = node.builder.cast(value, x.dtype)
    if node.shape(value) == tuple(dims):
        return value
    return node.builder.unsqueeze(value, range(1, len(dims) - 1))


def _inverse(node: GradNode, variance: ir.Value) -> ir.Value:
    """1 / sqrt(variance + epsilon)."""
    epsilon = node.number(float(node.attr("epsilon", 1e-5)), variance)
    return node.op("Reciprocal", node.op("Sqrt", node.op("Add", variance, epsilon)))


# -- training form ---------------------------------------------------------------------------------


def _training(node: GradNode) -> Sequence[ir.Value | None]:
    x, scale = node.input(0), node.input(1)
    dy, *running = (*node.cotangents, None, None)[:3]
    result: list[ir.Value | None] = [None] * 5
    if dy is not None and node.wants(0):
        mean, variance = _statistics(node)
        part = (scale.dtype, node.shape(scale))
        made = node.builder.ops(
            BATCH_NORM_GRAD,
            [dy, x, scale, mean, variance],
            [(x.dtype, node.shape(x)), part, part],
            {"epsilon": float(node.attr("epsilon", 1e-5))},
            domain=DOMAIN,
        )
        for index, value in enumerate(made):
            if node.wants(index):
                result[index] = value
            else:
                node.builder.forget(value)
    elif dy is not None and node.wanted & {1, 2}:
        # The gradient of the bias alone needs no statistics.
        mean, variance = _statistics(node) if node.wants(1) else (scale, scale)
        result = _by_constants(node, mean, variance, node.wanted & {1, 2})
    for index, cotangent in enumerate(running, 3):
        if cotangent is not None:
            _through_running(node, index, cotangent, result)
    return result


def _through_running(
    node: GradNode, index: int, cotangent: ir.Value, result: list[ir.Value | None]
) -> None:
    """Adds the gradient through a running statistic: momentum · old + (1 - momentum) · batch's.

    The derivative of the batch's mean by x is 1/n, that of its variance 2 (x - mean) / n.
    """
    momentum = float(node.attr("momentum", 0.9))
    if node.wants(index):
        result[index] = node.op("Mul", cotangent, node.number(momentum, cotangent))
    if not node.wants(0):
        return
    x = node.input(0)
    each = _aside(node, cotangent)
    share = node.number((1 - momentum) * (1 if index == 3 else 2), each)
    sizes = [node.shape(x)[axis] for axis in _axes(node)]
    count = node.builder.cast(node.builder.sizes([prod(sizes)]), x.dtype)
    each = node.op("Div", node.op("Mul", each, share), count)
    if index == 3:
        part = node.op("Expand", each, node.builder.shape_value(x), shape=node.shape(x))
    else:
        mean = node.builder.reduce("ReduceMean", x, _axes(node), keepdims=True)
        part = node.op("Mul", node.op("Sub", x, mean), each)
    result[0] = part if result[0] is None else node.op("Add", result[0], part)


def _statistics(node: GradNode) -> tuple[ir.Value, ir.Value]:
    """Mean and variance of the batch.

    A node with momentum 0 has them as its outputs. A node with another momentum, whose outputs are
    used, keeps them, and the statistics are computed once more.
    """
    forward = node.view.node
    kept = [out for out in forward.outputs[1:3] if out.name]
    if not kept:
        forward.attributes["momentum"] = ir.AttrFloat32("momentum", 0.0)
    if not float(node.attr("momentum", 0.9)):
        mean, variance = (
            node.further_output(i, operand.dtype, node.shape(operand))
            for i, operand in ((1, node.input(3)), (2, node.input(4)))
        )
        return mean, variance
    x, axes = node.input(0), _axes(node)
    mean = node.builder.reduce("ReduceMean", x, axes, keepdims=True)
    centred = node.op("Sub", x, mean)
    square = node.op("Mul", centred, centred)
    variance = node.builder.reduce("ReduceMean", square, axes, keepdims=True)
    return _like(node, mean, 3), _like(node, variance, 4)
