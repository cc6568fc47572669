"""Shape inference of Slice, Concat, Expand, Split, Pad and Reshape.

`onnx-shape-inference` assumes that a constant end of a Slice is inside a symbolic dim, and so gives
the dim a size that it may not have when the model runs.
"""

import onnx_ir as ir
import sympy
from onnx_shape_inference import OpUsageError, ShapeInferenceContext

from onnxpar.core.symbols import NO_CONSTRAINTS, Dim, as_dim
from onnxpar.core.symbols.formula_limits import MAX_DIMS
from onnxpar.ops.elementwise.inference import broadcast_shape
from onnxpar.ops.sizes.computed_sizes import LIMIT
from onnxpar.ops.sizes.inference import as_library, elements_of, readable_size, round_up
from onnxpar.ops.slots import Library

# Ends from here on mean "to the end", whatever integer type the exporter had in mind.
_FAR = 2**31 - 1
# More elements than the dims of any tensor are not followed.
_FEW = 64
_TARGETS = {"Reshape": 1, "Expand": 1, "ConstantOfShape": 0}
"""The operand that is the shape of the result."""


def check_rank(node: ir.Node) -> None:
    """Raises OpUsageError if an operand asks for a result of more dims than a tensor can have."""
    index = _TARGETS.get(node.op_type)
    target = None if index is None or index >= len(node.inputs) else node.inputs[index]
    if target is None or target.shape is None or len(target.shape) != 1:
        return
    count = target.shape[0]
    if isinstance(count, int) and count > MAX_DIMS:
        raise OpUsageError(node, f"expected a shape of at most {MAX_DIMS} dims, got {count}")


def infer_slice(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Slice: bounds are limited to the dim's ends, as the specification says."""
    library.infer(context, node)
    data, starts, ends, axes, steps = (
        node.inputs[i] if i < len(node.inputs) else None for i in range(5)
    )
    if data is None or data.shape is None:
        return
    known = {name: elements_of(context, v) for name, v in (("start", starts), ("end", ends))}
    start, end = known["start"], known["end"]
    at = range(len(start or ())) if axes is None else elements_of(context, axes)
    by = [1] * len(start or ()) if steps is None else elements_of(context, steps)
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
        dims[axis] = context.new_symbolic_dim() if length is None else as_library(length)
    node.outputs[0].shape = ir.Shape(dims)


def infer_concat(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Concat: a long list of integers is not followed; the library names each unknown element."""
    lengths = [value.shape[0] for value in node.inputs if value is not None and value.shape]
    if len(lengths) == len(node.inputs) and all(isinstance(n, int) for n in lengths):
        total = sum(n for n in lengths if isinstance(n, int))
        ranks = {len(value.shape) for value in node.inputs if value is not None and value.shape}
        if ranks == {1} and total > LIMIT and node.inputs[0] is not None:
            context.set_shape_and_dtype(node.outputs[0], ir.Shape([total]), node.inputs[0].dtype)
            return
    library.infer(context, node)


def infer_expand(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Expand: the operand is broadcast to the target shape; a known element is repeated.

    `torch.onnx.export` writes a missing bias of a convolution as zeros expanded to a size, and that
    size as a size expanded to one element.
    """
    library.infer(context, node)
    data, target = node.inputs
    sizes = None if target is None else context.get_symbolic_value(target)
    if sizes is not None and data is not None and data.shape is not None:
        node.outputs[0].shape = broadcast_shape(context, [data.shape, ir.Shape(sizes)])
        held = context.get_symbolic_value(data)
        count = sizes[0] if len(sizes) == 1 else None
        if held is not None and len(held) == 1 and isinstance(count, int) and 0 < count <= _FEW:
            context.set_symbolic_value(node.outputs[0], list(held) * count)


def infer_split(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Split: parts whose sizes are not constant have these sizes; they are not equal parts."""
    library.infer(context, node)
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


def infer_pad(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Pad: pads that are expressions are added like numbers."""
    library.infer(context, node)
    data, pads, axes = (node.inputs[i] if i < len(node.inputs) else None for i in (0, 1, 3))
    if pads is None or pads.const_value is not None or data is None or data.shape is None:
        return
    known = elements_of(context, pads)
    at = range(len(data.shape)) if axes is None else elements_of(context, axes)
    if known is None or at is None or len(known) != 2 * len(at):
        return
    dims = list(data.shape)
    for place, axis in enumerate(at):
        size = readable_size(context, dims[axis]) if isinstance(axis, int) else None
        if size is None:
            return
        dims[axis] = as_library(as_dim(size + known[place] + known[place + len(at)]))
    node.outputs[0].shape = ir.Shape(dims)


def infer_reshape(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """Reshape: a quotient that is proved to be a number becomes that number."""
    library.infer(context, node)
    shape = node.outputs[0].shape
    if shape is not None:
        known = [readable_size(context, d) for d in shape]
        dims = [d if k is None else as_library(k) for d, k in zip(shape, known, strict=True)]
        node.outputs[0].shape = ir.Shape(dims)


def _length(
    context: ShapeInferenceContext, dim: int | ir.SymbolicDim, start: Dim, end: Dim, step: Dim
) -> Dim | None:
    """The number of elements of a dim that a slice keeps; None where it is unknown."""
    size = readable_size(context, dim)
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
        return round_up(sympy.Min(size, -start), step)
    low = sympy.Min(start, size) if first > 0 else sympy.Max(0, size + start)
    if to_the_end:
        high = sympy.sympify(size)
    elif last < 0:
        high = sympy.Max(0, size + end)
    else:
        high = sympy.Min(end, size)
    return round_up(high - low, step)


def _counts_from(bound: Dim) -> int | None:
    """1 for a bound that counts from the start, -1 from the end; None if it may be either."""
    low, high = NO_CONSTRAINTS.bounds(bound)
    if low is not None and low >= 0:
        return 1
    return -1 if high is not None and high < 0 else None
