"""Nodes with bodies, and recurrent networks."""

import numpy as np

from tests.onnxpar.ops.op_harness import Case

TRUE = {"t": np.array(True)}


def _lengths(*values: int) -> dict[str, np.ndarray]:
    return {"l": np.array(values, np.int32)}


BRANCHES = (
    Case(
        """y = If (c) <
            then_branch = a () => (float[N,6] p) { q = Relu(x) p = Mul(q, k) },
            else_branch = b () => (float[N,6] r) { r = Softmax<axis=1>(x) }
        >""",
        {"c": "bool", "x": "float[N,6]", "k": "float[6]"},
        feeds={"c": np.array(True)},
    ),
    # Heads: the product of the first reshape has two components, of which one may be sharded.
    Case(
        """y = If (c) <
            then_branch = a () => (float[N,4,3] p) { p = Reshape(x, s) },
            else_branch = b () => (float[N,4,3] r) { q = Neg(x) r = Reshape(q, s) }
        >""",
        {"c": "bool", "x": "float[N,12]"},
        {"s": np.array([0, 4, 3])},
        {"c": np.array(False)},
    ),
    # A sum over the split dim is partial to the end of both branches.
    Case(
        """y = If (c) <
            then_branch = a () => (float[3,2] p) { q = Transpose(x) p = MatMul(q, z) },
            else_branch = b () => (float[3,2] r) { q = Transpose(x) u = MatMul(q, z) r = Neg(u) }
        >""",
        {"c": "bool", "x": "float[N,3]", "z": "float[N,2]"},
        feeds={"c": np.array(False)},
    ),
    # Rows and columns of the product are one dim of the operand, which must not be split twice.
    Case(
        """y = If (c) <
            then_branch = a () => (float p) { t = Transpose(x) u = MatMul(x, t)
                                              p = ReduceSum<keepdims=0>(u) },
            else_branch = b () => (float r) { r = ReduceSum<keepdims=0>(x) }
        >""",
        {"c": "bool", "x": "float[N,4]"},
        feeds={"c": np.array(True)},
    ),
)

LOOPS = (
    Case(
        """h, ys = Loop (m, t, h0) < body = b
            (int64 i, bool go, float[N,4] s) => (bool on, float[N,4] u, float[N,4] o)
            { on = Identity(go) a = MatMul(s, w) u = Tanh(a) o = Add(u, s) }
        >""",
        {"h0": "float[N,4]", "w": "float[4,4]"},
        {**TRUE, "m": np.array(3)},
    ),
    # A state that grows, and an index that counts the steps.
    Case(
        """h, z = Loop (m, t, h0, z0) < body = b
            (int64 i, bool go, float[N,4] s, int64[N,q] e) => (bool on, float[N,4] u, int64[N,r] o)
            { on = Identity(go) g = Gather(x, i) u = Mul(s, g)
              k = Cast<to=7>(s) o = Concat<axis=1>(e, k) }
        >""",
        {"h0": "float[N,4]", "z0": "int64[N,2]", "x": "float[6,N,4]"},
        {**TRUE, "m": np.array(3)},
    ),
    # A condition that ends the loop, of a value that all devices have.
    Case(
        """h, k = Loop (m, t, h0, k0) < body = b
            (int64 i, bool go, float[N,4] s, float j) => (bool on, float[N,4] u, float l)
            { l = Add(j, one) on = Less(l, end) u = Mul(s, s) }
        >""",
        {"h0": "float[N,4]"},
        {
            **TRUE,
            "m": np.array(9),
            "k0": np.array(0, np.float32),
            "one": np.array(1, np.float32),
            "end": np.array(3, np.float32),
        },
    ),
    # A sum over the split dim is handed from step to step: the state begins with zero.
    Case(
        """total = Loop (m, t, zero) < body = b
            (int64 i, bool go, float[3,2] s) => (bool on, float[3,2] u)
            { on = Identity(go) g = Gather(x, i) p = Transpose(g) q = MatMul(p, z) u = Add(s, q) }
        >""",
        {"x": "float[4,N,3]", "z": "float[N,2]"},
        {**TRUE, "m": np.array(4), "zero": np.zeros((3, 2), np.float32)},
    ),
    Case(
        """h, ys = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [-1],
            scan_input_directions = [1], scan_output_directions = [1], body = b
            (float[N,3] h, float[N,3] x) => (float[N,3] n, float[N,3] o)
            { a = Mul(x, w) n = Mul(a, h) o = Exp(a) }
        > (h0, xs)""",
        {"h0": "float[N,3]", "xs": "float[N,4,3]", "w": "float[3]"},
    ),
)


def _shapes(gates: int, directions: int, batch_first: bool = False) -> dict[str, str]:
    state = f"[N,{directions},3]" if batch_first else f"[{directions},N,3]"
    return {
        "x": "float[N,4,2]" if batch_first else "float[4,N,2]",
        "w": f"float[{directions},{3 * gates},2]",
        "r": f"float[{directions},{3 * gates},3]",
        "b": f"float[{directions},{6 * gates}]",
        "h0": f"float{state}",
        "c0": f"float{state}",
        "p": f"float[{directions},9]",
    }


def _some(shapes: dict[str, str], *names: str) -> dict[str, str]:
    return {name: shapes[name] for name in names}


RECURRENT = (
    Case("y, h = RNN<hidden_size=3>(x, w, r)", _some(_shapes(1, 1), "x", "w", "r")),
    Case(
        """y, h = RNN<hidden_size=3, direction="reverse", clip=4.0>(x, w, r, b, l, h0)""",
        {n: t.replace("N", "5") for n, t in _some(_shapes(1, 1), *"xwrb", "h0").items()},
        _lengths(4, 1, 3, 2, 4),
    ),
    *(
        Case(
            f"""y, h = GRU<hidden_size=3, direction="{way}", linear_before_reset={before}>
                (x, w, r, b, l, h0)""",
            {**_some(_shapes(3, count), "x", "w", "r", "b", "h0"), "l": "int32[N]"},
            feeds=_lengths(4, 1, 3, 2, 4),
        )
        for way, count, before in (("forward", 1, 0), ("bidirectional", 2, 1))
    ),
    *(
        Case(
            f"""y, h, c = LSTM<hidden_size=3, direction="{way}", input_forget={coupled}>
                (x, w, r, b, l, h0, c0, p)""",
            {**_shapes(4, count), "l": "int32[N]"},
            feeds=_lengths(4, 1, 3, 2, 4),
        )
        for way, count, coupled in (("reverse", 1, 0), ("bidirectional", 2, 1))
    ),
    Case(
        """y, h, c = LSTM<hidden_size=3, direction="bidirectional">(x, w, r, b)""",
        _some(_shapes(4, 2), "x", "w", "r", "b"),
        sizes={"N": 2},
    ),
    # Directions that differ in more than the direction are not sharded.
    Case(
        """y = RNN<hidden_size=3, direction="bidirectional", activations=["Tanh", "Relu"]>
            (x, w, r)""",
        _some(_shapes(1, 2), "x", "w", "r"),
    ),
)

CASES = (*BRANCHES, *LOOPS, *RECURRENT)
