"""The number of elements that a result of AveragePool counts along a dim.

A result o counts the elements j of the kernel with

    low <= stride * o - before + dilation * j < high,

where low and high are the ends of the dim, or of its padding if `count_include_pad` is set. What a
window covers beyond that (`ceil_mode`) is never counted (ONNX operator specification, AveragePool).
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.sharding import Component, local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.padding_masks import block_start
from onnxpar.ops.local_helpers import iota
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.window.geometry import Spatial, constant, split_dims
from onnxpar.ops.window.halo import Table, by_place, places


def counts_all(view: NodeView, dim: Spatial) -> bool:
    """Whether every result of a dim is proved to count all elements of the kernel."""
    if dim.before is None or dim.after is None:
        return False
    include = bool(view.attr("count_include_pad", 0))
    low, high = (dim.before, dim.after) if include else (0, 0)
    if dim.before > low:
        return False
    # Elements between the end of the last window and the last that may be counted.
    left = constant(
        dim.size + high + dim.before - (dim.results - 1) * dim.stride - dim.extent, view.table
    )
    if left is not None:
        return left >= 0
    return not view.attr("ceil_mode", 0) and dim.after <= high


def counts(node: LocalNode, dim: Spatial, atoms: Atoms) -> ir.Value:
    """Returns the number of elements that each local result counts, int64 [local results].

    Args:
        node: The node; its attributes say what is counted.
        dim: The dim; its padding must be known.
        atoms: The atoms that shard it; none if it is replicated.
    """
    assert dim.before is not None and dim.after is not None
    include = bool(node.attr("count_include_pad", 0))
    low, high = (dim.before, dim.after) if include else (0, 0)
    own = local_size(Component(dim.results, atoms), node.mesh, node.table)
    if isinstance(dim.size, int) and isinstance(dim.results, int):
        taps = np.arange(dim.kernel) * dim.dilation - dim.before
        at = np.arange(dim.results)[:, None] * dim.stride + taps
        table: Table = ((at >= -low) & (at < dim.size + high)).sum(axis=1).astype(np.int64)
        if not atoms:
            return node.builder.const(table)
        blocks = places(node, atoms, dim.results)
        rows = np.ones((len(blocks), int(own)), np.int64)
        for place, (low, valid, _) in enumerate(blocks):
            rows[place, :valid] = table[low : low + valid]
        return node.builder.reshape(by_place(node, atoms, rows), [own])
    at_first = node.op("Mul", iota(node, own), node.builder.const([dim.stride]), shape=[own])
    start = block_start(node.builder, Component(dim.results, atoms))
    start = node.op("Mul", start, node.builder.const([dim.stride]), shape=[1])
    at_first = node.op("Add", at_first, start, shape=[own])
    at_first = node.op("Sub", at_first, node.builder.const([dim.before]), shape=[own])
    ends = []
    for limit in (node.builder.size(dim.size + high), node.builder.const([-low])):
        # The number of the kernel's elements before the limit.
        room = node.op("Sub", limit, at_first, shape=[own])
        room = node.op("Max", room, node.builder.const([0]), shape=[own])
        steps = node.op("Add", room, node.builder.const([dim.dilation - 1]), shape=[own])
        steps = node.op("Div", steps, node.builder.const([dim.dilation]), shape=[own])
        ends.append(node.op("Min", steps, node.builder.const([dim.kernel]), shape=[own]))
    number = node.op("Sub", *ends, shape=[own])
    # Results that are padding may count no element.
    return node.op("Max", number, node.builder.const([1]), shape=[own])


def divided_by_counts(
    node: LocalNode, x: ir.Value, shape: Sequence[Dim], dims: Sequence[Spatial], *, all_dims: bool
) -> ir.Value:
    """Multiplies by the number of the kernel's elements over the number counted.

    Args:
        node: The node.
        x: A local value of results.
        shape: Its local shape.
        dims: The geometry.
        all_dims: Whether along all dims, or only along sharded ones.
    """
    split = split_dims(node, dims)
    for d, dim in enumerate(dims):
        if counts_all(node.view, dim) or not (all_dims or d in split):
            continue
        own = shape[2 + d]
        number = counts(node, dim, split.get(d, ()))
        count = node.builder.cast(number, x.dtype)
        kernel = node.builder.const(np.array([dim.kernel]), x.dtype)
        share = node.op("Div", kernel, count, shape=[own])
        share = node.builder.reshape(share, [own, *[1] * (len(dims) - d - 1)])
        x = node.op("Mul", x, share, shape=shape)
    return x
