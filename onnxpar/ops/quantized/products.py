"""Matrix products of quantised operands: MatMulInteger, QLinearMatMul and those of onnxruntime.

A sharded contraction sums int32 and is exact. Padding of the contracted dim gets the zero point of
the left operand, so that it counts as zero whatever the right operand holds. Operators that round
or add a bias do so once, after the sum. (Jacob et al., Quantization and Training of Neural Networks
for Efficient Integer-Arithmetic-Only Inference, 2018, section 2.2.)
"""

from collections.abc import Sequence

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.core.symbols import Dim
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.elementwise.broadcast import aligned, axis_names
from onnxpar.ops.local_helpers import FLOAT
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import Missing, NotDifferentiable, OpDef
from onnxpar.ops.quantized.helpers import (
    INT32,
    dims_if_single,
    filled,
    is_single,
    output_scale,
    ranged,
    requantised,
)
from onnxpar.ops.quantized.inference import infer_gemm, infer_product

_K = "K"
INTEGERS = NotDifferentiable("its operands and its result are integers")
FOR_INFERENCE = Missing(
    "it rounds to integers, for inference; train with QuantizeLinear and DequantizeLinear instead"
)


class _Product:
    """The text of the rule of `left · right`, for products like numpy.matmul or Gemm."""

    def __init__(self, view: NodeView, left: int, right: int) -> None:
        a, b = view.shape(left), view.shape(right)
        self.view = view
        self.m, self.n = len(a) > 1, len(b) > 1
        out = view.out_shape()
        self.batch = out[: len(out) - self.m - self.n]
        names = axis_names(len(self.batch))
        one, replicated = aligned(a[:-2] if self.m else (), self.batch, names)
        other, more = aligned(b[:-2] if self.n else (), self.batch, names)
        self.replicated = replicated | more
        swapped = bool(view.attr("transA", 0)), bool(view.attr("transB", 0))
        rows = "" if not self.m else f"{_K} M" if swapped[0] else f"M {_K}"
        columns = "" if not self.n else f"N {_K}" if swapped[1] else f"{_K} N"
        self.left = f"{one} {rows or _K}"
        self.right = f"{other} {columns or _K}"
        free = " ".join("1" if s == 1 else x for x, s in zip(names, self.batch, strict=True))
        self.out = f"{free} {'M' if self.m else ''} {'N' if self.n else ''}"
        self.names = [*names, *["M"] * self.m, *["N"] * self.n]

    def scale(self, index: int, *, rows: bool = False) -> str:
        """The dims of a scale or zero point: one element, or one for each row or column.

        ONNX gives those of rows as [M] or [… M 1], those of columns as [N] or [… 1 N].
        """
        single = dims_if_single(self.view, index)
        if single is not None:
            return single
        if len(self.view.shape(index)) == 1:
            return "M" if rows else "N"
        return self.added(index)

    def added(self, index: int) -> str:
        """The dims of a bias, which is broadcast to the result."""
        if not self.view.has(index):
            return "-"
        dims, replicated = aligned(self.view.shape(index), self.view.out_shape(), self.names)
        self.replicated |= replicated
        return dims

    def rule(self, operands: Sequence[str], kinds: str) -> OpRule:
        """The rule, with the clauses `kinds` after the operands."""
        shown = operands[: self.view.arity]
        text = f"{', '.join(shown)} -> {self.out}{kinds}"
        if replicated := self.replicated - {_K}:
            text += f"; replicated: {' '.join(sorted(replicated))}"
        return parse_rule(text)


def integer_rule(view: NodeView) -> OpRule:
    """MatMulInteger: `b m k, k n, m, n -> b m n; sum: k`."""
    p = _Product(view, 0, 1)
    points = [p.scale(2, rows=True) if view.arity > 2 else "", p.scale(3) if view.arity > 3 else ""]
    return p.rule([p.left, p.right, *points], f"; sum: {_K}")


def integer_local(node: LocalNode) -> Sequence[ir.Value]:
    """Padding of a sharded K gets the left zero point; the sum is partial."""
    if not node.atoms(_K):
        return node.copy()
    left = _filled_left(node, 2)
    return node.copy([left, *node.inputs[1:]])


def _filled_left(node: LocalNode, point: int) -> ir.Value:
    """The left operand with its zero point as the padding of K."""
    zero = node.inputs[point] if node.has(point) else None
    shape = node.in_shape(point) if zero is not None else ()
    if zero is not None and len(shape) == 1 and shape != (1,):
        zero = node.builder.reshape(zero, [*shape, 1])
    elif zero is not None and len(shape) == 1:
        zero = node.builder.reshape(zero, [])
    return filled(node, node.input(0), 0, _K, zero)


def _summed(node: LocalNode, left: ir.Value, right: ir.Value, *points: ir.Value | None) -> ir.Value:
    """The int32 product of this device's shard of K, all-reduced."""
    shape = node.out_shape()
    total = node.op("MatMulInteger", left, right, *points, dtype=INT32, shape=shape)
    return node.all_reduce(total, node.atoms(_K))


def qlinear_rule(view: NodeView) -> OpRule:
    """QLinearMatMul: products over K are summed in int32, then rounded."""
    p = _Product(view, 0, 3)
    one = [p.scale(1, rows=True), p.scale(2, rows=True)]
    other = [p.scale(4), p.scale(5)]
    split = is_single(view, 1) and is_single(view, 6)
    kind = "special" if split else "replicated"
    operands = [p.left, *one, p.right, *other, p.scale(6, rows=True), p.scale(7, rows=True)]
    return p.rule(operands, f"; {kind}: {_K}")


