"""Gradients of views: the cotangent has the same order of elements and gets the old shape."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode


def reshape_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Reshape, Flatten, Squeeze and Unsqueeze: gives the cotangent the shape of the operand."""
    return [node.builder.reshape_like(node.cotangent(), node.input(0))]


def transpose_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Transpose by the inverse permutation."""
    dy, rank = node.cotangent(), len(node.shape(node.input(0)))
    order = list(node.attr("perm") or reversed(range(rank)))
    inverse = sorted(range(rank), key=lambda axis: order[axis])
    return [node.op("Transpose", dy, shape=node.shape(node.input(0)), perm=inverse)]


def identity_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """The cotangent itself."""
    return [node.cotangent()]


def expand_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Sums over the dims that were added or repeated."""
    return [node.unbroadcast(node.cotangent(), 0)]
