"""Small nodes of the operators that extend, index, search and rearrange."""

import numpy as np

from tests.onnxpar.ops.op_harness import Case

_RNG = np.random.default_rng(7)


def ints(*values: int) -> np.ndarray:
    """A 1-D int64 constant."""
    return np.array(values, np.int64)


def scalar(value: float, dtype: type = np.float32) -> np.ndarray:
    """A 0-D constant."""
    return np.array(value, dtype)


PAD = (
    Case("y = Pad(x, p)", {"x": "float[N,6]"}, {"p": ints(0, 1, 0, 2)}),
    Case("y = Pad(x, p)", {"x": "float[N,6]"}, {"p": ints(0, 0, 0, 0)}),
    Case("y = Pad(x, p, c)", {"x": "float[N,6]"}, {"p": ints(0, 2, 0, -1), "c": scalar(1)}),
    Case(
        "y = Pad(x, p, c)",
        {"x": "float[N,6]", "c": "float"},
        {"p": ints(1, 0, 0, 0)},
        {"c": scalar(-1.5)},
    ),
    Case("y = Pad(x, p, , a)", {"x": "float[N,3,6]"}, {"p": ints(1, 2, 1, 0), "a": ints(-1, 1)}),
    *(
        Case(f'y = Pad<mode="{mode}">(x, p)', {"x": "float[N,4,3]"}, {"p": ints(0, 2, 1, 0, 1, 2)})
        for mode in ("reflect", "edge", "wrap")
    ),
    Case("y = Pad<pads=[0,1,0,2], value=1.5>(x)", {"x": "float[N,6]"}, opset=10),
    Case("y = Pad(x, p)", {"x": "int64[N,6]"}, {"p": ints(0, 1, 0, 2)}),
)

TILE = (
    Case("y = Tile(x, r)", {"x": "float[N,3]"}, {"r": ints(1, 4)}),
    Case("y = Tile(x, r)", {"x": "float[N,3,1]"}, {"r": ints(2, 3, 5)}),
    Case("y = Tile(x, r)", {"x": "int64[N,1]"}, {"r": ints(3, 1)}),
)

# Indices that name places more than once, from the end too, and others not at all.
_ELEMENTS = np.array([[0, -1, 6, 0], [3, 3, -7, 2], [5, 5, 5, 5], [1, 0, -2, -1], [0, 1, 2, 3]])
_DISTINCT = np.array([[0, -1, 1, 3], [3, 6, -7, 2], [5, 4, -4, 1], [1, 0, -2, -1], [0, 1, 2, 3]])

ELEMENTS = (
    *(
        Case(
            "y = GatherElements<axis=1>(d, i)",
            {"d": f"{kind}[N,7]", "i": f"{index}[N,4]"},
            feeds={"i": _ELEMENTS},
        )
        for kind, index in (("float", "int64"), ("int32", "int32"), ("bool", "int64"))
    ),
    Case("y = GatherElements(d, i)", {"d": "float[7,3]", "i": "int64[N,3]"}),
    Case("y = GatherElements(d, i)", {"d": "float[N,6]", "i": "int64[2,4]"}),
    *(
        Case(
            f'y = ScatterElements<axis=1, reduction="{reduction}">(d, i, u)',
            {"d": f"{kind}[N,7]", "i": "int64[N,4]", "u": f"{kind}[N,4]"},
            feeds={"i": _DISTINCT if reduction == "none" else _ELEMENTS},
            opset=18,
        )
        for reduction in ("none", "add", "mul", "max", "min")
        for kind in ("float", "int64")
    ),
    Case(
        "y = ScatterElements(d, i, u)",
        {"d": "float[12,3]", "i": "int64[2,3]", "u": "float[2,3]"},
        feeds={"i": [[0, 11, 3], [-1, 7, 2]]},
        opset=11,
    ),
    Case(
        "y = ScatterElements<axis=1>(d, i, u)",
        {"d": "bool[N,7]", "i": "int32[N,4]", "u": "bool[N,4]"},
        feeds={"i": _DISTINCT},
    ),
)

_ROWS = np.array([[0, -1], [0, 3], [-5, 3], [4, 2], [0, 3]])
_DISTINCT_ROWS = np.array([[0, -1], [3, 3], [-5, 2], [4, 3], [2, 0]])

