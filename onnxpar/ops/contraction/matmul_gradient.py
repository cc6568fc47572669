"""Gradients of MatMul, Gemm and FusedMatMul: two contractions of the same factors.

For Y = A·B: dA = dY·Bᵀ and dB = Aᵀ·dY (Petersen & Pedersen, The Matrix Cookbook, 2012). No operand
is transposed by a copy: the emitted operators have attributes for it. They are Gemm for two dims
and for a weight that multiplies a batch of rows, which its gradient contracts all at once, and
FusedMatMul (com.microsoft) otherwise.
"""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import broadcast_dims
from onnxpar.ops.grad_node import GradNode


def matmul_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cotangents of A and B of numpy.matmul."""
    return _product(node, False, False, 1.0)


def fused_matmul_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cotangents of A and B of alpha·A'·B', where the last dims of A' and B' may be transposed."""
    view = node.view
    return _product(
        node, bool(view.attr("transA", 0)), bool(view.attr("transB", 0)), view.attr("alpha", 1.0)
    )


def _product(node: GradNode, ta: bool, tb: bool, alpha: float) -> Sequence[ir.Value | None]:
    a, b, dy = node.input(0), node.input(1), node.cotangent()
    rank_a, rank_b = len(node.shape(a)), len(node.shape(b))
    # As in numpy, a vector gets one more dim for the product, which is removed afterwards.
    if rank_b == 1:
        b, tb = node.builder.unsqueeze(b, [1]), False
        dy = node.builder.unsqueeze(dy, [len(node.shape(dy))])
    if rank_a == 1:
        a, ta = node.builder.unsqueeze(a, [0]), False
        dy = node.builder.unsqueeze(dy, [len(node.shape(dy)) - 1])
    result: list[ir.Value | None] = [None, None]
    if node.wants(0):
        da = (
            _matmul(node, b, dy, tb, True, alpha)
            if ta
            else _matmul(node, dy, b, False, not tb, alpha)
        )
        result[0] = _fit(node, da, 0, a)
    if node.wants(1):
        if rank_b == 2 and len(node.shape(a)) > 2 and not ta:
            rows = _rows(node, dy), _rows(node, a)
            first, second = rows if tb else rows[::-1]
            result[1] = _gemm(node, first, second, True, False, alpha)
        else:
            db = (
                _matmul(node, dy, a, True, ta, alpha)
                if tb
                else _matmul(node, a, dy, not ta, False, alpha)
            )
            result[1] = _fit(node, db, 1, b)
    return result


def _fit(node: GradNode, x: ir.Value, index: int, like: ir.Value) -> ir.Value:
    """Sums over batch dims that the operand does not have, and removes the dim of a vector."""
    original = node.input(index)
    if like is original:
        return node.unbroadcast(x, index)
    batch = len(node.shape(x)) - 2
    if batch:
        x = node.builder.reduce("ReduceSum", x, range(batch))
    return node.builder.reshape_like(x, original)


def _rows(node: GradNode, x: ir.Value) -> ir.Value:
    """Merges all dims of `x` but the last."""
    *batch, last = node.shape(x)
    count: Dim = 1
    for size in batch:
        count = count * size
    if isinstance(last, int):
        # The other size follows without arithmetic on shapes at run time.
        target = node.builder.const(np.array([-1, last], np.int64))
        node.builder.contents[target.name or ""] = (-1, last)
        return node.builder.op("Reshape", x, target, shape=[count, last])
    return node.builder.op("Flatten", x, shape=[count, last], axis=len(batch))


def _matmul(node: GradNode, a: ir.Value, b: ir.Value, ta: bool, tb: bool, alpha: float) -> ir.Value:
    """Emits alpha·A'·B' over the last two dims, batch dims broadcast."""
    left, right = node.shape(a), node.shape(b)
    m = left[-1] if ta else left[-2]
    n = right[-2] if tb else right[-1]
    if len(left) == len(right) == 2:
        return _gemm(node, a, b, ta, tb, alpha)
    batch = broadcast_dims(left[:-2], right[:-2])
    if not ta and not tb and alpha == 1.0:
        return node.op("MatMul", a, b, shape=[*batch, m, n])
    return node.op(
        "FusedMatMul",
        a,
        b,
        shape=[*batch, m, n],
        domain=MICROSOFT,
        transA=int(ta),
        transB=int(tb),
        alpha=float(alpha),
    )


def _gemm(node: GradNode, a: ir.Value, b: ir.Value, ta: bool, tb: bool, alpha: float) -> ir.Value:
    left, right = node.shape(a), node.shape(b)
    shape = [left[1] if ta else left[0], right[0] if tb else right[1]]
    return node.op("Gemm", a, b, shape=shape, transA=int(ta), transB=int(tb), alpha=float(alpha))


def gemm_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """Cotangents of A, B and C of alpha·A'·B' + beta·C."""
    view = node.view
    ta, tb = bool(view.attr("transA", 0)), bool(view.attr("transB", 0))
    result: list[ir.Value | None] = [*_product(node, ta, tb, view.attr("alpha", 1.0)), None]
    if node.wants(2):
        dc, beta = node.unbroadcast(node.cotangent(), 2), view.attr("beta", 1.0)
        result[2] = dc if beta == 1.0 else node.op("Mul", dc, node.number(beta, dc))
    return result
