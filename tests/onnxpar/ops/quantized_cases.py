"""Small quantised nodes, with scales that round nothing away and zero points that are not zero."""

import numpy as np

from tests.onnxpar.ops.contrib_cases import contrib
from tests.onnxpar.ops.op_harness import Array, Case


def _real(*values: float) -> Array:
    return np.array(values, np.float32)


def _at(value: float, dtype: type = np.float32) -> Array:
    return np.array(value, dtype)


def _bytes(*values: int, dtype: type = np.uint8) -> Array:
    return np.array(values, dtype)


_S7 = _real(0.5, 0.25, 0.1, 1, 2, 0.3, 0.7)
_Z7 = _bytes(0, 3, 128, 255, 1, 2, 7)
_BLOCKS = np.linspace(0.1, 1, 15, dtype=np.float32).reshape(5, 3)

LINEAR = (
    Case("y = QuantizeLinear(x, s, z)", {"x": "float[N,7]"}, {"s": _at(0.1), "z": _at(9, np.int8)}),
    Case("y = QuantizeLinear(x, s)", {"x": "float[N,7]", "s": "float[1]"}, feeds={"s": _real(2)}),
    Case("y = QuantizeLinear(x, s, z)", {"x": "float[N,7]"}, {"s": _S7, "z": _Z7}),
    Case(
        "y = QuantizeLinear<axis=0>(x, s, z)", {"x": "float[7,N]"}, {"s": _S7, "z": _Z7}, opset=13
    ),
    Case(
        "y = QuantizeLinear<axis=1, block_size=4>(x, s)",
        {"x": "float[5,12]"},
        {"s": _BLOCKS},
        opset=21,
    ),
    Case(
        "y = QuantizeLinear<axis=1, block_size=5>(x, s)",
        {"x": "float[5,13]"},
        {"s": _BLOCKS},
        opset=21,
    ),
    Case(
        "y = DequantizeLinear(x, s, z)", {"x": "uint8[N,7]"}, {"s": _at(0.1), "z": _at(2, np.uint8)}
    ),
    Case("y = DequantizeLinear(x, s, z)", {"x": "uint8[N,7]", "s": "float[7]"}, {"z": _Z7}),
    Case("y = DequantizeLinear<axis=-2>(x, s)", {"x": "int32[2,7,N]"}, {"s": _S7}),
    Case(
        "y = DequantizeLinear<axis=1, block_size=4>(x, s)",
        {"x": "int8[5,12]", "s": "float[5,3]"},
        feeds={"x": np.arange(-30, 30).reshape(5, 12)},
        opset=21,
    ),
    # onnxruntime's own tool writes a scale of one dim and a zero point of none.
    Case(
        "y = DequantizeLinear(x, s, z)", {"x": "int32[7]"}, {"s": _real(0.5), "z": _at(0, np.int32)}
    ),
    Case("y, s, z = DynamicQuantizeLinear(x)", {"x": "float[N,7]"}),
    Case("y, s, z = DynamicQuantizeLinear(x)", {"x": "float[7]"}, feeds={"x": _real(*range(2, 9))}),
)

_U8 = {"a": "uint8[N,7]", "b": "uint8[7,6]"}
_ROWS = _bytes(1, 2, 3, 0, 5).reshape(5, 1)
_COLUMNS = _bytes(1, 2, 3, 0, 5, 2)
_ONE, _TWO = _at(1, np.uint8), _at(2, np.uint8)
_SCALES = {"sa": _at(0.5), "sb": _at(0.25), "sy": _at(0.7)}
_POINTS = {"za": _ONE, "zb": _TWO, "zy": _at(100, np.uint8)}
_Q = _SCALES | _POINTS
_QMATMUL = "y = QLinearMatMul(a, sa, za, b, sb, zb, sy, zy)"

MATMUL = (
    Case("y = MatMulInteger(a, b)", _U8),
    Case("y = MatMulInteger(a, b, za)", _U8, {"za": _ONE}),
    Case("y = MatMulInteger(a, b, za, zb)", _U8, {"za": _bytes(1), "zb": _COLUMNS}),
    Case("y = MatMulInteger(a, b, , zb)", _U8 | {"zb": "uint8"}),
    Case(
        "y = MatMulInteger(a, b, za, zb)",
        {"a": "uint8[N,2,7]", "b": "int8[7,6]"},
        {"za": _ONE, "zb": _at(-2, np.int8)},
    ),
    Case(
        "y = MatMulInteger(a, b, za, zb)",
        {"a": "uint8[2,N,7]", "b": "uint8[2,7,3]"},
        {"za": _ONE, "zb": _TWO},
    ),
    Case(
        "y = MatMulInteger(a, b, za)",
        {"a": "uint8[5,7]", "b": "uint8[7,6]"},
        {"za": _ROWS},
        reference=True,
    ),
    Case(_QMATMUL, _U8, _Q),
    Case(_QMATMUL, {"a": "uint8[N,2,7]", "b": "uint8[7,6]"}, _Q),
    Case(_QMATMUL, _U8, _Q | {"sb": _real(0.5, 0.25, 1, 2, 0.1, 3), "zb": _COLUMNS}),
    Case(
        _QMATMUL,
        {"a": "int8[N,7]", "b": "int8[7,6]"},
        _SCALES | {z: _at(-3, np.int8) for z in _POINTS},
    ),
    contrib(
        "y = QGemm(a, sa, za, b, sb, zb, c, sy, zy)", _U8, _Q | {"c": np.arange(6, dtype=np.int32)}
    ),
    contrib(
        'y = QGemm<transA=1, transB=1, alpha=2.0>(a, sa, za, b, sb, zb, "")',
        {"a": "uint8[7,N]", "b": "uint8[6,7]"},
        _Q,
    ),
    contrib(
        "y = QGemm<transB=1>(a, sa, za, b, sb, zb)",
        {"a": "uint8[N,7]", "b": "uint8[6,7]"},
        _Q | {"sb": _real(0.5, 0.25, 1, 2, 0.1, 3), "zb": _COLUMNS},
    ),
    contrib(
        "y = MatMulIntegerToFloat(a, b, sa, sb, za, zb, c)",
        _U8,
        _Q | {"c": np.arange(6, dtype=np.float32), "zb": _COLUMNS, "sb": _S7[:6]},
    ),
    contrib("y = MatMulIntegerToFloat(a, b, sa, sb)", {"a": "uint8[N,2,7]", "b": "uint8[7,6]"}, _Q),
    contrib(
        "y = DynamicQuantizeMatMul(a, b, sb, zb, c)",
        {"a": "float[N,7]", "b": "uint8[7,6]"},
        _Q | {"c": np.arange(6, dtype=np.float32)},
    ),
    contrib(
        "y = DynamicQuantizeMatMul(a, b, sb)",
        {"a": "float[N,2,7]", "b": "uint8[7,6]"},
        {"sb": _S7[:6]},
    ),
)

