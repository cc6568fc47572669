"""Small nodes of the operators that extend, index, search and rearrange."""

import numpy as np
from op_harness import Case

N5 = {"N": 5}
_RNG = np.random.default_rng(7)


def ints(*values: int) -> np.ndarray:
    """A 1-D int64 constant."""
    return np.array(values, np.int64)


def scalar(value: float, dtype: type = np.float32) -> np.ndarray:
    """A 0-D constant."""
    return np.array(value, dtype)


PAD = (
    Case("y = Pad(x, p)", {"x": "float[N,6]"}, N5, {"p": ints(0, 1, 0, 2)}),
    Case("y = Pad(x, p)", {"x": "float[N,6]"}, N5, {"p": ints(0, 0, 0, 0)}),
    Case("y = Pad(x, p, c)", {"x": "float[N,6]"}, N5, {"p": ints(0, 2, 0, -1), "c": scalar(1)}),
    Case(
        "y = Pad(x, p, c)",
        {"x": "float[N,6]", "c": "float"},
        N5,
        {"p": ints(1, 0, 0, 0)},
        {"c": scalar(-1.5)},
    ),
    Case(
        "y = Pad(x, p, , a)",
        {"x": "float[N,3,6]"},
        N5,
        {"p": ints(1, 2, 1, 0), "a": ints(-1, 1)},
    ),
    *(
        Case(
            f'y = Pad<mode="{mode}">(x, p)',
            {"x": "float[N,4,3]"},
            N5,
            {"p": ints(0, 2, 1, 0, 1, 2)},
        )
        for mode in ("reflect", "edge", "wrap")
    ),
    Case("y = Pad<pads=[0,1,0,2], value=1.5>(x)", {"x": "float[N,6]"}, N5, opset=10),
    Case("y = Pad(x, p)", {"x": "int64[N,6]"}, N5, {"p": ints(0, 1, 0, 2)}),
)

TILE = (
    Case("y = Tile(x, r)", {"x": "float[N,3]"}, N5, {"r": ints(1, 4)}),
    Case("y = Tile(x, r)", {"x": "float[N,3,1]"}, N5, {"r": ints(2, 3, 5)}),
    Case("y = Tile(x, r)", {"x": "int64[N,1]"}, N5, {"r": ints(3, 1)}),
)

CASES = (*PAD, *TILE)
