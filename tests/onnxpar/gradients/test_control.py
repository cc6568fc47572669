"""The gradients of If, Scan and Loop."""

import numpy as np
import pytest
from harness import GradCase

IF = """y = If (c) <
    then_branch = t () => (double[N,4] p) { q = Mul(x, x) p = MatMul(q, w) },
    else_branch = e () => (double[N,4] r) { r = Mul(x, k) }
>"""
SCAN = """last, ys = Scan <num_scan_inputs = 1, body = b
    (double[N,3] h, double[N,2] x) => (double[N,3] hn, double[N,3] o)
    {{ a = MatMul(x, w) b = MatMul(h, r) s = Sum(a, b, v) hn = Tanh(s) o = Mul(hn, hn) }}{more}
> (h0, xs)"""
LOOP = """last, ys = Loop (m, t, h0) < body = b
    (int64 i, bool go, double[N,3] h) => (bool on, double[N,3] hn, double[N,3] o)
    { on = Identity(go) a = MatMul(h, r) g = Gather(x, i) s = Add(a, g) hn = Tanh(s) o = Exp(h) }
>"""
RECURRENT = {
    "h0": "double[N,3]",
    "xs": "double[S,N,2]",
    "w": "double[2,3]",
    "r": "double[3,3]",
    "v": "double[3]",
}


def _if(taken: bool):  # type: ignore[no-untyped-def]
    return lambda torch, x, w, k, c: ((x * x) @ w if taken else x * k) + 0 * (w.sum() + k.sum())


def _scan(torch, h0, xs, w, r, v):  # type: ignore[no-untyped-def]
    h, out = h0, []
    for x in xs:
        h = torch.tanh(x @ w + h @ r + v)
        out.append(h * h)
    return h, torch.stack(out)


CASES = [
    GradCase(
        IF,
        {"x": "double[N,4]", "w": "double[4,4]", "k": "double[4]", "c": "bool"},
        _if(taken),
        data={"c": np.array(taken)},
    )
    for taken in (True, False)
] + [
    GradCase(SCAN.format(more=""), RECURRENT, _scan, reference=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients(case: GradCase) -> None:
    case.check()
