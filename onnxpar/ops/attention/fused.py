"""Attention as one operator, and its gradient: the scores exist for a few queries at a time.

Rank graphs of trainings have these operators in place of the product, mask, Softmax and product of
exporters (`onnxpar.ops.attention.recognise`). The scores of all queries, which grow with the square
of the sequence, are then no values of the graph: the gradient computes them again, as in selective
recomputation (Korthikanti et al., 2022) and flash attention (Dao et al., 2022).
"""

from dataclasses import dataclass

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.function import VERSION, Function
from onnxpar.ops.operator import FOR_RANKS, OpDef, written_only

_SCORES = """
    scale0 = Constant<value_float: float = @scale>()
    scale1 = CastLike(scale0, q)
    product = MatMul(q, kt)
    scaled = Mul(product, scale1)
"""
_ZERO = """
    number = Constant<value = float {0.0}>()
    zero = CastLike(number, q)
"""
_BIASED = f"""
    {_SCORES}
    scores = Add(scaled, bias)
    shares = Softmax<axis = -1>(scores)
"""
_SAFE = f"""
    {_SCORES}
    {_ZERO}
    scores = Add(scaled, bias)
    softmax = Softmax<axis = -1>(scores)
    none = IsNaN(softmax)
    shares = Where(none, zero, softmax)
"""
_MASKED = f"""
    {_SCORES}
    {_ZERO}
    hidden0 = Constant<value_float: float = @hidden>()
    hidden1 = CastLike(hidden0, q)
    scores = Where(seen, scaled, hidden1)
    shares = Softmax<axis = -1>(scores)
"""


def _forward(name: str, mask: str, shares: str, attributes: str = "scale") -> Function:
    return Function(f"""
        {name} <{attributes}> (q, kt, v, {mask}) => (y) {{
            {shares}
            y = MatMul(shares, v)
        }}
    """)


def _backward(
    name: str, mask: str, shares: str, attributes: str = "scale", kept: str = "Identity(dscores)"
) -> Function:
    return Function(f"""
        {name} <{attributes}> (dy, q, kt, v, {mask}) => (dq, dkt, dv) {{
            {shares}
            dshares = com.microsoft.FusedMatMul<transB = 1>(dy, v)
            last = Constant<value = int64[1] {{-1}}>()
            part = Mul(dshares, shares)
            total = ReduceSum<keepdims = 1>(part, last)
            share = Mul(shares, total)
            dscores = Sub(part, share)
            dkept = {kept}
            dproduct = Mul(dkept, scale1)
            dq = com.microsoft.FusedMatMul<transB = 1>(dproduct, kt)
            dkt = com.microsoft.FusedMatMul<transA = 1>(q, dproduct)
            dv = com.microsoft.FusedMatMul<transA = 1>(shares, dy)
        }}
    """)


@dataclass(frozen=True)
class Form:
    """An attention by its mask.

    Attributes:
        forward: The operator.
        backward: Its gradient.
    """

    forward: Function
    backward: Function


BIASED = Form(
    _forward("ScaledDotProductAttention", "bias", _BIASED),
    _backward("ScaledDotProductAttentionGrad", "bias", _BIASED),
)
"""A bias is added to the scores."""
SAFE = Form(
    _forward("SafeScaledDotProductAttention", "bias", _SAFE),
    _backward("SafeScaledDotProductAttentionGrad", "bias", _SAFE),
)
"""The same; shares that are no numbers, as where a bias of -inf hides all keys, count as zeros."""
MASKED = Form(
    _forward("MaskedScaledDotProductAttention", "seen", _MASKED, "scale, hidden"),
    _backward(
        "MaskedScaledDotProductAttentionGrad",
        "seen",
        _MASKED,
        "scale, hidden",
        "Where(seen, dscores, zero)",
    ),
)
"""Scores that are not seen are replaced by a number."""

DEFS = tuple(
    OpDef(DOMAIN, function.name, VERSION, written_only, gradient=FOR_RANKS, function=function)
    for form in (BIASED, SAFE, MASKED)
    for function in (form.forward, form.backward)
)
