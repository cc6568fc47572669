"""Sizes that a graph computes: the elements of small tensors as expressions in the symbols.

`onnx-shape-inference` evaluates sums and products of sizes. This module also evaluates quotients,
remainders, minima, rounding of floating-point numbers, choices, and everything that moves elements,
on tensors of any rank. An element is an `int`, an expression, a `bool`, or None if it is unknown.

The arithmetic of elements is in `onnxpar.ops.sizes.element_arithmetic`.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_shape_inference import SYM_DATA_KEY, ShapeInferenceContext

from onnxpar.core.symbols import as_dim, symbols_of
from onnxpar.core.symbols.formula_limits import is_small
from onnxpar.ops.sizes.element_arithmetic import (
    Number,
    UnknownError,
    absolute,
    dyadic,
    equal,
    fits_float,
    floored,
    greatest,
    integer_quotient,
    is_integer,
    least,
    less,
    modulo,
    number,
    of_float,
    over,
    power,
    raised,
    truncated,
)
from onnxpar.ops.sizes.inference import as_library

Array: TypeAlias = NDArray[Any]
"""An array of elements."""

LIMIT = 1024
"""Elements of the largest tensor that is evaluated."""

_FEW_FLOATS = 16

_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
_INTEGERS = tuple(ir.DataType[f"{sign}INT{bits}"] for sign in ("", "U") for bits in (8, 16, 32, 64))

_found: "WeakKeyDictionary[ShapeInferenceContext, dict[ir.Value, Array]]" = WeakKeyDictionary()


Result: TypeAlias = Sequence[Array | None]
ValuesFn: TypeAlias = Callable[["_Operands"], Result]
"""Returns the elements of a node's results; raises UnknownError if they are unknown."""


def put_values(context: ShapeInferenceContext, node: ir.Node, compute: ValuesFn) -> None:
    """Puts the elements of a node's results in the context, instead of those of the library.

    Args:
        context: The context of an inference that has inferred the node's shapes.
        node: The node.
        compute: The slot `values` of its operator's record.
    """
    for out in node.outputs:
        _forget(context, out)
    if not any(_may_be_known(out) for out in node.outputs):
        return
    try:
        results = compute(_Operands(context, node))
    except UnknownError:
        return
    for out, result in zip(node.outputs, results, strict=False):
        if result is not None and result.size <= LIMIT:
            _put(context, out, result)


def _may_be_known(value: ir.Value) -> bool:
    if value.shape is None:
        return True
    if not value.shape.is_static():
        return False
    return int(np.prod(value.shape.numpy(), dtype=object)) <= LIMIT


def small(item: int | ir.SymbolicDim) -> bool:
    """Whether an element or a dim is a number, or a formula that is not too large."""
    return isinstance(item, int) or item.value is None or is_small(item.value)


def forget_large(context: ShapeInferenceContext, value: ir.Value) -> None:
    """Drops the elements of a result if they are too many, or their formulas too large."""
    said = context._symbolic_values.get(value)
    if said is not None and (len(said) > LIMIT or not all(map(small, said))):
        _forget(context, value)


def _forget(context: ShapeInferenceContext, value: ir.Value) -> None:
    """Drops elements of a result that the library, or an earlier inference, has found."""
    _found.get(context, {}).pop(value, None)
    said = context._symbolic_values.pop(value, None)
    if value.metadata_props.pop(SYM_DATA_KEY, None) is not None or said is not None:
        value.const_value = None


def _put(context: ShapeInferenceContext, value: ir.Value, result: Array) -> None:
    kind = value.dtype
    if kind is None or all(x is None for x in result.flat):
        return
    if value.shape is None or not value.shape.is_static():
        value.shape = ir.Shape(result.shape)
    if tuple(value.shape.numpy()) != result.shape:
        return
    _found.setdefault(context, {})[value] = result
    if kind in _INTEGERS:
        dims = [context.new_symbolic_dim() if x is None else as_library(x) for x in result.flat]
        if any(x is None for x in result.flat):
            named = [d if isinstance(d, int) else as_dim(d.value) for d in dims]
            _found[context][value] = _array(named, result.shape)
        context.set_symbolic_value(value, dims)
    elif all(x is not None and (isinstance(x, bool) or is_integer(x)) for x in result.flat):
        context.set_symbolic_value(value, [as_library(x) for x in result.flat])


