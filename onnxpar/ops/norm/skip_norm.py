"""Normalisations of a residual sum, which onnxruntime fuses (domain `com.microsoft`).

y = norm(x + skip + bias). The sum itself is a further output, for the next layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import aligned, axis_names
from onnxpar.ops.local_helpers import reduced, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.norm.inference import infer_skip_norm
from onnxpar.ops.norm.split_statistics import normalised
from onnxpar.ops.operator import BY_BODY, LocalFn, OpDef


@dataclass(frozen=True)
class _Kind:
    """One of the two operators.

    Attributes:
        name: Its name.
        centre: Whether the mean is subtracted.
        bias: The input that is added to the sum before it is normalised.
    """

    name: str
    centre: bool
    bias: int


_KINDS = (
    _Kind("SkipLayerNormalization", True, 4),
    _Kind("SkipSimplifiedLayerNormalization", False, 3),
)
_MEAN, _INVERSE, _SUM = 1, 2, 3


def _rule(kind: _Kind) -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        shape = view.shape(0)
        names = axis_names(len(shape))
        dims, last = " ".join(names), names[-1]
        skip, replicated = aligned(view.shape(1), shape, names)
        operands = [dims, skip]
        operands += [last if view.has(i) else "-" for i in range(2, view.arity)]
        row = " ".join([*names[:-1], "1"])
        shapes = {0: dims, _MEAN: row, _INVERSE: row, _SUM: dims}
        outputs = [shapes[i] if out.name else "." for i, out in enumerate(view.node.outputs)]
        if not kind.centre and len(outputs) > _MEAN and outputs[_MEAN] != ".":
            raise view.fail("it has no mean output")
        text = f"{', '.join(operands)} -> {', '.join(outputs)}"
        if last not in replicated:
            text += f"; special: {last}"
        if replicated:
            text += f"; replicated: {' '.join(sorted(replicated))}"
        return parse_rule(text)

    rule.__doc__ = "Leading dims are parallel; the normalised dim, which vectors share, is special."
    return rule


def _local(kind: _Kind) -> LocalFn:
    def local(node: LocalNode) -> Sequence[ir.Value]:
        if not node.split_factors("special"):
            return _copied(node)
        view, shape, dtype = node.view, node.in_shape(0), node.out_dtype()
        total = node.op("Add", node.input(0), node.input(1), shape=shape)
        if view.has(kind.bias):
            total = node.op("Add", total, node.input(kind.bias), shape=shape)
        x = node.builder.cast(total, work_dtype(dtype))
        axes, sizes = [len(shape) - 1], view.shape(0)[-1:]
        made = normalised(node, x, shape, axes, sizes, _epsilon(view), centre=kind.centre)
        y = node.op("Mul", node.builder.cast(made.y, dtype), node.input(2), shape=shape)
        if kind.centre and view.has(3):
            y = node.op("Add", y, node.input(3), shape=shape)
        known = {0: y, _MEAN: made.mean, _INVERSE: made.inverse, _SUM: total}
        outputs = []
        for index, out in enumerate(view.node.outputs):
            value = known[index]
            # An output without a name, which nobody reads, must be a value of its own.
            if value is None or not out.name:
                value = node.op("Identity", made.inverse, shape=reduced(shape, axes))
            outputs.append(node.builder.cast(value, out.dtype if out.name else None))
        return outputs

    local.__doc__ = "Statistics are all-reduced, at most two numbers per row."
    return local


def _copied(node: LocalNode) -> Sequence[ir.Value]:
    """The same node; outputs that nobody reads get no name, and are not computed."""
    made = node.copy()
    for value, out in zip(made, node.view.node.outputs, strict=True):
        if not out.name:
            value.name = ""
    return made


def _body(kind: _Kind) -> Callable[[BodyNode], Sequence[ir.Value | None]]:
    def body(node: BodyNode) -> Sequence[ir.Value | None]:
        view, build = node.view, node.builder
        x = node.input(0)
        shape = node.shape(x)
        total = node.op("Add", x, node.input(1))
        if view.has(kind.bias):
            total = node.op("Add", total, node.input(kind.bias))
        stash = work_dtype(x.dtype)
        row = (stash, [*shape[:-1], 1])
        operands = [total, node.input(2)]
        if kind.centre and view.has(3):
            operands.append(node.input(3))
        wanted = [bool(out.name) for out in view.node.outputs]
        wanted += [False] * (_SUM + 1 - len(wanted))
        name = "LayerNormalization" if kind.centre else "SimplifiedLayerNormalization"
        statistics = (_MEAN, _INVERSE) if kind.centre else (_INVERSE,)
        read = any(wanted[i] for i in statistics)
        made = build.ops(
            name,
            operands,
            [(x.dtype, shape), *([row] * len(statistics) if read else [])],
            {"axis": -1, "epsilon": _epsilon(view), "stash_type": int(stash)},
        )
        found: list[ir.Value | None] = [made[0], None, None, total]
        for index, value in zip(statistics, made[1:], strict=False):
            found[index] = value
        return found[: len(view.node.outputs)]

    body.__doc__ = "Adds the operands, then normalises the sum."
    return body


def _epsilon(view: NodeView) -> float:
    # onnxruntime's default, which differs from that of ONNX's normalisations.
    return float(view.attr("epsilon", 1e-12))


DEFS = tuple(
    OpDef(
        MICROSOFT,
        kind.name,
        1,
        _rule(kind),
        _local(kind),
        gradient=BY_BODY,
        body=_body(kind),
        infer=infer_skip_norm,
    )
    for kind in _KINDS
)
