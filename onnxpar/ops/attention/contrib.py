"""Attention of onnxruntime (com.microsoft): batch and heads may be sharded, the cache with them."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.attention.composed import (
    Sizes,
    Window,
    attend,
    behind_past,
    key_heads,
    merged_heads,
    over_heads,
    query_heads,
    seen,
    split,
)
from onnxpar.ops.attention.heads import (
    Heads,
    Operands,
    head_size,
    heads_of,
    local_heads,
    present,
    valid_along,
)
from onnxpar.ops.attention.inference import infer_group_query_attention
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import broadcast_dims
from onnxpar.ops.local_helpers import BOOL, iota, with_padding
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import attends
from onnxpar.ops.operator import BY_BODY, Missing, OpDef, expanded
from onnxpar.ops.slots import Kernel

_SEQLENS, _TOTAL, _COSINES, _SINES, _POSITIONS = 5, 6, 7, 8, 9
_PADDING, _ADDED, _PAST, _STEP, _BEAMS = 4, 5, 6, 8, 9
INT32 = ir.DataType.INT32


def group_query_rule(view: NodeView) -> OpRule:
    """GroupQueryAttention: `b s (h g d), b s (h d), b s (h d), b h P d, … -> b s (h g d), b h T d`.

    Batch and heads may be sharded, and the cache with them. The sequence may not: each query reads
    the cache up to its own position.

    Raises:
        ModelError: Queries, keys and values are packed into one operand.
    """
    if not view.has(1) or not view.has(2):
        raise view.fail(
            "the heads of a packed operand cannot be sharded, because they occur in three parts "
            "of one dim; pass query, key and value as separate operands"
        )
    kv, groups = heads_of(view, view.attr("num_heads"), view.attr("kv_num_heads"))
    size = head_size(view, view.shape(0)[2], kv * groups)
    heads = Heads(kv, groups, size, size)
    queries, keys = f"b 1 ({heads.names} d)", "b 1 (h d)"
    cache = "b h 1 1"
    operands = Operands(view)
    lengths = "b" if len(view.shape(_SEQLENS)) == 1 else "b 1"
    operands.add(queries, keys, keys, cache, cache, lengths, ".", ".", ".", "b 1")
    # The bias has all query heads in one dim, or 1 for all of them.
    operands.add_broadcast("b", f"({heads.names})", "1", "1")
    operands.add(f"({heads.names})")
    for index in (12, 13):
        # One scale in all, or one for each element of the heads.
        many = view.has(index) and len(view.shape(index)) > 0 and view.shape(index)[-1] != 1
        operands.add("(h d)" if many and len(view.shape(index)) == 1 else None)
    text = operands.rule(queries, cache, cache, f"b ({heads.names}) 1 1")
    return parse_rule(f"{text}; replicated: d", heads.sizes)


def group_query_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local numbers of heads. A sequence that is padding gets the length of the longest.

    Its results are never read, but a length beyond the cache would read and write out of bounds.
    """
    inputs = list(node.inputs)
    if not node.is_even("b"):
        lengths, shape = node.input(_SEQLENS), node.in_shape(_SEQLENS)
        total = node.builder.reshape(node.input(_TOTAL), [1])
        longest = node.op("Sub", total, node.builder.const([1], INT32), shape=[1])
        here = node.builder.reshape(valid_along(node, "b"), shape)
        inputs[_SEQLENS] = node.op("Where", here, lengths, longest, dtype=INT32, shape=shape)
        if node.has(_POSITIONS):
            inputs[_POSITIONS] = with_padding(node, _POSITIONS)
    keys, queries = local_heads(node)
    return node.copy(inputs, {"num_heads": queries, "kv_num_heads": keys})


def multi_head_rule(view: NodeView) -> OpRule:
    """MultiHeadAttention: `b s (h d), b t (h d), b t (h e), … -> b s (h e)`, t and d replicated.

    Keys and values may also have the layout of a cache (`b h t d`).

    Raises:
        ModelError: Operands are packed, as kernels on GPUs allow; the node is a step on a shared
            cache, or with beam search; or it has a bias, and heads of values differ in size.
    """
    if view.has(_STEP) or view.has(_BEAMS):
        raise view.fail("a step on a shared cache, or with beam search, cannot be sharded")
    if len(view.shape(0)) != 3 or not view.has(1) or not view.has(2):
        raise view.fail("sharding needs query, key and value as separate operands")
    heads = _multi_heads(view)
    causal = bool(view.attr("unidirectional", 0))
    s = "1" if causal or len(view.node.outputs) > 3 else "s"
    operands = Operands(view)
    operands.add(f"b {s} (h d)")
    for index, size in ((1, "d"), (2, "e")):
        flat = len(view.shape(index)) == 3
        operands.add(f"b 1 (h {size})" if flat else f"b h 1 {size}")
    if view.has(3) and heads.size != heads.value_size:
        raise view.fail(
            "with a bias, sharding needs keys and values with heads of one size, got "
            f"{heads.size} and {heads.value_size} elements"
        )
    operands.add("(c h d)")
    mask, replicated = None, "c d"
    if view.has(_PADDING):
        rows = view.shape(_PADDING)
        batch = view.table.equal(rows[0], view.shape(0)[0])
        mask = {1: "b" if batch else ".", 2: "b 1", 3: f"b {s} 1"}[len(rows)]
        if not batch:
            # A mask [3 · batch + 2]: no part of it is that of one sequence.
            replicated += " b"
    operands.add(mask)
    operands.add_broadcast("b", "h", s, "1")
    operands.add("b h 1 d", "b h 1 e")
    text = operands.rule(f"b {s} (h e)", "b h 1 d", "b h 1 e", "b h 1 1")
    if view.has(3) or view.has(_PAST) or len(view.shape(2)) == 4:
        # Values are then as wide as keys, or the bias is.
        replicated += " e"
    text += f"; replicated: {present(text, replicated)}"
    if len(view.node.outputs) == 1 and not view.has(3):
        text += "; linear: sum 2"
    return parse_rule(text, {**heads.sizes, "c": 3})


