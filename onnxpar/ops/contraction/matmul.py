"""MatMul and Gemm: sharding rows or columns is parallel, sharding the inner dim gives partial sums.

These are the column and the row parallel layers of Megatron-LM.
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contraction.matmul_gradient import (
    fused_matmul_gradient,
    gemm_gradient,
    matmul_gradient,
)
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import aligned, axis_names
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.parts import same_node
from onnxpar.ops.slots import HALF, Roles

_MANY_COLUMNS = 128
"""A copy of A (m·k elements) pays if the result has so many columns; the product takes 2·m·n·k
operations."""
_ROWS_FOR_A_COLUMN = 2
"""It pays if the result has at most so many times as many rows as columns."""


def matmul_rule(view: NodeView) -> OpRule:
    """numpy.matmul: batch dims broadcast, `m k, k n -> m n`, vectors as numpy does.

    FusedMatMul (com.microsoft) swaps the last two dims of its operands if `transA` or `transB` is
    set.

    Raises:
        ModelError: FusedMatMul also moves batch dims (`transBatchA`, `transBatchB`).
    """
    if view.attr("transBatchA", 0) or view.attr("transBatchB", 0):
        raise view.fail("it cannot be sharded with 'transBatchA' or 'transBatchB'")
    left, right, out = view.shape(0), view.shape(1), view.out_shape()
    m, n = len(left) > 1, len(right) > 1
    batch = out[: len(out) - m - n]
    names = axis_names(len(batch))
    a, fixed_a = aligned(left[:-2] if m else (), batch, names)
    b, fixed_b = aligned(right[:-2] if n else (), batch, names)
    result = " ".join("1" if s == 1 else x for x, s in zip(names, batch, strict=True))
    rows = "" if not m else "K M" if view.attr("transA", 0) else "M K"
    columns = "" if not n else "N K" if view.attr("transB", 0) else "K N"
    return parse_rule(
        f"{a} {rows or 'K'}, {b} {columns or 'K'} -> "
        f"{result} {'M' if m else ''} {'N' if n else ''}; sum: K; linear: sum 0, sum 1; "
        f"replicated: {' '.join(sorted(fixed_a | fixed_b))}"
    )


def gemm_rule(view: NodeView) -> OpRule:
    """alpha·A'·B' + beta·C; if K is sharded, only one device of a group adds the bias C."""
    a = "K M" if view.attr("transA", 0) else "M K"
    b = "N K" if view.attr("transB", 0) else "K N"
    if not view.has(2):
        operands = f"{a}, {b}" + (", -" if view.arity > 2 else "")
        return parse_rule(f"{operands} -> M N; sum: K; linear: sum 0, sum 1")
    c, fixed = aligned(view.shape(2), view.out_shape(), ["M", "N"])
    text = f"{a}, {b}, {c} -> M N; sum: K; linear: sum 0+2, sum 1+2"
    return parse_rule(f"{text}; replicated: {' '.join(sorted(fixed))}")


def gemm_local(node: LocalNode) -> Sequence[ir.Value]:
    """If K is sharded, only the first device of a group adds the bias; the others add zero.

    If A is transposed, a Transpose may copy it first. Gemm of onnxruntime's CPU provider transposes
    A piece by piece, again for each block of columns, and takes longer than both together
    (docs/design/0038-step.md). On a GPU, onnxruntime merges the two nodes into one Gemm.
    """
    a, attributes = node.input(0), {}
    if _copies_transposed(node):
        m, k = node.local_size("M"), node.local_size("K")
        a = node.op("Transpose", a, shape=[m, k], perm=[1, 0])
        attributes["transA"] = 0
    operands, atoms = [a, node.input(1)], node.atoms("K")
    if node.has(2):
        operands.append(on_first(node, 2, atoms) if atoms else node.input(2))
    return node.copy(operands, attributes)


def _copies_transposed(node: LocalNode) -> bool:
    """Whether A is transposed, and a copy of it pays."""
    m, n = node.local_size("M"), node.local_size("N")
    if not isinstance(m, int) or not isinstance(n, int):
        return False
    float32 = node.out_dtype() == ir.DataType.FLOAT
    transposed = node.attr("transA", 0) and not node.attr("transB", 0)
    return bool(transposed and float32 and n >= _MANY_COLUMNS and m <= _ROWS_FOR_A_COLUMN * n)


def on_first(node: LocalNode, operand: int, atoms: Atoms) -> ir.Value:
    """Returns an operand that is added once: it is zero on all devices of a group but the first."""
    value = node.input(operand)
    first = node.op(
        "Equal",
        node.builder.position(atoms),
        node.builder.const([0]),
        dtype=ir.DataType.BOOL,
        shape=[1],
    )
    zero = node.builder.const(0.0, value.dtype)
    return node.op("Where", first, value, zero, dtype=value.dtype, shape=node.in_shape(operand))


def _gemm_bias(node: ir.Node, weight: Sequence[int]) -> int:
    return weight[0 if node.attributes.get_int("transB", 0) else 1]


DEFS = (
    OpDef(
        "",
        "MatMul",
        1,
        matmul_rule,
        gradient=matmul_gradient,
        keeps_zero=True,
        roles=Roles(weights=(0, 1), product=True),
        precision=HALF,
        on_part=same_node,
    ),
    OpDef(
        "",
        "Gemm",
        7,
        gemm_rule,
        gemm_local,
        gradient=gemm_gradient,
        roles=Roles(weights=(0, 1), vectors=(2,), bias_size=_gemm_bias),
        precision=HALF,
        on_part=same_node,
    ),
    OpDef(
        MICROSOFT,
        "FusedMatMul",
        1,
        matmul_rule,
        gradient=fused_matmul_gradient,
        keeps_zero=True,
        on_part=same_node,
    ),
)
