"""Helpers of quantised operators: ranges, padding that counts as zero, requantisation.

A quantised operator that sums over a sharded dim sums integers, exactly, and rounds once, after the
sum: the result is that of one device to the last bit.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import mask_component
from onnxpar.ops.local_helpers import BOOL, FLOAT
from onnxpar.ops.local_node import LocalNode

UINT8 = ir.DataType.UINT8
INT32 = ir.DataType.INT32


def ranged(
    node: LocalNode, x: ir.Value, factors: Sequence[str], shape: Sequence[Dim]
) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Quantises local float32 `x` to uint8 by its range on all devices.

    Args:
        node: The node, whose operand 0 is `x`.
        x: The local value.
        factors: The sharded factors of its dims.
        shape: Its local shape.

    Returns:
        The quantised shard, the scale and the zero point, as DynamicQuantizeLinear computes them.
    """
    for factor in factors:
        x = node.masked(x, 0, factor, 0, known_zero=node.zero[0])
    atoms = tuple(a for f in factors for a in node.atoms(f))
    flat = node.builder.reshape(x, [prod(shape)])
    zero, span, one = (node.builder.const(np.array(v, np.float32)) for v in (0, 255, 1))
    # Every range includes zero, the value of padding. The least element is negated, so that one
    # all-reduce carries both ends.
    top = node.builder.reduce("ReduceMax", flat, [0], keepdims=True)
    low = node.builder.reduce("ReduceMin", flat, [0], keepdims=True)
    low = node.op("Neg", low, shape=[1])
    ends = node.builder.ops("Concat", [top, low], [(FLOAT, [2])], {"axis": 0})[0]
    ends = node.op("Max", node.all_reduce(ends, atoms, "max"), zero, shape=[2])
    places = (node.builder.const(np.array(i, np.int64)) for i in (0, 1))
    high, down = (node.op("Gather", ends, place, shape=[], axis=0) for place in places)
    scale = node.op("Div", node.op("Add", high, down, shape=[]), span, shape=[])
    is_flat = node.op("Equal", scale, zero, dtype=BOOL, shape=[])
    scale = node.op("Where", is_flat, one, scale, dtype=FLOAT, shape=[])
    point = node.op("Div", down, scale, shape=[])
    point = node.op("Round", node.op("Clip", point, zero, span, shape=[]), shape=[])
    point = node.builder.cast(point, UINT8)
    made = node.op("QuantizeLinear", x, scale, point, dtype=UINT8, shape=shape)
    return made, scale, point


def valid_mask(node: LocalNode, factor: str) -> ir.Value:
    """Returns which local elements along `factor` are not padding, bool [local size]."""
    length = node.local_size(factor)
    one = node.builder.const(np.array(1, np.int64))
    mask = node.op("Expand", one, node.builder.size(length), dtype=INT64, shape=[length])
    components = node.components(factor)
    for place, component in enumerate(components):
        if component.atoms:
            rest = components[place + 1 :]
            mask = mask_component(
                node.builder, mask, [length], 0, components[:place], component, rest, 0
            )
    return node.op("Cast", mask, dtype=BOOL, shape=[length], to=int(BOOL))


def filled(
    node: LocalNode, x: ir.Value, operand: int, factor: str, point: ir.Value | None
) -> ir.Value:
    """Returns local `x` with its zero point as padding of `factor`, so that this counts as zero.

    Args:
        node: The node.
        x: A local value laid out as operand `operand`.
        operand: Index of the operand; one of its dims is `factor`, or has it as the last factor.
        factor: The factor.
        point: The zero point, of a shape that broadcasts against the operand; None for 0.
    """
    if node.is_even(factor):
        return x
    if point is None:
        return node.masked(x, operand, factor, 0, known_zero=node.zero[operand])
    dims = node.plan.rule.inputs[operand].dims
    axis = next(i for i, names in enumerate(dims) if factor in names)
    shape = node.in_shape(operand)
    length = node.local_size(factor)
    before = prod(node.local_size(name) for name in dims[axis][: dims[axis].index(factor)])
    mask = valid_mask(node, factor)
    if before != 1:
        mask = node.op("Expand", mask, node.builder.sizes([before, length]), shape=[before, length])
        mask = node.builder.reshape(mask, [before * length])
    mask = node.builder.reshape(mask, [before * length, *[1] * (len(shape) - axis - 1)])
    return node.op("Where", mask, x, point, dtype=x.dtype, shape=shape)


def requantised(
    node: LocalNode, total: ir.Value, scale: ir.Value, point: ir.Value | None, shape: Sequence[Dim]
) -> ir.Value:
    """Returns int32 sums times `scale`, rounded to the type and range of `point` (uint8)."""
    real = node.op("Mul", node.builder.cast(total, FLOAT), scale, shape=shape)
    one = node.builder.const(np.array(1, np.float32))
    if point is None:
        point = node.builder.const(np.array(0, np.uint8))
    point = node.builder.reshape(point, [])
    return node.op("QuantizeLinear", real, one, point, dtype=point.dtype, shape=shape)


def output_scale(
    node: LocalNode,
    left: ir.Value,
    right: ir.Value,
    out: ir.Value | None,
    shape: Sequence[Dim],
) -> ir.Value:
    """Returns left · right / out, in the order in which onnxruntime multiplies (float32).

    Args:
        node: The node.
        left: Scale of the left operand; it has one element.
        right: Scale of the right operand, of local shape `shape`.
        out: Scale of the result, with one element; None for 1.
        shape: Local shape of `right` and of the returned scale.
    """
    one = node.builder.cast(node.builder.reshape(left, []), FLOAT)
    both = node.op("Mul", one, node.builder.cast(right, FLOAT), shape=shape)
    if out is None:
        return both
    divisor = node.builder.cast(node.builder.reshape(out, []), FLOAT)
    return node.op("Div", both, divisor, shape=shape)


def is_single(view: NodeView, index: int) -> bool:
    """Whether operand `index` is absent or has one element."""
    return not view.has(index) or all(size == 1 for size in view.shape(index))


def dims_if_single(view: NodeView, index: int) -> str | None:
    """The dims of operand `index` in a rule if it is absent or has one element; None otherwise."""
    if not is_single(view, index):
        return None
    return " ".join("1" for _ in view.shape(index)) if view.has(index) else "-"
