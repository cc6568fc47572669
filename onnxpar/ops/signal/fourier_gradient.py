"""Gradient of DFT: the adjoint of a transform is the inverse transform, except for a factor.

With y = F x for n elements, F* = n F^-1; the inverse divides by n, so its adjoint is F / n. Real
and imaginary parts count as two real numbers, as in PyTorch's complex autograd.
"""

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.grad_node import GradNode


def dft_gradient(node: GradNode, axis: int) -> ir.Value:
    """Transforms the cotangent back.

    Args:
        node: The DFT.
        axis: The transformed axis, counted from the front.

    Raises:
        ModelError: Its length is not constant, or it is an inverse transform of half a spectrum.
    """
    view, x, dy = node.view, node.input(0), node.cotangent()
    inverse, onesided = bool(view.attr("inverse", 0)), bool(view.attr("onesided", 0))
    shape, made = list(node.shape(x)), list(node.shape(dy))
    size = shape[axis]
    length: Dim = size
    if view.has(1):
        known = view.contents(1)
        if known is None:
            raise view.fail("a gradient needs a constant dft_length")
        length = known[0]
    if not isinstance(length, int) or not isinstance(size, int):
        raise view.fail(f"a gradient needs an axis of constant size, got {size}")
    if inverse and onesided:
        raise view.fail("an inverse transform of half a spectrum has no gradient")
    if onesided:
        # The missing half of the spectrum has no cotangent.
        dy = _resized(node, dy, axis, length)
        made[axis] = length
    place = node.builder.const(axis)
    back = node.op("DFT", dy, None, place, shape=made, inverse=int(not inverse))
    factor = 1 / length if inverse else float(length)
    back = node.op("Mul", back, node.number(factor, back), shape=made)
    if shape[-1] == 1:
        back = _resized(node, back, len(shape) - 1, 1)
    return _resized(node, back, axis, size)


def _resized(node: GradNode, x: ir.Value, axis: int, size: int) -> ir.Value:
    """Shortens an axis at its end, or extends it by zeros."""
    shape = list(node.shape(x))
    before = shape[axis]
    assert isinstance(before, int)
    shape[axis] = size
    if before == size:
        return x
    if before > size:
        bounds = (node.builder.const([n]) for n in (0, size, axis))
        return node.op("Slice", x, *bounds, shape=shape)
    pads = np.zeros((2, len(shape)), np.int64)
    pads[1, axis] = size - before
    return node.op("Pad", x, node.builder.const(pads.ravel()), node.number(0, x), shape=shape)
