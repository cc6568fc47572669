"""Rotary positions (Su et al., 2021) in the form of exporters, in one operator, and the gradient.

Each element of a row has its own angle, and the halves of a row are turned against each other, as
`rotate_half` of transformers does: (a cos - b sin, b cos + a sin). ONNX's RotaryEmbedding has one
angle for each pair.
"""

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import aligned_operands, axis_names
from onnxpar.ops.function import VERSION, Function
from onnxpar.ops.fused.activation_gradients import ITSELF
from onnxpar.ops.operator import OpDef, for_ranks
from onnxpar.ops.slots import IN_PLACE

MOST_DIMS = 5
"""The most dims of a rotated tensor. With more, angles might broadcast over more groups of dims
than the kernels take: one for each dim but the last (`kAngleDims` in kernels/device/rotary.cuh)."""

ROTARY = Function("""
    RotaryEmbedding (x, cos, sin) => (y) {
        first, second = Split<axis = -1, num_outputs = 2>(x)
        opposite = Neg(second)
        turned = Concat<axis = -1>(opposite, first)
        along = Mul(x, cos)
        across = Mul(turned, sin)
        y = Add(along, across)
    }
""")

ROTARY_GRAD = Function("""
    RotaryEmbeddingGrad (dy, cos, sin) => (dx) {
        along = Mul(dy, cos)
        across = Mul(dy, sin)
        first, second = Split<axis = -1, num_outputs = 2>(across)
        opposite = Neg(first)
        turned = Concat<axis = -1>(second, opposite)
        dx = Add(along, turned)
    }
""")


def rotary_grad_rule(view: NodeView) -> OpRule:
    """Every dim but the last, which is turned; the cotangent may be a partial sum."""
    shape = view.shape(0)
    names = axis_names(len(shape))
    angles, replicated = aligned_operands(view, (1, 2), shape, names)
    dims = " ".join(names)
    fixed = " ".join(sorted({*replicated, names[-1]}))
    return parse_rule(f"{dims}, {', '.join(angles)} -> {dims}; replicated: {fixed}; linear: sum 0")


DEFS = (
    for_ranks(ROTARY.name, memory=IN_PLACE, function=ROTARY),
    OpDef(
        DOMAIN,
        ROTARY_GRAD.name,
        VERSION,
        rotary_grad_rule,
        gradient=ITSELF,
        keeps_zero=True,
        memory=IN_PLACE,
        function=ROTARY_GRAD,
    ),
)