def qlinear_local(node: LocalNode) -> Sequence[ir.Value]:
    """MatMulInteger of the shard of K, an all-reduce, and one rounding."""
    if not node.atoms(_K):
        return node.copy()
    left = _filled_left(node, 2)
    total = _summed(node, left, node.input(3), node.input(2), node.input(5))
    scale = output_scale(node, node.input(1), node.input(4), node.input(6), node.in_shape(4))
    return (requantised(node, total, scale, node.input(7), node.out_shape()),)


def gemm_rule(view: NodeView) -> OpRule:
    """QGemm (com.microsoft): Gemm of quantised operands with an int32 bias."""
    p = _Product(view, 0, 3)
    operands = [p.left, p.scale(1), p.scale(2), p.right, p.scale(4), p.scale(5)]
    operands += [p.added(6) if view.arity > 6 else ""]
    operands += [p.scale(i) if view.arity > i else "" for i in (7, 8)]
    return p.rule(operands, f"; special: {_K}")


def gemm_local(node: LocalNode) -> Sequence[ir.Value]:
    """MatMulInteger of the shard of K, an all-reduce, the bias, and one scaling."""
    if not node.atoms(_K):
        return node.copy()
    view, out = node.view, node.out_shape()
    left, right = _filled_left(node, 2), node.input(3)
    if view.attr("transA", 0):
        left = _transposed(node, left, node.in_shape(0))
    if view.attr("transB", 0):
        right = _transposed(node, right, node.in_shape(3))
    total = _summed(node, left, right, node.input(2), node.input(5))
    if view.has(6):
        total = node.op("Add", total, node.input(6), shape=out)
    alpha = node.builder.const(float(view.attr("alpha", 1.0)))
    first = node.op("Mul", alpha, node.builder.reshape(node.input(1), []), shape=[])
    scaled = node.input(7) if view.has(7) else None
    scale = output_scale(node, first, node.input(4), scaled, node.in_shape(4))
    if scaled is None:
        return (node.op("Mul", node.builder.cast(total, FLOAT), scale, shape=out),)
    return (requantised(node, total, scale, node.input(8) if view.has(8) else None, out),)


def _transposed(node: LocalNode, x: ir.Value, shape: Sequence[Dim]) -> ir.Value:
    return node.op("Transpose", x, shape=list(shape)[::-1], perm=[1, 0])


def float_rule(view: NodeView) -> OpRule:
    """MatMulIntegerToFloat (com.microsoft): a_scale · b_scale · (integer product) + bias."""
    p = _Product(view, 0, 1)
    operands = [p.left, p.right, p.scale(2, rows=True), p.scale(3)]
    operands += [p.scale(4, rows=True) if view.arity > 4 else ""]
    operands += [p.scale(5) if view.arity > 5 else "", p.added(6) if view.arity > 6 else ""]
    return p.rule(operands, f"; special: {_K}")


def float_local(node: LocalNode) -> Sequence[ir.Value]:
    """MatMulInteger of the shard of K, an all-reduce, the scales and the bias."""
    if not node.atoms(_K):
        return node.copy()
    left = _filled_left(node, 4)
    points = [node.inputs[i] if node.has(i) else None for i in (4, 5)]
    total = _summed(node, left, node.input(1), *points)
    bias = node.input(6) if node.has(6) else None
    return (_scaled(node, total, node.input(2), 3, bias),)


def _scaled(
    node: LocalNode, total: ir.Value, left: ir.Value, right: int, bias: ir.Value | None
) -> ir.Value:
    out = node.out_shape()
    scale = output_scale(node, left, node.input(right), None, node.in_shape(right))
    y = node.op("Mul", node.builder.cast(total, FLOAT), scale, shape=out)
    return y if bias is None else node.op("Add", y, bias, shape=out)


def dynamic_rule(view: NodeView) -> OpRule:
    """DynamicQuantizeMatMul (com.microsoft): quantises the undivided left operand by its range."""
    p = _Product(view, 0, 1)
    operands = [p.left, p.right, p.scale(2), p.scale(3) if view.arity > 3 else ""]
    operands += [p.added(4) if view.arity > 4 else ""]
    free = {n for n in p.left.split() if n not in ("1", _K)} - p.replicated
    kinds = f"; special: {' '.join(sorted({_K, *free}))}"
    return p.rule(operands, kinds)


def dynamic_local(node: LocalNode) -> Sequence[ir.Value]:
    """All-reduces the range if the left operand is sharded, and the product if K is."""
    factors = node.split_factors("special")
    if not factors:
        return node.copy()
    left, scale, point = ranged(node, node.input(0), factors, node.in_shape(0))
    left = filled(node, left, 0, _K, point)
    right_point = node.inputs[3] if node.has(3) else None
    total = _summed(node, left, node.input(1), point, right_point)
    bias = node.input(4) if node.has(4) else None
    return (_scaled(node, total, scale, 2, bias),)


DEFS: tuple[OpDef, ...] = (
    OpDef("", "MatMulInteger", 10, integer_rule, integer_local, gradient=INTEGERS),
    OpDef("", "QLinearMatMul", 10, qlinear_rule, qlinear_local, gradient=FOR_INFERENCE),
    OpDef(MICROSOFT, "QGemm", 1, gemm_rule, gemm_local, gradient=FOR_INFERENCE, infer=infer_gemm),
    OpDef(
        MICROSOFT,
        "MatMulIntegerToFloat",
        1,
        float_rule,
        float_local,
        gradient=FOR_INFERENCE,
        infer=infer_product,
    ),
    OpDef(
        MICROSOFT,
        "DynamicQuantizeMatMul",
        1,
        dynamic_rule,
        dynamic_local,
        gradient=FOR_INFERENCE,
        infer=infer_product,
    ),
)
