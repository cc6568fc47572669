"""Linear quantisation (ONNX QuantizeLinear and its relatives), by tensor, by axis and by block.

Scales and zero points of an axis lie as the axis does; those of blocks as the blocks do, which may
be split themselves. DynamicQuantizeLinear takes its scale from the range of the whole tensor, so
split devices agree on the range first.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import copy_or, normal_axis
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.quantized.helpers import ranged
from onnxpar.ops.quantized.linear_gradient import dequantize_gradient, quantize_gradient
from onnxpar.ops.quantized.products import FOR_INFERENCE

_INSIDE = "inside_block"


def _rule(view: NodeView) -> OpRule:
    shape, scale = view.shape(0), view.shape(1)
    names = axis_names(len(shape))
    sizes: dict[str, Dim] = {}
    whole: list[str] = []
    rows = list(names)
    by = ["1"] * len(scale)
    if len(scale) == 1 and scale[0] != 1:
        axis = normal_axis(view, view.attr("axis", 1), len(names))
        by = [names[axis]]
    elif len(scale) > 1:
        if len(scale) != len(shape):
            raise view.fail(
                f"expected a scale of rank 0, 1 or {len(shape)}, got {len(scale)}", NodeError
            )
        axis = normal_axis(view, view.attr("axis", 1), len(names))
        by = list(names)
        block = view.attr("block_size", 0)
        if block and shape[axis] == scale[axis] * block:
            rows[axis] = f"({names[axis]} {_INSIDE})"
            sizes = {names[axis]: scale[axis], _INSIDE: block}
        else:
            by[axis] = "blocks"
            whole = [names[axis], "blocks"]
    scales = " ".join(by)
    text = f"{' '.join(rows)}, {scales}"
    if view.arity > 2:
        # A scale of [1] may go with a zero point of no dims, and the other way round.
        single = view.has(2) and all(size == 1 for size in view.shape(2)) and set(by) <= {"1"}
        point = " ".join("1" for _ in view.shape(2)) if single else scales
        text += f", {point if view.has(2) else '-'}"
    text += f" -> {' '.join(rows)}"
    if whole:
        text += f"; replicated: {' '.join(whole)}"
    if view.op_type == "DequantizeLinear":
        text += "; linear: sum 1"
    return parse_rule(text, sizes)


def quantize_rule(view: NodeView) -> OpRule:
    """QuantizeLinear: `a b c, b, b -> a b c` for axis 1; blocks of k: `a (b k), a b -> a (b k)`."""
    return _rule(view)


def dequantize_rule(view: NodeView) -> OpRule:
    """DequantizeLinear: as QuantizeLinear, and linear in the scale."""
    return _rule(view)


def linear_local(node: LocalNode) -> Sequence[ir.Value]:
    """Copies the node; the part of a block that a device holds is a block of its own."""
    if _INSIDE in node.split_factors():
        return node.copy(attributes={"block_size": node.local_size(_INSIDE)})
    return node.copy()


def dynamic_rule(view: NodeView) -> OpRule:
    """DynamicQuantizeLinear: every dim may be split; the range of all elements communicates."""
    text = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{text} -> {text}, , " + (f"; special: {text}" if text else ""))


def dynamic_local(node: LocalNode) -> Sequence[ir.Value]:
    """The range of the part, all-reduced; then every device quantises what it has."""
    return ranged(node, node.input(0), node.split_factors("special"), node.in_shape(0))


_LINEAR = (
    ("", 10),
    ("com.microsoft", 1),
)
DEFS: tuple[OpDef, ...] = (
    *(
        OpDef(
            domain,
            "QuantizeLinear",
            since,
            quantize_rule,
            linear_local,
            gradient=quantize_gradient,
            carries_integers=True,
        )
        for domain, since in _LINEAR
    ),
    *(
        OpDef(
            domain,
            "DequantizeLinear",
            since,
            dequantize_rule,
            linear_local,
            gradient=dequantize_gradient,
        )
        for domain, since in _LINEAR
    ),
    OpDef(
        "",
        "DynamicQuantizeLinear",
        11,
        dynamic_rule,
        copy_or(dynamic_local),
        gradient=FOR_INFERENCE,
    ),
)
