"""Shape inference of the operators for which the library's own says more, or less, than is true.

`onnx-shape-inference` takes the end of a Slice that is a number to lie inside of a symbolic dim,
which then has a size that it may not have when the model runs; and it knows what ConstantOfShape
makes only where its operand is constant. A size that is wrong is worse than one that is not known,
since the split of everything behind it follows from it.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType, SimpleNamespace

import onnx_ir as ir
import sympy
from onnx_shape_inference import OpShapeInferenceRegistry, ShapeInferenceContext, registry
from onnx_shape_inference import _engine as _library_engine

from onnxpar.core.symbols import NO_CONSTRAINTS, Dim, as_dim, dim_str, symbols_of
from onnxpar.ops.contrib_inference import INFERENCE, MICROSOFT
from onnxpar.ops.control.inference import bodies_inference
from onnxpar.ops.image import inference as image_inference
from onnxpar.ops.quantized import inference as quantized_inference
from onnxpar.ops.sizes.computed_sizes import EVALUATED, put_values

InferFn = Callable[[ShapeInferenceContext, ir.Node], None]
# Ends beyond this mean "to the end", whichever width of integer they were written for.
_FAR = 2**31 - 1
# No tensor has more dims.
_FEW = 64


class _Corrected:
    """The functions of operators that are corrected; of all others what the library has by now.

    So shape inference that a user registers with the library is found, whenever that is done.
    """

    def __init__(self) -> None:
        self.own = OpShapeInferenceRegistry()

    def collect(self) -> None:
        """Loads the library's functions, as its engine asks for."""
        registry.collect()

    def get(self, domain: str, op_type: str, version: int) -> InferFn | None:
        """Returns the function of an operator at a version of its domain, or None."""
        source = self.own if self.own.has(domain, op_type) else registry
        found: InferFn | None = source.get(domain, op_type, version)
        return found


def _engine(functions: _Corrected) -> ModuleType:
    """A copy of the library's engine that looks functions up in the registry given.

    The engine takes no registry: it looks up a global one, which other code of the process may use.
    """
    spec = spec_from_file_location(
        f"{_library_engine.__name__}_of_onnxpar", _library_engine.__file__
    )
    assert spec is not None and spec.loader is not None
    engine = module_from_spec(spec)
    spec.loader.exec_module(engine)
    vars(engine)["_registry"] = SimpleNamespace(registry=functions)
    return engine


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


