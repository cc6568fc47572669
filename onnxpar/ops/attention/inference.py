"""Shape inference of attention that keeps a cache."""

import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.symbols import as_dim, dim_str
from onnxpar.ops.slots import Library


def infer_group_query_attention(
    library: Library, context: ShapeInferenceContext, node: ir.Node
) -> None:
    """GroupQueryAttention: the cache grows to the total length, or stays as it is if it is longer.

    The library assumes that it grows by the new tokens, which a cache of full length does not.
    """
    library.infer(context, node)
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
