"""MatMul and Gemm: contraction split into partial sums, Megatron's column and row forms alike."""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.errors import ModelError
from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contraction.matmul_gradient import (
    fused_matmul_gradient,
    gemm_gradient,
    matmul_gradient,
)
from onnxpar.ops.elementwise.broadcast import aligned, axis_names
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import OpDef
from onnxpar.ops.slots import HALF, Roles


def matmul_rule(view: NodeView) -> OpRule:
    """numpy.matmul: batch dims broadcast, `m k, k n -> m n`, vectors as numpy does.

    FusedMatMul (com.microsoft) reads its operands with the last two dims swapped where `transA` or
    `transB` says so.

    Raises:
        ModelError: FusedMatMul moves the batch dims as well (`transBatchA`, `transBatchB`).
    """
    if view.attr("transBatchA", 0) or view.attr("transBatchB", 0):
        raise ModelError(f"node {view.name!r}: transBatchA and transBatchB cannot be sharded")
    left, right, out = view.shape(0), view.shape(1), view.out_shape()
    m, n = len(left) > 1, len(right) > 1
    batch = out[: len(out) - m - n]
    names = axis_names(len(batch))
    a, whole_a = aligned(left[:-2] if m else (), batch, names)
    b, whole_b = aligned(right[:-2] if n else (), batch, names)
    result = " ".join("1" if s == 1 else x for x, s in zip(names, batch, strict=True))
    rows = "" if not m else "K M" if view.attr("transA", 0) else "M K"
    columns = "" if not n else "N K" if view.attr("transB", 0) else "K N"
    text = (
        f"{a} {rows or 'K'}, {b} {columns or 'K'} -> "
        f"{result} {'M' if m else ''} {'N' if n else ''}; sum: K; linear: sum 0, sum 1"
    )
    if whole_a | whole_b:
        text += f"; replicated: {' '.join(sorted(whole_a | whole_b))}"
    return parse_rule(text)


def gemm_rule(view: NodeView) -> OpRule:
    """alpha·A'·B' + beta·C; with a split K the bias is added on one device of the group only."""
    a = "K M" if view.attr("transA", 0) else "M K"
    b = "N K" if view.attr("transB", 0) else "K N"
    if not view.has(2):
        operands = f"{a}, {b}" + (", -" if view.arity > 2 else "")
        return parse_rule(f"{operands} -> M N; sum: K; linear: sum 0, sum 1")
    c, whole = aligned(view.shape(2), view.out_shape(), ["M", "N"])
    text = f"{a}, {b}, {c} -> M N; sum: K; linear: sum 0+2, sum 1+2"
    return parse_rule(text + (f"; replicated: {' '.join(sorted(whole))}" if whole else ""))


def gemm_local(node: LocalNode) -> Sequence[ir.Value]:
    """With K split, each device would add the bias: all but the first of the group add zero."""
    atoms = node.atoms("K")
    if not atoms or not node.has(2):
        return node.copy()
    return node.copy(inputs=[node.input(0), node.input(1), on_first(node, 2, atoms)])


def on_first(node: LocalNode, operand: int, atoms: Atoms) -> ir.Value:
    """Returns an operand that is to be added once: zero on all devices of a group but the first."""
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
    ),
    OpDef(
        "com.microsoft",
        "FusedMatMul",
        1,
        matmul_rule,
        gradient=fused_matmul_gradient,
        keeps_zero=True,
    ),
)
