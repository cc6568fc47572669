"""Linear quantisation (ONNX QuantizeLinear and related operators), by tensor, axis or block.

Scales and zero points of an axis are sharded like the axis, those of blocks like the blocks; a
block may be sharded itself. DynamicQuantizeLinear takes its scale from the range of the undivided
tensor, so devices that hold shards agree on the range first.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import axis_of, copy_or
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.parts import same_node
from onnxpar.ops.quantized.helpers import ranged
from onnxpar.ops.quantized.linear_gradient import dequantize_gradient, quantize_gradient
from onnxpar.ops.quantized.products import FOR_INFERENCE

_INSIDE = "inside_block"


def _rule(view: NodeView) -> OpRule:
    shape, scale = view.shape(0), view.shape(1)
    names = axis_names(len(shape))
    sizes: dict[str, Dim] = {}
    replicated: list[str] = []
    rows = list(names)
    by = ["1"] * len(scale)
    if len(scale) == 1 and scale[0] != 1:
        by = [names[axis_of(view, 1)]]
    elif len(scale) > 1:
        if len(scale) != len(shape):
            raise view.fail(
                f"expected a scale with 0, 1 or {len(shape)} dims, got {len(scale)}", NodeError
            )
        axis = axis_of(view, 1)
        by = list(names)
        block = view.attr("block_size", 0)
        if block and shape[axis] == scale[axis] * block:
            rows[axis] = f"({names[axis]} {_INSIDE})"
            sizes = {names[axis]: scale[axis], _INSIDE: block}
        else:
            by[axis] = "blocks"
            replicated = [names[axis], "blocks"]
    scales = " ".join(by)
    text = f"{' '.join(rows)}, {scales}"
    if view.arity > 2:
        # A scale of shape [1] may have a zero point of shape [], and vice versa.
        single = view.has(2) and all(size == 1 for size in view.shape(2)) and set(by) <= {"1"}
        point = " ".join("1" for _ in view.shape(2)) if single else scales
        text += f", {point if view.has(2) else '-'}"
    text += f" -> {' '.join(rows)}"
    if replicated:
        text += f"; replicated: {' '.join(replicated)}"
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
    """Copies the node; a device's shard of a block is a block of its own."""
    if _INSIDE in node.split_factors():
        return node.copy(attributes={"block_size": node.local_size(_INSIDE)})
    return node.copy()


def dynamic_rule(view: NodeView) -> OpRule:
    """DynamicQuantizeLinear: every dim may be sharded; the range is all-reduced."""
    text = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{text} -> {text}, , " + (f"; special: {text}" if text else ""))


def dynamic_local(node: LocalNode) -> Sequence[ir.Value]:
    """All-reduces the range; then every device quantises its shard."""
    return ranged(node, node.input(0), node.split_factors("special"), node.in_shape(0))


_LINEAR = (("", 10), (MICROSOFT, 1))
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
            on_part=same_node,
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
