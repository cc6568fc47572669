"""Gradients of Softmax, LogSoftmax, LayerNormalization and RMSNormalization."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.function import Function
from onnxpar.ops.fused.backward import (
    LAYER_NORMALIZATION_GRAD,
    LOG_SOFTMAX_GRAD,
    RMS_NORMALIZATION_GRAD,
    SOFTMAX_GRAD,
)
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import axis_of, reduced, work_dtype


def softmax_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dx = y (dy - Σ dy y), the sum over the normalised axis."""
    dy, y = node.cotangent(), node.output()
    return [node.fused(SOFTMAX_GRAD, dy, y, axis=axis_of(node.view, -1))]


def log_softmax_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dx = dy - exp(y) Σ dy, the sum over the normalised axis."""
    dy, y = node.cotangent(), node.output()
    return [node.fused(LOG_SOFTMAX_GRAD, dy, y, axis=axis_of(node.view, -1))]


def normalised_axes(view: NodeView) -> tuple[int, ...]:
    """Returns the axes that a LayerNormalization normalises: from `axis` to the last."""
    return tuple(range(axis_of(view, -1), len(view.shape(0))))


def layer_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """LayerNormalization (Ba et al., 2016), from its mean and inverse deviation.

    With x̂ = (x - mean) · inverse and g = dy · scale: dx = inverse (g - mean(g) - x̂ mean(g x̂)),
    dscale = Σ dy x̂ and dbias = Σ dy over the leading dims.
    """
    if any(c is not None for c in node.cotangents[1:]):
        raise node.fail("the loss depends on its mean or inverse deviation, which have no gradient")
    x, scale, dy = node.input(0), node.input(1), node.cotangent()
    if not node.wants(0) and not node.wants(1):
        return [None, None, node.unbroadcast(dy, 2)]
    over = normalised_axes(node.view)
    stash = ir.DataType(node.attr("stash_type", 1))
    kept = reduced(node.shape(x), over)
    mean, inverse = (node.further_output(i, stash, kept) for i in (1, 2))
    if node.wants(0) and _is_plain(node, over):
        return _fused(node, LAYER_NORMALIZATION_GRAD, (dy, x, scale, mean, inverse), over)
    mean, inverse = node.builder.cast(mean, x.dtype), node.builder.cast(inverse, x.dtype)
    normal = node.op("Mul", node.op("Sub", x, mean), inverse)
    along = node.op("Mul", dy, normal)
    result: list[ir.Value | None] = [None, None, None]
    if node.wants(0):
        g = node.op("Mul", dy, scale)
        both = node.op("Mul", along, scale)
        mean_g = node.builder.reduce("ReduceMean", g, over, keepdims=True)
        mean_both = node.builder.reduce("ReduceMean", both, over, keepdims=True)
        rest = node.op("Sub", node.op("Sub", g, mean_g), node.op("Mul", normal, mean_both))
        result[0] = node.op("Mul", rest, inverse)
    if node.wants(1):
        result[1] = node.unbroadcast(along, 1)
    if node.wants(2):
        result[2] = node.unbroadcast(dy, 2)
    return result


def rms_norm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """RMSNormalization (Zhang & Sennrich, 2019).

    With x̂ = x · inverse and g = dy · scale: dx = inverse (g - x̂ mean(g x̂)) and dscale = Σ dy x̂
    over the leading dims. The forward node gives the inverse as a further output, if it can; then
    one operator has both gradients.
    """
    if any(c is not None for c in node.cotangents[1:]):
        raise node.fail("the loss depends on its inverse deviation, which has no gradient")
    scale, over = node.input(1), normalised_axes(node.view)
    dtype = node.input(0).dtype
    wide = work_dtype(dtype)
    saved = _saved_inverse(node, over)
    if saved is not None and node.wants(0) and _is_plain(node, over) and scale.dtype == dtype:
        operands = (node.cotangent(), node.input(0), scale, saved)
        return _fused(node, RMS_NORMALIZATION_GRAD, operands, over)
    x, dy = (node.builder.cast(v, wide) for v in (node.input(0), node.cotangent()))
    inverse = _computed_inverse(node, x, over) if saved is None else saved
    normal = node.op("Mul", x, inverse)
    result: list[ir.Value | None] = [None, None]
    if node.wants(0):
        g = node.op("Mul", dy, node.builder.cast(scale, wide))
        both = node.builder.reduce("ReduceMean", node.op("Mul", g, normal), over, keepdims=True)
        rest = node.op("Sub", g, node.op("Mul", normal, both))
        result[0] = node.builder.cast(node.op("Mul", rest, inverse), dtype)
    if node.wants(1):
        along = node.unbroadcast(node.op("Mul", dy, normal), 1)
        result[1] = node.builder.cast(along, scale.dtype)
    return result


_WITH_INVERSE = "SimplifiedLayerNormalization"
"""onnxruntime's form of RMSNormalization, which also returns the inverse deviation."""


