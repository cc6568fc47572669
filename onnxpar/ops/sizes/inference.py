"""Shape inference of ConstantOfShape, Range and casts; sizes as inference reads and writes them.

`onnx-shape-inference` infers ConstantOfShape only if its operand is constant.
"""

import math
from collections.abc import Sequence

import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.symbols import NO_CONSTRAINTS, Dim, as_dim, dim_str, symbols_of
from onnxpar.ops.slots import Library

_ELEMENT = "integer element"
"""Key in the `meta` of a cast's result: its only element, if this is an integer."""


def infer_constant_of_shape(
    library: Library, context: ShapeInferenceContext, node: ir.Node
) -> None:
    """ConstantOfShape: the sizes are its operand's elements, which may be expressions."""
    value = node.attributes.get("value")
    dtype = ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    operand = node.inputs[0] if node.inputs else None
    sizes = None if operand is None else context.get_symbolic_value(operand)
    shape = None if sizes is None else ir.Shape(sizes)
    context.set_shape_and_dtype(node.outputs[0], shape, dtype)


def infer_range(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Range: the number of elements if both ends are integers, in either direction."""
    library.infer(context, node)
    known = [_integer(context, value) for value in node.inputs[:3]]
    if None in known:
        return
    start, limit, step = (number for number in known if number is not None)
    if not isinstance(step, int) or step == 0:
        return
    count = round_up(sympy.sympify((limit - start) * (1 if step > 0 else -1)), abs(step))
    node.outputs[0].shape = ir.Shape([as_library(count)])


def infer_cast(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Cast and CastLike: also notes the element of a size that becomes a floating-point number.

    It is exact, since float32 has every integer up to 2^24.
    """
    library.infer(context, node)
    node.outputs[0].meta[_ELEMENT] = _integer(context, node.inputs[0])


def elements_of(context: ShapeInferenceContext, value: ir.Value | None) -> Sequence[Dim] | None:
    """The elements of a tensor of integers; None if one is unknown or depends on data."""
    items = None if value is None else context.get_symbolic_value(value)
    if items is None:
        return None
    found = [readable_size(context, item) for item in items]
    return None if None in found else [item for item in found if item is not None]


def _integer(context: ShapeInferenceContext, value: ir.Value | None) -> Dim | None:
    """The only element of a tensor if it is an integer, perhaps of a floating-point type."""
    found = elements_of(context, value)
    if found is not None:
        return found[0] if len(found) == 1 else None
    if value is None:
        return None
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None:
        number = float(constant.numpy().item()) if constant.size == 1 else math.nan
        return int(number) if number.is_integer() else None
    noted: Dim | None = value.meta.get(_ELEMENT)
    return noted


def readable_size(context: ShapeInferenceContext, size: int | ir.SymbolicDim) -> Dim | None:
    """A size as an expression; None if it depends on data and may thus be 0."""
    if isinstance(size, int):
        return size
    if size.value is None:
        return None
    found = as_dim(size.value)
    if any(context.is_generated_symbol(name) for name in symbols_of(found)):
        return None
    return found


def round_up(length: sympy.Expr, step: int) -> Dim:
    """Returns length / step, rounded up, and at least 0."""
    found = as_dim(sympy.Max(0, sympy.ceiling(length / step)))
    return found if isinstance(found, int) else as_dim(NO_CONSTRAINTS.normal(found))


def as_library(size: Dim) -> int | ir.SymbolicDim:
    """Returns a size as `onnx-shape-inference` writes it."""
    return int(size) if isinstance(size, int) else ir.SymbolicDim(dim_str(size))
