"""Gradient of Resize: the transpose of a linear map that is separable by axes."""

from collections.abc import Mapping

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.grad_node import GradNode
from onnxpar.ops.image.interpolation import Interpolation, matrix
from onnxpar.ops.local_helpers import work_dtype
from onnxpar.ops.local_node import LocalNode


def resize_gradient(
    node: GradNode, axes: Mapping[int, Interpolation | None], times: Mapping[int, int]
) -> ir.Value:
    """Emits the cotangent of the operand.

    Args:
        node: The Resize.
        axes: How each resized axis was interpolated; None if its elements were repeated and its
            size is unknown.
        times: How often the elements of each axis were repeated in place; 0 if they were not.
    """
    dx = _summed(node, node.cotangent(), {a: n for a, n in times.items() if n})
    before = dx.dtype
    for axis, how in axes.items():
        if how is None or times[axis]:
            continue
        dx = node.builder.cast(dx, work_dtype(dx.dtype))
        dx = along(node, dx, node.builder.const(matrix(how).T, dx.dtype), axis)
    assert before is not None
    return node.builder.cast(dx, before)


def _summed(node: GradNode, dy: ir.Value, times: Mapping[int, int]) -> ir.Value:
    """Sums over the repetitions of each element, which a reshape makes a dim of their own."""
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
    return node.builder.reduce("ReduceSum", node.builder.reshape(dy, wide), axes)


def along(node: GradNode | LocalNode, x: ir.Value, weights: ir.Value, axis: int) -> ir.Value:
    """Emits the product of `weights` [out, size] and `x` along one axis of `x`."""
    shape, (out, size) = node.shape(x), node.shape(weights)
    rank = len(shape)
    result = [*shape[:axis], out, *shape[axis + 1 :]]
    if axis == rank - 2:
        return node.op("MatMul", weights, x, dtype=x.dtype, shape=result)
    turned = node.op("Transpose", weights, shape=[size, out], perm=[1, 0])
    if axis == rank - 1:
        return node.op("MatMul", x, turned, shape=result)
    order = [*(i for i in range(rank) if i != axis), axis]
    last = node.op("Transpose", x, shape=[shape[i] for i in order], perm=order)
    made = node.op("MatMul", last, turned, shape=[result[i] for i in order])
    back = [order.index(i) for i in range(rank)]
    return node.op("Transpose", made, shape=result, perm=back)
