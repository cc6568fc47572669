"""Attention of onnxruntime's contrib operators: by batch and heads, the cache with them."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.analysis.shapes import NodeView
from onnxpar.errors import ModelError
from onnxpar.ops.heads import (
    Heads,
    Operands,
    head_size,
    heads_of,
    in_range,
    local_heads,
    valid_along,
)
from onnxpar.ops.local import LocalNode
from onnxpar.ops.registry import Missing, OpDef
from onnxpar.ops.rule import OpRule, parse_rule

MICROSOFT = "com.microsoft"
_SEQLENS, _TOTAL, _POSITIONS = 5, 6, 9
INT32 = ir.DataType.INT32


def _outputs(view: NodeView, texts: Sequence[str]) -> str:
    return ", ".join(texts[: len(view.node.outputs)])


def group_query_rule(view: NodeView) -> OpRule:
    """GroupQueryAttention: `b s (h g d), b s (h d), b s (h d), b h P d, … -> b s (h g d), b h T d`.

    Batch and heads are split, and the cache with them. Positions in the sequence are not: each
    query reads the cache up to its own.

    Raises:
        ModelError: Queries, keys and values are packed into one operand.
    """
    if not view.has(1) or not view.has(2):
        raise ModelError(
            f"node {view.name!r} (GroupQueryAttention): heads of a packed operand lie in three "
            "places of one dim and cannot be split; give query, key and value each its own"
        )
    kv, groups = heads_of(view, view.attr("num_heads"), view.attr("kv_num_heads"))
    size = head_size(view, view.shape(0)[2], kv * groups)
    heads = Heads(kv, groups, size, size)
    queries, keys = f"b 1 ({heads.names} d)", "b 1 (h d)"
    cache = "b h 1 1"
    operands = Operands(view)
    lengths = "b" if len(view.shape(_SEQLENS)) == 1 else "b 1"
    for text in (queries, keys, keys, cache, cache, lengths, ".", ".", ".", "b 1"):
        operands.add(text)
    # The heads of the bias are one dim, and may be one for all.
    operands.add_broadcast(["b", f"({heads.names})", "1", "1"])
    operands.add(f"({heads.names})")
    for index in (12, 13):
        # One scale for all heads, or one for each element of them.
        many = view.has(index) and len(view.shape(index)) > 0 and view.shape(index)[-1] != 1
        operands.add("(h d)" if many and len(view.shape(index)) == 1 else None)
    made = _outputs(view, (queries, cache, cache, f"b ({heads.names}) 1 1"))
    return parse_rule(f"{operands.rest()} -> {made}; whole: d", heads.sizes)


def group_query_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local numbers of heads. A sequence that is padding has the length of the longest.

    Any length would do for what is not read, but one beyond the cache would read and write there.
    """
    inputs = list(node.inputs)
    if not node.is_even("b"):
        lengths, shape = node.input(_SEQLENS), node.in_shape(_SEQLENS)
        total = node.builder.reshape(node.input(_TOTAL), [1])
        longest = node.op("Sub", total, node.builder.const([1], INT32), shape=[1])
        here = node.builder.reshape(valid_along(node, "b"), shape)
        inputs[_SEQLENS] = node.op("Where", here, lengths, longest, dtype=INT32, shape=shape)
        if node.view.has(_POSITIONS):
            inputs[_POSITIONS] = in_range(node, _POSITIONS, ("b",))
    keys, queries = local_heads(node)
    return node.copy(inputs, {"num_heads": queries, "kv_num_heads": keys})


DEFS = (
    OpDef(
        MICROSOFT,
        "GroupQueryAttention",
        1,
        group_query_rule,
        group_query_local,
        gradient=Missing("it reads and writes a cache; train a model with Attention"),
    ),
)
