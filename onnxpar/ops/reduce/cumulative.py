"""Running sums and products: a scan of each shard, combined with the totals of earlier shards.

Each shard sends one total per row (the exclusive prefix of a parallel scan; Blelloch, 1990, "Prefix
sums and their applications").
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import IDENTITY, OpRule, parse_rule
from onnxpar.core.sharding import DimSharding, local_size
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.folding import INTEGERS
from onnxpar.ops.local_helpers import BOOL, copy_or, iota, reduced
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.reduce.cumulative_gradient import cumprod_gradient, running_axis
from onnxpar.ops.reduce.reduce_gradient import cumsum_gradient


def cumsum_rule(view: NodeView) -> OpRule:
    """CumSum: every dim may be sharded; along the axis, devices exchange a total per row."""
    return _rule(view, "sum")


def cumprod_rule(view: NodeView) -> OpRule:
    """CumProd: every dim may be sharded; along the axis, devices exchange a total per row."""
    return _rule(view, "prod")


def _rule(view: NodeView, linear: str) -> OpRule:
    names = axis_names(len(view.shape(0)))
    text = " ".join(names)
    running = names[running_axis(view)]
    return parse_rule(f"{text}, . -> {text}; special: {running}; linear: {linear} 0")


_COMBINE = {"sum": "Add", "prod": "Mul"}


def cumsum_local(node: LocalNode) -> Sequence[ir.Value]:
    """The running sum of the local shard, plus the totals of the shards before it."""
    return _local(node, "sum")


def cumprod_local(node: LocalNode) -> Sequence[ir.Value]:
    """The running product of the local shard, times the totals of the shards before it."""
    return _local(node, "prod")


def _local(node: LocalNode, reduction: str) -> Sequence[ir.Value]:
    axis, shape = running_axis(node.view), node.in_shape(0)
    factor = axis_names(len(shape))[axis]
    identity = IDENTITY[reduction]
    zero = node.zero[0] and identity == 0
    x = node.masked(node.input(0), 0, factor, identity, known_zero=zero)
    parts = node.components(factor)
    sizes = [local_size(c, node.mesh, node.table) for c in parts]
    tall = [*shape[:axis], *sizes, *shape[axis + 1 :]]
    exclusive = bool(node.attr("exclusive", 0))
    x = node.builder.reshape(x, tall)
    y = _scan(node, reduction, x, tall, axis, parts, exclusive=exclusive)
    return (node.builder.reshape(y, shape),)


def _scan(
    node: LocalNode,
    reduction: str,
    x: ir.Value,
    shape: Sequence[Dim],
    axis: int,
    parts: DimSharding,
    *,
    exclusive: bool,
) -> ir.Value:
    """The running total over one dim of components `parts`, which are the dims from `axis` on."""
    at = axis + len(parts) - 1
    atoms, reduce = parts[-1].atoms, f"Reduce{reduction.capitalize()}"
    reverse = int(node.attr("reverse", 0))
    where = node.builder.const(at)
    y = node.op(node.op_type, x, where, shape=shape, exclusive=int(exclusive), reverse=reverse)
    kept = reduced(shape, [at])
    total = node.builder.reduce(reduce, x, [at], keepdims=True)
    if atoms:
        count = node.mesh.count(atoms)
        totals = node.all_gather(total, atoms, at)
        gathered = [*kept[:at], count, *kept[at + 1 :]]
        # Only the totals of earlier shards.
        side = "Greater" if reverse else "Less"
        earlier = node.op(
            side, iota(node, count), node.builder.position(atoms), dtype=BOOL, shape=[count]
        )
        earlier = node.builder.reshape(earlier, [count, *[1] * (len(shape) - at - 1)])
        nothing = node.builder.const(np.array(IDENTITY[reduction]), x.dtype)
        before = node.op("Where", earlier, totals, nothing, dtype=x.dtype, shape=gathered)
        before = node.builder.reduce(reduce, before, [at], keepdims=True)
        y = node.op(_COMBINE[reduction], y, before, shape=shape)
        total = node.builder.reduce(reduce, totals, [at], keepdims=True)
    if len(parts) == 1:
        return y
    rows = [*shape[:at], *shape[at + 1 :]]
    total = node.builder.reshape(total, rows)
    before = _scan(node, reduction, total, rows, axis, parts[:-1], exclusive=True)
    return node.op(_COMBINE[reduction], y, node.builder.reshape(before, kept), shape=shape)


DEFS = (
    OpDef(
        "",
        "CumSum",
        11,
        cumsum_rule,
        copy_or(cumsum_local),
        gradient=cumsum_gradient,
        host_operands=(1,),
        folding=INTEGERS,
    ),
    OpDef("", "CumProd", 26, cumprod_rule, copy_or(cumprod_local), gradient=cumprod_gradient),
)
