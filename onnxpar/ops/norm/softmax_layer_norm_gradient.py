"""Gradients of Softmax, LogSoftmax, LayerNormalization and RMSNormalization."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.fused.backward import LAYER_NORMALIZATION_GRAD, LOG_SOFTMAX_GRAD, SOFTMAX_GRAD
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.local_helpers import work_dtype

Axes = Callable[[NodeView], tuple[int, ...]]


def softmax_gradient(axes: Axes) -> Callable[[GradNode], Sequence[ir.Value | None]]:
    """Returns the rule dx = y (dy - Σ dy y) over the axis that is normalised."""

    def gradient(node: GradNode) -> Sequence[ir.Value | None]:
        dy, y = node.cotangent(), node.output()
        (axis,) = axes(node.view)
        return [node.fused(SOFTMAX_GRAD, dy, y, axis=axis)]

    gradient.__doc__ = softmax_gradient.__doc__
    return gradient


def log_softmax_gradient(axes: Axes) -> Callable[[GradNode], Sequence[ir.Value | None]]:
    """Returns the rule dx = dy - exp(y) Σ dy over the axis that is normalised."""

    def gradient(node: GradNode) -> Sequence[ir.Value | None]:
        dy, y = node.cotangent(), node.output()
        (axis,) = axes(node.view)
        return [node.fused(LOG_SOFTMAX_GRAD, dy, y, axis=axis)]

    gradient.__doc__ = log_softmax_gradient.__doc__
    return gradient


def layer_norm_gradient(axes: Axes) -> Callable[[GradNode], Sequence[ir.Value | None]]:
    """Returns the rule of LayerNormalization (Ba et al., 2016), by mean and inverse deviation.

    With x̂ = (x - mean) · inverse and g = dy · scale: dx = inverse (g - mean(g) - x̂ mean(g x̂)),
    dscale = Σ dy x̂ and dbias = Σ dy over the leading dims.
    """

    def gradient(node: GradNode) -> Sequence[ir.Value | None]:
        if any(c is not None for c in node.cotangents[1:]):
            raise node.fail(
                "the loss depends on its mean or inverse deviation, which have no gradient"
            )
        x, scale, dy = node.input(0), node.input(1), node.cotangent()
        if not node.wants(0) and not node.wants(1):
            return [None, None, node.unbroadcast(dy, 2)]
        over = axes(node.view)
        stash = ir.DataType(node.attr("stash_type", 1))
        kept = [1 if axis in over else size for axis, size in enumerate(node.shape(x))]
        mean, inverse = (node.further_output(i, stash, kept) for i in (1, 2))
        if node.wants(0) and _is_plain(node, over):
            return _fused(node, (dy, x, scale, mean, inverse), over)
        assert x.dtype is not None
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

    gradient.__doc__ = layer_norm_gradient.__doc__
    return gradient


def rms_norm_gradient(axes: Axes) -> Callable[[GradNode], Sequence[ir.Value | None]]:
    """Returns the rule of RMSNormalization (Zhang & Sennrich, 2019).

    With x̂ = x · inverse and g = dy · scale: dx = inverse (g - x̂ mean(g x̂)) and dscale = Σ dy x̂
    over the leading dims. The inverse is that of the forward node, which gives it as a further
    output.
    """

    def gradient(node: GradNode) -> Sequence[ir.Value | None]:
        if any(c is not None for c in node.cotangents[1:]):
            raise node.fail("the loss depends on its inverse deviation, which has no gradient")
        scale, over = node.input(1), axes(node.view)
        dtype = node.input(0).dtype
        assert dtype is not None and scale.dtype is not None
        wide = work_dtype(dtype)
        x, dy = (node.builder.cast(v, wide) for v in (node.input(0), node.cotangent()))
        normal, inverse = _normal_by_inverse(node, x, over)
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

    gradient.__doc__ = rms_norm_gradient.__doc__
    return gradient


_WITH_INVERSE = "SimplifiedLayerNormalization"
"""The name of RMSNormalization in onnxruntime, which gives the inverse deviation, too."""


def _normal_by_inverse(
    node: GradNode, x: ir.Value, over: Sequence[int]
) -> tuple[ir.Value, ir.Value]:
    """Returns x̂ and the inverse root of the mean square, saved by the forward node if it can.

    It cannot where its statistics are narrower than x, nor where RMSNormalization broadcasts its
    scale: onnxruntime's operator need not.
    """
    view, build = node.view, node.builder
    stash = ir.DataType(view.attr("stash_type", 1))
    named = view.op_type == _WITH_INVERSE
    if x.dtype == stash and (named or _is_plain(node, over)):
        view.node.op_type = _WITH_INVERSE
        kept = [1 if axis in over else size for axis, size in enumerate(node.shape(x))]
        inverse = node.further_output(1, stash, kept)
        return node.op("Mul", x, inverse), inverse
    square = build.reduce("ReduceMean", node.op("Mul", x, x), over, keepdims=True)
    epsilon = node.number(float(view.attr("epsilon", 1e-5)), x)
    inverse = node.op("Reciprocal", node.op("Sqrt", node.op("Add", square, epsilon)))
    return node.op("Mul", x, inverse), inverse


@dataclass(frozen=True)
class Pulled:
    """The gradient of a normalisation by itself.

    Attributes:
        normal: What is normalised, x̂.
        dx: The cotangent of x; None where that of x̂ was not given.
    """

    normal: ir.Value
    dx: ir.Value | None


def pull_back(node: GradNode, x: ir.Value, g: ir.Value | None, axes: Sequence[int]) -> Pulled:
    """Emits x̂ = (x - mean) · inverse over `axes` anew, and the cotangent of x from that of x̂.

    Args:
        node: The node, whose attribute `epsilon` is added to the variance.
        x: What is normalised.
        g: The cotangent of x̂, if that of x is wanted.
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
    node: GradNode, operands: Sequence[ir.Value], over: Sequence[int]
) -> Sequence[ir.Value | None]:
    """Emits the node with all its outputs: onnxruntime infers types for each that a function has.

    Those that nobody wants have no name, and are not computed.
    """
    x, scale = node.input(0), node.input(1)
    whole = (x.dtype, node.shape(x))
    part = (scale.dtype, node.shape(scale))
    made = node.builder.ops(
        LAYER_NORMALIZATION_GRAD.name,
        operands,
        [whole, part, part],
        {"axis": over[0] - len(node.shape(x))},
        domain=DOMAIN,
    )
    unread = [value for index, value in enumerate(made) if not node.wants(index)]
    for value in unread:
        node.builder.forget(value)
    return [value if node.wants(index) else None for index, value in enumerate(made)]
