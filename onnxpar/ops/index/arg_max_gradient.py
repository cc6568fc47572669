"""Gradient of TopK."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.index.scatter_gradient import add_elements


def top_k_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Puts the cotangents of the values where the values were found."""
    axis = int(node.attr("axis", -1))
    return [add_elements(node, node.cotangent(), node.output(1), axis)]
