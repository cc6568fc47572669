"""Attention of ONNX (since opset 23), sharded by batch, by heads, and by either sequence.

If the queries are sharded, each device needs all keys and values. If keys and values are sharded,
the devices all-reduce the maximum and the sum of each row, and the result is partial. Propagation
chooses what is cheaper: to gather keys and values for a long prompt, or a partial result for a few
tokens that follow a long cache.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import INT64
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.attention.composed import (
    Emitter,
    Sizes,
    Window,
    attend,
    behind_past,
    constant,
    key_heads,
    merged_heads,
    over_heads,
    query_heads,
    seen,
)
from onnxpar.ops.attention.heads import (
    Heads,
    Operands,
    head_size,
    heads_of,
    local_heads,
    valid_along,
)
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.elementwise.broadcast import broadcast_dims
from onnxpar.ops.local_helpers import BOOL, global_index, iota, with_padding
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import attends
from onnxpar.ops.operator import BY_BODY, OpDef
from onnxpar.ops.slots import Precision

_MASK, _PAST_KEY, _LENGTHS = 3, 4, 6


def _heads(view: NodeView) -> Heads:
    q, k, v = (view.shape(i) for i in range(3))
    if len(q) == 4:
        kv, groups = heads_of(view, q[1], k[1])
        return Heads(kv, groups, q[3], v[3])
    kv, groups = heads_of(view, view.attr("q_num_heads"), view.attr("kv_num_heads"))
    return Heads(kv, groups, head_size(view, q[2], kv * groups), head_size(view, v[2], kv))


def _window(view: NodeView) -> Window:
    """The bounds by position: those of the attributes, and 0 on the right if it is causal."""
    left, right = (int(view.attr(f"{side}_window_size", -1)) for side in ("left", "right"))
    if view.attr("is_causal", 0):
        right = 0
    return Window(left if left >= 0 else None, right if right >= 0 else None)


def _lengths(view: NodeView) -> tuple[Dim, Dim, Dim]:
    """Length of the queries, of new keys, and of all keys."""
    q, k = view.shape(0), view.shape(1)
    axis = 2 if len(q) == 4 else 1
    past: Dim = view.shape(_PAST_KEY)[2] if view.has(_PAST_KEY) else 0
    return q[axis], k[axis], k[axis] + past


def attention_rule(view: NodeView) -> OpRule:
    """Attention: `b s (h g d), b t (h d), b t (h e), … -> b s (h g e); sum: t`, d replicated.

    Keys may be sharded only where no past comes before them.
    """
    heads = _heads(view)
    names = heads.names
    queries, _, keys = _lengths(view)
    grown, bounded = view.has(_PAST_KEY), _window(view).bounded
    mask = view.shape(_MASK) if view.has(_MASK) else ()
    # A mask may end before the keys do; it is then padded.
    short = bool(mask) and mask[-1] != 1 and not view.table.equal(mask[-1], keys)
    t = "1" if grown else "t"
    operands = Operands(view)
    if len(view.shape(0)) == 3:
        operands.add(f"b s ({names} d)", f"b {t} (h d)", f"b {t} (h e)")
        result = f"b s ({names} e)"
    else:
        operands.add(f"b ({names}) s d", f"b h {t} d", f"b h {t} e")
        result = f"b ({names}) s e"
    operands.add_broadcast("b", f"({names})", "s", "1" if short else t)
    operands.add("b h 1 d", "b h 1 e", "b")
    text = operands.rule(result, f"b h {t} d", f"b h {t} e", f"b ({names}) s 1")
    scores = len(view.node.outputs) > 3
    kinds = {"d": "replicated"}
    if not grown:
        kinds["t"] = "replicated" if short or scores else "sum"
    if short or (scores and bounded):
        kinds["s"] = "replicated"
    elif bounded:
        kinds["s"] = "special"
    text += "".join(f"; {kind}: {factor}" for factor, kind in kinds.items())
    text += "; linear: sum 2" if len(view.node.outputs) == 1 else ""
    rule = parse_rule(text, heads.sizes)
    if kinds.get("t") != "sum":
        return rule
    # The maximum and the sum of each row.
    rows = view.shape(0)[0] * heads.kv * heads.groups * queries
    return replace(rule, inner={"t": 2 * rows})


def attention_local(node: LocalNode) -> Sequence[ir.Value]:
    """The local numbers of heads; if queries are sharded, a mask says which keys they see."""
    if "t" in node.plan.rule.kinds and node.atoms("t"):
        return _over_keys(node)
    inputs = list(node.inputs)
    attributes: dict[str, object] = {}
    if len(node.in_shape(0)) == 3:
        keys, queries = local_heads(node)
        attributes = {"q_num_heads": queries, "kv_num_heads": keys}
    if node.has(_LENGTHS):
        # A sequence that is padding has one key, since some kernels do not expect none.
        inputs[_LENGTHS] = with_padding(node, _LENGTHS, 1)
    if node.atoms("s") and _window(node.view).bounded:
        inputs += [None] * (_MASK + 1 - len(inputs))
        inputs[_MASK] = _with_positions(node)
        attributes |= {"is_causal": 0}
        attributes |= dict.fromkeys(("left_window_size", "right_window_size"))
    return node.copy(inputs, attributes)


def _seen_locally(node: LocalNode) -> tuple[ir.Value, list[Dim]]:
    """Which local keys the local queries see by their positions, and the shape of this."""
    view = node.view
    axis = 1 if len(view.shape(0)) == 3 else 2
    queries = node.in_shape(0)[axis]
    size, _, total = _lengths(view)
    rows = global_index(node, "s")
    grown = view.has(_PAST_KEY)
    columns = iota(node, total) if grown else global_index(node, "t")
    keys = total if grown else node.local_size("t")
    if not view.has(_LENGTHS):
        if grown:
            past = node.builder.size(view.shape(_PAST_KEY)[2])
            rows = node.op("Add", rows, past, dtype=INT64, shape=[queries])
        return seen(node, rows, columns, _window(view), queries, keys), [queries, keys]
    batch = node.in_shape(_LENGTHS)[0]
    ends = node.builder.reshape(node.input(_LENGTHS), [batch, 1, 1])
    first = node.op("Sub", ends, node.builder.size(size), dtype=INT64, shape=[batch, 1, 1])
    rows = node.op("Add", rows, first, dtype=INT64, shape=[batch, 1, queries])
    found = seen(node, rows, columns, _window(view), queries, keys, batch)
    return found, [batch, 1, queries, keys]


def _with_positions(node: LocalNode) -> ir.Value:
    """The mask of the local queries, together with what they see by their positions."""
    found, shape = _seen_locally(node)
    if not node.has(_MASK):
        return found
    mask, dims = node.input(_MASK), node.in_shape(_MASK)
    together = broadcast_dims(dims, shape)
    if mask.dtype == BOOL:
        return node.op("And", mask, found, shape=together)
    assert mask.dtype is not None
    lowest = constant(node, -math.inf, mask.dtype)
    return node.op("Where", found, mask, lowest, dtype=mask.dtype, shape=together)


def _over_keys(node: LocalNode) -> Sequence[ir.Value]:
    """Keys are sharded: statistics of each row are all-reduced, and the result is partial."""
    view = node.view
    q, rank = node.in_shape(0), len(node.in_shape(0))
    kv, queries = local_heads(node)
    heads = Heads(kv, queries // kv, _heads(view).size, node.local_size("e"))
    sizes = Sizes(heads, q[0], q[1] if rank == 3 else q[2], node.local_size("t"))
    k = key_heads(node, node.input(1), sizes, heads.size, rank=rank)
    v = key_heads(node, node.input(2), sizes, heads.value_size, rank=rank)
    bias: ir.Value | None = None
    allowed: list[ir.Value] = []
    if view.has(_MASK):
        mask = over_heads(node, node.input(_MASK), node.in_shape(_MASK), sizes)
        if mask.dtype == BOOL:
            allowed.append(mask)
        else:
            bias = mask
    if _window(view).bounded:
        found, shape = _seen_locally(node)
        allowed.append(over_heads(node, found, shape, sizes))
    if not node.is_even("t"):
        allowed.append(valid_along(node, "t"))
    if view.has(_LENGTHS):
        ends = node.builder.reshape(node.input(_LENGTHS), [sizes.batch, 1, 1, 1, 1])
        shape = [sizes.batch, 1, 1, 1, sizes.keys]
        columns = global_index(node, "t")
        allowed.append(node.op("Less", columns, ends, dtype=BOOL, shape=shape))
    return _outputs(node, k, v, sizes, bias, allowed, node.atoms("t"))


def _outputs(
    node: Emitter,
    k: ir.Value,
    v: ir.Value,
    sizes: Sizes,
    bias: ir.Value | None,
    allowed: Sequence[ir.Value],
    atoms: Atoms = (),
) -> list[ir.Value]:
    """The attention (see `attend`), and its keys and values if they are outputs too."""
    view = node.view
    rank = len(view.shape(0))
    scale = view.attr("scale")
    y = attend(
        node,
        query_heads(node, node.input(0), sizes, rank=rank),
        k,
        v,
        sizes,
        scale=1 / math.sqrt(int(sizes.heads.size)) if scale is None else float(scale),
        softcap=float(view.attr("softcap", 0.0)),
        bias=bias,
        allowed=_all(node, allowed),
        atoms=atoms,
    )
    return [merged_heads(node, y, sizes, rank=rank), k, v][: len(view.node.outputs)]


def _all(node: Emitter, allowed: Sequence[ir.Value]) -> ir.Value | None:
    """What all of these allow; they broadcast against the scores in 5 dims."""
    if not allowed:
        return None
    found = allowed[0]
    for other in allowed[1:]:
        if isinstance(node, BodyNode):
            shape = broadcast_dims(node.shape(found), node.shape(other))
            found = node.op("And", found, other, shape=shape)
        else:
            found = node.op("And", found, other)
    return found


def attention_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """Products, a mask and a Softmax; the heads are a dim of their own.

    Raises:
        ModelError: The scores are an output too, or the mask ends before the keys do.
    """
    view = node.view
    if len(view.node.outputs) > 3 and view.node.outputs[3].name:
        raise node.fail("it has no gradient when its scores are an output")
    heads = _heads(view)
    queries, new, total = _lengths(view)
    rank = len(view.shape(0))
    sizes = Sizes(heads, view.shape(0)[0], queries, new)
    k = key_heads(node, node.input(1), sizes, heads.size, rank=rank)
    v = key_heads(node, node.input(2), sizes, heads.value_size, rank=rank)
    sizes = replace(sizes, keys=total)
    k, v = behind_past(node, _PAST_KEY, k, v, sizes)
    bias, allowed = _masks(node, sizes)
    return _outputs(node, k, v, sizes, bias, allowed)


def _masks(node: BodyNode, sizes: Sizes) -> tuple[ir.Value | None, list[ir.Value]]:
    """What is added to the scores, and masks that all say which keys are seen."""
    view, window = node.view, _window(node.view)
    bias: ir.Value | None = None
    allowed: list[ir.Value] = []
    if node.has(_MASK):
        mask, dims = node.input(_MASK), view.shape(_MASK)
        if dims[-1] != 1 and not view.table.equal(dims[-1], sizes.keys):
            raise node.fail(f"expected a mask of all {sizes.keys} keys, got {dims[-1]}")
        mask = over_heads(node, mask, dims, sizes)
        if mask.dtype == BOOL:
            allowed.append(mask)
        else:
            bias = mask
    if not window.bounded and not node.has(_LENGTHS):
        return bias, allowed
    rows, columns = iota(node, sizes.queries), iota(node, sizes.keys)
    if node.has(_LENGTHS):
        lead = [sizes.batch, 1, 1]
        ends = node.builder.reshape(node.input(_LENGTHS), lead)
        length = node.builder.sizes([sizes.queries])
        first = node.op("Sub", ends, length, shape=lead)
        rows = node.op("Add", rows, first, shape=[sizes.batch, 1, sizes.queries])
        shape = [sizes.batch, 1, sizes.keys]
        inside = node.op("Less", columns, ends, dtype=BOOL, shape=shape)
        allowed.append(over_heads(node, inside, [sizes.batch, 1, 1, sizes.keys], sizes))
    elif node.has(_PAST_KEY):
        past = node.builder.sizes([view.shape(_PAST_KEY)[2]])
        rows = node.op("Add", rows, past, shape=[sizes.queries])
    if window.bounded:
        batch = sizes.batch if node.has(_LENGTHS) else None
        found = seen(node, rows, columns, window, sizes.queries, sizes.keys, batch)
        allowed.append(over_heads(node, found, node.shape(found), sizes))
    return bias, allowed


DEFS: tuple[OpDef, ...] = (
    OpDef(
        "",
        "Attention",
        23,
        attention_rule,
        attention_local,
        gradient=BY_BODY,
        cost=attends(_PAST_KEY),
        body=attention_body,
        precision=Precision(half=frozenset({"T1", "T2"})),
    ),
)
