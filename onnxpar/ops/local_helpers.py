"""Helpers of local forms: axes, reductions, indices of a shard."""

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.core.sharding import Component, local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import block_start, fill_value, select, valid_count
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.local_node import LocalNode

BOOL = ir.DataType.BOOL
FLOAT = ir.DataType.FLOAT
DOUBLE = ir.DataType.DOUBLE


def normal_axes(
    view: NodeView, axes: Sequence[int], rank: int, name: str = "axes"
) -> tuple[int, ...]:
    """Returns axes counted from the front, ascending.

    Args:
        view: The node.
        axes: The axes; negative ones count from the end.
        rank: Rank of the tensor.
        name: Name of the attribute or input that gives the axes.

    Raises:
        NodeError: A tensor of this rank does not have such an axis.
        ModelError: An axis occurs twice, which some operators accept.
    """
    if any(not -rank <= a < rank for a in axes):
        raise view.fail(
            f"{name!r}: expected {-rank} to {rank - 1} for a tensor with {rank} dims, got "
            f"{list(axes)}",
            NodeError,
        )
    found = tuple(sorted(a + rank if a < 0 else a for a in axes))
    if len(set(found)) != len(found):
        raise view.fail(f"{name!r}: expected distinct axes, got {list(axes)}")
    return found


def normal_axis(view: NodeView, axis: int, rank: int) -> int:
    """Returns one axis counted from the front; NodeError if the tensor has no such axis."""
    return normal_axes(view, (axis,), rank, "axis")[0]


def axis_of(view: NodeView, default: int) -> int:
    """Returns the attribute `axis`, a dim of operand 0, counted from the front."""
    return normal_axis(view, view.attr("axis", default), len(view.shape(0)))


def reduced_axes(view: NodeView) -> tuple[int, ...] | None:
    """Returns the axes that a Reduce node reduces; None if it reduces nothing.

    Raises:
        ModelError: The axes are an input that is not constant.
    """
    rank = len(view.shape(0))
    axes = view.ints(1)
    if not axes:
        return None if view.attr("noop_with_empty_axes", 0) else tuple(range(rank))
    return normal_axes(view, axes, rank)


def work_dtype(dtype: ir.DataType | None) -> ir.DataType:
    """Returns the type in which norms and exponentials are computed: float32 for 16-bit floats."""
    return DOUBLE if dtype == DOUBLE else FLOAT


def zero_unless(node: LocalNode, kept: ir.Value, x: ir.Value) -> ir.Value:
    """Returns local `x` with zero (false) where `kept` is false."""
    return select(node.builder, kept, x, fill_value(x.dtype or FLOAT, 0))


def with_padding(node: LocalNode, operand: int, fill: float = 0) -> ir.Value:
    """Returns a local operand with all of its padding set to `fill`, such as a valid index."""
    value, kinds = node.input(operand), node.plan.rule.kinds
    for factor in (f for dim in node.plan.rule.inputs[operand].dims for f in dim):
        # Padding of a greatest or least has been set to an end of the type's range.
        zero = node.zero[operand] and kinds[factor] not in ("max", "min")
        value = node.masked(value, operand, factor, fill, known_zero=zero)
    return value


def reduced(shape: Sequence[Dim], axes: Sequence[int]) -> list[Dim]:
    """Returns `shape` with size 1 at `axes`."""
    return [1 if axis in axes else size for axis, size in enumerate(shape)]


def count_of(node: LocalNode, sizes: Sequence[Dim], dtype: ir.DataType) -> ir.Value:
    """Returns the product of global sizes as a tensor of shape [1] and type `dtype`."""
    total = prod(sizes)
    if isinstance(total, int):
        return node.builder.const([total], dtype)
    return node.op("Cast", node.builder.size(total), dtype=dtype, shape=[1], to=int(dtype))


def iota(node: LocalNode | BodyNode, size: Dim) -> ir.Value:
    """Returns 0, 1, … size-1 as int64 [size]."""
    if isinstance(size, int):
        return node.builder.const(np.arange(size, dtype=np.int64))
    zero, one = map(node.builder.const, (0, 1))
    stop = node.builder.reshape(node.builder.sizes([size]), [])
    return node.op("Range", zero, stop, one, dtype=INT64, shape=[size])


