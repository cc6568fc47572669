"""Shape inference of normalisations of a residual sum."""

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.ops.slots import Library


def infer_skip_norm(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Shapes are those of the first operand; statistics have one number per row."""
    x = node.inputs[0]
    if x is None or x.shape is None:
        return
    rows = ir.Shape([*x.shape.dims[:-1], 1])
    for index, out in enumerate(node.outputs):
        if index in (1, 2):
            context.set_shape_and_dtype(out, rows, ir.DataType.FLOAT)
        else:
            context.set_shape_and_dtype(out, x.shape, x.dtype)
