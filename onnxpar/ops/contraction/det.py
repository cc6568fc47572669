"""Determinants of matrices: a batch of them may be sharded, a matrix may not."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.operator import OpDef

MAX_SIZE = 32
"""Most rows of a matrix that is differentiated: it has n² minors of (n - 1)² elements each."""


def det_rule(view: NodeView) -> OpRule:
    """Det: every dim before those of the matrix."""
    names = axis_names(len(view.shape(0)))
    batch, matrix = " ".join(names[:-2]), " ".join(names[-2:])
    return parse_rule(f"{batch} {matrix} -> {batch}; replicated: {matrix}")


def det_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """dX_ij = dy (-1)^(i+j) det of X without row i and column j.

    These cofactors exist for any matrix, but the formula det(X) X⁻ᵀ fails for a singular one.

    Raises:
        ModelError: The size of the matrix is unknown or above `MAX_SIZE`.
    """
    x, dy = node.input(0), node.cotangent()
    shape = node.shape(x)
    size = shape[-1]
    if not isinstance(size, int) or size > MAX_SIZE:
        raise node.fail(f"a gradient needs at most {MAX_SIZE} rows, got {size}")
    batch = list(shape[:-2])
    slope = node.builder.unsqueeze(dy, [len(batch), len(batch) + 1])
    if size == 1:
        return [node.builder.reshape_like(slope, x)]
    rest = size - 1
    kept = np.array([[k for k in range(size) if k != i] for i in range(size)])
    rows = kept[:, None, :, None]
    columns = kept[None, :, None, :]
    places = (rows * size + columns).reshape(size * size, rest * rest)
    elements = [*batch, size * size]
    flat = node.builder.reshape(x, elements)
    picked = [*batch, size * size, rest * rest]
    minors = node.op("Gather", flat, node.builder.const(places), shape=picked, axis=len(batch))
    minors = node.builder.reshape(minors, [*batch, size * size, rest, rest])
    cofactors = node.builder.reshape_like(node.op("Det", minors, shape=elements), x)
    signs = (-1.0) ** np.add.outer(np.arange(size), np.arange(size))
    signed = node.op("Mul", cofactors, node.builder.const(signs, x.dtype))
    return [node.op("Mul", signed, slope)]


DEFS = (OpDef("", "Det", 11, det_rule, gradient=det_gradient),)
