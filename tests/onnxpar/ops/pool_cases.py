"""Small pools: sizes that splits by 2, 3 and 4 meet evenly and not, in 1, 2 and 3 dims."""

import numpy as np

from tests.onnxpar.ops.conv_cases import TWELVES, Bounded
from tests.onnxpar.ops.op_harness import Case

_N3 = {"N": 3}


def _pool(node: str, x: str, **more: object) -> Case:
    """A pool of an image of this type."""
    kind = Bounded if "symbols" in more else Case
    return kind(f"{node}(x)", {"x": x}, **{"sizes": _N3} | more)  # type: ignore[arg-type]


# Both kinds of windows: that overlap, that leave gaps; in padding and beyond it.
_WINDOWS = (
    ("kernel_shape=[3], pads=[1,1]", "float[N,2,8]"),
    ("kernel_shape=[2], strides=[2]", "float[N,2,9]"),
    ("kernel_shape=[3], strides=[2], pads=[1,1], ceil_mode=1", "float[2,2,10]"),
    ("kernel_shape=[2], strides=[3]", "float[1,2,13]"),
    ("kernel_shape=[5], pads=[2,2]", "float[1,1,6]"),
    ("kernel_shape=[3,2], strides=[2,1], pads=[1,0,1,1]", "float[1,2,7,6]"),
    ('kernel_shape=[2,3], auto_pad="SAME_UPPER", strides=[2,1]', "float[1,2,7,5]"),
    ("kernel_shape=[2,2,1], strides=[2,1,1], ceil_mode=1", "float[1,1,5,4,3]"),
)
_DILATED = ("kernel_shape=[2], dilations=[3], pads=[1,1]", "float[1,2,9]")

MAX_POOL = (
    *(_pool(f"y = MaxPool<{a}>", x) for a, x in (*_WINDOWS, _DILATED)),
    *(_pool(f"y, i = MaxPool<{a}>", x) for a, x in (_WINDOWS[0], _WINDOWS[2], _WINDOWS[5])),
    _pool("y, i = MaxPool<kernel_shape=[2,2], storage_order=1>", "float[N,2,4,5]"),
    _pool("y = MaxPool<kernel_shape=[2], pads=[1,0]>", "int8[N,2,7]"),
    _pool(
        "y, i = MaxPool<kernel_shape=[3], strides=[2], pads=[1,1]>",
        "float[N,2,H]",
        sizes={"N": 2, "H": 24},
        symbols=TWELVES,
    ),
    _pool("y, i = MaxPool<kernel_shape=[3], pads=[1,1]>", "float[N,2,H]", sizes={"N": 2, "H": 7}),
)

AVERAGE_POOL = (
    *(_pool(f"y = AveragePool<{a}>", x) for a, x in (*_WINDOWS, _DILATED)),
    _pool("y = AveragePool<kernel_shape=[3], pads=[1,1], count_include_pad=1>", "float[N,2,8]"),
    _pool(
        "y = AveragePool<kernel_shape=[3], strides=[2], pads=[1,0]>",
        "float[N,1,H]",
        sizes={"N": 2, "H": 9},
    ),
    _pool(
        "y = AveragePool<kernel_shape=[3], pads=[1,1]>",
        "float[N,1,H]",
        sizes={"N": 2, "H": 12},
        symbols=TWELVES,
    ),
)

LP_POOL = (
    *(_pool(f"y = LpPool<{a}, p=3>", x) for a, x in (_WINDOWS[0], _WINDOWS[1], _WINDOWS[5])),
)

MAX_UNPOOL = (
    Case(
        "y = MaxUnpool<kernel_shape=[2], strides=[2]>(x, i, s)",
        {"x": "float[3,2,2]", "i": "int64[3,2,2]"},
        consts={"s": np.array([3, 2, 5])},
        feeds={"i": np.array([[[0, 4], [5, 9]], [[10, 12], [16, 19]], [[20, 24], [26, 29]]])},
    ),
)

GLOBAL_POOL = (
    *(
        Case(f"y = {op}(x)", {"x": "float[N,2,5,4]"}, sizes=_N3)
        for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool", "GlobalLpPool<p=3>")
    ),
    *(
        Case(f"y = {op}(x)", {"x": "float[2,3,H]"}, sizes={"H": 7})
        for op in ("GlobalAveragePool", "GlobalLpPool<p=1>")
    ),
)

_IMAGE = np.array([5, 4])
_BLOCK = np.array([2, 3])

COL2IM = (
    Case(
        "y = Col2Im(x, i, b)", {"x": "float[N,18,8]"}, sizes=_N3, consts={"i": _IMAGE, "b": _BLOCK}
    ),
    Case(
        "y = Col2Im<pads=[1,0,1,0], strides=[2,1]>(x, i, b)",
        {"x": "float[2,12,6]"},
        consts={"i": _IMAGE, "b": _BLOCK},
    ),
)


def _deformed(attributes: str, **shapes: str) -> Case:
    """A DeformConv of these operands; its offsets have both signs and are not integers."""
    operands = ", ".join(shapes.get(n, "") and n for n in "xwobm").rstrip(", ")
    types = {n: f"float[{shapes[n]}]" for n in "xwobm" if n in shapes}
    return Case(f"y = DeformConv<{attributes}>({operands})", types, sizes=_N3, opset=22)


DEFORM = (
    _deformed("pads=[1,1,1,1]", x="N,4,4,3", w="3,4,3,3", o="N,18,4,3", b="3"),
    _deformed("offset_group=2", x="N,4,4,3", w="3,4,2,2", o="N,16,3,2", m="N,8,3,2"),
    _deformed("group=2", x="N,4,4,3", w="6,2,2,2", o="N,8,3,2", b="6", m="N,4,3,2"),
    _deformed("group=3, offset_group=3", x="2,3,4,3", w="6,1,2,2", o="2,24,3,2"),
)

CASES = (*MAX_POOL, *AVERAGE_POOL, *LP_POOL, *MAX_UNPOOL, *GLOBAL_POOL, *COL2IM, *DEFORM)
