"""Gradients of lookups: cotangents are added up at the indices from which elements were read."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.grad_node import GradNode

INDEXED_SUM = "IndexedSum"
"""Operator of the undivided program: rows [i…, b…], indices [i…], data? [V, b…] -> [V, b…].

It adds up rows of equal index: the gradient of Gather along dim 0. The optional operand has the
result's shape; its elements are not read.
"""


def gather_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Adds up the cotangent's rows where they were read."""
    data = node.input(0)
    axis = node.attr("axis", 0)
    axis = axis + len(node.shape(data)) if axis < 0 else axis
    return [indexed_gradient(node, node.cotangent(), node.input(1), axis, node.shape(data))]


def indexed_gradient(
    node: GradNode, dy: ir.Value, index: ir.Value, axis: int, shape: Sequence[Dim]
) -> ir.Value:
    """Emits the gradient of Gather along `axis` of a tensor of this shape."""
    places, rank = len(node.shape(index)), len(node.shape(dy))
    rows = list(shape)
    vocabulary = rows.pop(axis)
    if axis:
        # Move the indexed dims to the front; that of the result moves back below.
        order = [*range(axis, axis + places), *range(axis), *range(axis + places, rank)]
        before = node.shape(dy)
        dy = node.op("Transpose", dy, shape=[before[i] for i in order], perm=order)
    source = node.input(0)
    # An activation would stay in memory only for its shape; a parameter is there anyway.
    held = source.producer() is None and not axis and node.shape(source) == tuple(shape)
    like = source if held else None
    found = node.op(INDEXED_SUM, dy, index, like, shape=[vocabulary, *rows], domain=DOMAIN)
    if axis:
        back = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
        found = node.op("Transpose", found, shape=shape, perm=back)
    return found
