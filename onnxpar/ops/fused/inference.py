"""Shape inference of FusedGemm."""

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.ops.slots import Library


def infer_fused_gemm(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """FusedGemm: as Gemm."""
    left, right = node.inputs[:2]
    if left is None or right is None:
        return
    shape = None
    if left.shape is not None and right.shape is not None:
        rows = left.shape[node.attributes.get_int("transA", 0)]
        columns = right.shape[1 - node.attributes.get_int("transB", 0)]
        shape = ir.Shape([rows, columns])
    context.set_shape_and_dtype(node.outputs[0], shape, left.dtype)
