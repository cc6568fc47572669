"""Reductions: a sharded reduced dim leaves a partial result, or the local form communicates.

Sum, Mean, L1 and SumSquare leave a partial sum; Max, Min and Prod likewise. L2, LogSum and
LogSumExp end in a function that does not commute with sums, so their local forms all-reduce.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.folding import INTEGERS
from onnxpar.ops.local_helpers import (
    BOOL,
    copy_or,
    count_of,
    reduced,
    reduced_axes,
    work_dtype,
)
from onnxpar.ops.local_node import LocalNode, copy_node
from onnxpar.ops.old_node import operands
from onnxpar.ops.operator import LocalFn, OpDef
from onnxpar.ops.reduce import reduce_gradient as grad
from onnxpar.ops.sizes.computed_sizes import (
    REDUCE_MAX,
    REDUCE_MIN,
    REDUCE_PROD,
    REDUCE_SUM,
)
from onnxpar.ops.view.reshape import further


def _rule(kind: str, linear: str, exact: bool) -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        names = axis_names(len(view.shape(0)))
        axes = reduced_axes(view)
        operands = " ".join(names) + further(view)
        if axes is None:
            # With noop_with_empty_axes, reductions that are not linear still square, for example.
            text = f"{operands} -> {' '.join(names)}"
            return parse_rule(text + ("; linear: any 0" if linear else ""))
        keep = view.attr("keepdims", 1)
        result = [
            "1" if axis in axes else name
            for axis, name in enumerate(names)
            if keep or axis not in axes
        ]
        text = f"{operands} -> {' '.join(result)}"
        divides = exact or view.has_floats
        if axes:
            text += f"; {kind if divides else 'replicated'}: "
            text += " ".join(names[axis] for axis in axes)
        if linear and divides:
            text += f"; linear: {linear}"
        return parse_rule(text)

    rule.__doc__ = f"Reduced dims: {kind}; the others are kept." + (
        f" Linear: {linear}." if linear else ""
    )
    return rule


def mean_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local sum divided by the global count."""
    if not node.split_factors("sum"):
        return node.copy()
    axes = reduced_axes(node.view)
    assert axes is not None
    wide = work_dtype(node.out_dtype())
    x = node.builder.cast(node.input(0), wide)
    total = node.builder.reduce("ReduceSum", x, axes, keepdims=True)
    sizes = node.view.shape(0)
    count = count_of(node, [sizes[axis] for axis in axes], wide)
    return _finish(node, node.op("Div", total, count, shape=reduced(node.in_shape(0), axes)))


def _inner(node: LocalNode, fill: float | str) -> tuple[ir.Value, tuple[int, ...]]:
    """Returns the operand in the working type, its padding filled, and the reduced axes."""
    axes = reduced_axes(node.view)
    assert axes is not None
    x = node.input(0)
    for factor in node.split_factors("special"):
        x = node.masked(x, 0, factor, fill, known_zero=node.zero[0])
    return node.builder.cast(x, work_dtype(x.dtype)), axes


def _finish(node: LocalNode, x: ir.Value) -> Sequence[ir.Value]:
    x = node.builder.reshape(x, node.out_shape())
    return (node.builder.cast(x, node.out_dtype()),)


def _summed(op_type: str, last: str) -> Callable[[LocalNode], Sequence[ir.Value]]:
    def special(node: LocalNode) -> Sequence[ir.Value]:
        x, axes = _inner(node, 0)
        part = node.builder.reduce(op_type, x, axes, keepdims=True)
        total = node.all_reduce(part, node.split_atoms("special"))
        return _finish(node, node.op(last, total, shape=reduced(node.in_shape(0), axes)))

    special.__doc__ = f"{op_type} of the local shard, all-reduced, then {last}."
    return special


def log_sum_exp(node: LocalNode) -> Sequence[ir.Value]:
    """Emits log Σ exp(x - m) + m with the global maximum m; 0 stands for an infinite m."""
    x, axes = _inner(node, "lowest")
    shape = node.in_shape(0)
    kept, atoms = reduced(shape, axes), node.split_atoms("special")
    top = node.all_reduce(node.builder.reduce("ReduceMax", x, axes, keepdims=True), atoms, "max")
    size = node.op("Abs", top, shape=kept)
    infinite = node.op("Equal", size, node.number(inf, x), dtype=BOOL, shape=kept)
    top = node.op("Where", infinite, node.number(0.0, x), top, dtype=x.dtype, shape=kept)
    powers = node.op("Exp", node.op("Sub", x, top, shape=shape), shape=shape)
    total = node.all_reduce(node.builder.reduce("ReduceSum", powers, axes, keepdims=True), atoms)
    return _finish(node, node.op("Add", node.op("Log", total, shape=kept), top, shape=kept))


def _op(
    name: str,
    spread: grad.Spread,
    kind: str,
    linear: str = "",
    local: LocalFn = copy_node,
    *,
    exact: bool = True,
    zero: bool = False,
    **slots: Any,
) -> OpDef:
    """The record of a reduction.

    Args:
        name: Name of the operator.
        spread: Emits the cotangent of its operand.
        kind: The kind of reduced dims in its rule.
        linear: The operands in which its rule is linear.
        local: Its local form.
        exact: Whether shards of integers give the exact result; a mean or a logarithm rounds.
        zero: As `keeps_zero` of `OpDef`.
        **slots: Other slots of `OpDef`.
    """
    return OpDef(
        "",
        name,
        1,
        _rule(kind, linear, exact),
        local,
        grad.reduction(spread),
        keeps_zero=zero,
        host_operands=(1,),
        upgrades={13 if name == "ReduceSum" else 18: operands(axes=1)},
        **slots,
    )


def _ends_in(
    name: str, spread: grad.Spread, local: Callable[[LocalNode], Sequence[ir.Value]]
) -> OpDef:
    """The record of a reduction that ends in a function that does not commute with sums."""
    return _op(name, spread, "special", local=copy_or(local), exact=False)


DEFS = (
    _op(
        "ReduceSum",
        grad.spread_sum,
        "sum",
        "sum 0",
        zero=True,
        values=REDUCE_SUM,
        folding=INTEGERS,
    ),
    _op("ReduceMean", grad.spread_mean, "sum", "sum 0", mean_local, exact=False, zero=True),
    _op(
        "ReduceMax",
        grad.spread_extremum,
        "max",
        "max 0",
        values=REDUCE_MAX,
        folding=INTEGERS,
    ),
    _op(
        "ReduceMin",
        grad.spread_extremum,
        "min",
        "min 0",
        values=REDUCE_MIN,
        folding=INTEGERS,
    ),
    _op(
        "ReduceProd",
        grad.spread_product,
        "prod",
        "prod 0",
        values=REDUCE_PROD,
        folding=INTEGERS,
    ),
    _op("ReduceL1", grad.spread_l1, "sum", zero=True),
    _op("ReduceSumSquare", grad.spread_sum_square, "sum", zero=True),
    _ends_in("ReduceL2", grad.spread_l2, _summed("ReduceSumSquare", "Sqrt")),
    _ends_in("ReduceLogSum", grad.spread_log_sum, _summed("ReduceSum", "Log")),
    _ends_in("ReduceLogSumExp", grad.spread_log_sum_exp, log_sum_exp),
)
