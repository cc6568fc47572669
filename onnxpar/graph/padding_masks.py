"""Masks for padded dims: how many elements are valid, and setting the padding to an identity.

Padding is added where data is sharded: `onnxpar.resharding.lowering` pads values,
`onnxpar.emit.weight_files` weights, and the runtime inputs (`onnxpar_format.boxes`).
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import ShardingError
from onnxpar.core.sharding import Component, Sharding, is_even, local_size
from onnxpar.core.symbols import Dim, ceil_div
from onnxpar.graph.builder import INT64
from onnxpar.graph.local_builder import LocalBuilder

PADDING, PADDED = "padding", "padded"
"""The keys in a node's `meta` of the component whose padding it sets, and of the operand's index.

A node with a type that Where lacks is cast, and has no such operand.
"""


def valid_count(builder: LocalBuilder, component: Component) -> ir.Value:
    """Returns the number of local elements of a component that are not padding, int64 [1].

    Atom by atom: if a block with v valid elements is split into blocks of L elements, block i has
    min(max(v - i·L, 0), L) valid elements.
    """

    def make() -> ir.Value:
        valid = builder.size(component.size)
        local: Dim = component.size
        for atom in component.atoms:
            local = ceil_div(local, builder.mesh.atoms[atom], builder.table)
            length = builder.size(local)
            start = builder.op("Mul", builder.coord(atom), length, dtype=INT64, shape=[1])
            left = builder.op("Sub", valid, start, dtype=INT64, shape=[1])
            left = builder.op("Max", left, builder.const([0]), dtype=INT64, shape=[1])
            valid = builder.op("Min", left, length, dtype=INT64, shape=[1])
        return valid

    return builder.once(("valid", component), make)


def block_start(builder: LocalBuilder, component: Component) -> ir.Value:
    """Returns the index in a component of the first element that this rank holds, int64 [1]."""

    def make() -> ir.Value:
        total: ir.Value | None = None
        local: Dim = component.size
        for atom in component.atoms:
            local = ceil_div(local, builder.mesh.atoms[atom], builder.table)
            start = builder.coord(atom), builder.size(local)
            step = builder.op("Mul", *start, dtype=INT64, shape=[1])
            total = step if total is None else builder.op("Add", total, step, shape=[1])
        return builder.const([0]) if total is None else total

    return builder.once(("start", component), make)


def _is_valid(builder: LocalBuilder, component: Component, tail: int) -> ir.Value:
    """Returns for each local element of a component whether it is valid, with `tail` dims of 1."""
    length = local_size(component, builder.mesh, builder.table)

    def make() -> ir.Value:
        if tail:
            column = builder.const(np.array([-1, *[1] * tail], np.int64))
            row = _is_valid(builder, component, 0)
            return builder.op("Reshape", row, column, shape=[length, *[1] * tail])
        zero, one = (builder.const(np.array(number, np.int64)) for number in (0, 1))
        stop = builder.op("Squeeze", builder.size(length), dtype=INT64, shape=[])
        index = builder.op("Range", zero, stop, one, dtype=INT64, shape=[length])
        count = valid_count(builder, component)
        return builder.op("Less", index, count, dtype=ir.DataType.BOOL, shape=[length])

    return builder.once(("is_valid", component, tail), make)


def fill_value(dtype: ir.DataType, fill: float | str) -> NDArray[Any]:
    """Returns a 0-d array of `dtype`: a number, or the "lowest" or "highest" of its range."""
    kind = dtype.numpy()
    if fill in ("lowest", "highest"):
        if dtype == ir.DataType.BOOL:
            return np.array(fill == "highest")
        if dtype.is_floating_point():
            return np.array(-np.inf if fill == "lowest" else np.inf, kind)
        info = np.iinfo(kind)
        return np.array(info.min if fill == "lowest" else info.max, kind)
    return np.array(fill, kind)


# onnxruntime has no Where for these integers, so they are cast to int64; uint64 wraps both ways.
_CHOSEN_AS = dict.fromkeys((ir.DataType.INT16, ir.DataType.UINT16, ir.DataType.UINT64), INT64)


def select(
    builder: LocalBuilder, kept: ir.Value, x: ir.Value, fill: NDArray[np.generic]
) -> ir.Value:
    """Returns local `x` with `fill` wherever `kept` is false.

    Args:
        builder: Where nodes are emitted.
        kept: Booleans that broadcast against `x`.
        x: A local value.
        fill: A 0-d array of the type of `x`.
    """
    dtype, shape = x.dtype, builder.shape_of(x)
    if dtype is None:
        raise ShardingError(f"the element type of {x.name!r} is unknown")
    if dtype == ir.DataType.BOOL:
        # onnxruntime has no Where on booleans either.
        return builder.op("Or", x, builder.op("Not", kept)) if fill else builder.op("And", x, kept)
    wide = _CHOSEN_AS.get(dtype)
    if wide is None:
        return builder.op("Where", kept, x, builder.const(fill, dtype), dtype=dtype, shape=shape)
    held = builder.cast(x, wide)
    constant = builder.const(fill.astype(np.int64), wide)
    chosen = builder.op("Where", kept, held, constant, dtype=wide, shape=shape)
    return builder.cast(chosen, dtype)


def mask_component(
    builder: LocalBuilder,
    x: ir.Value,
    local: Sequence[Dim],
    axis: int,
    before: Sequence[Component],
    component: Component,
    after: Sequence[Component],
    fill: float | str,
) -> ir.Value:
    """Returns `x` with the padding of one component of dim `axis` set to `fill`.

    Args:
        builder: Where nodes are emitted.
        x: Local value of shape `local`.
        local: Local shape.
        axis: The dim.
        before: Components of the dim that are more major.
        component: The split component.
        after: Components of the dim that are more minor.
        fill: See `fill_value`.
    """
    mesh, table = builder.mesh, builder.table
    if is_even(component, mesh, table) or x.dtype is None:
        return x
    outer: Dim = prod(local_size(c, mesh, table) for c in before)
    inner: Dim = prod(local_size(c, mesh, table) for c in after)
    length = local_size(component, mesh, table)
    view, position = list(local), axis
    if before or after:
        view, position = [*local[:axis], outer, length, inner, *local[axis + 1 :]], axis + 1
    tall = builder.reshape(x, view) if before or after else x
    valid = _is_valid(builder, component, len(view) - position - 1)
    kept = select(builder, valid, tall, fill_value(x.dtype, fill))
    maker = kept.producer()
    assert maker is not None
    maker.meta[PADDING] = component
    if tall in maker.inputs:
        maker.meta[PADDED] = maker.inputs.index(tall)
    return builder.reshape(kept, local) if before or after else kept


def mask_padding(
    builder: LocalBuilder, x: ir.Value, sharding: Sharding, fill: float | str
) -> ir.Value:
    """Returns `x`, whose sharding is `sharding`, with all of its padding set to `fill`."""
    local = sharding.local_shape(builder.mesh, builder.table)
    for axis, parts in enumerate(sharding.dims):
        for index, part in enumerate(parts):
            if part.atoms:
                x = mask_component(
                    builder, x, local, axis, parts[:index], part, parts[index + 1 :], fill
                )
    return x