def _array(items: Sequence[Any], shape: Sequence[int]) -> Array:
    found = np.empty(len(items), dtype=object)
    found[:] = items
    return found.reshape(tuple(shape))


def _map(compute: Callable[..., Any], *arrays: Array) -> Array:
    """Computes element by element, with operands broadcast."""
    try:
        found = np.frompyfunc(compute, len(arrays), 1)(*arrays)
    except ValueError as error:
        raise UnknownError from error
    return found if isinstance(found, np.ndarray) else _array([found], ())


def _known(context: ShapeInferenceContext, value: ir.Value) -> Array | None:
    """The elements of a value; None if no element is known."""
    own = _found.get(context, {}).get(value)
    if own is not None:
        return own
    if value.metadata_props.get(SYM_DATA_KEY) is None:
        tensor = ir.convenience.get_const_tensor(value)
        return None if tensor is None else _constant(tensor)
    items = context.get_symbolic_value(value)
    if items is None or value.shape is None or not value.shape.is_static():
        return None
    shape = value.shape.numpy()
    if len(items) != np.prod(shape, dtype=int):
        return None
    found = [
        x if isinstance(x, int) else None if x.value is None else as_dim(x.value) for x in items
    ]
    return _array(found, shape)


def _constant(tensor: ir.TensorProtocol) -> Array | None:
    kind = tensor.dtype
    if tensor.size > LIMIT:
        return None
    if kind in _FLOATS and tensor.size <= _FEW_FLOATS:
        items = tensor.numpy().ravel().tolist()
        return _array([of_float(x) for x in items], tuple(tensor.shape.numpy()))
    if kind in _INTEGERS or kind == ir.DataType.BOOL:
        return _array(tensor.numpy().ravel().tolist(), tuple(tensor.shape.numpy()))
    return None


def _opaque(context: ShapeInferenceContext, x: Number | bool) -> bool:
    """Whether an element depends on data, so that its sign is unknown."""
    return not isinstance(x, int) and any(map(context.is_generated_symbol, symbols_of(x)))


# Nodes.


