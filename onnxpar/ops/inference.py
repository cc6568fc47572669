"""Shape inference of the operators for which the library's own says more, or less, than is true.

`onnx-shape-inference` takes the end of a Slice that is a number to lie inside of a symbolic dim,
which then has a size that it may not have when the model runs; and it knows what ConstantOfShape
makes only where its operand is constant. A size that is wrong is worse than one that is not known,
since the split of everything behind it follows from it.
"""

from collections.abc import Callable, Sequence

import onnx_ir as ir
import sympy
from onnx_shape_inference import ShapeInferenceContext, registry

from onnxpar.symbols import NO_CONSTRAINTS, Dim, as_dim, dim_str, symbols_of

InferFn = Callable[[ShapeInferenceContext, ir.Node], None]
# Ends beyond this mean "to the end", whichever width of integer they were written for.
_FAR = 2**31 - 1


def correct_inference() -> None:
    """Puts this module's functions into the library's registry, which is one for the process."""
    registry.collect()
    for op_type, version, infer in CORRECTIONS:
        if registry.get("", op_type, version) is not infer:
            registry.register("", op_type, version)(infer)


def infer_constant_of_shape(context: ShapeInferenceContext, node: ir.Node) -> None:
    """ConstantOfShape: its operand's elements, as expressions where they are not constant."""
    value = node.attributes.get("value")
    dtype = ir.DataType.FLOAT if value is None else value.as_tensor().dtype
    operand = node.inputs[0] if node.inputs else None
    sizes = None if operand is None else context.get_symbolic_value(operand)
    shape = None if sizes is None else ir.Shape(sizes)
    context.set_shape_and_dtype(node.outputs[0], shape, dtype)


def infer_slice(context: ShapeInferenceContext, node: ir.Node) -> None:
    """Slice: bounds cut off at the dim's ends, as the specification says, whatever its size."""
    _LIBRARY_SLICE(context, node)
    data, starts, ends, axes, steps = (
        node.inputs[i] if i < len(node.inputs) else None for i in range(5)
    )
    if data is None or data.shape is None:
        return
    known = {name: _elements(context, v) for name, v in (("start", starts), ("end", ends))}
    start, end = known["start"], known["end"]
    at = range(len(start or ())) if axes is None else _elements(context, axes)
    by = [1] * len(start or ()) if steps is None else _elements(context, steps)
    if start is None or end is None or at is None or by is None:
        return
    dims = list(data.shape)
    for axis, low, high, step in zip(at, start, end, by, strict=False):
        if not isinstance(axis, int) or not -len(dims) <= axis < len(dims):
            return
        size = dims[axis]
        if isinstance(size, int) and all(isinstance(x, int) for x in (low, high, step)):
            dims[axis] = len(range(*slice(low, high, step).indices(size))) if step else 0
            continue
        length = _length(context, size, low, high, step)
        dims[axis] = context.new_symbolic_dim() if length is None else _as_library(length)
    node.outputs[0].shape = ir.Shape(dims)


def _elements(context: ShapeInferenceContext, value: ir.Value | None) -> Sequence[Dim] | None:
    """The elements of a tensor of integers; None where they, or what they depend on, is unknown."""
    items = None if value is None else context.get_symbolic_value(value)
    if items is None:
        return None
    found = [_readable(context, item) for item in items]
    return None if None in found else [item for item in found if item is not None]


def _readable(context: ShapeInferenceContext, size: int | ir.SymbolicDim) -> Dim | None:
    """A size as an expression; None where it depends on data, so that it may be 0."""
    if isinstance(size, int):
        return size
    if size.value is None:
        return None
    found = as_dim(size.value)
    if any(context.is_generated_symbol(name) for name in symbols_of(found)):
        return None
    return found


def _length(
    context: ShapeInferenceContext, dim: int | ir.SymbolicDim, start: Dim, end: Dim, step: Dim
) -> Dim | None:
    """The number of elements that a slice keeps of a dim; None where it cannot be said."""
    size = _readable(context, dim)
    if size is None or not isinstance(step, int) or not isinstance(start, int) or step == 0:
        return None
    if step < 0:
        everything = step == -1 and start in (-1, 2**63 - 1, _FAR) and isinstance(end, int)
        return size if everything and isinstance(end, int) and end <= -_FAR else None
    to_the_end = isinstance(end, int) and end >= _FAR
    if to_the_end and start < 0:
        return _round_up(sympy.Min(size, -start), step)
    if not to_the_end and not isinstance(end, int) and not _at_least_zero(end):
        return None
    low = sympy.Min(start, size) if start >= 0 else sympy.Max(0, size + start)
    if to_the_end:
        high = sympy.sympify(size)
    elif isinstance(end, int) and end < 0:
        high = sympy.Max(0, size + end)
    else:
        high = sympy.Min(end, size)
    return _round_up(high - low, step)


def _at_least_zero(size: Dim) -> bool:
    low, _ = NO_CONSTRAINTS.bounds(size)
    return low is not None and low >= 0


def _round_up(length: sympy.Expr, step: int) -> Dim:
    found = as_dim(sympy.Max(0, sympy.ceiling(length / step)))
    return found if isinstance(found, int) else as_dim(NO_CONSTRAINTS.normal(found))


def _as_library(size: Dim) -> int | ir.SymbolicDim:
    return size if isinstance(size, int) else ir.SymbolicDim(dim_str(size))


def _library(op_type: str, version: int) -> InferFn:
    registry.collect()
    found: InferFn | None = registry.get("", op_type, version)
    assert found is not None, f"onnx-shape-inference has no {op_type}"
    return found


_LIBRARY_SLICE = _library("Slice", 10)

CORRECTIONS: tuple[tuple[str, int, InferFn], ...] = (
    ("ConstantOfShape", 9, infer_constant_of_shape),
    ("Slice", 10, infer_slice),
)
