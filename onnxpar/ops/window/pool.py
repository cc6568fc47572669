"""Pools over windows: MaxPool, AveragePool, LpPool, MaxUnpool.

Batch and channels are parallel. Sharded spatial dims exchange halos (`onnxpar.ops.window.halo`),
whose border has a value that changes no result: the lowest number for a maximum, zero for a sum.
"""

from collections.abc import Sequence
from math import prod

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.device.cuda_functions import itself
from onnxpar.ops.fallback import require_readable
from onnxpar.ops.local_helpers import global_index, iota
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import FOLLOWS
from onnxpar.ops.window.geometry import Spatial, pool_dims, split_dims, windowed, words
from onnxpar.ops.window.halo import DimSplit, begin
from onnxpar.ops.window.pool_counts import divided_by_counts
from onnxpar.ops.window.pool_gradient import (
    average_pool_gradient,
    lp_pool_gradient,
    max_pool_gradient,
    max_unpool_gradient,
)


def _has_indices(view: NodeView) -> bool:
    return len(view.node.outputs) > 1 and bool(view.node.outputs[1].name)


def max_pool_rule(view: NodeView) -> OpRule:
    """MaxPool: `N C y x -> N C y x; scaled: y x`; with indices N and C are special.

    Indices are those of the undivided tensor, so batch and channels then need a local form, which
    does not communicate.
    """
    space = words(pool_dims(view))
    outputs = [f"N C {space.results}"]
    if len(view.node.outputs) > 1:
        outputs.append(outputs[0] if _has_indices(view) else ".")
    text = f"N C {space.image} -> {', '.join(outputs)}{space.clauses(kernel=False)}"
    return parse_rule(f"{text}; special: N C" if _has_indices(view) else f"{text}; linear: max 0")


def sum_pool_rule(view: NodeView) -> OpRule:
    """AveragePool and LpPool: `N C y x -> N C y x; scaled: y x`; the average is linear."""
    space = words(pool_dims(view))
    text = f"N C {space.image} -> N C {space.results}{space.clauses(kernel=False)}"
    return parse_rule(f"{text}; linear: sum 0" if view.op_type == "AveragePool" else text)


def _pooled(node: LocalNode, fill: float | str) -> tuple[ir.Value, ...]:
    """The pool on windows; a copy of the node if no spatial dim is sharded."""
    dims = pool_dims(node.view)
    if not split_dims(node, dims):
        return node.copy()
    # With ceil_mode a longer image would give one more result; indices depend on its length.
    exact = bool(node.attr("ceil_mode", 0)) or _has_indices(node.view)
    image = windowed(node, 0, dims, fill, exact=exact)
    return node.copy([image.x], {"pads": list(image.pads), "auto_pad": None})


