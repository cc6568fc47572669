"""Gradients of reads and writes at indices: reads become writes, and writes become reads."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.fallback import readable
from onnxpar.ops.grad_node import GradNode

GATHER_ND_GRAD = "GatherNDGrad"
"""Operator of the undivided program: rows [a…, i…, b…], indices [a…, i…, k] -> [a…, V1…Vk, b…].

It adds up rows of equal index: the gradient of GatherND with the same attribute batch_dims.
"""


def gather_elements_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Adds up the cotangent's elements where they were read."""
    return [add_elements(node, node.cotangent(), node.input(1), int(node.attr("axis", 0)))]


def add_elements(node: GradNode, dy: ir.Value, indices: ir.Value, axis: int) -> ir.Value:
    """Emits zeros shaped as input 0 with `dy` added along `axis` at `indices`, of its shape."""
    shape = node.shape(node.input(0))
    zeros = node.builder.zeros(shape, dy.dtype)
    return node.op("ScatterElements", zeros, indices, dy, shape=shape, axis=axis, reduction="add")


def gather_nd_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Adds up the cotangent's rows where they were read."""
    found = node.op(
        GATHER_ND_GRAD,
        node.cotangent(),
        node.input(1),
        shape=node.shape(node.input(0)),
        domain=DOMAIN,
        batch_dims=int(node.attr("batch_dims", 0)),
    )
    return [found]


def scatter_gradient(node: GradNode, reduction: str) -> Sequence[ir.Value | None]:
    """ScatterElements and ScatterND: the data gets dy where nothing was written, updates the rest.

    If several updates are written to one place and do not add up, the specification does not say
    which of them remains. Each of them then gets the cotangent.

    Raises:
        ModelError: The reduction is a product, a maximum or a minimum.
    """
    op_type = node.op_type
    if reduction not in ("none", "add"):
        raise node.fail(f"the reduction {reduction!r} has no gradient")
    dy, indices, updates = node.cotangent(), node.input(1), node.input(2)
    flags: dict[str, Any] = {}
    read = "GatherND"
    if op_type == "ScatterElements":
        flags, read = {"axis": int(node.attr("axis", 0))}, "GatherElements"
    found: list[ir.Value | None] = [None, None, None]
    if node.wants(0):
        found[0] = dy
        if reduction == "none":
            zeros = _zeros_like(node, updates, dy.dtype)
            found[0] = node.op(op_type, dy, indices, zeros, **flags)
    if node.wants(2):
        found[2] = node.op(read, dy, indices, shape=node.shape(updates), **flags)
    return found


def one_hot_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Gradient of the two values: dy summed over the off elements, and over the on elements."""
    dy, view = node.cotangent(), node.view
    ends = node.builder.const(np.array([0, 1]), dy.dtype)
    axis = int(view.attr("axis", -1))
    hot = node.op(
        "OneHot",
        node.input(0),
        node.input(1),
        ends,
        dtype=dy.dtype,
        shape=node.shape(dy),
        axis=axis,
    )
    on = node.op("Mul", dy, hot)
    every = range(len(node.shape(dy)))
    totals = [
        node.builder.unsqueeze(node.builder.reduce("ReduceSum", part, every), [0])
        for part in (node.op("Sub", dy, on), on)
    ]
    return [None, None, node.op("Concat", *totals, shape=[2], axis=0)]


def _zeros_like(node: GradNode, like: ir.Value, dtype: ir.DataType | None) -> ir.Value:
    shape = node.shape(like)
    if readable(node.view, shape):
        return node.builder.zeros(shape, dtype)
    # A size that depends on data, such as the number of elements that a mask chooses.
    zero = node.builder.const(np.array(0), dtype)
    return node.op("Expand", zero, node.builder.shape_value(like), shape=shape)
