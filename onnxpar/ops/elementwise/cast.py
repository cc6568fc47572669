"""Cast, CastLike and BitCast."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.new_nodes import constant
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.elementwise.cast_gradient import cast_gradient
from onnxpar.ops.folding import MOVED_TYPES, Array, Folding, Operands
from onnxpar.ops.local_node import LocalNode
from onnxpar.ops.operator import NotDifferentiable, OpDef
from onnxpar.ops.parts import same_node
from onnxpar.ops.sizes.computed_sizes import cast_elements
from onnxpar.ops.sizes.inference import infer_cast
from onnxpar.ops.slots import IN_PLACE, REARRANGES
from onnxpar.ops.value_patterns import unchanged

_F = ir.DataType
# Casts that are exact, so that a partial operand of any kind gives a partial result.
_WIDENING = {
    (_F.FLOAT16, _F.FLOAT),
    (_F.FLOAT16, _F.DOUBLE),
    (_F.BFLOAT16, _F.FLOAT),
    (_F.BFLOAT16, _F.DOUBLE),
    (_F.FLOAT, _F.DOUBLE),
}


def _linear(view: NodeView) -> str:
    value, result = view.node.inputs[0], view.node.outputs[0]
    source, target = (None if v is None else v.dtype for v in (value, result))
    if source is None or target is None:
        return ""
    if source == target or (source, target) in _WIDENING:
        return "; linear: any 0"
    # Rounding keeps the order of floats; a sum of rounded terms is not the rounded sum.
    both = source.is_floating_point() and target.is_floating_point()
    return "; linear: max 0, min 0" if both else ""


def cast_rule(view: NodeView) -> OpRule:
    """Cast: every dim; a sum may stay partial only if the cast is exact."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names} -> {names}{_linear(view)}")


def cast_like_rule(view: NodeView) -> OpRule:
    """CastLike: as Cast; only the type of the second operand is used."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names}, * -> {names}{_linear(view)}")


def cast_like_local(node: LocalNode) -> Sequence[ir.Value]:
    """A Cast to the type of the second operand, which the node then does not read."""
    return (node.builder.cast(node.input(0), node.out_dtype()),)


def bit_cast_rule(view: NodeView) -> OpRule:
    """BitCast: every dim."""
    names = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{names} -> {names}")


def fold_casts(graph: ir.Graph) -> None:
    """Replaces each CastLike of a constant to a known type, as is common in bodies, by a constant.

    Args:
        graph: The graph; it is changed. The types of its nodes' results need not be known.
    """
    for node in list(graph):
        if node.domain or node.op_type != "CastLike":
            continue
        value, like = node.inputs
        tensor = None if value is None else value.const_value
        dtype = None if like is None else like.dtype
        if value is None or tensor is None or dtype is None:
            continue
        folded = constant(f"{node.outputs[0].name}.folded", tensor.numpy(), dtype)
        graph.register_initializer(folded)
        ir.convenience.replace_all_uses_with(node.outputs[0], folded)
        graph.remove(node, safe=True)


def _folded(node: ir.Node, operands: Operands) -> tuple[Array] | None:
    """A cast whose result every kernel agrees on: no string, no number outside the type."""
    x, to = operands[0], node.attributes.get("to")
    like = node.inputs[-1]
    kind = ir.DataType(to.as_int()) if to is not None else like and like.dtype
    if x is None or kind not in MOVED_TYPES:
        return None
    target = np.dtype(kind.numpy())
    if target.kind in "iu":
        limits = np.iinfo(target)
        if x.dtype.kind == "f" and not (
            np.isfinite(x).all() and (np.abs(x) < 2.0 ** (limits.bits - 1)).all()
        ):
            return None
        if target.kind == "u" and x.dtype.kind == "f" and (x < 0).any():
            return None
    with np.errstate(over="ignore"):
        result = x.astype(target)
    return (result,)


_CAST = Folding("casts whose result is certain", MOVED_TYPES, elements=(0,), compute=_folded)

DEFS = (
    OpDef(
        "",
        "Cast",
        6,
        cast_rule,
        gradient=cast_gradient,
        keeps_zero=True,
        roles=REARRANGES,
        memory=IN_PLACE,
        infer=infer_cast,
        values=cast_elements,
        pattern=unchanged,
        folding=_CAST,
        on_part=same_node,
    ),
    OpDef(
        "",
        "CastLike",
        15,
        cast_like_rule,
        cast_like_local,
        gradient=cast_gradient,
        keeps_zero=True,
        infer=infer_cast,
        values=cast_elements,
        folding=_CAST,
    ),
    OpDef(
        "",
        "BitCast",
        26,
        bit_cast_rule,
        gradient=NotDifferentiable("its result is a bit pattern"),
        keeps_zero=True,
    ),
)
