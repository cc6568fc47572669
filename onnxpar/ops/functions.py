"""Operators of the domain `onnxpar` that say in standard operators what they compute.

They exist for speed: one node, where standard operators need many passes over memory. A graph that
calls one carries it as a model-local function. onnxruntime takes a registered kernel of the same
name where there is one and the function where there is none, so the graph means the same without
the runtime's library.

Functions are generic in the element type T of their tensors (float32 or float64). Scalars are
float64 and are rounded to T where they meet a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx.parser
import onnx_ir as ir

from onnxpar.passes.builder import DOMAIN

VERSION = 1
MIN_OPSET = 18
"""Oldest opset of the default domain in which the bodies are written."""


@dataclass(frozen=True)
class Function:
    """An operator as a function.

    Attributes:
        name: Name of the operator.
        inputs: Names of its inputs, all of which must be given.
        outputs: Names of its outputs.
        body: Its nodes, in ONNX's text form.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str

    def made(self, opset: int) -> ir.Function:
        """Returns the function for a version of the default domain."""
        text = (
            f'<domain: "{DOMAIN}", opset_import: ["": {opset}]> {self.name} '
            f"({', '.join(self.inputs)}) => ({', '.join(self.outputs)}) {{ {self.body} }}"
        )
        return ir.serde.deserialize_function(onnx.parser.parse_function(text))


_SCALES = ("scale", "lr", "weight_decay")

SGD_STEP = Function(
    "SgdStep",
    ("p", "g", *_SCALES),
    ("new_p",),
    # p (1 - lr wd) - (lr scale) g, which is p - lr (scale g + wd p) in fewer passes.
    """
    one = Constant<value = double {1.0}>()
    decay = Mul(lr, weight_decay)
    kept = Sub(one, decay)
    kept_t = CastLike(kept, p)
    rate = Mul(lr, scale)
    rate_t = CastLike(rate, p)
    old = Mul(p, kept_t)
    step = Mul(g, rate_t)
    new_p = Sub(old, step)
    """,
)

MOMENTUM_STEP = Function(
    "MomentumStep",
    ("p", "g", "m", "scale", "lr", "momentum", "dampening", "first", "weight_decay"),
    ("new_p", "new_m"),
    # m starts as zeros, so the first step, m = g, differs in the share of g alone.
    """
    one = Constant<value = double {1.0}>()
    later = Sub(one, first)
    damped = Mul(dampening, later)
    share = Sub(one, damped)
    g_share = Mul(share, scale)
    g_share_t = CastLike(g_share, p)
    p_share = Mul(share, weight_decay)
    p_share_t = CastLike(p_share, p)
    momentum_t = CastLike(momentum, p)
    lr_t = CastLike(lr, p)
    kept = Mul(m, momentum_t)
    from_g = Mul(g, g_share_t)
    from_p = Mul(p, p_share_t)
    sum = Add(kept, from_g)
    new_m = Add(sum, from_p)
    step = Mul(new_m, lr_t)
    new_p = Sub(p, step)
    """,
)

_ADAM = (
    *("p", "g", "m", "v", "scale", "lr_corrected", "beta1", "beta1_complement", "beta2"),
    *("beta2_complement", "eps", "correction2_sqrt"),
)
# The quotient of lr m / (1 - beta1^t) and sqrt(v / (1 - beta2^t)) + eps, both multiplied by
# sqrt(1 - beta2^t), which takes one pass less.
_ADAM_STEP = """
    beta1_t = CastLike(beta1, p)
    beta2_t = CastLike(beta2, p)
    share1_t = CastLike(beta1_complement, p)
    share2_t = CastLike(beta2_complement, p)
    kept_m = Mul(m, beta1_t)
    from_m = Mul(gradient, share1_t)
    new_m = Add(kept_m, from_m)
    square = Mul(gradient, gradient)
    kept_v = Mul(v, beta2_t)
    from_v = Mul(square, share2_t)
    new_v = Add(kept_v, from_v)
    epsilon = Mul(eps, correction2_sqrt)
    epsilon_t = CastLike(epsilon, p)
    rate = Mul(lr_corrected, correction2_sqrt)
    rate_t = CastLike(rate, p)
    root = Sqrt(new_v)
    divisor = Add(root, epsilon_t)
    quotient = Div(new_m, divisor)
    step = Mul(quotient, rate_t)
    new_p = Sub(kept, step)
"""

ADAM_STEP = Function(
    "AdamStep",
    (*_ADAM, "weight_decay"),
    ("new_p", "new_m", "new_v"),
    """
    scale_t = CastLike(scale, p)
    decay_t = CastLike(weight_decay, p)
    scaled = Mul(g, scale_t)
    from_p = Mul(p, decay_t)
    gradient = Add(scaled, from_p)
    kept = Identity(p)
    """
    + _ADAM_STEP,
)

ADAMW_STEP = Function(
    "AdamWStep",
    (*_ADAM, "decay"),
    ("new_p", "new_m", "new_v"),
    """
    scale_t = CastLike(scale, p)
    decay_t = CastLike(decay, p)
    gradient = Mul(g, scale_t)
    kept = Mul(p, decay_t)
    """
    + _ADAM_STEP,
)

SQUARE_SUM = Function(
    "SquareSum",
    ("x",),
    ("sum",),
    # Row by row: onnxruntime adds up a whole matrix in too few lanes, and 4 million squares came
    # out wrong by 1.6e-4 in float32; by rows it is 1e-8.
    """
    square = Mul(x, x)
    last = Constant<value = int64[1] {-1}>()
    rows = ReduceSum<keepdims = 0>(square, last)
    sum = ReduceSum<keepdims = 0>(rows)
    """,
)

FUNCTIONS: Mapping[str, Function] = {
    function.name: function
    for function in (SGD_STEP, MOMENTUM_STEP, ADAM_STEP, ADAMW_STEP, SQUARE_SUM)
}


def attach_functions(model: ir.Model) -> None:
    """Gives a model the functions that its nodes call. The model is changed."""
    opset = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    for node in model.graph:
        if node.domain != DOMAIN or node.op_identifier() in model.functions:
            continue
        function = FUNCTIONS.get(node.op_type)
        if function is not None:
            model.functions[node.op_identifier()] = function.made(opset)
            model.opset_imports[DOMAIN] = VERSION