_QCONV = "QLinearConv{}(x, sa, za, w, sb, zb, sy, zy{})"
_IMAGE = {"x": "uint8[N,6,4,3]", "w": "uint8[7,6,3,1]"}
_GROUPS = {"x": "uint8[N,6,4]", "w": "uint8[9,2,3]"}

CONV = (
    Case("y = ConvInteger(x, w)", _IMAGE),
    Case("y = ConvInteger<pads=[1,0,1,0]>(x, w, za, zb)", _IMAGE, {"za": _ONE, "zb": _TWO}),
    Case("y = ConvInteger<group=3, pads=[1,1]>(x, w, za, zb)", _GROUPS, {"za": _ONE, "zb": _TWO}),
    Case("y = ConvInteger(x, w)", {"x": "uint8[N,1,4]", "w": "uint8[6,1,3]"}),
    Case("y = ConvInteger<group=6>(x, w)", {"x": "uint8[N,6,4]", "w": "uint8[6,1,3]"}),
    Case(f"y = {_QCONV.format('<pads=[1,0,1,0]>', '')}", _IMAGE, _Q),
    Case(
        f"y = {_QCONV.format('<strides=[2,1]>', ', c')}",
        _IMAGE,
        _Q | {"sb": _S7, "c": np.arange(-3, 4, dtype=np.int32)},
    ),
    Case(
        f"y = {_QCONV.format('<group=3, pads=[1,1]>', ', c')}",
        _GROUPS,
        _Q
        | {"sb": np.linspace(0.1, 1, 9, dtype=np.float32), "c": np.arange(-4, 5, dtype=np.int32)},
    ),
    Case(
        f"y = {_QCONV.format('', '')}",
        {"x": "int8[N,5,4]", "w": "int8[7,5,3]"},
        _SCALES
        | {"za": _at(-2, np.int8), "zb": np.zeros(7, np.int8), "zy": _at(3, np.int8), "sb": _S7},
    ),
    contrib(
        f"y = {_QCONV.format('<channels_last=1>', '')}",
        {"x": "uint8[N,4,6]", "w": "uint8[7,6,3]"},
        _Q,
    ),
)

_X4 = {"x": "uint8[N,3,4,6]"}
_FEW = {"x": "uint8[N,6]"}
ELEMENTWISE = (
    contrib(
        "y = QLinearAdd(a, sa, za, b, sb, zb, sy, zy)", {"a": "uint8[N,6]", "b": "uint8[6]"}, _Q
    ),
    contrib(
        "y = QLinearMul(a, sa, za, b, sb, zb, sy, zy)", {"a": "uint8[N,2,6]", "b": "uint8[2,1]"}, _Q
    ),
    contrib(
        "y = QLinearWhere(c, a, sa, za, b, sb, zb, sy, zy)",
        {"c": "bool[N,1]", "a": "uint8[N,6]", "b": "uint8[6]"},
        _Q,
    ),
    contrib("y = QLinearSigmoid(x, sa, za, sy, zy)", _FEW, _Q | {"sy": _at(0.01)}),
    contrib("y = QLinearLeakyRelu<alpha=0.2>(x, sa, za, sy, zy)", _FEW, _Q),
    contrib(
        "y = QLinearSoftmax<axis=-1, opset=13>(x, sa, za, sy, zy)", _X4, _Q | {"sy": _at(0.01)}
    ),
    contrib("y = QLinearSoftmax<axis=1, opset=11>(x, sa, za, sy, zy)", _X4, _Q | {"sy": _at(0.01)}),
    contrib(
        "y = QLinearConcat<axis=1>(sy, zy, a, sa, za, b, sb, zb)",
        {"a": "uint8[N,3]", "b": "uint8[N,4]"},
        _Q,
    ),
    contrib("y = QLinearGlobalAveragePool(x, sa, za, sy, zy)", _X4, _Q),
    contrib(
        "y = QLinearGlobalAveragePool<channels_last=1>(x, sa, za, sy, zy)",
        {"x": "uint8[N,3,5,6]"},
        _Q | {"sy": _at(0.2)},
    ),
    contrib("y = QLinearAveragePool<kernel_shape=[2,3]>(x, sa, za, sy, zy)", _X4, _Q),
)

CASES = (*LINEAR, *MATMUL, *CONV, *ELEMENTWISE)
