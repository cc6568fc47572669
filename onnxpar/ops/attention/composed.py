"""The parts of attention, for bodies and for local forms that communicate.

Softmax(scale · Q Kᵀ + bias) V (Vaswani et al., 2017), with grouped heads, a soft cap on the scores,
masks, and keys that may be sharded. If they are, the maximum and the sum of each row are
all-reduced, and each device computes one term of the result from its own values (as in Milakov and
Gimelshein's online softmax, 2018, on which flash attention is based).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.ops.attention.heads import Heads
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.local_helpers import BOOL, work_dtype
from onnxpar.ops.local_node import LocalNode

Emitter = LocalNode | BodyNode


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention; in a local form the local ones.

    Attributes:
        heads: The heads.
        batch: Number of sequences.
        queries: Length of the queries.
        keys: Length of keys and values.
    """

    heads: Heads
    batch: Dim
    queries: Dim
    keys: Dim

    @property
    def scores(self) -> list[Dim]:
        """Shape of the scores."""
        return [self.batch, self.heads.kv, self.heads.groups, self.queries, self.keys]


def transpose(node: Emitter, x: ir.Value, order: Sequence[int]) -> ir.Value:
    """Emits a Transpose."""
    shape = node.shape(x)
    return node.op("Transpose", x, shape=[shape[i] for i in order], perm=list(order))


def split(node: BodyNode, x: ir.Value, sizes: Sequence[Dim]) -> tuple[ir.Value, ...]:
    """Emits a Split of the last dim of `x` into parts of these static sizes."""
    lead = node.shape(x)[:-1]
    return node.builder.ops(
        "Split",
        [x, node.builder.const(np.array(sizes))],
        [(x.dtype, [*lead, size]) for size in sizes],
        {"axis": -1},
    )


def constant(node: Emitter, value: float, dtype: ir.DataType) -> ir.Value:
    """A scalar."""
    return node.builder.const(np.array(value), dtype)


def query_heads(node: Emitter, q: ir.Value, sizes: Sizes, *, rank: int) -> ir.Value:
    """Queries as [batch, kv, groups, queries, size], from 3 dims or from 4 (heads second)."""
    b, s, heads = sizes.batch, sizes.queries, sizes.heads
    h, g, d = heads.kv, heads.groups, heads.size
    if rank == 4:
        return node.builder.reshape(q, [b, h, g, s, d])
    return transpose(node, node.builder.reshape(q, [b, s, h, g, d]), [0, 2, 3, 1, 4])


def key_heads(node: Emitter, x: ir.Value, sizes: Sizes, size: Dim, *, rank: int) -> ir.Value:
    """Keys or values as [batch, kv, keys, size], from 3 dims or from 4 (heads second)."""
    if rank == 4:
        return x
    dims = [sizes.batch, sizes.keys, sizes.heads.kv, size]
    return transpose(node, node.builder.reshape(x, dims), [0, 2, 1, 3])


def merged_heads(node: Emitter, y: ir.Value, sizes: Sizes, *, rank: int) -> ir.Value:
    """The result [batch, kv, groups, queries, value_size] in 3 dims or in 4."""
    b, s, heads = sizes.batch, sizes.queries, sizes.heads
    h, e = heads.kv * heads.groups, heads.value_size
    if rank == 4:
        return node.builder.reshape(y, [b, h, s, e])
    return node.builder.reshape(transpose(node, y, [0, 3, 1, 2, 4]), [b, s, h * e])


def over_heads(node: Emitter, mask: ir.Value, dims: Sequence[Dim], sizes: Sizes) -> ir.Value:
    """A mask of up to 4 dims, right-aligned to [batch, heads, queries, keys], in 5 dims."""
    full = [1] * (4 - len(dims)) + list(dims)
    heads = [1, 1] if full[1] == 1 else [sizes.heads.kv, sizes.heads.groups]
    return node.builder.reshape(mask, [full[0], *heads, *full[2:]])


def behind_past(
    node: BodyNode, past: int, k: ir.Value, v: ir.Value, sizes: Sizes
) -> tuple[ir.Value, ir.Value]:
    """Concatenates the operands `past` and `past + 1`, if present, and new keys and values.

    Args:
        node: The attention.
        past: Index of the operand that holds past keys [batch, kv, past, size].
        k: New keys [batch, kv, new, size].
        v: New values [batch, kv, new, value_size].
        sizes: Sizes of the attention; `keys` counts past and new keys.
    """
    if not node.has(past):
        return k, v
    heads = sizes.heads
    lead = [sizes.batch, heads.kv, sizes.keys]
    return (
        node.op("Concat", node.input(past), k, shape=[*lead, heads.size], axis=2),
        node.op("Concat", node.input(past + 1), v, shape=[*lead, heads.value_size], axis=2),
    )