def infer_broadcast(library: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Elementwise operators: the greatest of the sizes, since all that differ from it are 1."""
    library(context, node)
    shapes = [v.shape for v in node.inputs if v is not None]
    if all(shape is not None for shape in shapes):
        node.outputs[0].shape = _broadcast(context, [s for s in shapes if s is not None])


def infer_expand(library: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Expand: the operand is broadcast to the target, and so is a size that it holds.

    `torch.onnx.export` writes the bias that a convolution does not have as zeros expanded to a
    size, and that size as one expanded to one element.
    """
    library(context, node)
    data, target = node.inputs
    sizes = None if target is None else context.get_symbolic_value(target)
    if sizes is not None and data is not None and data.shape is not None:
        node.outputs[0].shape = _broadcast(context, [data.shape, ir.Shape(sizes)])
        held = context.get_symbolic_value(data)
        count = sizes[0] if len(sizes) == 1 else None
        if held is not None and len(held) == 1 and isinstance(count, int) and 0 < count <= _FEW:
            context.set_symbolic_value(node.outputs[0], list(held) * count)


def infer_split(library: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Split: parts of sizes that are no constants are as large as they say, not equal parts."""
    library(context, node)
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    if sizes is None or sizes.const_value is not None:
        return
    known = context.get_symbolic_value(sizes)
    data, axis = node.inputs[0], node.attributes.get("axis")
    for index, output in enumerate(node.outputs):
        if data is not None and data.shape is not None:
            dims = list(data.shape)
            part = None if known is None or len(known) != len(node.outputs) else known[index]
            dims[0 if axis is None else axis.as_int()] = (
                context.new_symbolic_dim() if part is None else part
            )
            output.shape = ir.Shape(dims)


def infer_pad(library: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Pad: pads that are expressions count as numbers do."""
    library(context, node)
    data, pads, axes = (node.inputs[i] if i < len(node.inputs) else None for i in (0, 1, 3))
    if pads is None or pads.const_value is not None or data is None or data.shape is None:
        return
    known = _elements(context, pads)
    at = range(len(data.shape)) if axes is None else _elements(context, axes)
    if known is None or at is None or len(known) != 2 * len(at):
        return
    dims = list(data.shape)
    for place, axis in enumerate(at):
        size = _readable(context, dims[axis]) if isinstance(axis, int) else None
        if size is None:
            return
        dims[axis] = _as_library(as_dim(size + known[place] + known[place + len(at)]))
    node.outputs[0].shape = ir.Shape(dims)


def infer_range(library: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Range: the number of elements where both ends are integers, whichever way it counts."""
    library(context, node)
    known = [_integer(context, value) for value in node.inputs[:3]]
    if None in known:
        return
    start, limit, step = (number for number in known if number is not None)
    if not isinstance(step, int) or step == 0:
        return
    count = _round_up(sympy.sympify((limit - start) * (1 if step > 0 else -1)), abs(step))
    node.outputs[0].shape = ir.Shape([_as_library(count)])


def infer_reshape(library: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Reshape: a size that a quotient shows to be a number is that number."""
    library(context, node)
    shape = node.outputs[0].shape
    if shape is not None:
        known = [_readable(context, d) for d in shape]
        dims = [d if k is None else _as_library(k) for d, k in zip(shape, known, strict=True)]
        node.outputs[0].shape = ir.Shape(dims)


def _broadcast(context: ShapeInferenceContext, shapes: Sequence[ir.Shape]) -> ir.Shape:
    dims: list[int | ir.SymbolicDim] = []
    for place in range(max(len(shape) for shape in shapes), 0, -1):
        here = [shape[-place] for shape in shapes if place <= len(shape)]
        sizes = [_readable(context, size) for size in here]
        known = list(dict.fromkeys(n for n in sizes if n is not None and n != 1))
        numbers = [size for size in known if isinstance(size, int)]
        if numbers:
            dims.append(numbers[0])
        elif None not in sizes:
            largest = as_dim(sympy.Max(*known)) if len(known) > 1 else [1, *known][-1]
            if len(known) > 1 and not isinstance(largest, int):
                largest = as_dim(NO_CONSTRAINTS.normal(largest))
            dims.append(_as_library(largest))
        else:
            names = {str(size) for size in here if size != 1}
            other = [size for size in here if size != 1]
            dims.append(other[0] if len(names) == 1 else context.new_symbolic_dim())
    return ir.Shape(dims)


def _elements(context: ShapeInferenceContext, value: ir.Value | None) -> Sequence[Dim] | None:
    """The elements of a tensor of integers; None where they, or what they depend on, is unknown."""
    items = None if value is None else context.get_symbolic_value(value)
    if items is None:
        return None
    found = [_readable(context, item) for item in items]
    return None if None in found else [item for item in found if item is not None]


def _integer(context: ShapeInferenceContext, value: ir.Value | None) -> Dim | None:
    """The one element of a tensor, where it is an integer, perhaps of a floating type.

    A size that is cast is exact: float32 has every integer up to 2^24.
    """
    found = _elements(context, value)
    if found is not None:
        return found[0] if len(found) == 1 else None
    if value is None:
        return None
    constant = ir.convenience.get_const_tensor(value)
    if constant is not None:
        number = float(constant.numpy().item()) if constant.size == 1 else math.nan
        return int(number) if number.is_integer() else None
    node = value.producer()
    casts = node is not None and node.domain == "" and node.op_type in ("Cast", "CastLike")
    return _integer(context, node.inputs[0]) if node is not None and casts else None


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
    if size is None or not isinstance(step, int) or step == 0:
        return None
    if step < 0:
        everything = step == -1 and start in (-1, 2**63 - 1, _FAR) and isinstance(end, int)
        return size if everything and isinstance(end, int) and end <= -_FAR else None
    to_the_end = isinstance(end, int) and end >= _FAR
    first, last = _counts_from(start), _counts_from(end)
    if first is None or last is None:
        return None
    if to_the_end and first < 0:
        return _round_up(sympy.Min(size, -start), step)
    low = sympy.Min(start, size) if first > 0 else sympy.Max(0, size + start)
    if to_the_end:
        high = sympy.sympify(size)
    elif last < 0:
        high = sympy.Max(0, size + end)
    else:
        high = sympy.Min(end, size)
    return _round_up(high - low, step)


def _counts_from(bound: Dim) -> int | None:
    """1 for a bound that counts from the start, -1 from the end; None where it may do either."""
    low, high = NO_CONSTRAINTS.bounds(bound)
    if low is not None and low >= 0:
        return 1
    return -1 if high is not None and high < 0 else None


def _round_up(length: sympy.Expr, step: int) -> Dim:
    found = as_dim(sympy.Max(0, sympy.ceiling(length / step)))
    return found if isinstance(found, int) else as_dim(NO_CONSTRAINTS.normal(found))


def _as_library(size: Dim) -> int | ir.SymbolicDim:
    return size if isinstance(size, int) else ir.SymbolicDim(dim_str(size))


def _library(op_type: str, version: int) -> InferFn:
    found: InferFn | None = registry.get("", op_type, version)
    assert found is not None, f"onnx-shape-inference has no {op_type}"
    return found


def _wrapped(
    infer: Callable[[InferFn, ShapeInferenceContext, ir.Node], None], *op_types: str
) -> tuple[tuple[str, int, InferFn], ...]:
    """The correction of every version of some operators."""
    return tuple(
        (op_type, version, partial(infer, _library(op_type, version)))
        for op_type in op_types
        for version in registry.version_boundaries("", op_type)
    )


registry.collect()
_LIBRARY_SLICE = _library("Slice", 10)
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "Sum", "Mean", "Where")
_COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_BITS = ("And", "Or", "Xor", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor")

_SHAPES: tuple[tuple[str, int, InferFn], ...] = (
    ("ConstantOfShape", 9, infer_constant_of_shape),
    ("Slice", 10, infer_slice),
    *_wrapped(infer_broadcast, *_ARITHMETIC, *_COMPARISONS, *_BITS),
    *_wrapped(infer_expand, "Expand"),
    *_wrapped(infer_reshape, "Reshape"),
    *image_inference.CORRECTIONS,
    *_wrapped(infer_split, "Split"),
    *_wrapped(infer_pad, "Pad"),
    *_wrapped(infer_range, "Range"),
)


def _and_values() -> tuple[tuple[str, int, InferFn], ...]:
    """Every correction of shapes; of operators whose elements are followed, every version."""
    found = {(op_type, version): infer for op_type, version, infer in _SHAPES}
    for op_type in EVALUATED:
        for version in registry.version_boundaries("", op_type):
            infer = found.get((op_type, version)) or _library(op_type, version)
            found[op_type, version] = partial(_with_values, infer)
    return tuple((op_type, version, infer) for (op_type, version), infer in found.items())


def _with_values(infer: InferFn, context: ShapeInferenceContext, node: ir.Node) -> None:
    infer(context, node)
    put_values(context, node)


def _corrected() -> tuple[_Corrected, ModuleType]:
    """The registry with this module's functions, and the engine that uses it."""
    found = _Corrected()
    engine = _engine(found)
    corrections = (*_and_values(), *bodies_inference(engine._process_graph))
    for op_type in {op_type for op_type, _, _ in corrections}:
        for version in registry.version_boundaries("", op_type):
            found.own.register("", op_type, version)(_library(op_type, version))
    for op_type, version, infer in corrections:
        found.own.register("", op_type, version)(infer)
    further = (*quantized_inference.INFERENCE, *image_inference.MICROSOFT)
    for op_type, infer in (*INFERENCE, *further):
        found.own.register(MICROSOFT, op_type, 1)(infer)
    return found, engine


CORRECTED, _ENGINE = _corrected()
"""The registry of the functions by which the shapes of models are inferred."""


def infer_shapes(model: ir.Model) -> None:
    """Infers the shapes of all values of a model, which is changed, with `CORRECTED`.

    Raises:
        ShapeInferenceError: A node's operands do not fit one another.
        OpUsageError: A node is not what its operator allows.
        ValueError: As these.
    """
    _ENGINE.infer_symbolic_shapes(model, warn_on_missing=False, adopt_declared_symbols=False)