class _Operands:
    """A node and the elements of its operands."""

    def __init__(self, context: ShapeInferenceContext, node: ir.Node) -> None:
        self.context = context
        self.node = node

    def value(self, index: int) -> ir.Value | None:
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def has(self, index: int) -> bool:
        return self.value(index) is not None

    def array(self, index: int) -> Array:
        """Elements of an operand; `UnknownError` if none is known."""
        value = self.value(index)
        found = None if value is None else _known(self.context, value)
        if found is None:
            raise UnknownError
        return found

    def ints(self, index: int) -> list[int]:
        """Elements of an operand; `UnknownError` unless all are numbers."""
        items = self.array(index).ravel().tolist()
        if not all(isinstance(x, int) for x in items):
            raise UnknownError
        return items

    def attribute(self, name: str, default: Any) -> Any:
        found = self.node.attributes.get(name)
        return default if found is None else found.value

    def dtype(self, index: int = 0) -> ir.DataType | None:
        value = self.value(index)
        return None if value is None else value.dtype

    def shape(self, output: int = 0) -> tuple[int, ...]:
        """The inferred shape of a result; `UnknownError` unless all sizes are numbers."""
        found = self.node.outputs[output].shape
        if found is None or not found.is_static():
            raise UnknownError
        return tuple(found.numpy())

    def each(self, compute: Callable[..., Any], *arrays: Array) -> Array:
        """Computes element by element, with operands broadcast; None where that is unknown."""

        def one(*items: Any) -> Any:
            if any(x is None for x in items):
                return None
            try:
                return compute(*items)
            except UnknownError:
                return None

        return _map(one, *arrays)

    def known_sign(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a function that needs signs: those of elements that depend on data are unknown."""

        def wrapped(*items: Any) -> Any:
            if any(_opaque(self.context, x) for x in items):
                raise UnknownError
            return compute(*items)

        return wrapped

    def in_range(self, result: Array, dtype: ir.DataType | None) -> Array:
        """Drops numbers that a result of this type cannot hold exactly."""
        if dtype is None:
            raise UnknownError
        if dtype in _FLOATS:
            fits = fits_float
        elif dtype in _INTEGERS:
            limits = np.iinfo(dtype.numpy())

            def fits(x: Number) -> bool:
                return not isinstance(x, int) or limits.min <= x <= limits.max
        else:
            raise UnknownError
        return self.each(lambda x: x if fits(x) else None, result)


def _arithmetic(
    compute: Callable[[Number, Number], Number], asks_sign: bool = False
) -> Callable[[_Operands], Result]:
    def evaluate(node: _Operands) -> Result:
        dtype = node.dtype()
        floating = dtype in _FLOATS

        def one(a: Number, b: Number) -> Number:
            if isinstance(a, bool) or (floating and not (dyadic(a) and dyadic(b))):
                raise UnknownError
            found = compute(a, b)
            return found if isinstance(found, int) else number(found)

        chosen = node.known_sign(one) if asks_sign else one
        count = len(node.node.inputs)
        result = reduce(lambda a, b: node.each(chosen, a, b), [node.array(i) for i in range(count)])
        return [node.in_range(result, dtype)]

    return evaluate


def divided(node: _Operands) -> Result:
    """Div: truncated quotients of integers, exact quotients of floats."""
    if node.dtype() in _FLOATS:

        def one(a: Number, b: Number) -> Number:
            if not (dyadic(a) and dyadic(b)):
                raise UnknownError
            return over(a, b)
    else:

        def one(a: Number, b: Number) -> Number:
            if b == 0:
                raise UnknownError
            return integer_quotient(a, b)

    result = node.each(node.known_sign(one), node.array(0), node.array(1))
    return [node.in_range(result, node.dtype())]


def remainder(node: _Operands) -> Result:
    """Mod: of integers, with the sign of the divisor."""
    dtype = node.dtype()
    if dtype not in _INTEGERS:
        raise UnknownError
    truncated = bool(node.attribute("fmod", 0))
    return [
        node.each(
            node.known_sign(lambda a, b: modulo(a, b, truncated)), node.array(0), node.array(1)
        )
    ]


def _unary(
    compute: Callable[[Number], Number], asks_sign: bool = True
) -> Callable[[_Operands], Result]:
    def evaluate(node: _Operands) -> Result:
        one = node.known_sign(compute) if asks_sign else compute
        return [node.in_range(node.each(one, node.array(0)), node.dtype())]

    return evaluate


def clipped(node: _Operands) -> Result:
    """Clip: at least `min`, then at most `max`."""
    result = node.array(0)
    for index, name, compute in ((1, "min", greatest), (2, "max", least)):
        if name in node.node.attributes:
            raise UnknownError
        if node.has(index):
            result = node.each(node.known_sign(compute), result, node.array(index))
    return [node.in_range(result, node.dtype())]


def cast_elements(node: _Operands) -> Result:
    """Cast and CastLike: the same number, or a rounded one, in the other type."""
    source, target = node.dtype(), node.node.outputs[0].dtype
    if source is None or target is None:
        raise UnknownError
    x = node.array(0)
    if target == ir.DataType.BOOL:
        return [node.each(node.known_sign(lambda a: not equal(a, 0)), x)]
    if source == ir.DataType.BOOL:
        return [node.each(int, x)]
    if source in _FLOATS and target in _INTEGERS:
        x = node.each(node.known_sign(truncated), x)
    elif source in _FLOATS and target in _FLOATS and source != target:
        x = node.each(lambda a: a if dyadic(a) else None, x)
    return [node.in_range(x, target)]


def _comparison(compute: Callable[[Number, Number], bool]) -> Callable[[_Operands], Result]:
    def evaluate(node: _Operands) -> Result:
        def one(a: Any, b: Any) -> bool:
            if isinstance(a, bool) and isinstance(b, bool):
                return bool(compute(int(a), int(b)))
            return compute(a, b)

        return [node.each(node.known_sign(one), node.array(0), node.array(1))]

    return evaluate


def _logic(compute: Callable[..., bool]) -> Callable[[_Operands], Result]:
    def evaluate(node: _Operands) -> Result:
        count = len(node.node.inputs)
        return [node.each(compute, *(node.array(i) for i in range(count)))]

    return evaluate


def chosen(node: _Operands) -> Result:
    """Where: the elements that the condition chooses, as far as it is known."""
    condition = node.node.inputs[0]
    known = None if condition is None else _known(node.context, condition)
    x, y = node.array(1), node.array(2)
    if known is None:
        shape = None if condition is None else condition.shape
        if shape is None or not shape.is_static():
            raise UnknownError
        known = np.full(tuple(shape.numpy()), None, dtype=object)

    def one(which: Any, a: Any, b: Any) -> Any:
        if which is None:
            return a if a == b else None
        return a if which else b

    return [_map(one, known, x, y)]


def same_elements(node: _Operands) -> Result:
    """Identity, Reshape and similar: the elements of the first operand in the same order."""
    x, shape = node.array(0), node.shape()
    if x.size != np.prod(shape, dtype=int):
        raise UnknownError
    return [x.reshape(shape)]


def transposed(node: _Operands) -> Result:
    """Transpose: the elements in the order of the permuted dims."""
    return [node.array(0).transpose(node.attribute("perm", None))]


def gathered(node: _Operands) -> Result:
    """Gather: the elements at indices that are known."""
    x, index = node.array(0), np.array(node.ints(1), np.int64)
    axis = node.attribute("axis", 0)
    if not -x.ndim <= axis < x.ndim:
        raise UnknownError
    axis %= x.ndim
    size = x.shape[axis]
    if index.size and not (-size <= index.min() and index.max() < size):
        raise UnknownError
    shape = (*x.shape[:axis], *node.array(1).shape, *x.shape[axis + 1 :])
    return [np.take(x, index, axis=axis).reshape(shape)]


def sliced(node: _Operands) -> Result:
    """Slice: the elements between bounds that are known."""
    x = node.array(0)
    starts, ends = node.ints(1), node.ints(2)
    axes = node.ints(3) if node.has(3) else list(range(len(starts)))
    steps = node.ints(4) if node.has(4) else [1] * len(starts)
    chosen = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if not -x.ndim <= axis < x.ndim or step == 0:
            raise UnknownError
        if step < 0 and start < -x.shape[axis]:
            # The specification takes the first element, Python takes none.
            raise UnknownError
        chosen[axis] = slice(start, end, step)
    return [x[tuple(chosen)]]


def concatenated(node: _Operands) -> Result:
    """Concat: the elements of all operands."""
    parts = []
    for value in node.node.inputs:
        if value is None:
            raise UnknownError
        part = _known(node.context, value)
        if part is None:
            if value.shape is None or not value.shape.is_static() or not _may_be_known(value):
                raise UnknownError
            part = np.full(tuple(value.shape.numpy()), None, dtype=object)
        parts.append(part)
    try:
        return [np.concatenate(parts, axis=node.attribute("axis", 0))]
    except ValueError as error:
        raise UnknownError from error


def parts(node: _Operands) -> Result:
    """Split: the elements of each part."""
    x, axis = node.array(0), node.attribute("axis", 0)
    ends = np.cumsum([node.shape(i)[axis] for i in range(len(node.node.outputs))])
    if ends[-1] != x.shape[axis]:
        raise UnknownError
    return np.split(x, ends[:-1], axis=axis)


def expanded(node: _Operands) -> Result:
    """Expand: the elements, repeated."""
    x = node.array(0)
    try:
        return [np.broadcast_to(x, np.broadcast_shapes(x.shape, tuple(node.ints(1))))]
    except ValueError as error:
        raise UnknownError from error


def tiled(node: _Operands) -> Result:
    """Tile: the elements, repeated."""
    x, repeats = node.array(0), node.ints(1)
    if len(repeats) != x.ndim or x.size * np.prod(repeats, dtype=object) > LIMIT:
        raise UnknownError
    return [np.tile(x, repeats)]


def filled(node: _Operands) -> Result:
    """ConstantOfShape: its value in every place."""
    shape = node.shape()
    value = node.attribute("value", None)
    item = None if value is None else _constant(value)
    if value is not None and item is None:
        raise UnknownError
    return [np.full(shape, 0 if item is None else item.ravel()[0], dtype=object)]


def ranged(node: _Operands) -> Result:
    """Range: start + i · step in place i."""
    (count,) = node.shape()
    start, step = node.array(0).ravel(), node.array(2).ravel()
    places = _array(list(range(count)), (count,))
    dtype = node.dtype()

    def one(i: int, a: Number, by: Number) -> Number:
        if dtype in _FLOATS and not (dyadic(a) and dyadic(by)):
            raise UnknownError
        return number(a + i * by)

    return [node.in_range(node.each(one, places, start, step), dtype)]


def _reduced(
    compute: Callable[[Number, Number], Number], asks_sign: bool = False
) -> Callable[[_Operands], Result]:
    def evaluate(node: _Operands) -> Result:
        x = node.array(0)
        axes = node.ints(1) if node.has(1) else list(node.attribute("axes", ()))
        if not axes:
            if node.attribute("noop_with_empty_axes", 0):
                return [x]
            axes = list(range(x.ndim))
        axes = sorted({axis % x.ndim for axis in axes}) if x.ndim else []
        moved = np.moveaxis(x, axes, range(len(axes)))
        rest = moved.shape[len(axes) :]
        rows = moved.reshape((-1, *rest))
        if not len(rows):
            raise UnknownError
        floating = node.dtype() in _FLOATS

        def one(a: Number, b: Number) -> Number:
            if floating and not (dyadic(a) and dyadic(b)):
                raise UnknownError
            return number(compute(a, b))

        chosen = node.known_sign(one) if asks_sign else one
        found = reduce(lambda a, b: node.each(chosen, a, b), list(rows))
        return [node.in_range(np.asarray(found, dtype=object).reshape(node.shape()), node.dtype())]

    return evaluate


def _add(a: Number, b: Number) -> Number:
    return a + b


def _multiply(a: Number, b: Number) -> Number:
    return a * b


ADD = _arithmetic(_add)
SUB = _arithmetic(lambda a, b: a - b)
MUL = _arithmetic(_multiply)
SUM = _arithmetic(_add)
MAX = _arithmetic(greatest, asks_sign=True)
MIN = _arithmetic(least, asks_sign=True)
POW = _arithmetic(power)
NEG = _unary(lambda x: -x, asks_sign=False)
ABS = _unary(absolute)
FLOOR = _unary(floored)
CEIL = _unary(raised)
EQUAL = _comparison(equal)
LESS = _comparison(less)
LESS_OR_EQUAL = _comparison(lambda a, b: less(a, b, or_equal=True))
GREATER = _comparison(lambda a, b: less(b, a))
GREATER_OR_EQUAL = _comparison(lambda a, b: less(b, a, or_equal=True))
AND = _logic(lambda a, b: a and b)
OR = _logic(lambda a, b: a or b)
XOR = _logic(lambda a, b: a != b)
NOT = _logic(lambda a: not a)
REDUCE_PROD = _reduced(_multiply)
REDUCE_SUM = _reduced(_add)
REDUCE_MAX = _reduced(greatest, asks_sign=True)
REDUCE_MIN = _reduced(least, asks_sign=True)
