"""Gradients of Conv and ConvTranspose.

For y = x ∗ W, dx is the transposed convolution of dy by W, and dW[m, c, k] is the sum over batch
and results o of dy[m, o] x[c, stride · o + dilation · k - pad] (Dumoulin and Visin, "A guide to
convolution arithmetic for deep learning", 2016). Both are operators of their own on the global
graph, so that a spatial split of them exchanges halos as the convolution does.
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.window.geometry import Spatial, conv_dims
from onnxpar.ops.window.gradient_windows import window_attributes
from onnxpar.ops.window.transposed import transpose_dims

INPUT_GRAD, WEIGHT_GRAD = "ConvInputGrad", "ConvWeightGrad"


def conv_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cotangents of image, weights and bias.

    Raises:
        ModelError: The padding depends on sizes that are not numbers.
    """
    x, w, dy = node.input(0), node.input(1), node.cotangent()
    attributes = _attributes(node, conv_dims(node.view))
    found: list[ir.Value | None] = [None for _ in range(node.arity)]
    if node.wants(0):
        shape = node.shape(x)
        found[0] = node.op(INPUT_GRAD, dy, w, shape=shape, domain=DOMAIN, **attributes)
    if node.wants(1):
        shape = node.shape(w)
        found[1] = node.op(WEIGHT_GRAD, x, dy, shape=shape, domain=DOMAIN, **attributes)
    if node.wants(2):
        found[2] = _bias(node, dy)
    return found


def conv_transpose_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cotangents of operand, weights and bias: the transpose of a transpose is the convolution.

    Raises:
        ModelError: As `conv_gradient`, or an output padding is as great as its stride.
    """
    x, w, dy = node.input(0), node.input(1), node.cotangent()
    dims = transpose_dims(node.view)
    attributes = _attributes(node, dims)
    extra = node.attr("output_padding") or [0] * len(dims)
    if any(e >= d.stride for e, d in zip(extra, dims, strict=True)):
        raise node.fail(f"a gradient needs output_padding below the strides, got {list(extra)}")
    found: list[ir.Value | None] = [None for _ in range(node.arity)]
    if node.wants(0):
        found[0] = node.op("Conv", dy, w, shape=node.shape(x), **attributes)
    if node.wants(1):
        shape = node.shape(w)
        found[1] = node.op(WEIGHT_GRAD, dy, x, shape=shape, domain=DOMAIN, **attributes)
    if node.wants(2):
        found[2] = _bias(node, dy)
    return found


def _bias(node: GradNode, dy: ir.Value) -> ir.Value:
    rank = len(node.shape(dy))
    return node.builder.reduce("ReduceSum", dy, [0, *range(2, rank)])


def _attributes(node: GradNode, dims: Sequence[Spatial]) -> dict[str, Any]:
    group = int(node.view.attr("group", 1))
    return {**window_attributes(node, dims), "group": group}
