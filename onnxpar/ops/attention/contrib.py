"""Attention of onnxruntime's contrib operators: by batch and heads, the cache with them."""

import math
from collections.abc import Sequence

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
    key_heads,
    merged_heads,
    over_heads,
    places,
    query_heads,
    reshape,
    seen,
)
from onnxpar.ops.attention.heads import (
    Heads,
    Operands,
    head_size,
    heads_of,
    in_range,
    local_heads,
    valid_along,
)
from onnxpar.ops.attention.inference import infer_group_query_attention
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.local_helpers import BOOL
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import attends
from onnxpar.ops.operator import BY_BODY, Missing, OpDef, expanded

MICROSOFT = "com.microsoft"
_SEQLENS, _TOTAL, _POSITIONS = 5, 6, 9
_PADDING, _ADDED, _PAST, _STEP, _BEAMS = 4, 5, 6, 8, 9
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
    return parse_rule(f"{operands.rest()} -> {made}; replicated: d", heads.sizes)


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
        if node.has(_POSITIONS):
            inputs[_POSITIONS] = in_range(node, _POSITIONS, ("b",))
    keys, queries = local_heads(node)
    return node.copy(inputs, {"num_heads": queries, "kv_num_heads": keys})


def multi_head_rule(view: NodeView) -> OpRule:
    """MultiHeadAttention: `b s (h d), b t (h d), b t (h e), … -> b s (h e)`, t and d replicated.

    Keys and values may lie as a cache has them (`b h t d`).

    Raises:
        ModelError: Operands are packed, as kernels of GPUs take them, it is one step of a beam
            search, or the bias is of heads of two sizes.
    """
    if view.has(_STEP) or view.has(_BEAMS):
        raise view.fail("a step on a shared cache cannot be sharded")
    if len(view.shape(0)) != 3 or not view.has(1) or not view.has(2):
        raise view.fail("expected query, key and value as separate operands")
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
            f"a bias of heads of {heads.size} and {heads.value_size} elements cannot be sharded"
        )
    operands.add("(c h d)")
    if view.has(_PADDING):
        rows = view.shape(_PADDING)
        batch = view.table.equal(rows[0], view.shape(0)[0])
        # Three numbers a sequence and two more lie in one dim.
        texts = {1: "b" if batch else ".", 2: "b 1", 3: f"b {s} 1"}
        operands.add(texts[len(rows)])
        fixed = "" if batch else " b"
    else:
        operands.add()
        fixed = ""
    operands.add_broadcast(["b", "h", s, "1"])
    for text in ("b h 1 d", "b h 1 e"):
        operands.add(text)
    made = _outputs(view, (f"b {s} (h e)", "b h 1 d", "b h 1 e", "b h 1 1"))
    text = f"{operands.rest()} -> {made}; replicated: d"
    used = text.split(";")[0].replace("(", " ").replace(")", " ").replace(",", " ").split()
    text += fixed + (" c" if "c" in used else "")
    if "e" in used and (view.has(3) or view.has(_PAST) or len(view.shape(2)) == 4):
        # Values are then as wide as keys, or the bias is.
        text += " e"
    if len(view.node.outputs) == 1 and not view.has(3):
        text += "; linear: sum 2"
    return parse_rule(text, {**heads.sizes, "c": 3})


def _multi_heads(view: NodeView) -> Heads:
    count, values = int(view.attr("num_heads")), view.shape(2)
    size = head_size(view, view.shape(0)[2], count)
    wide = values[3] if len(values) == 4 else head_size(view, values[2], count)
    return Heads(count, 1, size, wide)


