"""Gradients of Conv and ConvTranspose.

For y = x ∗ W, dx is the transposed convolution of dy by W, and dW[m, c, k] is the sum over batch
and results o of dy[m, o] x[c, stride · o + dilation · k - pad] (Dumoulin and Visin, "A guide to
convolution arithmetic for deep learning", 2016). Both are operators of the undivided graph, so that
they exchange halos over sharded spatial dims, like the convolution.
"""

from collections.abc import Sequence

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
    x, dy = node.input(0), node.cotangent()
    return _cotangents(node, conv_dims(node.view), (DOMAIN, INPUT_GRAD), image=x, results=dy)


def conv_transpose_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cotangents of operand, weights and bias: the transpose of a transpose is the convolution.

    Raises:
        ModelError: As `conv_gradient`, or an output padding is not less than its stride.
    """
    x, dy = node.input(0), node.cotangent()
    dims = transpose_dims(node.view)
    extra = node.attr("output_padding") or [0] * len(dims)
    if any(e >= d.stride for e, d in zip(extra, dims, strict=True)):
        raise node.fail(f"a gradient needs output_padding below the strides, got {list(extra)}")
    return _cotangents(node, dims, ("", "Conv"), image=dy, results=x)


def _cotangents(
    node: GradNode,
    dims: Sequence[Spatial],
    by_operand: tuple[str, str],
    *,
    image: ir.Value,
    results: ir.Value,
) -> Sequence[ir.Value | None]:
    """The cotangents of operand 0, weights and bias.

    Args:
        node: The node.
        dims: Its spatial dims.
        by_operand: Domain and name of the operator that gives the cotangent of operand 0.
        image: What the convolution slides over.
        results: What it makes of the image.
    """
    x, w, dy = node.input(0), node.input(1), node.cotangent()
    attributes = {**window_attributes(node, dims), "group": int(node.attr("group", 1))}
    found: list[ir.Value | None] = [None] * node.arity
    if node.wants(0):
        domain, op_type = by_operand
        found[0] = node.op(op_type, dy, w, shape=node.shape(x), domain=domain, **attributes)
    if node.wants(1):
        shape = node.shape(w)
        found[1] = node.op(WEIGHT_GRAD, image, results, shape=shape, domain=DOMAIN, **attributes)
    if node.wants(2):
        found[2] = node.builder.reduce("ReduceSum", dy, [0, *range(2, len(node.shape(dy)))])
    return found