def max_pool_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on windows; indices in a window become indices in the undivided tensor."""
    made = _pooled(node, "lowest")
    if not _has_indices(node.view) or not node.plan.factors:
        return made
    return made[0], _global_indices(node, made[1])


def _global_indices(node: LocalNode, index: ir.Value) -> ir.Value:
    """Indices in the undivided tensor, from those in a local one."""
    dims, image = pool_dims(node.view), node.view.shape(0)
    split, shape = split_dims(node, dims), node.out_shape(1)
    sizes: list[Dim] = []
    for d, dim in enumerate(dims):
        part = _split(node, dims, d)
        sizes.append(dim.size if part is None else dim.sliding.span(part.own(node)))
    where = node.op("Mod", index, node.builder.size(prod(sizes)), shape=shape)
    if split:
        where = _global_places(node, where, sizes, shape)
    # Batch and channel of an index follow from its own position.
    size = node.builder.size(prod(image[2:]))
    row = _row(node, global_index(node, "N"), global_index(node, "C"), image[1], size, shape)
    return node.op("Add", where, row, dtype=INT64, shape=shape)


def _row(
    node: LocalNode,
    batch: ir.Value,
    channel: ir.Value,
    channels: Dim,
    size: ir.Value,
    shape: Sequence[Dim],
) -> ir.Value:
    """The index of the first element of each image: (batch · channels + channel) · size."""
    ones = [1] * (len(shape) - 2)
    batch = node.builder.reshape(batch, [shape[0], 1, *ones])
    channel = node.builder.reshape(channel, [shape[1], *ones])
    rows = [*shape[:2], *ones]
    row = node.op("Mul", batch, node.builder.size(channels), shape=[shape[0], 1, *ones])
    row = node.op("Add", row, channel, shape=rows)
    return node.op("Mul", row, size, shape=rows)


def _global_places(
    node: LocalNode, where: ir.Value, sizes: Sequence[Dim], shape: Sequence[Dim]
) -> ir.Value:
    """Places in the undivided image, from those in an image of local sizes."""
    dims = pool_dims(node.view)
    columns = bool(node.attr("storage_order", 0))
    order = range(len(dims)) if columns else range(len(dims) - 1, -1, -1)
    total: ir.Value | None = None
    stride: Dim = 1
    for d in order:
        size = node.builder.size(sizes[d])
        place = node.op("Mod", where, size, shape=shape)
        where = node.op("Div", where, size, shape=shape)
        part = _split(node, dims, d)
        if part is not None:
            place = node.op("Add", place, begin(node, part), shape=shape)
        if stride != 1:
            place = node.op("Mul", place, node.builder.size(stride), shape=shape)
        total = place if total is None else node.op("Add", total, place, shape=shape)
        stride = stride * dims[d].size
    assert total is not None
    return total


def _split(node: LocalNode, dims: Sequence[Spatial], d: int) -> DimSplit | None:
    """How one spatial dim is sharded, or None."""
    atoms = split_dims(node, dims).get(d)
    if atoms is None:
        return None
    return DimSplit(2 + d, atoms, dims[d].size, dims[d].results, dims[d].sliding)


def average_pool_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on windows; averages over full kernels become averages over the elements counted."""
    (made,) = _pooled(node, 0)
    dims = pool_dims(node.view)
    return (divided_by_counts(node, made, node.out_shape(), dims, all_dims=False),)


def lp_pool_local(node: LocalNode) -> Sequence[ir.Value]:
    """Runs on windows with a border of zeros."""
    return _pooled(node, 0)


def max_unpool_rule(view: NodeView) -> OpRule:
    """MaxUnpool: `N C y x, N C y x -> N C y x`; spatial dims are replicated."""
    require_readable(view, "the shape of the result", view.out_shape())
    rank = len(view.shape(0)) - 2
    read, made = (" ".join(f"{end}{d}" for d in range(rank)) for end in ("i", "o"))
    shape = ", ." if view.has(2) else ", -" if view.arity > 2 else ""
    text = f"N C {read}, N C {read}{shape} -> N C {made}; special: N C; replicated: {read} {made}"
    return parse_rule(f"{text}; linear: any 0")


def max_unpool_local(node: LocalNode) -> Sequence[ir.Value]:
    """Indices in the undivided tensor become indices in the local one, also those in padding."""
    if not node.plan.factors:
        return node.copy()
    shape, out = node.in_shape(1), list(node.out_shape())
    size = node.builder.size(prod(out[2:]))
    # Padding may hold any number; Mod by a positive divisor is not negative.
    where = node.op("Mod", node.input(1), size, shape=shape)
    row = _row(node, iota(node, shape[0]), iota(node, shape[1]), shape[1], size, shape)
    index = node.op("Add", where, row, dtype=INT64, shape=shape)
    return node.copy([node.input(0), index, node.builder.sizes(out)])


_POOL = {
    "auto_pad": "string",
    "ceil_mode": "int",
    "dilations": "ints",
    "kernel_shape": "ints",
    "pads": "ints",
    "strides": "ints",
}

DEFS = (
    OpDef(
        "",
        "MaxPool",
        1,
        max_pool_rule,
        max_pool_local,
        gradient=max_pool_gradient,
        device_function=itself("MaxPool", ("y", "indices"), **_POOL),
        windowed=True,
        precision=FOLLOWS,
    ),
    OpDef(
        "",
        "AveragePool",
        1,
        sum_pool_rule,
        average_pool_local,
        gradient=average_pool_gradient,
        windowed=True,
        precision=FOLLOWS,
    ),
    OpDef("", "LpPool", 1, sum_pool_rule, lp_pool_local, gradient=lp_pool_gradient, windowed=True),
    OpDef("", "MaxUnpool", 9, max_unpool_rule, max_unpool_local, gradient=max_unpool_gradient),
)
