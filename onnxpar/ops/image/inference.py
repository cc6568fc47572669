"""Shape inference of operators on images where `onnx-shape-inference` says too little, or else.

It rounds down where an aspect ratio is kept, and knows neither the scales that Resize of opset 10
has as its second operand nor those that Upsample of opset 7 has as an attribute. A symbolic number
of regions is another symbol to it after RoiAlign.
"""

from collections.abc import Sequence
from math import floor

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.ops.slots import Library

_OLD = 2
"""Operands of Resize in opset 10: the scales are the second."""


def infer_resize(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Resize: a kept aspect ratio rounds to the nearest size, halves up."""
    if len(node.inputs) == _OLD:
        _infer_old_resize(context, node)
        return
    library.infer(context, node)
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    x = node.inputs[0]
    sizes = node.inputs[3] if len(node.inputs) > 3 else None
    known = None if sizes is None else ir.convenience.get_const_tensor(sizes)
    if policy == "stretch" or x is None or x.shape is None or known is None:
        return
    dims = list(x.shape)
    axes = [a % len(dims) for a in node.attributes.get_ints("axes", range(len(dims)))]
    before = [dims[a] for a in axes]
    if not all(isinstance(d, int) for d in before):
        return
    wanted = [int(s) for s in known.numpy()]
    ratios = [w / int(d) for w, d in zip(wanted, before, strict=True)]  # type: ignore[arg-type]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    for axis, size in zip(axes, before, strict=True):
        dims[axis] = floor(int(size) * ratio + 0.5)  # type: ignore[arg-type]
    node.outputs[0].shape = ir.Shape(dims)


def _infer_old_resize(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Resize of opset 10: the scales are the second operand."""
    scales = node.inputs[1] if len(node.inputs) > 1 else None
    known = None if scales is None else ir.convenience.get_const_tensor(scales)
    _scaled(context, node, None if known is None else [float(s) for s in known.numpy().ravel()])


def infer_upsample(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Upsample: the scales are an attribute until opset 9."""
    if "scales" not in node.attributes:
        library.infer(context, node)
        return
    _scaled(context, node, node.attributes["scales"].as_floats())


def _scaled(context: ShapeInferenceContext, node: ir.Node, scales: Sequence[float] | None) -> None:
    x = node.inputs[0]
    if x is None or x.shape is None:
        return
    dims: list[int | ir.SymbolicDim] = []
    for place, size in enumerate(x.shape):
        scale = None if scales is None else scales[place]
        if scale == 1:
            dims.append(size)
        elif scale is not None and isinstance(size, int):
            dims.append(floor(size * scale))
        elif scale is not None and scale == int(scale):
            dims.append(size * int(scale))
        else:
            dims.append(context.new_symbolic_dim())
    context.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)


def infer_roi_align(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """RoiAlign, CropAndResize: a result for each region and channel, symbolic numbers too."""
    x, rois = node.inputs[:2]
    if x is None or rois is None or x.shape is None or rois.shape is None:
        return
    bins: list[int | ir.SymbolicDim]
    if node.op_type == "RoiAlign":
        bins = [node.attributes.get_int(f"output_{n}", 1) for n in ("height", "width")]
    else:
        size = node.inputs[3]
        known = None if size is None else ir.convenience.get_const_tensor(size)
        if known is None:
            bins = [context.new_symbolic_dim() for _ in range(2)]
        else:
            bins = [int(n) for n in known.numpy()]
    context.set_shape_and_dtype(
        node.outputs[0], ir.Shape([rois.shape[0], x.shape[1], *bins]), x.dtype
    )
