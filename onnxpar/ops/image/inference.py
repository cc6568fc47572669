"""Shape inference of operators on images, where `onnx-shape-inference` is wrong or incomplete.

It rounds down if an aspect ratio is kept. After RoiAlign, it gives a symbolic number of regions
another symbol.
"""

from math import floor

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.ops.slots import Library


def infer_resize(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Resize: a kept aspect ratio rounds to the nearest size, halves up."""
    library.infer(context, node)
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    x = node.inputs[0]
    sizes = node.inputs[3] if len(node.inputs) > 3 else None
    known = None if sizes is None else ir.convenience.get_const_tensor(sizes)
    if policy == "stretch" or x is None or x.shape is None or known is None:
        return
    dims = list(x.shape)
    axes = [a % len(dims) for a in node.attributes.get_ints("axes", range(len(dims)))]
    before = [d for d in (dims[a] for a in axes) if isinstance(d, int)]
    if len(before) != len(axes):
        return
    ratios = [int(s) / d for s, d in zip(known.numpy(), before, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    for axis, size in zip(axes, before, strict=True):
        dims[axis] = floor(size * ratio + 0.5)
    node.outputs[0].shape = ir.Shape(dims)


def infer_roi_align(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """RoiAlign, CropAndResize: a result for each region and channel, also of symbolic numbers."""
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
