"""Shape inference of contrib operators that `onnx-shape-inference` does not know, or not fully."""

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

MICROSOFT = "com.microsoft"


def infer_matmul_bnb4(context: ShapeInferenceContext, node: ir.Node) -> None:
    """MatMulBnb4: the last dim becomes N."""
    x = node.inputs[0]
    if x is not None and x.shape is not None:
        shape = ir.Shape([*x.shape.dims[:-1], node.attributes["N"].as_int()])
        context.set_shape_and_dtype(node.outputs[0], shape, x.dtype)


def infer_gather_block_quantized(context: ShapeInferenceContext, node: ir.Node) -> None:
    """GatherBlockQuantized: as Gather; bytes hold several elements of the quantised axis."""
    data, indices, scales = node.inputs[:3]
    if data is None or indices is None or scales is None:
        return
    shape = None
    if data.shape is not None and indices.shape is not None:
        dims, attributes = list(data.shape), node.attributes
        axis = attributes.get_int("gather_axis", 0) % len(dims)
        if data.dtype == ir.DataType.UINT8:
            quantised = attributes.get_int("quantize_axis", 1) % len(dims)
            dims[quantised] = dims[quantised] * (8 // attributes.get_int("bits", 4))
        dims[axis : axis + 1] = list(indices.shape)
        shape = ir.Shape(dims)
    context.set_shape_and_dtype(node.outputs[0], shape, scales.dtype)


INFERENCE = (
    ("MatMulBnb4", infer_matmul_bnb4),
    ("GatherBlockQuantized", infer_gather_block_quantized),
)
"""Operators of the domain `com.microsoft`, version 1."""
