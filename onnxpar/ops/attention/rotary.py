"""Rotary position embedding (Su et al., 2021): every dim but the rotated one may be sharded."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.attention.composed import split
from onnxpar.ops.attention.heads import head_size
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.local_helpers import global_index, iota, with_padding
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import BY_BODY, OpDef


def _operand(view: NodeView, heads: int) -> tuple[str, dict[str, Dim]]:
    """The text of the rotated operand: `b h s 1`, or `b s (h d)` with sizes."""
    shape = view.shape(0)
    if len(shape) == 4:
        return "b h s 1", {}
    if len(shape) != 3 or heads < 1:
        raise view.fail(
            f"expected 4 dims, or 3 dims and 'num_heads', got {len(shape)} dims and {heads} heads"
        )
    return "b s (h d)", {"h": heads, "d": head_size(view, shape[2], heads)}


def _rule(text: str, caches: str, sizes: dict[str, Dim], linear: str, special: str = "") -> OpRule:
    kinds = f"replicated: {'d' if sizes else ''}; special: {special}"
    return parse_rule(f"{text}, {caches} -> {text}; {kinds}; linear: {linear}", sizes)


def rotary_rule(view: NodeView) -> OpRule:
    """RotaryEmbedding (23): `b s (h d), ., ., b s -> b s (h d)`, d replicated."""
    text, sizes = _operand(view, int(view.attr("num_heads", 0)))
    if view.has(3):
        return _rule(text, "., ., b s", sizes, "sum 0")
    caches = "b s 1, b s 1" + (", -" if view.arity > 3 else "")
    # Elements that are not rotated do not depend on the angles: the result is not linear in them.
    linear = "sum 0" if view.attr("rotary_embedding_dim", 0) else "sum 0, sum 1+2"
    return _rule(text, caches, sizes, linear)


def rotary_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local number of heads; padding is rotated by the first angle."""
    inputs = list(node.inputs)
    if node.has(3):
        inputs[3] = with_padding(node, 3)
    heads = {"num_heads": int(node.local_size("h"))} if len(node.in_shape(0)) == 3 else {}
    return node.copy(inputs, heads)


def _contrib_heads(view: NodeView) -> int:
    """Heads of an operand with three dims: the attribute, or from the width of the caches."""
    heads = int(view.attr("num_heads", 0))
    hidden, half = view.shape(0)[-1], view.shape(2)[-1]
    if heads or not isinstance(hidden, int) or not isinstance(half, int):
        return heads
    return hidden // (2 * half)


def contrib_rotary_rule(view: NodeView) -> OpRule:
    """RotaryEmbedding of com.microsoft: `b s (h d), b s, ., . -> b s (h d)`, d replicated.

    The positions may also be one offset (`1`); then `special: s`.

    Raises:
        ModelError: The batch is packed (`is_packed_batching`).
    """
    if view.attr("is_packed_batching", 0):
        raise view.fail("a packed batch ('is_packed_batching') cannot be sharded")
    text, sizes = _operand(view, _contrib_heads(view))
    offset = len(view.shape(1)) == 1
    caches = f"{'1' if offset else 'b s'}, ., ."
    return _rule(text, caches, sizes, "sum 0", "s" if offset else "")


