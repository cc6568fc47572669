"""The gradients of If, Scan and Loop."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.autodiff.differentiate import differentiate
from onnxpar.core.errors import ModelError
from onnxpar.ops.table import REGISTRY
from tests.onnxpar.ops.gradient_harness import GradCase, chosen

IF = """y = If (c) <
    then_branch = t () => (double[N,4] p) { q = Mul(x, x) p = MatMul(q, w) },
    else_branch = e () => (double[N,4] r) { r = Mul(x, k) }
>"""
IF_SUMS = """y = If (c) <
    then_branch = t () => (double[4,2] p) { q = Transpose(x) p = MatMul(q, z) },
    else_branch = e () => (double[4,2] r) { q = Transpose(x) s = MatMul(q, z) r = Tanh(k) }
>"""
IF_DEEP = """y, v = If (c) <
    then_branch = t () => (double[S,N] p, double[N] a) {
        p = If (d) < then_branch = u () => (double[S,N] i) { i = Tanh(x) },
                     else_branch = f () => (double[S,N] j) { j = Mul(x, h) } >
        a = Identity(h) },
    else_branch = e () => (double[S,N] r, double[N] b) { r = Neg(x) b = Mul(h, h) }
>"""
SCAN = """last, ys = Scan <num_scan_inputs = 1, body = b
    (double[N,3] h, double[N,2] x) => (double[N,3] n, double[N,3] o)
    { a = MatMul(x, w) b = MatMul(h, r) s = Sum(a, b, v) n = Tanh(s) o = Mul(n, n) }
> (h0, xs)"""
SCAN_AXES = """last, ys = Scan <num_scan_inputs = 2, scan_input_axes = [1, -1],
    scan_output_axes = [1], scan_input_directions = [1, 0], scan_output_directions = [1], body = b
    (double[N] h, double[N] x, double[N] z) => (double[N] n, double[N] o)
    { a = Mul(x, h) n = Add(a, z) o = Exp(z) }
> (h0, xs, zs)"""
SCAN_COUNTS = """last, count, ys = Scan <num_scan_inputs = 1, body = b
    (double[2,N] h, int64 i, double[2,N] x) => (double[2,N] n, int64 j, double[N] o)
    { one = Constant<value_int = 1>() j = Add(i, one) g = Gather(v, i)
      a = Mul(x, g) n = Add(a, h) first = Constant<value_ints = [0]>()
      o = ReduceSum<keepdims = 0>(x, first) }
> (h0, zero, xs)"""
LOOP = """last, ys = Loop (m, t, h0) < body = b
    (int64 i, bool go, double[N,3] h) => (bool on, double[N,3] n, double[N,3] o)
    { on = Identity(go) a = MatMul(h, r) g = Gather(x, i) s = Add(a, g) n = Tanh(s) o = Exp(h) }
>"""
LOOP_POWER = """last = Loop (m, , h0) < body = b
    (int64 i, bool go, double[N] h) => (bool on, double[N] n)
    { on = Constant<value = bool {1}>() n = Mul(h, x) }
>"""
LOOP_BRANCH = """last = Loop (m, t, h0) < body = b
    (int64 i, bool go, double[N,2] h) => (bool on, double[N,2] n)
    { on = Identity(go)
      c = Cast<to = 9>(i)
      n = If (c) < then_branch = u () => (double[N,2] p) { q = MatMul(h, w) p = Tanh(q) },
                   else_branch = e () => (double[N,2] r) { r = Mul(h, h) } > }
