"""Operators on text and image files, which are replicated."""

from collections.abc import Callable

import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, OpDef

_TEXT = "it computes on text, which no collective can transfer"
_IMAGE = "the bytes of an image file are decoded sequentially"


def _replicated(reason: str) -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        raise view.fail(reason)

    rule.__doc__ = f"Replicated: {reason}."
    return rule


def tf_idf_rule(view: NodeView) -> OpRule:
    """TfIdfVectorizer: the rows may be sharded, but not the words of a row; text is replicated."""
    value = view.node.inputs[0]
    if value is None or value.dtype == ir.DataType.STRING:
        raise view.fail(_TEXT)
    rows = "b " if len(view.shape(0)) == 2 else ""
    return parse_rule(f"{rows}C -> {rows}V; replicated: C V")


DEFS = (
    *(
        OpDef("", name, version, _replicated(_TEXT), gradient=NOT_DIFFERENTIABLE)
        for name, version in (
            ("RegexFullMatch", 20),
            ("StringConcat", 20),
            ("StringNormalizer", 10),
            ("StringSplit", 20),
        )
    ),
    OpDef("", "ImageDecoder", 20, _replicated(_IMAGE), gradient=NOT_DIFFERENTIABLE),
    OpDef("", "TfIdfVectorizer", 9, tf_idf_rule, gradient=NOT_DIFFERENTIABLE),
)