def multi_head_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local number of heads; a sequence that is padding has no key masked by its length."""
    inputs = list(node.inputs)
    if node.has(_PADDING) and "b" in node.split_factors():
        inputs[_PADDING] = in_range(node, _PADDING, ("b",))
    return node.copy(inputs, {"num_heads": int(node.local_size("h"))})


def multi_head_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """Products, masks and a Softmax.

    Raises:
        ModelError: Operands are packed, or the mask is one of lengths.
    """
    view = node.view
    if len(view.shape(0)) != 3 or not node.has(2) or len(view.node.outputs) > 3:
        raise node.fail("its gradient needs query, key and value as separate operands")
    if view.has(_STEP) or view.has(_BEAMS):
        raise node.fail("its gradient needs a cache that grows")
    heads = _multi_heads(view)
    q, k, v = (node.input(i) for i in range(3))
    q, k, v = _biased(node, heads, (q, k, v))
    batch, queries, _ = view.shape(0)
    ranks = [len(view.shape(i)) for i in (1, 2)]
    new = view.shape(1)[1 if ranks[0] == 3 else 2]
    sizes = Sizes(batch, heads.kv, 1, queries, new, heads.size, heads.value_size)
    k = key_heads(node, k, sizes, heads.size, rank=ranks[0])
    v = key_heads(node, v, sizes, heads.value_size, rank=ranks[1])
    past = view.shape(_PAST)[2] if node.has(_PAST) else 0
    total = new + past
    if node.has(_PAST):
        shapes = [[batch, heads.kv, total, size] for size in (heads.size, heads.value_size)]
        k = node.op("Concat", node.input(_PAST), k, shape=shapes[0], axis=2)
        v = node.op("Concat", node.input(_PAST + 1), v, shape=shapes[1], axis=2)
    sizes = Sizes(batch, heads.kv, 1, queries, total, heads.size, heads.value_size)
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
    """Query, key and value, each with its part of the bias; none for a cache's keys and values."""
    if not node.has(3):
        return operands
    widths = [heads.kv * int(s) for s in (heads.size, heads.size, heads.value_size)]
    bias = node.input(3)
    parts = node.builder.ops(
        "Split",
        [bias, node.builder.const(np.array(widths))],
        [(bias.dtype, [width]) for width in widths],
        {"axis": 0},
    )
    return tuple(
        node.op("Add", x, part) if len(node.shape(x)) == 3 else x
        for x, part in zip(operands, parts, strict=True)
    )


def _bias(node: BodyNode, sizes: Sizes, past: Dim) -> ir.Value | None:
    """What is added to the scores: the operand, a large number where a mask or the order hides."""
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
        added = reshape(node, added, wide)
        shape = [wide[0], 1, 1, *wide[1:]]
        found.append(node.op("Reshape", added, node.builder.sizes(shape), shape=shape))
    if view.attr("unidirectional", 0):
        rows = places(node, sizes.queries)
        if past != 0:
            offset = node.builder.sizes([past])
            rows = node.op("Add", rows, offset, shape=[sizes.queries])
        shown = seen(
            node,
            rows,
            places(node, sizes.keys),
            Window(None, 0),
            sizes.queries,
            sizes.keys,
        )
        lowest = node.builder.const(np.array(np.finfo(dtype.numpy()).min), dtype)
        added = node.op("Where", shown, zero, lowest, dtype=dtype)
        found.append(over_heads(node, added, node.shape(added), sizes))
    total = found[0] if found else None
    for other in found[1:]:
        assert total is not None
        pairs = zip(node.shape(total), node.shape(other), strict=True)
        total = node.op("Add", total, other, shape=[b if a == 1 else a for a, b in pairs])
    return total


def _hidden_keys(node: BodyNode, sizes: Sizes) -> tuple[ir.Value, list[Dim]]:
    """Which keys the mask hides, and the shape of that as [batch, 1 or queries, keys].

    Raises:
        ModelError: The mask is one of starts and ends of sequences.
    """
    mask, dims = node.input(_PADDING), list(node.view.shape(_PADDING))
    if len(dims) > 1:
        none = node.builder.const(np.array(0), mask.dtype)
        wide = dims if len(dims) == 3 else [dims[0], 1, dims[1]]
        return node.op("Equal", mask, none, dtype=BOOL), wide
    if not node.table.equal(dims[0], sizes.batch):
        raise node.fail("expected a mask with a length for each sequence or a number for each key")
    lengths = node.builder.unsqueeze(node.builder.cast(mask, INT64), [1])
    shape = [sizes.batch, sizes.keys]
    shown = node.op("Less", places(node, sizes.keys), lengths, dtype=BOOL, shape=shape)
    return node.op("Not", shown), [sizes.batch, 1, sizes.keys]


def attention_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """One product to queries, keys and values, and MultiHeadAttention.

    Raises:
        ModelError: Rotary embedding inside, a cache of full length, or heads of two sizes.
    """
    view = node.view
    width = node.shape(node.input(1))[1]
    widths = view.attr("qkv_hidden_sizes") or [exact_third(node, width)] * 3
    if view.attr("do_rotary", 0) or view.attr("past_present_share_buffer", 0) or node.has(6):
        raise node.fail("expected no rotary embedding inside and no shared cache")
    lead = list(view.shape(0))[:2]
    fused = node.op("MatMul", node.input(0), node.input(1), shape=[*lead, width])
    if node.has(2):
        fused = node.op("Add", fused, node.input(2))
    q, k, v = node.builder.ops(
        "Split",
        [fused, node.builder.const(np.array(widths))],
        [(fused.dtype, [*lead, w]) for w in widths],
        {"axis": -1},
    )
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


def exact_third(node: BodyNode, width: Dim) -> int:
    """A third of the columns; ModelError where there is none."""
    if not isinstance(width, int) or width % 3:
        raise node.fail(f"expected a weight of three parts, got {width} columns")
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
        infer=infer_group_query_attention,
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
