"""Mixtures of experts as one operator (com.microsoft), sharded by tokens and by inner width.

Each expert is a feed-forward network, whose inner width is sharded as in Megatron-LM (Shoeybi et
al., 2019): each device has a shard of every expert, the router's choice is the same on all devices,
and the result is a partial sum. All devices have equal work, whichever experts are chosen.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.attention.heads import Operands, present
from onnxpar.ops.contraction.matmul import on_first
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.node_cost import routes
from onnxpar.ops.operator import Missing, OpDef

# The index of the last bias among the operands of MoE, and of QMoE.
_LAST_BIAS, _QUANTISED_LAST_BIAS = 5, 7


def _widths(view: NodeView, rows: Dim, inner: int) -> str:
    """Factors of the rows of the first weight, `{0}` being the inner width.

    There is one row for each inner element, or two with an activation that has a gate (SwiGLU).

    Raises:
        ModelError: There is another number of rows.
    """
    fusion = int(view.attr("swiglu_fusion", 0))
    if rows == inner:
        return "{0}"
    if rows != 2 * inner or fusion not in (1, 2):
        raise view.fail(
            f"expected {inner} rows in the first weight, "
            f"or twice as many and 'swiglu_fusion', got {rows}"
        )
    return "({0} u)" if fusion == 1 else "(u {0})"


def _tokens(view: NodeView) -> tuple[str, str]:
    """The texts of the tokens, and of the router's probabilities of experts for each token."""
    return ("n 1", "n 1") if len(view.shape(0)) == 2 else ("b s 1", "(b s) 1")


def experts_rule(view: NodeView) -> OpRule:
    """MoE: `n 1, n 1, 1 k 1, 1 k, 1 1 k, 1 1, … -> n 1; sum: k`, k the inner width.

    Raises:
        ModelError: The inner width is unknown, or the first weight does not fit it.
    """
    inner = view.shape(4)[2]
    if not isinstance(inner, int):
        raise view.fail(f"sharding needs a known inner width, got {inner}")
    rows = _widths(view, view.shape(2)[1], inner).format("k")
    tokens, router = _tokens(view)
    operands = Operands(view)
    operands.add(tokens, router, f"1 {rows} 1", f"1 {rows}", "1 1 k", "1 1", "1 k 1", "1 k")
    text = operands.rule(tokens)
    sizes: dict[str, Dim] = {"k": inner, "u": 2, **_token_sizes(view)}
    return parse_rule(f"{text}; sum: k; replicated: {present(text, 'u')}", sizes)


def _token_sizes(view: NodeView) -> dict[str, Dim]:
    shape = view.shape(0)
    return {} if len(shape) == 2 else {"b": shape[0], "s": shape[1]}


def quantised_experts_rule(view: NodeView) -> OpRule:
    """QMoE: as MoE, with weights of few bits; shards are made of complete bytes and blocks.

    Raises:
        ModelError: It has zero points, weights with different numbers of bits, or weights that are
            prepared for one kernel; or the inner width is unknown or has no whole blocks.
    """
    bits, block = int(view.attr("expert_weight_bits", 4)), int(view.attr("block_size", 0))
    further = any(view.has(i) for i in range(11, view.arity) if i != 14)
    two = any(view.attr(f"fc{n}_expert_weight_bits", 0) not in (0, bits) for n in (1, 2, 3))
    kernel = view.attr("weights_prepacked", 0) not in (0, -1)
    if further or two or kernel or view.attr("quant_type", "int") not in ("int", b"int"):
        raise view.fail(
            "sharding needs integer weights that all have the same number of bits, have no zero "
            "points and are not prepacked"
        )
    per_byte = 8 // bits
    stored = view.shape(5)[2]
    if not isinstance(stored, int) or (block and stored * per_byte % block):
        raise view.fail(f"expected whole blocks in each row of operand 5, got {stored} bytes")
    unit = block or per_byte
    inner = stored * per_byte
    columns = "(k p)" if unit > 1 else "k"
    inside = columns.strip("()")
    rows = _widths(view, view.shape(2)[1], inner)
    rows = rows.format(inside) if rows != "{0}" else columns
    last = "(k w)" if unit > per_byte else "k"
    tokens, router = _tokens(view)
    wide = " 1" if block else ""
    operands = Operands(view)
    operands.add(
        tokens,
        router,
        f"1 {rows} 1",
        f"1 {rows}{wide}",
        f"1 {rows}",
        f"1 1 {last}",
        "1 1 k" if block else "1 1",
        "1 1",
        f"1 {columns} 1",
        f"1 {columns}{wide}",
        f"1 {columns}",
        *[None] * 3,
        router,
    )
    text = operands.rule(tokens)
    sizes: dict[str, Dim] = {"k": inner // unit, "p": unit, "w": unit // per_byte, "u": 2}
    text += f"; sum: k; replicated: {present(text, 'p w u')}"
    return parse_rule(text, {**sizes, **_token_sizes(view)})


def experts_local(node: LocalNode) -> Sequence[ir.Value]:
    """If the inner width is sharded, the last bias is added on one device only."""
    inputs = list(node.inputs)
    index = _LAST_BIAS if node.op_type == "MoE" else _QUANTISED_LAST_BIAS
    if node.atoms("k") and node.has(index):
        inputs[index] = on_first(node, index, node.atoms("k"))
    return node.copy(inputs)


DEFS = (
    OpDef(
        MICROSOFT,
        "MoE",
        1,
        experts_rule,
        experts_local,
        gradient=Missing("to train the experts, export them as separate operators"),
        cost=routes(2, 4, 6),
    ),
    OpDef(
        MICROSOFT,
        "QMoE",
        1,
        quantised_experts_rule,
        experts_local,
        gradient=Missing("its weights are integers with few bits"),
        cost=routes(2, 5, 8, bits=4),
    ),
)
