"""Shape inference of operators on images where `onnx-shape-inference` says too little, or else.

It rounds down where an aspect ratio is kept. A symbolic number of regions is another symbol to it
after RoiAlign.
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
    before = [dims[a] for a in axes]
    if not all(isinstance(d, int) for d in before):
        return
    wanted = [int(s) for s in known.numpy()]
    ratios = [w / int(d) for w, d in zip(wanted, before, strict=True)]  # type: ignore[arg-type]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    for axis, size in zip(axes, before, strict=True):
        dims[axis] = floor(int(size) * ratio + 0.5)  # type: ignore[arg-type]
    node.outputs[0].shape = ir.Shape(dims)


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
