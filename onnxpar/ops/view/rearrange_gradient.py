"""Gradients of operators that rearrange elements: the inverse rearrangement."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.ops.grad_node import GradNode


def depth_to_space_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """SpaceToDepth; for mode CRD, which it has only since opset 28, Reshape and Transpose."""
    dy, x, block = node.cotangent(), node.input(0), int(node.attr("blocksize"))
    shape = node.shape(x)
    if str(node.attr("mode", "DCR")) == "DCR":
        return [node.op("SpaceToDepth", dy, shape=shape, blocksize=block)]
    batch, depth, height, width = node.shape(dy)[0], node.shape(dy)[1], *shape[2:]
    tall = [batch, depth, height, block, width, block]
    view = node.op("Reshape", dy, node.builder.sizes(tall), shape=tall)
    order = [0, 1, 3, 5, 2, 4]
    moved = node.op("Transpose", view, shape=[tall[i] for i in order], perm=order)
    return [node.builder.reshape_like(moved, x)]


def space_to_depth_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """DepthToSpace with the same order of channels."""
    mode = str(node.attr("mode", "DCR"))
    flags: dict[str, Any] = {} if mode == "DCR" else {"mode": mode}
    shape, block = node.shape(node.input(0)), int(node.attr("blocksize"))
    return [node.op("DepthToSpace", node.cotangent(), shape=shape, blocksize=block, **flags)]


def reverse_sequence_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Reverses the cotangent: the operator is its own inverse."""
    view = node.view
    batch, time = int(view.attr("batch_axis", 1)), int(view.attr("time_axis", 0))
    return [
        node.op(
            "ReverseSequence", node.cotangent(), node.input(1), batch_axis=batch, time_axis=time
        )
    ]