>"""


def _if(taken: bool) -> Any:
    return lambda torch, x, w, k, c: ((x * x) @ w if taken else x * k) + 0 * (w.sum() + k.sum())


def _if_sums(taken: bool) -> Any:
    return lambda torch, x, z, k, c: (x.T @ z + 0 * k) if taken else (torch.tanh(k) + 0 * (x.T @ z))


def _if_deep(torch: Any, x: Any, h: Any, c: Any, d: Any) -> Any:
    return x * h, h


def _scan(torch: Any, h0: Any, xs: Any, w: Any, r: Any, v: Any) -> Any:
    h, out = h0, []
    for x in xs:
        h = torch.tanh(x @ w + h @ r + v)
        out.append(h * h)
    return h, torch.stack(out)


def _scan_axes(torch: Any, h0: Any, xs: Any, zs: Any) -> Any:
    h, steps = h0, xs.shape[1]
    for t in range(steps):
        h = xs[:, steps - 1 - t] * h + zs[:, t]
    return h, torch.flip(torch.exp(zs), (1,))


def _scan_counts(torch: Any, h0: Any, xs: Any, v: Any) -> Any:
    return h0 + (xs * v[: xs.shape[0], None, None]).sum(0), xs.sum(1)


def _loop(torch: Any, h0: Any, x: Any, r: Any) -> Any:
    h, out = h0, []
    for i in range(3):
        out.append(torch.exp(h))
        h = torch.tanh(h @ r + x[i])
    return h, torch.stack(out)


def _branches(torch: Any, h0: Any, w: Any) -> Any:
    return torch.tanh(torch.tanh((h0 * h0) @ w) @ w)


YES = np.array(True)
CASES = [
    *(
        GradCase(nodes, operands | {"c": "bool"}, torch_of(taken), data={"c": np.array(taken)})
        for nodes, operands, torch_of in (
            (IF, {"x": "double[N,4]", "w": "double[4,4]", "k": "double[4]"}, _if),
            (IF_SUMS, {"x": "double[N,4]", "z": "double[N,2]", "k": "double[4,2]"}, _if_sums),
        )
        for taken in (True, False)
    ),
    GradCase(
        IF_DEEP,
        {"x": "double[S,N]", "h": "double[N]", "c": "bool", "d": "bool"},
        _if_deep,
        data={"c": YES, "d": np.array(False)},
        reference=False,
    ),
    GradCase(
        SCAN,
        {
            "h0": "double[N,3]",
            "xs": "double[S,N,2]",
            "w": "double[2,3]",
            "r": "double[3,3]",
            "v": "double[3]",
        },
        _scan,
        reference=False,
    ),
    GradCase(
        SCAN_AXES,
        {"h0": "double[N]", "xs": "double[N,S]", "zs": "double[N,S]"},
        _scan_axes,
        reference=False,
    ),
    GradCase(
        SCAN_COUNTS,
        {"h0": "double[2,N]", "xs": "double[S,2,N]", "v": "double[6]"},
        _scan_counts,
        consts={"zero": np.array(0)},
        reference=False,
    ),
    GradCase(
        LOOP,
        {"h0": "double[N,3]", "x": "double[4,N,3]", "r": "double[3,3]"},
        _loop,
        consts={"m": np.array(3), "t": YES},
        reference=False,
    ),
    GradCase(
        LOOP_POWER,
        {"h0": "double[N]", "x": "double[N]"},
        lambda torch, h0, x: h0 * x**4,
        consts={"m": np.array(4)},
        reference=False,
    ),
    GradCase(
        LOOP_BRANCH,
        {"h0": "double[N,2]", "w": "double[2,2]"},
        _branches,
        consts={"m": np.array(3), "t": YES},
        reference=False,
    ),
]


@pytest.mark.parametrize("case", chosen(CASES, 4), ids=lambda c: c.nodes)
def test_gradients(case: GradCase) -> None:
    case.check()


def test_a_loop_that_takes_no_step_is_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> g (double[N] x) => (double y) '
        "<int64 m = {0}, bool t = {1}> { h = Loop (m, t, x) < body = b "
        "(int64 i, bool c, double[N] s) => (bool c2, double[N] s2) "
        "{ c2 = Identity (c) s2 = Mul (s, s) } > y = ReduceSum<keepdims = 0> (h) }"
    )
    known = analyse(ir.from_proto(model), {})
    with pytest.raises(ModelError, match="needs at least one step, got a trip count of 0"):
        differentiate(known.model, known.env, REGISTRY, "y", ["x"])
