"""Normalizer of `ai.onnx.ml`: each row is divided by its norm."""

from collections.abc import Sequence

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.local_helpers import BOOL, reduced, work_dtype
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import BY_BODY, OpDef
from onnxpar.ops.slots import Library

_NORMS = {"MAX": "ReduceMax", "L1": "ReduceL1", "L2": "ReduceL2"}
"""As onnxruntime has them: MAX is the greatest element, which may be negative, whereas
`onnx.reference` takes absolute values; L1 sums absolute values, whereas ONNX's text does not."""


def _norm(view: NodeView) -> str:
    norm: str = view.attr("norm", "MAX")
    if norm not in _NORMS:
        raise view.fail(f"'norm': expected MAX, L1 or L2, got {norm!r}")
    rank = len(view.shape(0))
    if rank not in (1, 2):
        raise view.fail(f"expected an operand with 1 or 2 dims, got {rank}")
    return norm


def infer_normalizer(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """As the operand, of float32 whatever its type."""
    x = node.inputs[0]
    if x is not None and x.shape is not None:
        context.set_shape_and_dtype(node.outputs[0], x.shape, ir.DataType.FLOAT)


def normalizer_rule(view: NodeView) -> OpRule:
    """`n c -> n c; special: c`; a tensor with one dim is one row.

    Raises:
        ModelError: The rank is not 1 or 2, or there is no such norm.
    """
    _norm(view)
    dims = "n c" if len(view.shape(0)) == 2 else "c"
    return parse_rule(f"{dims} -> {dims}; special: c")


def normalizer_local(node: LocalNode) -> Sequence[ir.Value]:
    """The norm of the local part of each row, all-reduced; rows of norm 0 are unchanged.

    The node is never copied: the L2 kernel of onnxruntime 1.31 loses the signs of float32 and int32
    elements if it writes its result over its operand, and CUDA has no kernel.
    """
    shape, norm = node.in_shape(0), _norm(node.view)
    axes = [len(shape) - 1]
    wide = work_dtype(node.input(0).dtype)
    x = node.builder.cast(node.input(0), wide)
    greatest = norm == "MAX"
    kept = reduced(shape, axes)
    part = node.masked(x, 0, "c", "lowest" if greatest else 0, known_zero=node.zero[0])
    kind = "ReduceSumSquare" if norm == "L2" else _NORMS[norm]
    part = node.builder.reduce(kind, part, axes, keepdims=True)
    total = node.all_reduce(part, node.atoms("c"), "max" if greatest else "sum")
    if norm == "L2":
        total = node.op("Sqrt", total, shape=kept)
    none = node.op("Equal", total, node.builder.const(0, wide), dtype=BOOL, shape=kept)
    total = node.op("Where", none, node.builder.const(1, wide), total, dtype=wide, shape=kept)
    return (node.builder.cast(node.op("Div", x, total, shape=shape), node.out_dtype()),)


def normalizer_body(node: BodyNode) -> Sequence[ir.Value]:
    """Gives x / norm, and x in rows of norm 0."""
    wide = work_dtype(node.input(0).dtype)
    x = node.builder.cast(node.input(0), wide)
    axes = [len(node.shape(x)) - 1]
    norm = node.builder.reduce(_NORMS[_norm(node.view)], x, axes, keepdims=True)
    none = node.op("Equal", norm, node.number(0, norm), dtype=BOOL)
    norm = node.op("Where", none, node.number(1, norm), norm, dtype=wide)
    y = node.op("Div", x, norm)
    return [node.builder.cast(y, ir.DataType.FLOAT)]


DEFS = (
    OpDef(
        "ai.onnx.ml",
        "Normalizer",
        1,
        normalizer_rule,
        normalizer_local,
        gradient=BY_BODY,
        body=normalizer_body,
        infer=infer_normalizer,
        keeps_zero=True,
    ),
)
