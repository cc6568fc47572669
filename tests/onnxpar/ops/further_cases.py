"""Small nodes of the operators that stand by themselves: scans, searches, determinants, bits."""

import numpy as np

from tests.onnxpar.ops.op_harness import Case


def axis(value: int) -> dict[str, np.ndarray]:
    """The axis as a constant operand."""
    return {"axis": np.array(value)}


# Numbers near 1, so that products of seven neither vanish nor overflow.
NEAR_ONE = {"x": (np.linspace(0.5, 1.5, 70) * np.resize([1, -1, 1], 70)).reshape(5, 7, 2)}

RUNNING = tuple(
    Case(
        f"y = CumProd<exclusive={exclusive}, reverse={reverse}>(x, axis)",
        {"x": "float[N,7,2]"},
        axis(1),
        NEAR_ONE,
        opset=26,
        reference=True,
    )
    for exclusive in (0, 1)
    for reverse in (0, 1)
)
SEARCH = (
    Case("y = Hardmax(x)", {"x": "float[N,6]"}),
    Case("y = Hardmax<axis=1>(x)", {"x": "float[N,7,2]"}),
    Case("y = Hardmax<axis=0>(x)", {"x": "float[N,3]"}, feeds={"x": np.ones((5, 3))}),
)
MATRICES = (
    Case("y = Det(x)", {"x": "float[N,3,4,4]"}),
    Case("y = Det(x)", {"x": "float[N,2,2]"}, opset=11),
)
OTHER = (
    Case("y = Shrink<lambd=0.7, bias=0.2>(x)", {"x": "float[N,6]"}),
    Case("y = Shrink<lambd=-1.0, bias=1.5>(x)", {"x": "float[N,3,2]"}, opset=9),
    Case("y = Swish<alpha=1.5>(x)", {"x": "float[N,6]"}, opset=24),
    Case("y = Mean(a, b, c)", {"a": "float[N,6]", "b": "float[6]", "c": "float[N,1]"}),
    Case("y = BitCast<to=6>(x)", {"x": "float[N,6]"}, opset=26, reference=True),
)
CASES = (*RUNNING, *SEARCH, *MATRICES, *OTHER)