@dataclass(frozen=True)
class Window:
    """Which keys a query sees by their positions: from `left` before it to `right` after it.

    Attributes:
        left: Number of positions before the query; None without a bound.
        right: Number of positions after it, 0 in causal attention; None without a bound.
    """

    left: int | None
    right: int | None

    @property
    def bounded(self) -> bool:
        """Whether there is a bound."""
        return self.left is not None or self.right is not None


def seen(
    node: Emitter,
    rows: ir.Value,
    columns: ir.Value,
    window: Window,
    queries: Dim,
    keys: Dim,
    batch: Dim | None = None,
) -> ir.Value:
    """Emits which keys each query sees by their positions.

    Args:
        node: Where to emit.
        rows: Position of each query among the keys, int64 [queries] or [batch, 1, queries].
        columns: Position of each key, int64 [keys].
        window: The bounds; there must be one.
        queries: Number of queries.
        keys: Number of keys.
        batch: Size of dim 0 of `rows`; None if `rows` is [queries].

    Returns:
        Booleans [queries, keys], or [batch, 1, queries, keys].
    """
    lead = [] if batch is None else [batch, 1]
    dims = [*lead, queries, keys]
    tall = node.builder.reshape(rows, [*lead, queries, 1])
    found: ir.Value | None = None
    for bound, sign in ((window.right, 1), (window.left, -1)):
        if bound is None:
            continue
        limit = node.builder.const([sign * bound])
        edge = node.op("Add", tall, limit, dtype=INT64, shape=[*lead, queries, 1])
        pair = (edge, columns) if sign > 0 else (columns, edge)
        beyond = node.op("Less", *pair, dtype=BOOL, shape=dims)
        inside = node.op("Not", beyond, shape=dims)
        found = inside if found is None else node.op("And", found, inside, shape=dims)
    assert found is not None
    return found


def attend(
    node: Emitter,
    q: ir.Value,
    k: ir.Value,
    v: ir.Value,
    sizes: Sizes,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: ir.Value | None = None,
    allowed: ir.Value | None = None,
    atoms: Atoms = (),
) -> ir.Value:
    """Emits an attention from its parts.

    Args:
        node: Where to emit.
        q: Queries [batch, kv, groups, queries, size].
        k: Keys [batch, kv, keys, size].
        v: Values [batch, kv, keys, value_size].
        sizes: The sizes.
        scale: Factor of the scores.
        softcap: Bound of the scores, by a hyperbolic tangent; 0 for none.
        bias: Added to the scores; broadcasts against them in 5 dims.
        allowed: Booleans that broadcast in the same way; a key is not seen where they are false.
        atoms: Atoms that shard the keys. The result is then partial.

    Returns:
        [batch, kv, groups, queries, value_size]; zeros for a query that sees no key.
    """
    dims, dtype, cast = sizes.scores, q.dtype or ir.DataType.FLOAT, node.builder.cast
    wide = work_dtype(dtype)
    heads, b, t = sizes.heads, sizes.batch, sizes.keys
    h, d, e = heads.kv, heads.size, heads.value_size
    columns = node.builder.reshape(transpose(node, k, [0, 1, 3, 2]), [b, h, 1, d, t])
    q = node.op("Mul", q, constant(node, scale, dtype), shape=[*dims[:4], d])
    scores = cast(node.op("MatMul", q, columns, shape=dims), wide)
    if softcap:
        limit = constant(node, softcap, wide)
        capped = node.op("Tanh", node.op("Div", scores, limit, shape=dims), shape=dims)
        scores = node.op("Mul", capped, limit, shape=dims)
    # Finite: in a row without keys, infinity minus infinity would be NaN.
    lowest = constant(node, float(np.finfo(wide.numpy()).min), wide)
    if bias is not None:
        scores = node.op("Add", scores, cast(bias, wide), shape=dims)
        scores = node.op("Max", scores, lowest, shape=dims)
    if allowed is not None:
        scores = node.op("Where", allowed, scores, lowest, dtype=wide, shape=dims)
    hidden = bias is not None or allowed is not None
    rows = [*dims[:4], 1]
    top: ir.Value | None = None
    if hidden or isinstance(node, LocalNode):
        top = node.builder.reduce("ReduceMax", scores, [4], keepdims=True)
    if isinstance(node, LocalNode):
        assert top is not None
        top = node.all_reduce(top, atoms, "max")
        powers = node.op("Exp", node.op("Sub", scores, top, shape=dims), shape=dims)
        total = node.builder.reduce("ReduceSum", powers, [4], keepdims=True)
        total = node.all_reduce(total, atoms)
        shares = node.op("Div", powers, total, shape=dims)
    else:
        shares = node.op("Softmax", scores, shape=dims, axis=-1)
    values = node.builder.reshape(v, [b, h, 1, t, e])
    y = node.op("MatMul", cast(shares, dtype), values, shape=[*dims[:4], e])
    if top is None or not hidden:
        return y
    some = node.op("Less", lowest, top, dtype=BOOL, shape=rows)
    return node.op("Where", some, y, constant(node, 0, dtype), dtype=dtype, shape=[*dims[:4], e])
