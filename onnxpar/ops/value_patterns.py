"""The slot `pattern`, and the pattern of any value, found from the nodes that made it."""

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import CONST_LIMIT
from onnxpar.graph.patterns import UNKNOWN, Pattern
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.registry import Registry


def pattern_of(registry: Registry, env: ShapeEnv, value: ir.Value) -> Pattern:
    """Returns the pattern of a value.

    Args:
        registry: The operators.
        env: Shapes of values. Where a shape is unknown, no dim is known to count.
        value: The value.
    """
    if value.const_value is not None:
        return _constant_pattern(value.const_value)
    node = value.producer()
    definition = registry.of(node) if node is not None else None
    if node is None or definition is None or not node.inputs or value is not node.outputs[0]:
        return UNKNOWN
    make = definition.pattern or (in_order if definition.memory.view else None)
    first = node.inputs[0]
    if make is None or first is None:
        return UNKNOWN
    return make(node, env, pattern_of(registry, env, first))


def _constant_pattern(tensor: ir.TensorProtocol) -> Pattern:
    if tensor.size > CONST_LIMIT:
        return UNKNOWN
    array = np.asarray(tensor.numpy())
    return Pattern(not np.any(array), counted_dim(array))


def counted_dim(array: NDArray[np.generic]) -> int | None:
    """Returns the dim along which an array counts 0, 1, …; None if there is none."""
    for dim, size in enumerate(array.shape):
        steps = np.arange(size).reshape([-1, *[1] * (array.ndim - dim - 1)])
        if size > 1 and np.array_equal(array, np.broadcast_to(steps, array.shape)):
            return dim
    return None


def _shapes(node: ir.Node, env: ShapeEnv) -> tuple[tuple[Dim, ...] | None, tuple[Dim, ...] | None]:
    """The shapes of operand 0 and of result 0."""
    before, after = node.inputs[0], node.outputs[0]
    assert before is not None
    return env.shapes.get(before.name or ""), env.shapes.get(after.name or "")


def unchanged(node: ir.Node, env: ShapeEnv, first: Pattern) -> Pattern:
    """The result has the pattern of operand 0."""
    return first


def side_by_side(node: ir.Node, env: ShapeEnv, first: Pattern) -> Pattern:
    """The result has its operands side by side along `axis`."""
    _, after = _shapes(node, env)
    if after is None or node.attributes["axis"].as_int() not in (-1, len(after) - 1):
        return UNKNOWN
    return Pattern(parts=tuple(v for v in node.inputs if v is not None))


def in_order(node: ir.Node, env: ShapeEnv, first: Pattern) -> Pattern:
    """The result has the elements of operand 0 in their order, in another shape."""
    before, after = _shapes(node, env)
    if first.counted is None or before is None or after is None:
        return Pattern(first.zero)
    # Only dims of size 1 may be added or removed.
    ours = [d for d, size in enumerate(before) if size != 1]
    theirs = [d for d, size in enumerate(after) if size != 1]
    same = len(ours) == len(theirs) and first.counted in ours
    if not same or not all(
        env.table.equal(before[a], after[b]) for a, b in zip(ours, theirs, strict=True)
    ):
        return Pattern(first.zero)
    return Pattern(first.zero, theirs[ours.index(first.counted)])


def repeated(node: ir.Node, env: ShapeEnv, first: Pattern) -> Pattern:
    """The result repeats operand 0 along dims that it lacks or that have size 1."""
    before, after = _shapes(node, env)
    if first.counted is None or before is None or after is None:
        return Pattern(first.zero)
    moved = first.counted + len(after) - len(before)
    kept = env.table.equal(before[first.counted], after[moved])
    return Pattern(first.zero, moved if kept else None)
