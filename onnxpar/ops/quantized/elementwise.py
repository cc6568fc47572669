"""onnxruntime's elementwise operators, pools and concatenation of quantised tensors.

Scale and zero point hold for all elements of a tensor, so they do not limit which dims may be
sharded. (Domain `com.microsoft`.)
"""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import aligned, axis_names
from onnxpar.ops.local_helpers import (
    FLOAT,
    axis_of,
    copy_or,
    count_of,
    normal_axes,
    normal_axis,
    reduced,
)
from onnxpar.ops.local_node import LocalNode, copy_node
from onnxpar.ops.operator import LocalFn, OpDef, RuleFn
from onnxpar.ops.quantized.helpers import INT32, requantised
from onnxpar.ops.quantized.inference import infer_mean, infer_pool
from onnxpar.ops.quantized.products import FOR_INFERENCE
from onnxpar.ops.view.reshape import further


def _broadcast(*tensors: int) -> RuleFn:
    """Returns the rule of an operator that broadcasts these operands; the others are scalars."""

    def rule(view: NodeView) -> OpRule:
        out = view.out_shape()
        names = axis_names(len(out))
        replicated, texts = set[str](), []
        for index in range(view.arity):
            if index in tensors:
                text, fixed = aligned(view.shape(index), out, names)
                texts.append(text)
                replicated |= fixed
            else:
                texts.append("." if view.has(index) else "-")
        result = " ".join("1" if s == 1 else n for n, s in zip(names, out, strict=True))
        clause = f"; replicated: {' '.join(sorted(replicated))}" if replicated else ""
        return parse_rule(f"{', '.join(texts)} -> {result}{clause}")

    rule.__doc__ = "Elementwise; scales and zero points are replicated."
    return rule


def softmax_rule(view: NodeView) -> OpRule:
    """QLinearSoftmax: rows are parallel; the normalised dims are replicated."""
    names = axis_names(len(view.shape(0)))
    axis = axis_of(view, -1)
    # Before opset 13 all dims from the axis on formed one row.
    row = names[axis:] if int(view.attr("opset", 13)) < 13 else [names[axis]]
    return _scaled(view, " ".join(names), " ".join(names), "replicated", row)


def _scaled(view: NodeView, left: str, right: str, kind: str, factors: Sequence[str]) -> OpRule:
    clause = f"; {kind}: {' '.join(factors)}" if factors else ""
    return parse_rule(f"{left}{further(view)} -> {right}{clause}")


def concat_rule(view: NodeView) -> OpRule:
    """QLinearConcat: all dims except the concatenated one may be sharded."""
    rank = len(view.out_shape())
    names = axis_names(rank)
    axis = normal_axis(view, view.attr("axis"), rank)
    texts, joined = [".", "."], []
    for index in range(2, view.arity):
        if (index - 2) % 3:
            texts.append(".")
            continue
        joined.append(f"join{index}")
        texts.append(" ".join([*names[:axis], joined[-1], *names[axis + 1 :]]))
    text = (
        f"{', '.join(texts)} -> {' '.join(names)}; replicated: {' '.join([*joined, names[axis]])}"
    )
    return parse_rule(text)


def _spatial(view: NodeView) -> list[int]:
    rank = len(view.shape(0))
    return list(range(1, rank - 1) if view.attr("channels_last", 0) else range(2, rank))


def mean_rule(view: NodeView) -> OpRule:
    """QLinearGlobalAveragePool, QLinearReduceMean: devices add integer sums of sharded dims."""
    names = axis_names(len(view.shape(0)))
    axes = _mean_axes(view)
    keep = view.attr("keepdims", 1)
    result = ["1" if i in axes else n for i, n in enumerate(names) if keep or i not in axes]
    return _scaled(view, " ".join(names), " ".join(result), "special", [names[a] for a in axes])


def _mean_axes(view: NodeView) -> list[int]:
    if view.op_type == "QLinearGlobalAveragePool":
        return _spatial(view)
    rank = len(view.shape(0))
    return list(normal_axes(view, view.attr("axes") or range(rank), rank))


def mean_local(node: LocalNode) -> Sequence[ir.Value]:
    """Sums in int32, all-reduces, subtracts the zero point, and rounds once."""
    view, shape = node.view, node.in_shape(0)
    axes = _mean_axes(view)
    names = axis_names(len(shape))
    x = node.builder.cast(node.input(0), INT32)
    for factor in node.split_factors("special"):
        x = node.masked(x, 0, factor, 0, known_zero=node.zero[0])
    kept = reduced(shape, axes)
    total = node.builder.reduce("ReduceSum", x, axes, keepdims=True)
    total = node.all_reduce(total, node.split_atoms("special"))
    sizes = [node.size(names[a]) for a in axes]
    if view.has(2):
        point = node.builder.cast(node.builder.reshape(node.input(2), [1]), INT32)
        zeros = node.op("Mul", point, count_of(node, sizes, INT32), shape=[1])
        total = node.op("Sub", total, zeros, shape=kept)
    divisor = node.op(
        "Mul", node.builder.reshape(node.input(3), [1]), count_of(node, sizes, FLOAT), shape=[1]
    )
    scale = node.op("Div", node.builder.reshape(node.input(1), [1]), divisor, shape=[1])
    made = requantised(node, total, scale, node.inputs[4] if view.has(4) else None, kept)
    return (node.builder.reshape(made, node.out_shape()),)


def pool_rule(view: NodeView) -> OpRule:
    """QLinearAveragePool: batch and channels are parallel, spatial dims replicated."""
    rank = len(view.shape(0))
    names, spatial = axis_names(rank), _spatial(view)
    left = [f"{n}_in" if i in spatial else n for i, n in enumerate(names)]
    right = [f"{n}_out" if i in spatial else n for i, n in enumerate(names)]
    windowed = [n for n in (*left, *right) if n not in names]
    return _scaled(view, " ".join(left), " ".join(right), "replicated", windowed)


def _op(op_type: str, rule: RuleFn, local: LocalFn = copy_node, **slots: Any) -> OpDef:
    return OpDef(MICROSOFT, op_type, 1, rule, local, gradient=FOR_INFERENCE, **slots)


DEFS = (
    _op("QLinearAdd", _broadcast(0, 3)),
    _op("QLinearMul", _broadcast(0, 3)),
    _op("QLinearWhere", _broadcast(0, 1, 4)),
    _op("QLinearSigmoid", _broadcast(0)),
    _op("QLinearLeakyRelu", _broadcast(0)),
    _op("QLinearSoftmax", softmax_rule),
    _op("QLinearConcat", concat_rule),
    _op("QLinearAveragePool", pool_rule, infer=infer_pool),
    _op("QLinearGlobalAveragePool", mean_rule, copy_or(mean_local), infer=infer_mean),
    _op("QLinearReduceMean", mean_rule, copy_or(mean_local), infer=infer_mean),
)
