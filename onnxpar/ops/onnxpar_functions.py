"""Operators of the domain `onnxpar` that say in standard operators what they compute.

They exist for speed: one node, where standard operators need many passes over memory. A graph that
calls one carries it as a model-local function. onnxruntime takes a registered kernel of the same
name where there is one and the function where there is none, so the graph means the same without
the runtime's library.

Functions are generic in the element type T of their tensors; optimizers' are called with float32
or float64. Scalars of optimizers are float64 and are rounded to T where they meet a tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, pi, sqrt

import onnx.parser
import onnx_ir as ir

from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import default_opset

VERSION = 1
MIN_OPSET = 18
"""Oldest opset of the default domain in which the bodies are written."""


@dataclass(frozen=True)
class Function:
    """An operator as a function.

    Attributes:
        name: Name of the operator.
        inputs: Names of its inputs, all of which must be given.
        outputs: Names of its outputs; the last ones may be left out.
        body: Its nodes, in ONNX's text form.
        attributes: Names of its attributes, all of which must be given.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    body: str
    attributes: tuple[str, ...] = ()

    def made(self, opset: int) -> ir.Function:
        """Returns the function for a version of the default domain."""
        attributes = f"<{', '.join(self.attributes)}>" if self.attributes else ""
        text = (
            f'<domain: "{DOMAIN}", opset_import: ["": {opset}]> {self.name} {attributes} '
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

_GRADIENT = ("dy", "y")

RELU_GRAD = Function(
    "ReluGrad",
    _GRADIENT,
    ("dx",),
    # y, a result of Relu, is never negative; CUDA has no Greater for bfloat16.
    """
    number = Constant<value = float {0.0}>()
    zero = CastLike(number, dy)
    positive = Cast<to = 9>(y)
    dx = Where(positive, dy, zero)
    """,
)

TANH_GRAD = Function(
    "TanhGrad",
    _GRADIENT,
    ("dx",),
    """
    number = Constant<value = float {1.0}>()
    one = CastLike(number, dy)
    square = Mul(y, y)
    slope = Sub(one, square)
    dx = Mul(dy, slope)
    """,
)

SIGMOID_GRAD = Function(
    "SigmoidGrad",
    _GRADIENT,
    ("dx",),
    """
    number = Constant<value = float {1.0}>()
    one = CastLike(number, dy)
    part = Mul(dy, y)
    rest = Sub(one, y)
    dx = Mul(part, rest)
    """,
)

GELU_GRAD = Function(
    "GeluGrad",
    ("dy", "x"),
    ("dx",),
    # dy (Φ(x) + x φ(x)); 2 φ(x) = exp(log √(2/π) - x²/2), and the half of all terms goes to dy.
    f"""
    number1 = Constant<value = double {{{sqrt(0.5)!r}}}>()
    number2 = Constant<value = double {{{log(sqrt(2 / pi))!r}}}>()
    number3 = Constant<value = double {{1.0}}>()
    number4 = Constant<value = double {{0.5}}>()
    root = CastLike(number1, x)
    top = CastLike(number2, x)
    one = CastLike(number3, x)
    half = CastLike(number4, x)
    t = Mul(x, root)
    square = Mul(t, t)
    power = Sub(top, square)
    density = Exp(power)
    distribution = Erf(t)
    rise = Mul(x, density)
    sum = Add(distribution, rise)
    slope = Add(sum, one)
    half_dy = Mul(dy, half)
    dx = Mul(half_dy, slope)
    """,
)

_AXIS = """
    axis0 = Constant<value_int: int = @axis>()
    one_dim = Constant<value = int64[1] {-1}>()
    axes = Reshape(axis0, one_dim)
"""

SOFTMAX_GRAD = Function(
    "SoftmaxGrad",
    _GRADIENT,
    ("dx",),
    _AXIS
    + """
    part = Mul(dy, y)
    total = ReduceSum<keepdims = 1>(part, axes)
    share = Mul(y, total)
    dx = Sub(part, share)
    """,
    ("axis",),
)

LOG_SOFTMAX_GRAD = Function(
    "LogSoftmaxGrad",
    _GRADIENT,
    ("dx",),
    _AXIS
    + """
    total = ReduceSum<keepdims = 1>(dy, axes)
    softmax = Exp(y)
    share = Mul(softmax, total)
    dx = Sub(dy, share)
    """,
    ("axis",),
)

LAYER_NORMALIZATION_GRAD = Function(
    "LayerNormalizationGrad",
    ("dy", "x", "scale", "mean", "inv_std"),
    ("dx", "dscale", "dbias"),
    # The axis is counted from the end: -1 where the last dim alone is normalised. All axes are
    # constants once the body stands in a graph, whatever the rank.
    """
    zero = Constant<value = int64 {0}>()
    one = Constant<value = int64 {1}>()
    axis0 = Constant<value_int: int = @axis>()
    axes = Range(axis0, zero, one)
    leading = Constant<value = int64[1] {0}>()
    part = Shape(scale)
    mean_t = CastLike(mean, x)
    inverse = CastLike(inv_std, x)
    centred = Sub(x, mean_t)
    normal = Mul(centred, inverse)
    along = Mul(dy, normal)
    g = Mul(dy, scale)
    both = Mul(along, scale)
    mean_g = ReduceMean<keepdims = 1>(g, axes)
    mean_both = ReduceMean<keepdims = 1>(both, axes)
    rest = Sub(g, mean_g)
    bend = Mul(normal, mean_both)
    slope = Sub(rest, bend)
    dx = Mul(slope, inverse)
    along_rows = Flatten<axis: int = @axis>(along)
    dy_rows = Flatten<axis: int = @axis>(dy)
    along_sum = ReduceSum<keepdims = 0>(along_rows, leading)
    dy_sum = ReduceSum<keepdims = 0>(dy_rows, leading)
    dscale = Reshape(along_sum, part)
    dbias = Reshape(dy_sum, part)
    """,
    ("axis",),
)

CROSS_ENTROPY = Function(
    "SoftmaxCrossEntropyLoss",
    ("scores", "labels"),
    ("loss", "log_prob"),
    """
    loss, log_prob = SoftmaxCrossEntropyLoss<
        reduction: string = @reduction, ignore_index: int = @ignore_index>(scores, labels)
    """,
    ("reduction", "ignore_index"),
)

CROSS_ENTROPY_GRAD = Function(
    "SoftmaxCrossEntropyLossGrad",
    ("dloss", "log_prob", "labels"),
    ("dx",),
    # Of a loss that is a sum ("sum", dloss one element) or not reduced ("none", dloss shaped as the
    # labels): to spread dloss over the labels is right for both.
    """
    number = Constant<value = float {0.0}>()
    zero = CastLike(number, log_prob)
    none = Constant<value = int64 {0}>()
    classes = Constant<value = int64[1] {1}>()
    left_out = Constant<value_int: int = @ignore_index>()
    ignored = Equal(labels, left_out)
    rows = Shape(labels)
    each = Expand(dloss, rows)
    scale = Where(ignored, zero, each)
    place = Where(ignored, none, labels)
    column = Unsqueeze(place, classes)
    counted = Not(ignored)
    kept = Unsqueeze(counted, classes)
    scales = Unsqueeze(scale, classes)
    softmax = Exp(log_prob)
    scaled = Mul(softmax, scales)
    spread = Where(kept, scaled, zero)
    hit = Neg(scales)
    dx = ScatterElements<axis = 1, reduction = "add">(spread, column, hit)
    """,
    ("reduction", "ignore_index"),
)

GATHER_GRAD = Function(
    "GatherGrad",
    ("dy", "indices", "data"),
    ("dx",),
    # Along dim 0, by indices counted from the front; of `data` only the shape is read.
    """
    number = Constant<value = float {0.0}>()
    zero = CastLike(number, dy)
    last = Constant<value = int64[1] {-1}>()
    shape = Shape(data)
    start = Expand(zero, shape)
    place = Unsqueeze(indices, last)
    dx = ScatterND<reduction = "add">(start, place, dy)
    """,
)

FUNCTIONS: Mapping[str, Function] = {
    function.name: function
    for function in (
        *(SGD_STEP, MOMENTUM_STEP, ADAM_STEP, ADAMW_STEP, SQUARE_SUM),
        *(RELU_GRAD, TANH_GRAD, SIGMOID_GRAD, GELU_GRAD, SOFTMAX_GRAD, LOG_SOFTMAX_GRAD),
        *(LAYER_NORMALIZATION_GRAD, CROSS_ENTROPY, CROSS_ENTROPY_GRAD, GATHER_GRAD),
    )
}


def attach_functions(model: ir.Model) -> None:
    """Gives a model the functions that its nodes call. The model is changed."""
    opset = default_opset(model.opset_imports)
    for node in model.graph:
        if node.domain != DOMAIN or node.op_identifier() in model.functions:
            continue
        function = FUNCTIONS.get(node.op_type)
        if function is not None:
            model.functions[node.op_identifier()] = function.made(opset)
            model.opset_imports[DOMAIN] = VERSION