def _multi_heads(view: NodeView) -> Heads:
    count, values = int(view.attr("num_heads")), view.shape(2)
    size = head_size(view, view.shape(0)[2], count)
    wide = values[3] if len(values) == 4 else head_size(view, values[2], count)
    return Heads(count, 1, size, wide)


def multi_head_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local number of heads; the mask of a sequence that is padding is set to zeros."""
    inputs = list(node.inputs)
    if node.has(_PADDING):
        mask, zero = node.input(_PADDING), node.zero[_PADDING]
        inputs[_PADDING] = node.masked(mask, _PADDING, "b", 0, known_zero=zero)
    return node.copy(inputs, {"num_heads": int(node.local_size("h"))})


def multi_head_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """Products, masks and a Softmax.

    Raises:
        ModelError: Operands are packed, a cache is shared, or the mask is one of starts and ends.
    """
    view = node.view
    if len(view.shape(0)) != 3 or not node.has(2) or len(view.node.outputs) > 3:
        raise node.fail("its gradient needs query, key and value as separate operands")
    if view.has(_STEP) or view.has(_BEAMS):
        raise node.fail("its gradient needs a cache that is not shared, and no beam search")
    heads = _multi_heads(view)
    q, k, v = (node.input(i) for i in range(3))
    q, k, v = _biased(node, heads, (q, k, v))
    batch, queries, _ = view.shape(0)
    ranks = [len(view.shape(i)) for i in (1, 2)]
    new = view.shape(1)[1 if ranks[0] == 3 else 2]
    sizes = Sizes(heads, batch, queries, new)
    k = key_heads(node, k, sizes, heads.size, rank=ranks[0])
    v = key_heads(node, v, sizes, heads.value_size, rank=ranks[1])
    past = view.shape(_PAST)[2] if node.has(_PAST) else 0
    sizes = replace(sizes, keys=new + past)
    k, v = behind_past(node, _PAST, k, v, sizes)
    y = attend(
        node,
        query_heads(node, q, sizes, rank=3),
        k,
        v,
        sizes,
        scale=float(view.attr("scale", 0.0)) or 1 / math.sqrt(int(heads.size)),
        bias=_bias(node, sizes, past),
    )
    return [merged_heads(node, y, sizes, rank=3), k, v][: len(view.node.outputs)]


def _biased(node: BodyNode, heads: Heads, operands: tuple[ir.Value, ...]) -> tuple[ir.Value, ...]:
    """Query, key and value, each plus its part of the bias, except keys and values of a cache."""
    if not node.has(3):
        return operands
    widths = [heads.kv * int(s) for s in (heads.size, heads.size, heads.value_size)]
    parts = split(node, node.input(3), widths)
    return tuple(
        node.op("Add", x, part) if len(node.shape(x)) == 3 else x
        for x, part in zip(operands, parts, strict=True)
    )


def _bias(node: BodyNode, sizes: Sizes, past: Dim) -> ir.Value | None:
    """The sum of all that is added to the scores: a bias, and masks as large negative numbers."""
    view = node.view
    dtype = node.input(0).dtype or ir.DataType.FLOAT
    found: list[ir.Value] = []
    if node.has(_ADDED):
        found.append(over_heads(node, node.input(_ADDED), view.shape(_ADDED), sizes))
    zero, hidden = (
        node.builder.const(np.array(x), dtype)
        for x in (0.0, float(view.attr("mask_filter_value", -10000.0)))
    )
    if node.has(_PADDING):
        hides, wide = _hidden_keys(node, sizes)
        added = node.op("Where", hides, hidden, zero, dtype=dtype)
        found.append(node.builder.reshape(added, [wide[0], 1, 1, *wide[1:]]))
    if view.attr("unidirectional", 0):
        rows = iota(node, sizes.queries)
        if past != 0:
            offset = node.builder.sizes([past])
            rows = node.op("Add", rows, offset, shape=[sizes.queries])
        columns = iota(node, sizes.keys)
        shown = seen(node, rows, columns, Window(None, 0), sizes.queries, sizes.keys)
        lowest = node.builder.const(np.array(np.finfo(dtype.numpy()).min), dtype)
        added = node.op("Where", shown, zero, lowest, dtype=dtype)
        found.append(over_heads(node, added, node.shape(added), sizes))
    total = found[0] if found else None
    for other in found[1:]:
        assert total is not None
        shape = broadcast_dims(node.shape(total), node.shape(other))
        total = node.op("Add", total, other, shape=shape)
    return total


def _hidden_keys(node: BodyNode, sizes: Sizes) -> tuple[ir.Value, list[Dim]]:
    """Which keys the mask hides, and their shape with a dim for queries: [batch, 1 or n, keys].

    Raises:
        ModelError: The mask is one of starts and ends of sequences.
    """
    mask, dims = node.input(_PADDING), list(node.view.shape(_PADDING))
    if len(dims) > 1:
        none = node.builder.const(np.array(0), mask.dtype)
        wide = dims if len(dims) == 3 else [dims[0], 1, dims[1]]
        return node.op("Equal", mask, none, dtype=BOOL), wide
    if not node.table.equal(dims[0], sizes.batch):
        raise node.fail(
            "its gradient needs a mask with a length for each sequence or a number for each key"
        )
    lengths = node.builder.unsqueeze(node.builder.cast(mask, INT64), [1])
    shape = [sizes.batch, sizes.keys]
    shown = node.op("Less", iota(node, sizes.keys), lengths, dtype=BOOL, shape=shape)
    return node.op("Not", shown), [sizes.batch, 1, sizes.keys]


def attention_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """One product for queries, keys and values, and MultiHeadAttention.

    Raises:
        ModelError: It includes rotary embedding, shares its cache, or the widths of queries, keys
            and values are unknown.
    """
    view = node.view
    width = node.shape(node.input(1))[1]
    widths = view.attr("qkv_hidden_sizes") or [_third(node, width)] * 3
    if view.attr("do_rotary", 0) or view.attr("past_present_share_buffer", 0) or node.has(6):
        raise node.fail(
            "sharding needs 'do_rotary' 0, 'past_present_share_buffer' 0 and no operand 6 "
            "(past_sequence_length)"
        )
    lead = list(view.shape(0))[:2]
    fused = node.op("MatMul", node.input(0), node.input(1), shape=[*lead, width])
    if node.has(2):
        fused = node.op("Add", fused, node.input(2))
    q, k, v = split(node, fused, widths)
    heads = int(view.attr("num_heads"))
    cache: list[ir.Value | None] = [None, None]
    present = [view.shape(0)[0], heads, lead[1], int(widths[2]) // heads]
    if node.has(4):
        shape = list(view.shape(4))
        present[2] = present[2] + shape[3]
        cache = [
            node.op(
                "Gather", node.input(4), node.builder.const(np.array(i)), shape=shape[1:], axis=0
            )
            for i in (0, 1)
        ]
    names = ("scale", "mask_filter_value", "unidirectional")
    kept = {n: view.attr(n) for n in names if view.attr(n) is not None}
    makes = len(view.node.outputs) > 1
    made = node.builder.ops(
        "MultiHeadAttention",
        [q, k, v, None, *(node.input(i) if node.has(i) else None for i in (3, 5)), *cache],
        [(fused.dtype, [*lead, widths[2]]), *[(fused.dtype, present)] * (2 * makes)],
        {"num_heads": heads, **kept},
        domain=MICROSOFT,
    )
    if not makes:
        return made
    pair = [node.builder.unsqueeze(x, [0]) for x in made[1:]]
    return made[0], node.op("Concat", *pair, shape=[2, *present], axis=0)


def _third(node: BodyNode, width: Dim) -> int:
    """Returns a third of the columns.

    Raises:
        ModelError: Their number is unknown or no multiple of three.
    """
    if not isinstance(width, int) or width % 3:
        raise node.fail(
            "without 'qkv_hidden_sizes', expected a weight whose number of columns is a multiple "
            f"of three, got {width}"
        )
    return width // 3


DEFS = (
    OpDef(
        MICROSOFT,
        "GroupQueryAttention",
        1,
        group_query_rule,
        group_query_local,
        gradient=Missing("it reads and writes a cache; train a model with Attention"),
        cost=attends(3),
        memory=Kernel(appends=((3, 1), (4, 2))),
        host_operands=(_TOTAL,),
        infer=infer_group_query_attention,
        counts_rows=((_TOTAL, _COSINES), (_TOTAL, _SINES)),
    ),
    OpDef(
        MICROSOFT,
        "MultiHeadAttention",
        1,
        multi_head_rule,
        multi_head_local,
        gradient=BY_BODY,
        cost=attends(6),
        body=multi_head_body,
    ),
    OpDef(MICROSOFT, "Attention", 1, expanded, gradient=BY_BODY, body=attention_body),
)