def _saved_inverse(node: GradNode, over: Sequence[int]) -> ir.Value | None:
    """Returns 1 / sqrt(mean square + epsilon) as a further output of the forward node, or None.

    It has none where its statistics are narrower than x, or where RMSNormalization broadcasts its
    scale, which onnxruntime's operator need not support.
    """
    view, x = node.view, node.input(0)
    stash = ir.DataType(view.attr("stash_type", 1))
    named = view.op_type == _WITH_INVERSE
    if work_dtype(x.dtype) != stash or not (named or _is_plain(node, over)):
        return None
    view.node.op_type = _WITH_INVERSE
    return node.further_output(1, stash, reduced(node.shape(x), over))


def _computed_inverse(node: GradNode, x: ir.Value, over: Sequence[int]) -> ir.Value:
    """Returns 1 / sqrt(mean square + epsilon)."""
    square = node.builder.reduce("ReduceMean", node.op("Mul", x, x), over, keepdims=True)
    epsilon = node.number(float(node.attr("epsilon", 1e-5)), x)
    return node.op("Reciprocal", node.op("Sqrt", node.op("Add", square, epsilon)))


@dataclass(frozen=True)
class Pulled:
    """The gradient of a normalisation without scale and bias.

    Attributes:
        normal: The normalised x, x̂.
        dx: The cotangent of x; None if that of x̂ was not given.
    """

    normal: ir.Value
    dx: ir.Value | None


def pull_back(node: GradNode, x: ir.Value, g: ir.Value | None, axes: Sequence[int]) -> Pulled:
    """Emits x̂ = (x - mean) · inverse over `axes`, and the cotangent of x from that of x̂.

    Args:
        node: The node; its attribute `epsilon` is added to the variance.
        x: What the node normalises.
        g: The cotangent of x̂; None if the cotangent of x is not wanted.
        axes: The axes that statistics run over.
    """
    build = node.builder
    centred = node.op("Sub", x, build.reduce("ReduceMean", x, axes, keepdims=True))
    square = node.op("Mul", centred, centred)
    variance = build.reduce("ReduceMean", square, axes, keepdims=True)
    epsilon = node.number(float(node.attr("epsilon", 1e-5)), x)
    root = node.op("Sqrt", node.op("Add", variance, epsilon))
    inverse = node.op("Reciprocal", root)
    normal = node.op("Mul", centred, inverse)
    if g is None:
        return Pulled(normal, None)
    mean_both = build.reduce("ReduceMean", node.op("Mul", g, normal), axes, keepdims=True)
    rest = node.op("Sub", g, node.op("Mul", normal, mean_both))
    rest = node.op("Sub", rest, build.reduce("ReduceMean", g, axes, keepdims=True))
    return Pulled(normal, node.op("Mul", rest, inverse))


def _is_plain(node: GradNode, over: Sequence[int]) -> bool:
    """Whether scale and bias have exactly the dims that are normalised."""
    sizes = node.shape(node.input(0))[over[0] :]
    equal = node.builder.table.equal
    return all(
        len(shape) == len(sizes) and all(map(equal, shape, sizes))
        for shape in (node.shape(node.input(i)) for i in (1, 2) if node.has(i))
    )


def _fused(
    node: GradNode, function: Function, operands: Sequence[ir.Value], over: Sequence[int]
) -> Sequence[ir.Value | None]:
    """Emits the fused gradient with all its outputs, since onnxruntime infers the type of each.

    Outputs that are not wanted get no name, and are not computed.
    """
    x, scale = node.input(0), node.input(1)
    full = (x.dtype, node.shape(x))
    vector = (scale.dtype, node.shape(scale))
    made = node.builder.ops(
        function.name,
        operands,
        [full, *[vector] * (len(function.outputs) - 1)],
        {"axis": over[0] - len(node.shape(x))},
        domain=DOMAIN,
    )
    unread = [value for index, value in enumerate(made) if not node.wants(index)]
    for value in unread:
        node.builder.forget(value)
    return [value if node.wants(index) else None for index, value in enumerate(made)]
