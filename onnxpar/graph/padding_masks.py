"""Masks for padded dims: how many elements are valid, and setting the others to an identity.

Padding itself is added where data is split: `onnxpar.resharding.lowering` pads values,
`onnxpar.emit.weight_files` weights, and the runtime inputs (`onnxpar_format.boxes`).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import ShardingError
from onnxpar.core.sharding import Component, Sharding, local_size
from onnxpar.core.symbols import Dim, ceil_div
from onnxpar.graph.builder import INT64
from onnxpar.graph.local_builder import LocalBuilder


def valid_count(builder: LocalBuilder, component: Component) -> ir.Value:
    """Returns the number of local elements of a component that are no padding, int64 [1].

    Atom by atom: of v valid elements in a block, piece i of L elements has min(max(v - i·L, 0), L).
    """
    if not component.atoms:
        return builder.size(component.size)
    valid = builder.size(component.size)
    local: Dim = component.size
    for atom in component.atoms:
        local = ceil_div(local, builder.mesh.atoms[atom], builder.table)
        piece = builder.size(local)
        start = builder.op("Mul", builder.coord(atom), piece, dtype=INT64, shape=[1])
        left = builder.op("Sub", valid, start, dtype=INT64, shape=[1])
        valid = _clamp(builder, left, piece)
    return valid


def _clamp(builder: LocalBuilder, x: ir.Value, top: ir.Value) -> ir.Value:
    """Returns min(max(x, 0), top) of int64 [1]."""
    low = builder.op("Max", x, builder.const([0]), dtype=INT64, shape=[1])
    return builder.op("Min", low, top, dtype=INT64, shape=[1])


def block_start(builder: LocalBuilder, component: Component) -> ir.Value:
    """Returns the index, inside a component, of this rank's first element of it, int64 [1]."""
    total: ir.Value | None = None
    local: Dim = component.size
    for atom in component.atoms:
        local = ceil_div(local, builder.mesh.atoms[atom], builder.table)
        step = builder.op("Mul", builder.coord(atom), builder.size(local), dtype=INT64, shape=[1])
        total = step if total is None else builder.op("Add", total, step, dtype=INT64, shape=[1])
    return builder.const([0]) if total is None else total


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


# Integers for which onnxruntime has no Where, and the type that they are chosen in; uint64 wraps
# into it and back.
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
    if table.divisible(component.size, mesh.count(component.atoms)) or x.dtype is None:
        return x
    outer: Dim = 1
    for c in before:
        outer = outer * local_size(c, mesh, table)
    inner: Dim = 1
    for c in after:
        inner = inner * local_size(c, mesh, table)
    length = local_size(component, mesh, table)
    view = [*local[:axis], outer, length, inner, *local[axis + 1 :]]
    tall = builder.reshape(x, view) if before or after else x
    position = axis + 1 if before or after else axis
    tail = (len(view) if before or after else len(local)) - position - 1
    scalar = builder.const(np.array(0, np.int64))
    stop = builder.op("Squeeze", builder.size(length), dtype=INT64, shape=[])
    one = builder.const(np.array(1, np.int64))
    index = builder.op("Range", scalar, stop, one, dtype=INT64, shape=[length])
    valid = builder.op(
        "Less", index, valid_count(builder, component), dtype=ir.DataType.BOOL, shape=[length]
    )
    valid_shape: list[Dim] = [length, *[1] * tail]
    valid = builder.op(
        "Reshape",
        valid,
        builder.const(np.array([-1, *[1] * tail], np.int64)),
        shape=valid_shape,
    )
    kept = select(builder, valid, tall, fill_value(x.dtype, fill))
    return builder.reshape(kept, local) if before or after else kept


def mask_padding(
    builder: LocalBuilder, x: ir.Value, sharding: Sharding, fill: float | str
) -> ir.Value:
    """Returns `x`, laid out as `sharding`, with all of its padding set to `fill`."""
    local = sharding.local_shape(builder.mesh, builder.table)
    for axis, parts in enumerate(sharding.dims):
        for index, part in enumerate(parts):
            if part.atoms:
                x = mask_component(
                    builder, x, local, axis, parts[:index], part, parts[index + 1 :], fill
                )
    return x
