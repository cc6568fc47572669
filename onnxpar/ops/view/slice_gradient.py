"""Gradients of what cuts and joins: what was removed gets zeros, what was joined is cut again."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.index.gather_gradient import indexed_gradient


def split_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Joins the cotangents; a piece that the loss does not read has zeros."""
    x = node.input(0)
    pieces = [
        node.builder.zeros(node.shape(output), x.dtype) if given is None else given
        for output, given in zip(node.view.node.outputs, node.cotangents, strict=True)
    ]
    axis = node.attr("axis", 0)
    return [node.op("Concat", *pieces, dtype=x.dtype, shape=node.shape(x), axis=axis)]


def concat_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cuts the cotangent into the operands' pieces."""
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
    """How an axis is cut.

    Attributes:
        position: Where starts, ends and steps say so.
        start: The first index, counted from the front; None where the run decides it.
        step: The step; None where the run decides it.
    """

    position: int
    start: Dim | None
    step: int | None


def slice_gradient(node: GradNode, cuts: Mapping[int, AxisSlice]) -> ir.Value:
    """Puts zeros before and after the cotangent, or its elements where they were taken.

    Args:
        node: The Slice.
        cuts: Of each axis that does not keep all.
    """
    dy, x = node.cotangent(), node.input(0)
    for axis, cut in cuts.items():
        full = node.shape(x)[axis]
        shape = list(node.shape(dy))
        if cut.step == 1 and cut.start is not None:
            parts = [dy]
            after = full - cut.start - shape[axis]
            if cut.start != 0:
                parts.insert(0, node.builder.zeros(_with(shape, axis, cut.start), dy.dtype))
            if after != 0:
                parts.append(node.builder.zeros(_with(shape, axis, after), dy.dtype))
            if len(parts) > 1:
                dy = node.op("Concat", *parts, shape=_with(shape, axis, full), axis=axis)
            continue
        index = _taken(node, cut, full, shape[axis])
        dy = indexed_gradient(node, dy, index, axis, _with(shape, axis, full))
    return dy


def _taken(node: GradNode, cut: AxisSlice, full: Dim, count: Dim) -> ir.Value:
    """The indices that a Slice takes along an axis of `full` elements, int64 [count]."""
    builder = node.builder
    if isinstance(cut.start, int) and cut.step is not None and isinstance(count, int):
        return builder.const(cut.start + cut.step * np.arange(count, dtype=np.int64))
    # All indices cut as the axis is, so that bounds outside of it are understood as they are there.
    zero, one = builder.const(0), builder.const(1)
    end = node.op("Reshape", builder.sizes([full]), builder.const(np.empty(0, np.int64)), shape=())
    every = node.op("Range", zero, end, one, shape=[full])
    chosen = builder.const([cut.position])
    kind = node.input(1).dtype
    bounds: list[ir.Value | None] = [
        node.op("Gather", node.input(i), chosen, shape=[1]) for i in (1, 2)
    ]
    bounds.append(builder.const([0], kind))
    if node.has(4):
        bounds.append(node.op("Gather", node.input(4), chosen, shape=[1]))
    return node.op("Slice", every, *bounds, shape=[count])


def _with(shape: Sequence[Dim], axis: int, size: Dim) -> list[Dim]:
    return [size if position == axis else s for position, s in enumerate(shape)]
