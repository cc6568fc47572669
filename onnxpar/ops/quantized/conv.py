"""Convolutions of quantised tensors: ConvInteger, QLinearConv.

Batch, output channels and groups are parallel. A split of the input channels sums int32, exactly,
padding of the channels holding the zero point of the weights; QLinearConv rounds after the sum.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves
from onnxpar.ops.operator import OpDef
from onnxpar.ops.quantized.helpers import (
    INT32,
    filled,
    is_single,
    output_scale,
    requantised,
)
from onnxpar.ops.quantized.products import FOR_INFERENCE, INTEGERS

_BATCH, _GROUP, _IN, _OUT = "N", "G", "C", "M"


class _Conv:
    """Words of the rule: `N (G C) x…, (G M) C k… -> N (G M) y…`."""

    def __init__(self, view: NodeView, weight: int) -> None:
        x, w = view.shape(0), view.shape(weight)
        group = int(view.attr("group", 1))
        if not isinstance(w[0], int) or not isinstance(w[1], int):
            raise view.fail(f"the channels must be known to be sharded, got {w[0]} and {w[1]}")
        self.view = view
        self.sizes: dict[str, Dim] = {}
        self.inner = "1" if group == w[1] == 1 else _merged(self.sizes, group, _IN, w[1])
        self.outer = _merged(self.sizes, group, _OUT, w[0] // group)
        spatial = axis_names(len(x) - 2)
        self.last = bool(view.attr("channels_last", 0))
        self.x = self._image(self.inner, [f"{n}_in" for n in spatial])
        self.y = self._image(self.outer, [f"{n}_out" for n in spatial])
        kernel = [f"{n}_kernel" for n in spatial]
        self.w = f"{self.outer} {_IN if w[1] != 1 else 1} {' '.join(kernel)}"
        self.whole = [f"{n}_{end}" for n in spatial for end in ("in", "out", "kernel")]
        self.channels = w[1]

    def _image(self, channels: str, spatial: Sequence[str]) -> str:
        words = [*spatial, channels] if self.last else [channels, *spatial]
        return " ".join([_BATCH, *words])

    def by_channel(self, index: int) -> str:
        """Words of a scale, zero point or bias, which has one element or one for each channel."""
        if not self.view.has(index):
            return "-"
        shape = self.view.shape(index)
        if all(size == 1 for size in shape):
            return " ".join("1" for _ in shape)
        return self.outer

    def rule(self, operands: Sequence[str], kind: str) -> OpRule:
        """The rule, a split of the input channels being of a kind."""
        shown = ", ".join(operands[: self.view.arity])
        text = f"{shown} -> {self.y}; replicated: {' '.join(self.whole)}"
        if self.channels != 1:
            text += f"{f' {_IN}' if kind == 'replicated' else f'; {kind}: {_IN}'}"
        return parse_rule(text, self.sizes)


def _merged(sizes: dict[str, Dim], group: int, name: str, size: int) -> str:
    """Word of a dim of `group` times `size`, and the sizes of its factors."""
    if group == 1:
        return name
    if size == 1:
        return _GROUP
    sizes |= {_GROUP: group, name: size}
    return f"({_GROUP} {name})"


def integer_rule(view: NodeView) -> OpRule:
    """ConvInteger: `N (G C) x, (G M) C k, , (G M) -> N (G M) y; sum: C`."""
    conv = _Conv(view, 1)
    points = [conv.by_channel(i) if view.arity > i else "" for i in (2, 3)]
    return conv.rule([conv.x, conv.w, *points], "sum")


def _copied(node: LocalNode, inputs: Sequence[ir.Value | None] | None = None) -> ir.Value:
    """The node on local operands, with as many groups as there are here."""
    attributes = {}
    if node.attr("group", 1) != 1 and _GROUP in node.split_factors():
        attributes = {"group": node.local_size(_GROUP)}
    return node.copy(inputs, attributes)[0]


def integer_local(node: LocalNode) -> Sequence[ir.Value]:
    """Padding of split input channels has weights that count as zero; the sum is partial."""
    if _IN not in node.split_factors():
        return (_copied(node),)
    weight = _filled_weight(node, 1, 3)
    return (_copied(node, [node.input(0), weight, *node.inputs[2:]]),)


def _filled_weight(node: LocalNode, weight: int, point: int) -> ir.Value:
    value = node.input(weight)
    zero = node.input(point) if node.has(point) else None
    if zero is not None:
        shape = node.in_shape(point)
        rest = [1] * (len(node.in_shape(weight)) - 1)
        wide = [1] if is_single(node.view, point) else list(shape)
        zero = node.builder.reshape(zero, [*wide, *rest])
    return filled(node, value, weight, _IN, zero)


def qlinear_rule(view: NodeView) -> OpRule:
    """QLinearConv: as ConvInteger, rounded after the sum of the input channels."""
    conv = _Conv(view, 3)
    operands = [conv.x, conv.by_channel(1), conv.by_channel(2), conv.w]
    operands += [conv.by_channel(i) for i in (4, 5, 6, 7)]
    operands += [conv.by_channel(8) if view.arity > 8 else ""]
    # onnxruntime's ConvInteger takes one zero point, channels second.
    split = is_single(view, 5) and not conv.last
    return conv.rule(operands, "special" if split else "replicated")


def qlinear_local(node: LocalNode) -> Sequence[ir.Value]:
    """ConvInteger of the channels that are here, an all-reduce, the bias, and one rounding."""
    if _IN not in node.split_factors():
        return (_copied(node),)
    view, out = node.view, node.out_shape()
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {n: view.node.attributes[n] for n in names if n in view.node.attributes}
    operands = [node.input(0), _filled_weight(node, 3, 5), node.input(2), node.input(5)]
    if _GROUP in node.split_factors():
        attributes["group"] = ir.AttrInt64("group", int(node.local_size(_GROUP)))
    total = node.builder.ops("ConvInteger", operands, [(INT32, out)], attributes)[0]
    total = node.all_reduce(total, node.atoms(_IN))
    column = [1] * (len(out) - 2)
    if view.has(8):
        bias = node.builder.reshape(node.input(8), [*node.in_shape(8), *column])
        total = node.op("Add", total, bias, shape=out)
    scale = output_scale(node, node.input(1), node.input(4), node.input(6), node.in_shape(4))
    if not is_single(view, 4):
        scale = node.builder.reshape(scale, [*node.in_shape(4), *column])
    return (requantised(node, total, scale, node.input(7), out),)


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "",
        "ConvInteger",
        10,
        integer_rule,
        integer_local,
        gradient=INTEGERS,
        cost=convolves(None, 1),
        windowed=True,
    ),
    *(
        OpDef(
            domain,
            "QLinearConv",
            since,
            qlinear_rule,
            qlinear_local,
            gradient=FOR_INFERENCE,
            cost=convolves(None, 3),
            windowed=not domain,
        )
        for domain, since in (("", 10), ("com.microsoft", 1))
    ),
)
