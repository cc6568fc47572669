"""Fused updates of optimizers, which are elementwise over a parameter and its states."""

from collections.abc import Callable

from onnxpar.core.rule import OpRule, parse_rule
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.node_view import NodeView
from onnxpar.ops.elementwise.broadcast import axis_names
from onnxpar.ops.function import VERSION, Function
from onnxpar.ops.operator import NOT_DIFFERENTIABLE, OpDef
from onnxpar.ops.slots import IN_PLACE, Kernel

# In every step, `active` says whether anything changes: 1, or 0 if the gradients are not finite.

# p (1 - lr wd) - (lr scale) g, which is p - lr (scale g + wd p) in fewer passes.
SGD_STEP = Function("""
    SgdStep (p, g, scale, lr, weight_decay, active) => (new_p) {
        one = Constant<value = double {1.0}>()
        decay = Mul(lr, weight_decay)
        kept = Sub(one, decay)
        kept_t = CastLike(kept, p)
        rate = Mul(lr, scale)
        rate_t = CastLike(rate, p)
        old = Mul(p, kept_t)
        step = Mul(g, rate_t)
        next_p = Sub(old, step)
        changes = Cast<to = 9>(active)
        new_p = Where(changes, next_p, p)
    }
""")

# m starts as zeros, so the first step, m = g, differs only in the factor of g.
MOMENTUM_STEP = Function("""
    MomentumStep (p, g, m, scale, lr, momentum, dampening, first, weight_decay, active)
    => (new_p, new_m) {
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
        next_m = Add(sum, from_p)
        step = Mul(next_m, lr_t)
        next_p = Sub(p, step)
        changes = Cast<to = 9>(active)
        new_p = Where(changes, next_p, p)
        new_m = Where(changes, next_m, m)
    }
""")

_ADAM = (
    "p, g, m, v, scale, lr_corrected, beta1, beta1_complement, beta2, beta2_complement, eps, "
    "correction2_sqrt"
)
# The quotient of lr m / (1 - beta1^t) and sqrt(v / (1 - beta2^t)) + eps, both multiplied by
# sqrt(1 - beta2^t), which saves one pass.
_ADAM_STEP = """
    beta1_t = CastLike(beta1, p)
    beta2_t = CastLike(beta2, p)
    share1_t = CastLike(beta1_complement, p)
    share2_t = CastLike(beta2_complement, p)
    kept_m = Mul(m, beta1_t)
    from_m = Mul(gradient, share1_t)
    next_m = Add(kept_m, from_m)
    square = Mul(gradient, gradient)
    kept_v = Mul(v, beta2_t)
    from_v = Mul(square, share2_t)
    next_v = Add(kept_v, from_v)
    epsilon = Mul(eps, correction2_sqrt)
    epsilon_t = CastLike(epsilon, p)
    rate = Mul(lr_corrected, correction2_sqrt)
    rate_t = CastLike(rate, p)
    root = Sqrt(next_v)
    divisor = Add(root, epsilon_t)
    quotient = Div(next_m, divisor)
    step = Mul(quotient, rate_t)
    next_p = Sub(kept, step)
    changes = Cast<to = 9>(active)
    new_p = Where(changes, next_p, p)
    new_m = Where(changes, next_m, m)
    new_v = Where(changes, next_v, v)
"""

ADAM_STEP = Function(f"""
    AdamStep ({_ADAM}, weight_decay, active) => (new_p, new_m, new_v) {{
        scale_t = CastLike(scale, p)
        decay_t = CastLike(weight_decay, p)
        scaled = Mul(g, scale_t)
        from_p = Mul(p, decay_t)
        gradient = Add(scaled, from_p)
        kept = Identity(p)
        {_ADAM_STEP}
    }}
""")

ADAMW_STEP = Function(f"""
    AdamWStep ({_ADAM}, decay, active) => (new_p, new_m, new_v) {{
        scale_t = CastLike(scale, p)
        decay_t = CastLike(decay, p)
        gradient = Mul(g, scale_t)
        kept = Mul(p, decay_t)
        {_ADAM_STEP}
    }}
""")

# Row by row: onnxruntime adds up a complete matrix in too few lanes. For 4 million squares in
# float32, the error was 1.6e-4; by rows it is 1e-8.
SQUARE_SUM = Function("""
    SquareSum (x) => (sum) {
        square = Mul(x, x)
        last = Constant<value = int64[1] {-1}>()
        rows = ReduceSum<keepdims = 0>(square, last)
        sum = ReduceSum<keepdims = 0>(rows)
    }
""")


def _update_rule(function: Function, tensors: int) -> Callable[[NodeView], OpRule]:
    def rule(view: NodeView) -> OpRule:
        dims = " ".join(axis_names(len(view.shape(0))))
        operands = [dims] * tensors + ["."] * (len(function.inputs) - tensors)
        return parse_rule(f"{', '.join(operands)} -> {', '.join([dims] * len(function.outputs))}")

    rule.__doc__ = "Every dim of the parameter and its states; scalars are replicated."
    return rule


def square_sum_rule(view: NodeView) -> OpRule:
    """SquareSum: every dim is summed."""
    dims = " ".join(axis_names(len(view.shape(0))))
    return parse_rule(f"{dims} -> ; sum: {dims}")


def _op(function: Function, tensors: int, memory: Kernel, *, zero: bool = False) -> OpDef:
    return OpDef(
        DOMAIN,
        function.name,
        VERSION,
        _update_rule(function, tensors),
        gradient=NOT_DIFFERENTIABLE,
        keeps_zero=zero,
        memory=memory,
        function=function,
    )


_ADAM_MEMORY = Kernel(over=((0, 0), (2, 1), (3, 2)))

DEFS = (
    _op(SGD_STEP, 2, IN_PLACE, zero=True),
    _op(MOMENTUM_STEP, 3, Kernel(over=((0, 0), (2, 1))), zero=True),
    # Padding does not stay zero: if eps is zero, it is zero over zero.
    _op(ADAM_STEP, 4, _ADAM_MEMORY),
    _op(ADAMW_STEP, 4, _ADAM_MEMORY),
    OpDef(
        DOMAIN,
        SQUARE_SUM.name,
        VERSION,
        square_sum_rule,
        gradient=NOT_DIFFERENTIABLE,
        keeps_zero=True,
        function=SQUARE_SUM,
    ),
)
