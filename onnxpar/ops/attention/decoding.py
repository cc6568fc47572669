"""Operators of decoding that have a state: caches, recurrent attention, causal convolution.

Batch and heads (or channels) may be sharded, the sequence may not.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.attention.heads import Operands, head_size
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.local_helpers import normal_axis, with_padding
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import convolves, keeps_state
from onnxpar.ops.operator import Missing, OpDef

_SELECTED = "any 0+1, max 0, max 1, min 0, min 1"
_DECODING = Missing("it is a step of decoding; train a model without a cache")
"""Why operators of decoding have no gradient."""


def tensor_scatter_rule(view: NodeView) -> OpRule:
    """TensorScatter: every dim but the written one; the write positions are sharded as dim 0."""
    names = axis_names(len(view.shape(0)))
    axis = normal_axis(view, view.attr("axis", -2), len(names))
    words = ["1" if i == axis else name for i, name in enumerate(names)]
    text = " ".join(words)
    operands = Operands(view)
    operands.add(text, text, words[0])
    return parse_rule(f"{operands.rule(text)}; linear: {_SELECTED}")


def tensor_scatter_local(node: LocalNode) -> Sequence[ir.Value]:
    """For sequences that are padding, the write position is 0."""
    inputs = list(node.inputs)
    if node.has(2):
        inputs[2] = with_padding(node, 2)
    return node.copy(inputs)


def linear_attention_rule(view: NodeView) -> OpRule:
    """LinearAttention: `b 1 (h d), b 1 (h d), b 1 (h e), b h d e, … -> b 1 (h e), b h d e`.

    Raises:
        ModelError: Queries, keys and values have different numbers of heads, or several states are
            kept.
    """
    queries, values = (int(view.attr(f"{n}_num_heads")) for n in ("q", "kv"))
    if queries != values or view.attr("state_window", 0):
        raise view.fail(
            "sharding needs equal 'q_num_heads' and 'kv_num_heads', and 'state_window' 0, "
            f"got {queries}, {values} and {view.attr('state_window', 0)}"
        )
    size = head_size(view, view.shape(0)[2], queries)
    value_size = head_size(view, view.shape(2)[2], values)
    if view.shape(1)[2] != view.shape(0)[2]:
        raise view.fail(
            "sharding needs keys and queries of equal width, got "
            f"{view.shape(1)[2]} and {view.shape(0)[2]}"
        )
    operands = Operands(view)
    operands.add("b 1 (h d)", "b 1 (h d)", "b 1 (h e)", "b h 1 1")
    for index in (4, 5):
        width = view.shape(index)[2] if view.has(index) else 1
        kinds = {1: "b 1 1", values: "b 1 h", values * size: "b 1 (h d)"}
        operands.add(kinds.get(width) if isinstance(width, int) else None)
    sizes = {"h": values, "d": size, "e": value_size}
    return parse_rule(f"{operands.rule('b 1 (h e)', 'b h 1 1')}; replicated: d e", sizes)


def linear_attention_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local numbers of heads."""
    heads = int(node.local_size("h"))
    return node.copy(None, {"q_num_heads": heads, "kv_num_heads": heads})


def causal_conv_rule(view: NodeView) -> OpRule:
    """CausalConvWithState: `b c 1, c 1 1, c, b c 1 -> b c 1, b c 1`.

    Raises:
        ModelError: The convolution has several dims, has its channels last, or keeps several
            states.
    """
    plain = not view.attr("state_window", 0) and int(view.attr("ndim", 1)) == 1
    if not plain or view.attr("channels_last", 0):
        raise view.fail("sharding needs 'ndim' 1, 'channels_last' 0 and 'state_window' 0")
    operands = Operands(view)
    operands.add("b c 1", "c 1 1", "c", "b c 1")
    return parse_rule(operands.rule("b c 1", "b c 1"))


DEFS = (
    OpDef("", "TensorScatter", 24, tensor_scatter_rule, tensor_scatter_local, gradient=_DECODING),
    *(
        OpDef(
            domain,
            "LinearAttention",
            since,
            linear_attention_rule,
            linear_attention_local,
            gradient=_DECODING,
            cost=keeps_state,
        )
        for domain, since in (("", 27), (MICROSOFT, 1))
    ),
    OpDef(
        MICROSOFT,
        "CausalConvWithState",
        1,
        causal_conv_rule,
        gradient=_DECODING,
        cost=convolves(0, 1),
    ),
)
