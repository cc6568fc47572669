"""Gradients of normalisations over instances, groups of channels and chosen axes."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import BOOL, axis_of, normal_axes
from onnxpar.ops.norm.softmax_layer_norm_gradient import pull_back

MVN_EPSILON = 1e-9
"""What ONNX's function body of MeanVarianceNormalization adds to the deviation."""


def mvn_axes(view: NodeView) -> tuple[int, ...]:
    """Returns the axes that a MeanVarianceNormalization normalises, counted from the front."""
    return normal_axes(view, view.attr("axes", (0, 2, 3)), len(view.shape(0)))


def instance_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """InstanceNormalization (Ulyanov et al., 2016): `pull_back` over the spatial dims."""
    shape = node.shape(node.input(0))
    space = tuple(range(2, len(shape)))
    aside = [shape[1], *[1] * len(space)]
    return _affine(node, node.input(0), node.cotangent(), space, aside, (0, *space))


def group_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """GroupNormalization (Wu & He, 2018): `pull_back` over a group's channels and space."""
    x, build = node.input(0), node.builder
    shape = node.shape(x)
    groups = int(node.attr("num_groups", 1))
    inner = shape[1] // groups
    grouped = [shape[0], groups, inner, *shape[2:]]
    split = build.sizes(grouped)
    dy = node.op("Reshape", node.cotangent(), split, shape=grouped)
    # The gradient of the bias alone does not need x.
    parted = dy if node.wanted == {2} else node.op("Reshape", x, split, shape=grouped)
    axes = tuple(range(2, len(grouped)))
    aside: list[Dim] = [groups, inner, *[1] * len(shape[2:])]
    dx, *rest = _affine(node, parted, dy, axes, aside, (0, *axes[1:]))
    return [None if dx is None else build.reshape_like(dx, x), *rest]


def _affine(
    node: GradNode,
    x: ir.Value,
    dy: ir.Value,
    axes: Sequence[int],
    aside: Sequence[Dim],
    summed: Sequence[int],
) -> list[ir.Value | None]:
    """The gradient of x̂ · scale + bias.

    Args:
        node: The node; its inputs 1 and 2 are scale and bias.
        x: Its input 0, in the shape in which it is normalised.
        dy: The cotangent of its output, in that shape.
        axes: The axes that statistics run over.
        aside: The shape in which scale and bias broadcast to x.
        summed: The axes of x that scale and bias do not have.
    """
    build = node.builder
    g = None
    if node.wants(0):
        scale = node.op("Reshape", node.input(1), build.sizes(aside), shape=aside)
        g = node.op("Mul", dy, scale, shape=node.shape(dy))
    dx = normal = None
    if node.wants(0) or node.wants(1):
        pulled = pull_back(node, x, g, axes)
        dx, normal = pulled.dx, pulled.normal
    found = [dx]
    for index, values in ((1, normal), (2, dy)):
        if not node.wants(index) or values is None:
            found.append(None)
            continue
        along = node.op("Mul", dy, values) if index == 1 else values
        total = build.reduce("ReduceSum", along, summed)
        found.append(build.reshape_like(total, node.input(index)))
    return found


def mean_variance_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Of y = c / (σ + 1e-9), where c = x - mean and σ² = mean(c²).

    dx = (dy - mean(dy) - c mean(dy c) / (σ (σ + 1e-9))) / (σ + 1e-9). Where σ is 0, so is c, and
    the term with c is left out.
    """
    x, dy, build = node.input(0), node.cotangent(), node.builder
    over = mvn_axes(node.view)
    if not over:
        return [node.op("Mul", dy, node.number(0.0, dy))]
    centred = node.op("Sub", x, build.reduce("ReduceMean", x, over, keepdims=True))
    square = node.op("Mul", centred, centred)
    deviation = node.op("Sqrt", build.reduce("ReduceMean", square, over, keepdims=True))
    divisor = node.op("Add", deviation, node.number(MVN_EPSILON, x))
    zero, one = node.number(0.0, x), node.number(1.0, x)
    flat = node.op("Equal", deviation, zero, dtype=BOOL)
    safe = node.op("Where", flat, one, deviation, dtype=x.dtype, shape=node.shape(deviation))
    along = build.reduce("ReduceMean", node.op("Mul", dy, centred), over, keepdims=True)
    bend = node.op("Div", along, node.op("Mul", safe, divisor))
    rest = node.op("Sub", dy, build.reduce("ReduceMean", dy, over, keepdims=True))
    rest = node.op("Sub", rest, node.op("Mul", centred, bend))
    return [node.op("Div", rest, divisor)]


def lp_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dx = (dy - s Σ dy y) / norm along one axis.

    s is the derivative of the norm: y for the 2-norm, the sign of x for the 1-norm. Where the norm
    is 0, the operator's result is 0 by definition, and so is dx.
    """
    x, y, dy = node.input(0), node.output(), node.cotangent()
    axes = [axis_of(node.view, -1)]
    first = node.attr("p", 2) == 1
    norm = node.builder.reduce("ReduceL1" if first else "ReduceL2", x, axes, keepdims=True)
    slope = node.op("Sign", x) if first else y
    total = node.builder.reduce("ReduceSum", node.op("Mul", dy, y), axes, keepdims=True)
    rest = node.op("Sub", dy, node.op("Mul", slope, total))
    zero, one = node.number(0.0, x), node.number(1.0, x)
    none = node.op("Equal", norm, zero, dtype=BOOL)
    safe = node.op("Where", none, one, norm, dtype=x.dtype, shape=node.shape(norm))
    inverse = node.op(
        "Where", none, zero, node.op("Reciprocal", safe), dtype=x.dtype, shape=node.shape(norm)
    )
    return [node.op("Mul", rest, inverse)]