def global_index(node: LocalNode, factor: str) -> ir.Value:
    """Returns the global index along `factor` of each local element, int64 [local size].

    The indices of padding elements continue those of the block.
    """

    def block(component: Component, size: Dim) -> ir.Value:
        here = iota(node, size)
        if component.atoms:
            start = block_start(node.builder, component)
            here = node.op("Add", here, start, shape=[size])
        return here

    def row(total: ir.Value, length: Dim, component: Component) -> ir.Value:
        return node.op("Mul", total, node.builder.size(component.size), shape=[length])

    return over_components(node, factor, "Add", block, row)


def over_components(
    node: LocalNode,
    factor: str,
    op_type: str,
    block: Callable[[Component, Dim], ir.Value],
    row: Callable[[ir.Value, Dim, Component], ir.Value] = lambda value, length, component: value,
) -> ir.Value:
    """Combines a value of each component of a factor to one of each local element, [local size].

    Args:
        node: The node.
        factor: The factor.
        op_type: The operator that combines the values of major components with the next one's.
        block: Returns the value of each local element of a component, given its local size.
        row: Changes the values of the major components, [length], before they are combined with
            those of the next component.
    """
    total: ir.Value | None = None
    length: Dim = 1
    for component in node.components(factor):
        size = local_size(component, node.mesh, node.table)
        here = block(component, size)
        if total is None:
            total, length = here, size
            continue
        major = node.builder.reshape(row(total, length, component), [length, 1])
        both = node.op(op_type, major, here, shape=[length, size])
        length = length * size
        total = node.builder.reshape(both, [length])
    assert total is not None
    return total


def locate(
    node: LocalNode, factor: str, index: ir.Value, shape: Sequence[Dim]
) -> tuple[ir.Value, ir.Value]:
    """Finds global indices along `factor` in this rank's shard.

    Args:
        node: The node.
        factor: The factor that is indexed.
        index: Global indices, int64, of local shape `shape`; an index out of range is in no shard.
        shape: Their local shape.

    Returns:
        The place of each index in the shard (0 if it is not there), and whether it is there.
    """
    inside: ir.Value | None = None
    place: ir.Value | None = None
    zero = node.builder.const([0])
    left = index
    components = node.components(factor)
    for position, component in enumerate(components):
        digit = left
        if position + 1 < len(components):
            stride = node.builder.size(prod(c.size for c in components[position + 1 :]))
            digit = node.op("Div", left, stride, shape=shape)
            left = node.op("Sub", left, node.op("Mul", digit, stride, shape=shape), shape=shape)
        if component.atoms:
            start = block_start(node.builder, component)
            digit = node.op("Sub", digit, start, shape=shape)
        limit = valid_count(node.builder, component)
        below = node.op("Less", digit, zero, dtype=BOOL, shape=shape)
        low = node.op("Not", below, shape=shape)
        high = node.op("Less", digit, limit, dtype=BOOL, shape=shape)
        here = node.op("And", low, high, shape=shape)
        inside = here if inside is None else node.op("And", inside, here, shape=shape)
        if place is None:
            place = digit
        else:
            local = node.builder.size(local_size(component, node.mesh, node.table))
            place = node.op("Mul", place, local, shape=shape)
            place = node.op("Add", place, digit, shape=shape)
    assert inside is not None and place is not None
    return node.op("Where", inside, place, zero, dtype=INT64, shape=shape), inside


def copy_or(
    special: Callable[[LocalNode], Sequence[ir.Value]],
) -> Callable[[LocalNode], Sequence[ir.Value]]:
    """Returns the local form that copies the node unless one of its special factors is sharded."""

    def local(node: LocalNode) -> Sequence[ir.Value]:
        return special(node) if node.split_factors("special") else node.copy()

    local.__doc__ = special.__doc__

    return local


def written_out(
    form: Callable[[LocalNode], Sequence[ir.Value]], axes: Callable[[NodeView], Sequence[int]]
) -> Callable[[LocalNode], Sequence[ir.Value]]:
    """Returns the local form of an operator for which CUDA has no kernel in any opset.

    Other operators replace the node, sharded or not; it is copied only if it has no axes.
    """

    def local(node: LocalNode) -> Sequence[ir.Value]:
        return form(node) if axes(node.view) else node.copy()

    local.__doc__ = form.__doc__

    return local
