"""Gradients of what cuts and joins: what was cut off gets zeros, what was joined is cut again."""

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.errors import ModelError
from onnxpar.ops.gradient import GradNode
from onnxpar.ops.gradients.gather import indexed_gradient
from onnxpar.symbols import Dim, dim_str


def split_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Joins the cotangents; a piece that the loss does not read has zeros."""
    x = node.input(0)
    pieces = [
        _zeros(node, node.shape(output)) if given is None else given
        for output, given in zip(node.view.node.outputs, node.cotangents, strict=True)
    ]
    axis = node.view.attr("axis", 0)
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
    attributes: dict[str, object] = {"axis": axis}
    inputs = [dy]
    if node.builder.opset >= 13:
        inputs.append(node.builder.sizes(sizes))
    elif all(isinstance(size, int) for size in sizes):
        attributes["split"] = [int(size) for size in sizes]
    else:
        raise ModelError(
            f"node {view.name!r} (Concat): the pieces {', '.join(map(dim_str, sizes))} are cut "
            f"again only from opset 13 on, the model has {node.builder.opset}"
        )
    return list(node.builder.ops("Split", inputs, outputs, attributes))


def slice_gradient(node: GradNode, steps: Mapping[int, tuple[Dim, int]]) -> ir.Value:
    """Puts zeros before and after the cotangent.

    Args:
        node: The Slice.
        steps: Of each axis that does not keep all, the first index (counted from the front) and
            the step.

    Raises:
        ModelError: A step other than 1 over a size that is not constant.
    """
    dy, x = node.cotangent(), node.input(0)
    for axis, (start, step) in steps.items():
        full = node.shape(x)[axis]
        shape = list(node.shape(dy))
        if step == 1:
            parts = [dy]
            after = full - start - shape[axis]
            if start != 0:
                parts.insert(0, _zeros(node, _with(shape, axis, start), dy.dtype))
            if after != 0:
                parts.append(_zeros(node, _with(shape, axis, after), dy.dtype))
            if len(parts) > 1:
                dy = node.op("Concat", *parts, shape=_with(shape, axis, full), axis=axis)
            continue
        if not isinstance(start, int) or not isinstance(shape[axis], int):
            raise ModelError(
                f"node {node.view.name!r} (Slice): a gradient over step {step} needs constant "
                f"bounds, got the start {dim_str(start)} and {dim_str(shape[axis])} elements"
            )
        places = start + step * np.arange(int(shape[axis]), dtype=np.int64)
        index = node.builder.const(places)
        dy = indexed_gradient(node, dy, index, axis, _with(shape, axis, full))
    return dy


def _with(shape: Sequence[Dim], axis: int, size: Dim) -> list[Dim]:
    return [size if position == axis else s for position, s in enumerate(shape)]


def _zeros(node: GradNode, shape: Sequence[Dim], dtype: ir.DataType | None = None) -> ir.Value:
    zero = node.builder.const(np.array(0), dtype or node.input(0).dtype)
    return node.op("Expand", zero, node.builder.sizes(shape), shape=shape)
