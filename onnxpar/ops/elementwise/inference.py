"""Shape inference of operators that broadcast: the default if `OpDef.broadcasts` is set."""

from collections.abc import Sequence

import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.symbols import NO_CONSTRAINTS, as_dim
from onnxpar.ops.sizes.inference import as_library, readable_size
from onnxpar.ops.slots import Library


def infer_broadcast(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Elementwise operators: the greatest size of each dim, since all other sizes are 1."""
    library.infer(context, node)
    shapes = [v.shape for v in node.inputs if v is not None]
    if all(shape is not None for shape in shapes):
        node.outputs[0].shape = broadcast_shape(context, [s for s in shapes if s is not None])


def broadcast_shape(context: ShapeInferenceContext, shapes: Sequence[ir.Shape]) -> ir.Shape:
    """Returns the shape to which shapes broadcast: the greatest size of each dim."""
    dims: list[int | ir.SymbolicDim] = []
    for place in range(max(len(shape) for shape in shapes), 0, -1):
        here = [shape[-place] for shape in shapes if place <= len(shape)]
        sizes = [readable_size(context, size) for size in here]
        known = list(dict.fromkeys(n for n in sizes if n is not None and n != 1))
        numbers = [size for size in known if isinstance(size, int)]
        if numbers:
            dims.append(numbers[0])
        elif None not in sizes:
            largest = as_dim(sympy.Max(*known)) if len(known) > 1 else [1, *known][-1]
            if len(known) > 1 and not isinstance(largest, int):
                largest = as_dim(NO_CONSTRAINTS.normal(largest))
            dims.append(as_library(largest))
        else:
            names = {str(size) for size in here if size != 1}
            other = [size for size in here if size != 1]
            dims.append(other[0] if len(names) == 1 else context.new_symbolic_dim())
    return ir.Shape(dims)