ROWS = (
    Case("y = GatherND(d, i)", {"d": "float[5,4,3]", "i": "int64[N,2]"}, feeds={"i": _ROWS}),
    Case("y = GatherND(d, i)", {"d": "int32[N,6]", "i": "int64[2,3,1]"}),
    Case("y = GatherND(d, i)", {"d": "bool[5,4]", "i": "int64[N,2]"}, feeds={"i": _ROWS}),
    Case(
        "y = GatherND<batch_dims=1>(d, i)",
        {"d": "float[N,5,2]", "i": "int64[N,3,1]"},
        feeds={"i": np.array([0, 4, -1, 2, 3, -5, 1, 1, 0, 2, -2, 3, 4, 0, 2]).reshape(5, 3, 1)},
    ),
    Case("y = GatherND<batch_dims=2>(d, i)", {"d": "float[N,3,4]", "i": "int64[N,3,1]"}),
    *(
        Case(
            f'y = ScatterND<reduction="{reduction}">(d, i, u)',
            {"d": "float[5,4,3]", "i": "int64[N,2]", "u": "float[N,3]"},
            feeds={"i": _DISTINCT_ROWS if reduction == "none" else _ROWS},
            opset=18,
        )
        for reduction in ("none", "add", "mul", "max", "min")
    ),
    Case(
        "y = ScatterND(d, i, u)",
        {"d": "int64[7,N]", "i": "int64[2,2,1]", "u": "int64[2,2,N]"},
        feeds={"i": np.array([0, -1, 3, 2]).reshape(2, 2, 1)},
        opset=13,
    ),
    Case(
        'y = ScatterND<reduction="add">(d, i, u)',
        {"d": "float[6,N]", "i": "int64[2,2,1]", "u": "float[2,2,N]"},
    ),
)

# Rows with ties, and one that is all as low as padding is.
_TIES = np.array(
    [
        [1, 5, 2, 5, 5, 0, -1, 5, 2, 2, 2, 2],
        [-np.inf] * 12,
        [np.inf, 3, np.inf, 3, 3, 3, -np.inf, 3, 3, 3, 3, 3],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [4, 3, 2, 1, 0, 0, 1, 2, 3, 4, 5, 5],
    ]
)
_LOW = np.where(np.isinf(_TIES), np.sign(_TIES) * 128, _TIES).clip(-128, 127)

# Column 0 counts along dim 0; two writes of a row meet.
_COUNTED = np.array([[[r, c], [r, c]] for r, c in enumerate([3, 0, -1, 2, 2, 1])])

COUNTED = (
    Case("y = GatherND(d, i)", {"d": "float[6,4,N]"}, {"i": _COUNTED}),
    Case("y = GatherND(d, i)", {"d": "bool[6,4]"}, {"i": _COUNTED}),
    Case(
        "y = GatherND<batch_dims=1>(d, i)",
        {"d": "float[2,3,4]"},
        {"i": np.array([[[0, 1], [1, -1], [2, 3]]] * 2)},
    ),
    Case("y = GatherND(d, i)", {"d": "int64[6,N]"}, {"i": np.arange(6).reshape(6, 1)}),
    *(
        Case(
            f'y = ScatterND<reduction="{reduction}">(d, i, u)',
            {"d": "float[6,4,N]", "u": f"float[6,{length},N]"},
            {"i": _COUNTED[:, :length]},
        )
        for reduction, length in (("none", 1), ("add", 2), ("max", 2))
    ),
    Case(
        "y = ScatterND(d, i, u)",
        {"d": "int64[6,4]", "u": "int64[6,4]"},
        {"i": np.stack(np.meshgrid(np.arange(6), np.arange(4), indexing="ij"), -1)},
    ),
)

SEARCH = (
    *(
        Case(
            f"y = Arg{which}<axis=1, select_last_index={last}>(x)",
            {"x": "float[N,12]"},
            feeds={"x": _TIES},
        )
        for which in ("Max", "Min")
        for last in (0, 1)
    ),
    Case("y = ArgMax<axis=-1>(x)", {"x": "int32[N,12]"}, feeds={"x": _LOW}),
    Case("y = ArgMin<axis=1>(x)", {"x": "int8[N,12]"}, feeds={"x": _LOW}),
    Case("y = ArgMax<axis=0, keepdims=0>(x)", {"x": "float[N,3,2]"}),
    Case("y = ArgMin<keepdims=0>(x)", {"x": "double[7]"}, opset=11),
    *(
        Case(
            f"y, i = TopK<largest={largest}>(x, k)",
            {"x": "float[N,12]"},
            {"k": ints(k)},
            {"x": _TIES},
        )
        for largest in (0, 1)
        for k in (1, 3, 12)
    ),
    Case("y, i = TopK<axis=1>(x, k)", {"x": "int64[2,N,3]"}, {"k": ints(2)}),
    Case("y, i = TopK<axis=0>(x, k)", {"x": "double[N,3]"}, {"k": ints(4)}),
    Case("y, i = TopK(x, k)", {"x": "float[N,6]"}, {"k": ints(4)}, opset=10),
)

