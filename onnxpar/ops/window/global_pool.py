"""Pools over all of space: GlobalAveragePool, GlobalMaxPool, GlobalLpPool."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import count_of, work_dtype, written_out
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import FOLLOWS
from onnxpar.ops.window.pool_gradient import (
    global_average_gradient,
    global_lp_gradient,
    global_max_gradient,
)


def _rule(view: NodeView, kind: str, linear: str = "") -> OpRule:
    rank = len(view.shape(0)) - 2
    space = " ".join(axis_names(rank))
    text = f"N C {space} -> N C {' '.join(['1'] * rank)}"
    return parse_rule(text + (f"; {kind}: {space}" if rank else "") + linear)


def global_average_rule(view: NodeView) -> OpRule:
    """GlobalAveragePool: `N C y x -> N C 1 1; sum: y x`."""
    return _rule(view, "sum", "; linear: sum 0")


def global_average_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local sum divided by the global count."""
    if not node.split_factors("sum"):
        return node.copy()
    shape, made = node.in_shape(0), node.out_shape()
    wide = work_dtype(node.out_dtype())
    x = node.builder.cast(node.input(0), wide)
    total = node.builder.reduce("ReduceSum", x, range(2, len(shape)), keepdims=True)
    count = count_of(node, node.view.shape(0)[2:], wide)
    mean = node.op("Div", total, count, shape=made)
    return (node.builder.cast(mean, node.out_dtype()),)


def global_max_rule(view: NodeView) -> OpRule:
    """GlobalMaxPool: `N C y x -> N C 1 1; max: y x`."""
    return _rule(view, "max", "; linear: max 0")


def global_lp_rule(view: NodeView) -> OpRule:
    """GlobalLpPool: `N C y x -> N C 1 1; special: y x`."""
    return _rule(view, "special")


def _space(view: NodeView) -> range:
    return range(2, len(view.shape(0)))


def global_lp_local(node: LocalNode) -> Sequence[ir.Value]:
    """The root of the all-reduced sum of powers."""
    shape, made = node.in_shape(0), node.out_shape()
    wide = work_dtype(node.out_dtype())
    x = node.input(0)
    for factor in node.split_factors("special"):
        x = node.masked(x, 0, factor, 0, known_zero=node.zero[0])
    p = int(node.attr("p", 2))
    x = node.op("Abs", node.builder.cast(x, wide), shape=shape)
    power = x if p == 1 else node.op("Pow", x, node.number(p, x), shape=shape)
    total = node.builder.reduce("ReduceSum", power, range(2, len(shape)), keepdims=True)
    total = node.all_reduce(total, node.split_atoms("special"))
    root = total if p == 1 else node.op("Pow", total, node.number(1 / p, x), shape=made)
    return (node.builder.cast(root, node.out_dtype()),)


DEFS = (
    OpDef(
        "",
        "GlobalAveragePool",
        1,
        global_average_rule,
        global_average_local,
        gradient=global_average_gradient,
        precision=FOLLOWS,
    ),
    OpDef("", "GlobalMaxPool", 1, global_max_rule, gradient=global_max_gradient, precision=FOLLOWS),
    OpDef(
        "",
        "GlobalLpPool",
        1,
        global_lp_rule,
        written_out(global_lp_local, _space),
        gradient=global_lp_gradient,
    ),
)
