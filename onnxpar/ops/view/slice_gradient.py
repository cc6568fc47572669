"""Gradients of Slice, Split and Concat: removed elements get zeros, joined tensors are split."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.grad_node import GradNode, Placed
from onnxpar.ops.index.gather_gradient import indexed_gradient
from onnxpar.ops.view.pieces import join_pieces, resized


def split_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Joins the cotangents, with zeros for a piece that the loss does not depend on."""
    x = node.input(0)
    pieces = [
        node.builder.zeros(node.shape(output), x.dtype) if given is None else given
        for output, given in zip(node.view.node.outputs, node.cotangents, strict=True)
    ]
    axis = node.attr("axis", 0)
    return [node.op("Concat", *pieces, dtype=x.dtype, shape=node.shape(x), axis=axis)]


def concat_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Splits the cotangent into those of the operands."""
    dy, view = node.cotangent(), node.view
    operands = [node.input(i) for i in range(view.arity)]
    if len(operands) == 1:
        return [dy]
    axis = view.attr("axis", 1)
    sizes = [node.shape(x)[axis] for x in operands]
    outputs = [(dy.dtype, node.shape(x)) for x in operands]
    return list(node.builder.ops("Split", [dy, node.builder.sizes(sizes)], outputs, {"axis": axis}))


@dataclass(frozen=True)
class AxisSlice:
    """How an axis is sliced.

    Attributes:
        position: Position of the axis in starts, ends and steps.
        start: The first index, counted from the front; None if unknown before the model runs.
        step: The step; None if unknown before the model runs.
    """

    position: int
    start: Dim | None
    step: int | None


def slice_gradient(node: GradNode, slices: Mapping[int, AxisSlice]) -> ir.Value | Placed:
    """Places the cotangent along each axis, or scatters it to the indices that were taken.

    Args:
        node: The Slice.
        slices: How each axis is sliced that does not keep all its elements.
    """
    dy, x = node.cotangent(), node.input(0)
    left = len(slices)
    for axis, piece in slices.items():
        left -= 1
        full = node.shape(x)[axis]
        if piece.step == 1 and piece.start is not None:
            placed = Placed(dy, axis, piece.start)
            if not left:
                return placed
            dy = join_pieces(node.builder, [placed], full)
            continue
        taken = node.shape(dy)[axis]
        index = _taken(node, piece, full, taken)
        dy = indexed_gradient(node, dy, index, axis, resized(node.shape(dy), axis, full))
    return dy


def _taken(node: GradNode, piece: AxisSlice, full: Dim, count: Dim) -> ir.Value:
    """The indices that a Slice takes along an axis of `full` elements, int64 [count]."""
    builder = node.builder
    if isinstance(piece.start, int) and piece.step is not None and isinstance(count, int):
        return builder.const(piece.start + piece.step * np.arange(count, dtype=np.int64))
    # Slices the indices themselves, so that bounds beyond the axis mean the same.
    zero, one = builder.const(0), builder.const(1)
    end = node.op("Reshape", builder.sizes([full]), builder.const(np.empty(0, np.int64)), shape=())
    every = node.op("Range", zero, end, one, shape=[full])
    chosen = builder.const([piece.position])
    kind = node.input(1).dtype
    bounds: list[ir.Value | None] = [
        node.op("Gather", node.input(i), chosen, shape=[1]) for i in (1, 2)
    ]
    bounds.append(builder.const([0], kind))
    if node.has(4):
        bounds.append(node.op("Gather", node.input(4), chosen, shape=[1]))
    return node.op("Slice", every, *bounds, shape=[count])