SCAN = (
    *(
        Case(
            f"y = CumSum<exclusive={exclusive}, reverse={reverse}>(x, a)",
            {"x": "float[N,12]"},
            {"a": scalar(1, np.int64)},
        )
        for exclusive in (0, 1)
        for reverse in (0, 1)
    ),
    Case("y = CumSum(x, a)", {"x": "int64[2,N,3]"}, {"a": scalar(-2, np.int64)}),
    Case("y = CumSum<reverse=1>(x, a)", {"x": "double[7]"}, {"a": ints(0)}, opset=11),
)

_CLASSES = np.array([[0, -1, 6], [7, -7, 3], [-8, 2, 2], [5, 4, 1], [99, -99, 0]])

ONE_HOT = (
    *(
        Case(
            f"y = OneHot<axis={axis}>(i, d, v)",
            {"i": "int64[N,3]"},
            {"d": scalar(7, np.int64), "v": np.array([0.5, -2], np.float32)},
            {"i": _CLASSES},
        )
        for axis in (-1, 0, 1)
    ),
    Case(
        "y = OneHot(i, d, v)",
        {"i": "float[N]", "v": "int64[2]"},
        {"d": ints(6)},
        {"i": [0, 5, 2, -1, 7], "v": [0, 1]},
    ),
)

REARRANGE = (
    *(
        Case(f'y = DepthToSpace<blocksize=2, mode="{mode}">(x)', {"x": "float[N,12,2,3]"})
        for mode in ("DCR", "CRD")
    ),
    Case("y = DepthToSpace<blocksize=3>(x)", {"x": "float[2,9,N,2]"}),
    Case("y = SpaceToDepth<blocksize=2>(x)", {"x": "float[N,3,4,6]"}),
    Case(
        'y = SpaceToDepth<blocksize=2, mode="CRD">(x)',
        {"x": "float[N,3,4,8]"},
        opset=28,
        reference=True,
    ),
    Case(
        "y = ReverseSequence(x, s)",
        {"x": "float[7,N,3]", "s": "int64[N]"},
        feeds={"s": [7, 1, 4, 2, 0]},
    ),
    Case(
        "y = ReverseSequence<batch_axis=0, time_axis=1>(x, s)",
        {"x": "float[N,6]", "s": "int64[N]"},
        feeds={"s": [6, 1, 4, 2, 3]},
    ),
)

EINSUM = (
    Case('y = Einsum<equation="ij,jk->ik">(a, b)', {"a": "float[N,6]", "b": "float[6,4]"}),
    Case(
        'y = Einsum<equation="ij, jk">(a, b)',
        {"a": "float[N,K]", "b": "float[K,4]"},
        sizes={"N": 5, "K": 7},
    ),
    Case(
        'y = Einsum<equation="bhqd,bhkd->bhqk">(a, b)',
        {"a": "float[N,2,3,4]", "b": "float[N,2,5,4]"},
    ),
    Case(
        'y = Einsum<equation="...ij,...jk->...ik">(a, b)',
        {"a": "float[N,1,3,4]", "b": "float[1,2,4,5]"},
    ),
    Case('y = Einsum<equation="i...->...i">(a)', {"a": "float[N,3,4]"}),
    Case('y = Einsum<equation="ij->">(a)', {"a": "float[N,6]"}),
    Case('y = Einsum<equation="ij->j">(a)', {"a": "int64[N,6]"}),
    Case('y = Einsum<equation="ii->i">(a)', {"a": "float[5,5]"}),
    Case('y = Einsum<equation="iij,j->i">(a, b)', {"a": "float[4,4,N]", "b": "float[N]"}),
    Case(
        'y = Einsum<equation="ij,jk,kl->il">(a, b, c)',
        {"a": "float[N,3]", "b": "float[3,4]", "c": "float[4,6]"},
    ),
    Case('y = Einsum<equation="i,j->ij">(a, b)', {"a": "float[N]", "b": "float[6]"}),
)

CASES = (*PAD, *TILE, *ELEMENTS, *ROWS, *COUNTED, *SEARCH, *SCAN, *ONE_HOT, *REARRANGE, *EINSUM)
