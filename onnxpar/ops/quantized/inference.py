"""Shape inference of quantised contrib operators, where `onnx-shape-inference` is wrong.

It gives the result of a pool the shape of the operand, and that of QGemm always a float type.
"""

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext, registry

from onnxpar.ops.slots import Library


def _as(op_type: str, version: int, context: ShapeInferenceContext, node: ir.Node) -> ir.Value:
    """Infers the result of a standard operator, whose operands have shapes but no elements.

    The operands are new values: the node must not become a reader of the model's values.
    """
    infer = registry.get("", op_type, version)
    assert infer is not None, f"onnx-shape-inference has no {op_type}"
    infer(context, node)
    return node.outputs[0]


def infer_product(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """MatMulIntegerToFloat, DynamicQuantizeMatMul: the shape of numpy.matmul, floats."""
    if any(v is None or v.shape is None for v in node.inputs[:2]):
        return
    real = ir.TensorType(ir.DataType.FLOAT)
    operands = [ir.Value(name=v.name, shape=v.shape, type=real) for v in node.inputs[:2] if v]
    product = ir.Node("", "MatMul", operands, num_outputs=1)
    shape = _as("MatMul", 13, context, product).shape
    context.set_shape_and_dtype(node.outputs[0], shape, ir.DataType.FLOAT)


def infer_gemm(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """QGemm: floats if no scale of the result is given, else the type of its zero point."""
    left, right = node.inputs[0], node.inputs[3]
    dtype: ir.DataType | None = ir.DataType.FLOAT
    if len(node.inputs) > 7 and node.inputs[7] is not None:
        point = node.inputs[8] if len(node.inputs) > 8 else None
        dtype = ir.DataType.UINT8 if point is None else point.dtype
    shape = None
    if left is not None and right is not None and left.shape and right.shape:
        rows = left.shape[1 if node.attributes.get_int("transA", 0) else 0]
        columns = right.shape[0 if node.attributes.get_int("transB", 0) else 1]
        shape = ir.Shape([rows, columns])
    context.set_shape_and_dtype(node.outputs[0], shape, dtype)


def _moved(shape: ir.Shape, *, last: bool) -> list[int | ir.SymbolicDim]:
    """The dims with the channels as dim 1."""
    dims = list(shape)
    return [dims[0], dims[-1], *dims[1:-1]] if last else dims


def infer_pool(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """QLinearAveragePool: like AveragePool, with the channels as dim 1 or last."""
    x, out = node.inputs[0], node.outputs[0]
    if x is None or x.shape is None:
        return
    last = bool(node.attributes.get_int("channels_last", 0))
    attributes = [a for n, a in node.attributes.items() if n != "channels_last"]
    image = ir.Value(name="x", shape=ir.Shape(_moved(x.shape, last=last)), type=x.type)
    pool = ir.Node("", "AveragePool", [image], attributes, num_outputs=1)
    shape = _as("AveragePool", 11, context, pool).shape
    if shape is not None and last:
        dims = list(shape)
        shape = ir.Shape([dims[0], *dims[2:], dims[1]])
    context.set_shape_and_dtype(out, shape, x.dtype)


def infer_mean(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """QLinearGlobalAveragePool, QLinearReduceMean: reduced dims become 1 or are removed."""
    x = node.inputs[0]
    if x is None or x.shape is None:
        return
    rank, attributes = len(x.shape), node.attributes
    keep = True
    if node.op_type == "QLinearReduceMean":
        axes = [a % rank for a in attributes.get_ints("axes", range(rank))]
        keep = bool(attributes.get_int("keepdims", 1))
    else:
        last = attributes.get_int("channels_last", 0)
        axes = list(range(1, rank - 1) if last else range(2, rank))
    dims = [1 if i in axes else d for i, d in enumerate(x.shape) if keep or i not in axes]
    context.set_shape_and_dtype(node.outputs[0], ir.Shape(dims), x.dtype)


def infer_matmul_bnb4(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """MatMulBnb4: the last dim becomes N."""
    x = node.inputs[0]
    if x is not None and x.shape is not None:
        shape = ir.Shape([*x.shape.dims[:-1], node.attributes["N"].as_int()])
        context.set_shape_and_dtype(node.outputs[0], shape, x.dtype)


def infer_gather_block_quantized(
    library: Library, context: ShapeInferenceContext, node: ir.Node
) -> None:
    """GatherBlockQuantized: like Gather; a byte holds several elements of the quantised axis."""
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
