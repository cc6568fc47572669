"""Local forms of transposed convolutions: ConvTranspose, and gradients by the image.

Element i of the operand adds to `extent` results, the first of which is stride * i - before. A
device takes all elements that add to its block of results. Those at the ends also add to results
outside the block, which are removed: by the operator's own padding if all devices remove equally
many, else by a Slice.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.window.geometry import (
    SAME,
    Spatial,
    constant,
    kernel_of,
    shared_padding,
    split_dims,
)
from onnxpar.ops.window.halo import DimSplit, skipped, window


def transpose_dims(view: NodeView) -> tuple[Spatial, ...]:
    """Returns the geometry of the convolution that a ConvTranspose transposes.

    Padding that follows from `output_shape` or `auto_pad` is shared as the ONNX operator
    specification says (`shared_padding`).
    """
    kernel = kernel_of(view, 1)
    rank = len(kernel)
    strides = view.attr("strides") or [1] * rank
    dilations = view.attr("dilations") or [1] * rank
    pads = view.attr("pads") or [0] * (2 * rank)
    extra = view.attr("output_padding") or [0] * rank
    auto = str(view.attr("auto_pad", "NOTSET"))
    found = []
    for d in range(rank):
        stride, dilation = int(strides[d]), int(dilations[d])
        size, results = view.out_shape()[2 + d], view.shape(0)[2 + d]
        before: int | None = int(pads[d])
        after: int | None = int(pads[rank + d])
        if auto == "VALID":
            before = after = 0
        if auto in SAME or view.attr("output_shape"):
            extent = dilation * (kernel[d] - 1) + 1
            total = constant(stride * (results - 1) + int(extra[d]) + extent - size, view.table)
            before, after = shared_padding(total if total is None or total >= 0 else None, auto)
        found.append(Spatial(kernel[d], stride, dilation, before, after, size, results))
    return tuple(found)


def spread(
    node: LocalNode,
    dims: Sequence[Spatial],
    weights: ir.Value,
    group: int,
    bias: Sequence[ir.Value] = (),
    *,
    x: ir.Value | None = None,
    out: Sequence[Dim] | None = None,
) -> ir.Value:
    """Emits a transposed convolution.

    Args:
        node: The node; its rule names the spatial factors as `axis_names` does.
        dims: The geometry of the convolution that it transposes.
        weights: Local weights.
        group: Local number of groups.
        bias: The bias, if there is one.
        x: The local operand, with the spatial dims of operand 0; by default that operand.
        out: Local shape of the result; by default that of output 0.
    """
    shape = list(node.in_shape(0))
    if x is None or out is None:
        x, out = node.input(0), node.out_shape()
    else:
        shape[:2] = [out[0], 1]
    split = split_dims(node, dims)
    made = list(out)
    begins, ends, extra = [], [], []
    slices: list[tuple[int, ir.Value | int, Dim]] = []
    for d, dim in enumerate(dims):
        begin: int | ir.Value = dim.before or 0
        if d in split:
            part = DimSplit(2 + d, split[d], dim.results, dim.size, dim.spreading)
            x, shape = window(node, x, shape, part, zero=node.zero[0])
            begin = skipped(node, part)
        total = (shape[2 + d] - 1) * dim.stride + dim.extent
        if isinstance(begin, int):
            rest = constant(total - begin - out[2 + d], node.table)
            pad, more, start = _even(begin, rest, dim.stride)
            begins.append(pad)
            ends.append(pad)
            extra.append(more)
            if start is not None:
                made[2 + d] = total - 2 * pad + more
                slices.append((2 + d, start, out[2 + d]))
        else:
            begins.append(0)
            ends.append(0)
            extra.append(0)
            made[2 + d] = total
            slices.append((2 + d, begin, out[2 + d]))
    y = node.op(
        "ConvTranspose",
        x,
        weights,
        *bias,
        shape=made,
        strides=[d.stride for d in dims],
        dilations=[d.dilation for d in dims],
        kernel_shape=[d.kernel for d in dims],
        pads=[*begins, *ends],
        output_padding=extra,
        group=group,
    )
    for axis, begin, size in slices:
        y = kept(node, y, made, axis, begin, size)
        made[axis] = size
    return y


def _even(before: int, after: int | None, stride: int) -> tuple[int, int, int | None]:
    """Returns how to remove both ends of a result with equal padding: cuDNN knows no other.

    Args:
        before: Elements to remove before the first wanted one.
        after: Elements to remove after the last wanted one. Negative if there are too few; None if
            that depends on a symbolic size and fewer than `stride` are missing.
        stride: The stride; output padding must be less.

    Returns:
        The padding, the output padding (which restores elements that the padding removes at the
        end), and the start of the wanted part in the rest; None if the rest is the wanted part.
    """
    if after is None:
        return 0, stride - 1, before
    if 0 <= before - after < stride:
        return before, before - after, None
    if before < after:
        return before, 0, 0
    pad = max(after, 0)
    return pad, pad - after, before - pad


def kept(
    node: LocalNode,
    x: ir.Value,
    shape: Sequence[Dim],
    axis: int,
    begin: ir.Value | int,
    size: Dim,
) -> ir.Value:
    """Emits the slice of one dim that begins at `begin` and has the local size `size`."""
    start = node.builder.const([begin]) if isinstance(begin, int) else begin
    end = node.op("Add", start, node.builder.size(size), shape=[1])
    made = [*shape[:axis], size, *shape[axis + 1 :]]
    return node.op("Slice", x, start, end, node.builder.const([axis]), shape=made)
