"""What ONNX and `onnx-shape-inference` do not know of onnxruntime's own operators."""

import onnx
import onnx_ir as ir
import sympy
from onnx.defs import OpSchema
from onnx_shape_inference import ShapeInferenceContext, registry

from onnxpar.core.symbols import as_dim, dim_str

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


def infer_fused_gemm(context: ShapeInferenceContext, node: ir.Node) -> None:
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


def infer_group_query_attention(context: ShapeInferenceContext, node: ir.Node) -> None:
    """GroupQueryAttention: the cache grows to the total length, or is as long as it was.

    The library takes it to grow by the new tokens, which a cache of full length does not.
    """
    _LIBRARY_GROUPED(context, node)
    past, total = node.inputs[3], node.inputs[6]
    sizes = None if total is None else context.get_symbolic_value(total)
    length: int | ir.SymbolicDim | None = None
    if sizes is not None and len(sizes) == 1:
        length = _longer(past.shape[2] if past and past.shape else 0, sizes[0])
    for output in node.outputs[1:3]:
        if output.shape is not None and not node.attributes.get_int("sliding_window_cache", 0):
            dims = list(output.shape)
            dims[2] = context.new_symbolic_dim() if length is None else length
            output.shape = ir.Shape(dims)


def _longer(past: int | ir.SymbolicDim, total: int | ir.SymbolicDim) -> int | ir.SymbolicDim | None:
    texts = [d if isinstance(d, int) else d.value for d in (past, total)]
    if None in texts:
        return None
    length = as_dim(sympy.Max(*(sympy.sympify(as_dim(t)) for t in texts if t is not None)))
    return length if isinstance(length, int) else ir.SymbolicDim(dim_str(length))


def infer_skip_norm(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Normalisations of a residual sum: as the first operand, statistics one number a row."""
    x = node.inputs[0]
    if x is None or x.shape is None:
        return
    rows = ir.Shape([*x.shape.dims[:-1], 1])
    for index, out in enumerate(node.outputs):
        if index in (1, 2):
            context.set_shape_and_dtype(out, rows, ir.DataType.FLOAT)
        else:
            context.set_shape_and_dtype(out, x.shape, x.dtype)


registry.collect()
_GROUPED = registry.get(MICROSOFT, "GroupQueryAttention", 1)
assert _GROUPED is not None, "onnx-shape-inference has no GroupQueryAttention"
_LIBRARY_GROUPED = _GROUPED

INFERENCE = (
    ("GroupQueryAttention", infer_group_query_attention),
    ("FusedGemm", infer_fused_gemm),
    ("MatMulBnb4", infer_matmul_bnb4),
    ("GatherBlockQuantized", infer_gather_block_quantized),
    ("SkipLayerNormalization", infer_skip_norm),
    ("SkipSimplifiedLayerNormalization", infer_skip_norm),
)
"""Operators of the domain `com.microsoft`, version 1."""


def correct_schemas() -> None:
    """Tells ONNX, once a process, of what onnxruntime defines in ONNX's own domain.

    Its optimiser and its exporters of language models put SimplifiedLayerNormalization there,
    which ONNX's checker would refuse.
    """
    if onnx.defs.has(_SIMPLIFIED):
        return
    floats = ["tensor(float16)", "tensor(bfloat16)", "tensor(float)", "tensor(double)"]
    parameter, optional = OpSchema.FormalParameter, OpSchema.FormalParameterOption.Optional
    defaults = {"axis": -1, "epsilon": 1e-5, "stash_type": 1}
    onnx.defs.register_schema(
        OpSchema(
            _SIMPLIFIED,
            "",
            1,
            "Division by the root of the mean square, and a scale (onnxruntime's own).",
            inputs=[parameter("X", "T"), parameter("scale", "V")],
            outputs=[parameter("Y", "V"), parameter("inv_std_dev", "U", param_option=optional)],
            type_constraints=[(name, floats, "") for name in ("T", "U", "V")],
            attributes=[
                OpSchema.Attribute(name, onnx.helper.make_attribute(name, value))
                for name, value in defaults.items()
            ],
        )
    )


_SIMPLIFIED = "SimplifiedLayerNormalization"
