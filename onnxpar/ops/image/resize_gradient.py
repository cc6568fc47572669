"""Gradient of Resize: the transpose of a linear map that is separable by axes."""

from collections.abc import Mapping

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.image.interpolation import Interpolation, matrix
from onnxpar.ops.local_helpers import work_dtype


def resize_gradient(
    node: GradNode, axes: Mapping[int, Interpolation | None], times: Mapping[int, int]
) -> ir.Value:
    """Brings the cotangent back to the operand's shape.

    Args:
        node: The Resize.
        axes: How each resized axis was interpolated.
        times: Of each axis how often its elements were repeated in place, 0 where they were not;
            such an axis needs no interpolation.
    """
    dx = _summed(node, node.cotangent(), {a: n for a, n in times.items() if n})
    before = dx.dtype
    for axis, how in axes.items():
        if how is None or times[axis]:
            continue
        dx = node.builder.cast(dx, work_dtype(dx.dtype))
        dx = _along(node, dx, node.builder.const(matrix(how).T, dx.dtype), axis)
    assert before is not None
    return node.builder.cast(dx, before)


def _summed(node: GradNode, dy: ir.Value, times: Mapping[int, int]) -> ir.Value:
    """Sums what came of one element, which a view has as a dim of its own."""
    if not times:
        return dy
    wide: list[Dim] = []
    axes = []
    for axis, (size, after) in enumerate(
        zip(node.shape(node.input(0)), node.shape(dy), strict=True)
    ):
        if axis not in times:
            wide.append(after)
            continue
        wide += [size, times[axis]]
        axes.append(len(wide) - 1)
    view = node.op("Reshape", dy, node.builder.sizes(wide), shape=wide)
    return node.builder.reduce("ReduceSum", view, axes)


def _along(node: GradNode, x: ir.Value, weights: ir.Value, axis: int) -> ir.Value:
    """Returns weights [size, out] times `x` along an axis of it."""
    shape = node.shape(x)
    rank, size = len(shape), node.shape(weights)[0]
    result = [*shape[:axis], size, *shape[axis + 1 :]]
    if axis == rank - 2:
        return node.op("MatMul", weights, x, shape=result)
    order = [*(i for i in range(rank) if i != axis), axis]
    turned = node.op("Transpose", weights, shape=list(node.shape(weights))[::-1], perm=[1, 0])
    if axis == rank - 1:
        return node.op("MatMul", x, turned, shape=result)
    last = node.op("Transpose", x, shape=[shape[i] for i in order], perm=order)
    made = node.op("MatMul", last, turned, shape=[result[i] for i in order])
    back = [order.index(i) for i in range(rank)]
    return node.op("Transpose", made, shape=result, perm=back)
