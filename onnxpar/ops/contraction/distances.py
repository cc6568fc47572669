"""CDist: the distances between the rows of two matrices."""

from collections.abc import Sequence

import onnx_ir as ir
from onnx_shape_inference import ShapeInferenceContext

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.local_helpers import copy_or
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import BY_BODY, OpDef
from onnxpar.ops.slots import Library


def _euclidean(view: NodeView) -> bool:
    return bool(view.attr("metric", "sqeuclidean") == "euclidean")


def cdist_rule(view: NodeView) -> OpRule:
    """`m k, n k -> m n; sum: k`; the root of the sums is taken once all of them are added."""
    return parse_rule(f"m k, n k -> m n; {'special' if _euclidean(view) else 'sum'}: k")


def cdist_local(node: LocalNode) -> Sequence[ir.Value]:
    """Squares of the local columns, all-reduced, and their root."""
    (factor,) = node.split_factors("special")
    shape = (node.in_shape(0)[0], node.in_shape(1)[0])
    a, b = (node.masked(node.input(i), i, factor, 0, known_zero=node.zero[i]) for i in range(2))
    part = node.op("CDist", a, b, shape=shape, domain=MICROSOFT, metric="sqeuclidean")
    return (node.op("Sqrt", node.all_reduce(part, node.atoms(factor)), shape=shape),)


def cdist_body(node: BodyNode) -> Sequence[ir.Value]:
    """Gives the sum of squares of all differences, or its root."""
    a, b = node.input(0), node.input(1)
    (m, k), (n, _) = node.shape(a), node.shape(b)
    rows = node.builder.unsqueeze(a, [1])
    difference = node.op("Sub", rows, node.builder.unsqueeze(b, [0]), shape=(m, n, k))
    kind = "ReduceL2" if _euclidean(node.view) else "ReduceSumSquare"
    return [node.builder.reduce(kind, difference, [2])]


def infer_cdist(library: Library, context: ShapeInferenceContext, node: ir.Node) -> None:
    """CDist: a distance for each row of the first matrix and each of the second."""
    a, b = node.inputs[:2]
    if a is not None and b is not None and a.shape is not None and b.shape is not None:
        context.set_shape_and_dtype(node.outputs[0], ir.Shape([a.shape[0], b.shape[0]]), a.dtype)


DEFS = (
    OpDef(
        MICROSOFT,
        "CDist",
        1,
        cdist_rule,
        copy_or(cdist_local),
        gradient=BY_BODY,
        body=cdist_body,
        infer=infer_cdist,
    ),
)
