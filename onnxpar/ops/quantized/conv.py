"""Convolutions of quantised tensors: ConvInteger, QLinearConv.

Batch, output channels and groups are parallel. Sharded input channels are summed in int32, exactly;
their padding has the zero point of the weights. QLinearConv rounds after the sum.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves
from onnxpar.ops.operator import OpDef
from onnxpar.ops.quantized.helpers import (
    INT32,
    dims_if_single,
    filled,
    is_single,
    output_scale,
    requantised,
)
from onnxpar.ops.quantized.products import FOR_INFERENCE, INTEGERS
from onnxpar.ops.window.channels import BATCH, FEW, GROUP, MANY, channel_dims


class _Conv:
    """The dims in the text of the rule: `N (G C) x…, (G M) C k… -> N (G M) y…`."""

    def __init__(self, view: NodeView, weight: int) -> None:
        x, w = view.shape(0), view.shape(weight)
        group = int(view.attr("group", 1))
        if not isinstance(w[0], int) or not isinstance(w[1], int):
            raise view.fail(f"sharding needs constant numbers of channels, got {w[0]} and {w[1]}")
        self.view = view
        self.sizes: dict[str, Dim] = {}
        inner = "1" if group == w[1] == 1 else channel_dims(self.sizes, group, FEW, w[1])[0]
        self.outer = channel_dims(self.sizes, group, MANY, w[0] // group)[0]
        spatial = axis_names(len(x) - 2)
        self.last = bool(view.attr("channels_last", 0))
        self.x = self._image(inner, [f"{n}_in" for n in spatial])
        self.y = self._image(self.outer, [f"{n}_out" for n in spatial])
        kernel = [f"{n}_kernel" for n in spatial]
        self.w = f"{self.outer} {FEW if w[1] != 1 else 1} {' '.join(kernel)}"
        self.replicated = [f"{n}_{end}" for n in spatial for end in ("in", "out", "kernel")]
        self.channels = w[1]

    def _image(self, channels: str, spatial: Sequence[str]) -> str:
        words = [*spatial, channels] if self.last else [channels, *spatial]
        return " ".join([BATCH, *words])

    def by_channel(self, index: int) -> str:
        """The dims of a scale, zero point or bias: one element, or one for each channel."""
        single = dims_if_single(self.view, index)
        return self.outer if single is None else single

    def rule(self, operands: Sequence[str], kind: str) -> OpRule:
        """The rule, in which the input channels are of a kind."""
        shown = ", ".join(operands[: self.view.arity])
        text = f"{shown} -> {self.y}; replicated: {' '.join(self.replicated)}"
        if self.channels != 1:
            text += f" {FEW}" if kind == "replicated" else f"; {kind}: {FEW}"
        return parse_rule(text, self.sizes)


def integer_rule(view: NodeView) -> OpRule:
    """ConvInteger: `N (G C) x, (G M) C k, , (G M) -> N (G M) y; sum: C`."""
    conv = _Conv(view, 1)
    points = [conv.by_channel(i) if view.arity > i else "" for i in (2, 3)]
    return conv.rule([conv.x, conv.w, *points], "sum")


def _copied(node: LocalNode, inputs: Sequence[ir.Value | None] | None = None) -> ir.Value:
    """The node on local operands, with the local number of groups."""
    attributes = {}
    if node.attr("group", 1) != 1 and GROUP in node.split_factors():
        attributes = {"group": node.local_size(GROUP)}
    return node.copy(inputs, attributes)[0]


def integer_local(node: LocalNode) -> Sequence[ir.Value]:
    """Padding of sharded input channels gets weights that count as zero; the sum is partial."""
    if FEW not in node.split_factors():
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
    return filled(node, value, weight, FEW, zero)


def qlinear_rule(view: NodeView) -> OpRule:
    """QLinearConv: as ConvInteger, rounded after the sum of the input channels."""
    conv = _Conv(view, 3)
    operands = [conv.x, conv.by_channel(1), conv.by_channel(2), conv.w]
    operands += [conv.by_channel(i) for i in (4, 5, 6, 7)]
    operands += [conv.by_channel(8) if view.arity > 8 else ""]
    # onnxruntime's ConvInteger takes a single zero point, and channels as dim 1.
    split = is_single(view, 5) and not conv.last
    return conv.rule(operands, "special" if split else "replicated")


def qlinear_local(node: LocalNode) -> Sequence[ir.Value]:
    """ConvInteger of the local channels, an all-reduce, the bias, and one rounding."""
    if FEW not in node.split_factors():
        return (_copied(node),)
    view, out = node.view, node.out_shape()
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    attributes = {n: view.node.attributes[n] for n in names if n in view.node.attributes}
    operands = [node.input(0), _filled_weight(node, 3, 5), node.input(2), node.input(5)]
    if GROUP in node.split_factors():
        attributes["group"] = ir.AttrInt64("group", int(node.local_size(GROUP)))
    total = node.builder.ops("ConvInteger", operands, [(INT32, out)], attributes)[0]
    total = node.all_reduce(total, node.atoms(FEW))
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
        for domain, since in (("", 10), (MICROSOFT, 1))
    ),
)