def contrib_rotary_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local number of heads; an offset is replaced by the positions of the local shard."""
    inputs = list(node.inputs)
    x = node.in_shape(0)
    batch, length = x[0], x[1 if len(x) == 3 else 2]
    if len(node.view.shape(1)) == 2:
        inputs[1] = with_padding(node, 1)
    elif node.atoms("s"):
        # Padding takes the last position: beyond it there are no angles.
        last = node.builder.size(node.size("s") - 1)
        index = node.op("Min", global_index(node, "s"), last, dtype=INT64, shape=[length])
        line = node.op("Add", index, node.input(1), dtype=INT64, shape=[length])
        shape = node.builder.sizes([batch, length])
        inputs[1] = node.op("Expand", line, shape, dtype=INT64, shape=[batch, length])
    named = len(x) == 3 and node.attr("num_heads", 0)
    return node.copy(inputs, {"num_heads": int(node.local_size("h"))} if named else {})


def rotary_body(node: BodyNode) -> Sequence[ir.Value]:
    """Pairs of elements as points in a plane, rotated by the angle of their position."""
    cos, sin = node.input(1), node.input(2)
    rank = len(node.view.shape(0))
    if node.has(3):
        cos, sin = (_looked_up(node, table, node.input(3)) for table in (cos, sin))
    angles = tuple(node.builder.unsqueeze(table, [2 if rank == 3 else 1]) for table in (cos, sin))
    return (_turned(node, angles, int(node.attr("num_heads", 0))),)


def contrib_rotary_body(node: BodyNode) -> Sequence[ir.Value]:
    """Pairs of elements as points in a plane, rotated by the angle of their position.

    Raises:
        ModelError: The batch is packed.
    """
    if node.attr("is_packed_batching", 0):
        raise node.fail("its gradient needs a batch that is not packed ('is_packed_batching')")
    x = node.view.shape(0)
    indices, length = node.input(1), x[1 if len(x) == 3 else 2]
    axes = [2 if len(x) == 3 else 1]
    if len(node.view.shape(1)) == 1:
        indices = node.op("Add", iota(node, length), indices, shape=[length])
        axes = [0, 2] if len(x) == 3 else [0, 1]
    angles = tuple(
        node.builder.unsqueeze(_looked_up(node, node.input(i), indices), axes) for i in (2, 3)
    )
    return (_turned(node, angles, _contrib_heads(node.view)),)


def _looked_up(node: BodyNode, table: ir.Value, indices: ir.Value) -> ir.Value:
    shape = [*node.shape(indices), node.shape(table)[-1]]
    return node.op("Gather", table, indices, shape=shape, axis=0)


def _turned(node: BodyNode, angles: Sequence[ir.Value], heads: int) -> ir.Value:
    """The operand rotated by cosines and sines, which broadcast against its halves."""
    x, given = node.input(0), node.view.shape(0)
    shape = list(given)
    if len(given) == 3:
        size = head_size(node.view, given[2], heads)
        shape = [*given[:2], heads, size]
        x = node.builder.reshape(x, shape)
    *lead, width = shape
    half = node.shape(angles[0])[-1]
    if not isinstance(width, int) or not isinstance(half, int):
        raise node.fail(f"expected heads and angles of known size, got {width} and {half}")
    rest: list[ir.Value] = []
    if 2 * half < width:
        x, other = split(node, x, [2 * half, width - 2 * half])
        rest = [other]
    pairs = bool(node.attr("interleaved", 0))
    if pairs:
        parts = split(node, node.builder.reshape(x, [*lead, half, 2]), [1, 1])
        first, second = (node.builder.reshape(part, [*lead, half]) for part in parts)
    else:
        first, second = split(node, x, [half, half])
    cos, sin = angles
    turned = [
        node.op(sign, node.op("Mul", a, cos), node.op("Mul", b, sin))
        for sign, a, b in (("Sub", first, second), ("Add", second, first))
    ]
    if pairs:
        turned = [node.builder.reshape(part, [*lead, half, 1]) for part in turned]
        y = node.op("Concat", *turned, shape=[*lead, half, 2], axis=-1)
        y = node.builder.reshape(y, [*lead, 2 * half])
        y = node.op("Concat", y, *rest, shape=shape, axis=-1) if rest else y
    else:
        y = node.op("Concat", *turned, *rest, shape=shape, axis=-1)
    return node.builder.reshape(y, given)


DEFS = (
    OpDef(
        "",
        "RotaryEmbedding",
        23,
        rotary_rule,
        rotary_local,
        gradient=BY_BODY,
        body=rotary_body,
    ),
    OpDef(
        MICROSOFT,
        "RotaryEmbedding",
        1,
        contrib_rotary_rule,
        contrib_rotary_local,
        gradient=BY_BODY,
        body=contrib_rotary_body,
    ),
)
