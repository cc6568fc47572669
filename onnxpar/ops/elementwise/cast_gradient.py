"""Gradients of Cast and CastLike: the cotangent in the type of the operand."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode


def cast_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gives dy in the type of x, rounded if that is narrower; the second operand gets nothing."""
    x = node.input(0)
    if not node.wants(0) or x.dtype is None:
        return []
    return [node.builder.cast(node.cotangent(), x.dtype)]
