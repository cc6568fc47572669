"""Gradient of Col2Im: the blocks of the cotangent, read by a convolution with unit kernels."""

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.grad_node import GradNode


def col2im_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Each block is a result of a convolution whose kernels have a single 1.

    Raises:
        ModelError: The block's shape is not constant.
    """
    view, dy = node.view, node.cotangent()
    block = view.contents(2)
    if block is None or not all(isinstance(b, int) for b in block):
        raise view.fail("a gradient needs a constant block shape")
    kernel = [int(b) for b in block]
    count, rank = prod(kernel), len(kernel)
    out = node.shape(dy)
    strides = list(view.attr("strides") or [1] * rank)
    dilations = list(view.attr("dilations") or [1] * rank)
    pads = list(view.attr("pads") or [0] * (2 * rank))
    made: list[Dim] = []
    for d in range(rank):
        room = out[2 + d] + pads[d] + pads[rank + d] - dilations[d] * (kernel[d] - 1) - 1
        if not isinstance(room, int):
            raise view.fail("a gradient needs a constant image")
        made.append(room // int(strides[d]) + 1)
    images = out[0] * out[1]
    # Batch and channels become one dim, as each channel is handled by itself.
    image = node.builder.reshape(dy, [images, 1, *out[2:]])
    units = node.builder.const(np.eye(count).reshape([count, 1, *kernel]), dy.dtype)
    blocks = node.op(
        "Conv",
        image,
        units,
        shape=[images, count, *made],
        kernel_shape=kernel,
        strides=strides,
        dilations=dilations,
        pads=pads,
    )
    return [node.builder.reshape_like(blocks, node.input(0)), None, None]
