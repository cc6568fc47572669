"""Small nodes of every operator, of sizes that splits by 2, 3, 4 and 6 meet evenly and not."""

import numpy as np

from tests.onnxpar.ops.contrib_cases import CASES as CONTRIB
from tests.onnxpar.ops.control_cases import CASES as CONTROL
from tests.onnxpar.ops.conv_cases import CASES as CONV
from tests.onnxpar.ops.further_cases import CASES as FURTHER
from tests.onnxpar.ops.index_cases import CASES as INDEX
from tests.onnxpar.ops.norm_cases import CASES as FURTHER_NORMS
from tests.onnxpar.ops.op_harness import HALF, Case
from tests.onnxpar.ops.pool_cases import CASES as POOL
from tests.onnxpar.ops.quantized_cases import CASES as QUANTIZED
from tests.onnxpar.ops.resize_cases import CASES as RESIZE
from tests.onnxpar.ops.sample_cases import CASES as SAMPLE
from tests.onnxpar.ops.signal_cases import CASES as SIGNAL

F, I64, B = "float", "int64", "bool"


def ints(*values: int) -> np.ndarray:
    """A 1-D int64 constant."""
    return np.array(values, np.int64)


def scalar(value: float, dtype: type = np.int64) -> np.ndarray:
    """A 0-D constant."""
    return np.array(value, dtype)


_UNARY = (
    *("Relu", "Tanh", "Sigmoid", "Exp", "Ceil", "Floor", "Round", "Sign", "Erf", "Softplus"),
    *("Softsign", "Atan", "Sinh", "Asinh", "HardSigmoid", "Abs", "Celu", "Cos", "Cosh", "Elu"),
    *("Gelu", "HardSwish", "LeakyRelu", "Mish", "Reciprocal", "Selu", "Sin", "Tan", "Neg"),
    *("ThresholdedRelu", "IsNaN", "IsInf", "Log", "Sqrt", "Acos", "Acosh", "Asin", "Atanh"),
)
_BINARY = ("Add", "Sub", "Mul", "Div", "Less", "Greater", "Equal", "LessOrEqual", "GreaterOrEqual")
_REDUCE = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSumExp")

# Integers must not be divided by zero.
_QUOTIENTS = {"a": np.arange(-17, 18).reshape(5, 7), "b": np.arange(35).reshape(5, 7) % 4 + 1}

ELEMENTWISE = (
    *(Case(f"y = {op}(x)", {"x": "float[N,6]"}) for op in _UNARY),
    *(Case(f"y = {op}(a, b)", {"a": "float[N,3,4]", "b": "float[3,1]"}) for op in _BINARY),
    *(Case(f"y = {op}(a, b)", {"a": "float[N,6]", "b": "float[N,6]"}) for op in _BINARY),
    *(Case(f"y = {op}(a, b)", {"a": "bool[N,6]", "b": "bool[6]"}) for op in ("And", "Or", "Xor")),
    *(
        Case(f"y = {op}(a, b, c)", {"a": "float[N,6]", "b": "float[6]", "c": "float[N,6]"})
        for op in ("Sum", "Max", "Min")
    ),
    Case("y = Not(x)", {"x": "bool[N,6]"}),
    Case("y = BitwiseNot(x)", {"x": "int32[N,6]"}),
    Case("y = BitwiseAnd(a, b)", {"a": "int32[N,6]", "b": "int32[6]"}),
    Case("y = BitwiseOr(a, b)", {"a": "int32[N,6]", "b": "int32[6]"}),
    Case("y = BitwiseXor(a, b)", {"a": "int32[N,6]", "b": "int32[6]"}),
    Case('y = BitShift<direction="LEFT">(a, b)', {"a": "uint8[N,6]", "b": "uint8[6]"}),
    Case("y = Pow(a, b)", {"a": "float[N,6]"}, {"b": scalar(2, np.float32)}),
    Case("y = Mod(a, b)", {"a": "int64[N,6]"}, {"b": scalar(3)}),
    Case("y = Div(a, b)", {"a": "int64[N,6]"}, {"b": scalar(3)}),
    *(
        Case(f"y = {op}(a, b)", {k: f"{kind}[N,7]" for k in "ab"}, feeds=_QUOTIENTS)
        for op in ("Mod", "Div")
        for kind in ("int32", "int64")
    ),
    Case("y = Div(a, b)", {"a": "int8[N,7]", "b": "int8[7]"}, feeds={"b": ints(*range(1, 8))}),
    Case("y = HardSigmoid<alpha=-0.5>(x)", {"x": "float[N,6]"}),
    Case("y = PRelu(a, b)", {"a": "float[N,6]", "b": "float[6]"}),
    Case(
        "y = Clip(x, lo, hi)",
        {"x": "float[N,6]"},
        {"lo": scalar(-1, np.float32), "hi": scalar(1, np.float32)},
    ),
    Case("y = Where(c, a, b)", {"c": "bool[N,1]", "a": "float[N,6]", "b": "float[6]"}),
    Case(
        "y = Where(c, a, z)", {"c": "bool[N,6]", "a": "float[N,6]"}, {"z": np.zeros((), np.float32)}
    ),
    Case("y = Cast<to=11>(x)", {"x": "float[N,6]"}),
    Case("y = Cast<to=10>(x)", {"x": "float[N,6]"}),
    Case("y = Cast<to=7>(x)", {"x": "float[N,6]"}),
    Case("y = Cast<to=1>(x)", {"x": "int64[N,6]"}),
    Case("y = CastLike(x, t)", {"x": "float[N,6]", "t": "double[3]"}),
    Case("y = Identity(x)", {"x": "float[N,6]"}),
    Case("y = Dropout(x)", {"x": "float[N,6]"}),
    Case("y, m = Dropout(x)", {"x": "float[N,6]"}),
)

MATMUL = (
    Case("y = MatMul(a, b)", {"a": "float[N,6]", "b": "float[6,4]"}),
    Case("y = MatMul(a, b)", {"a": "float[N,3,K]", "b": "float[K,4]"}, sizes={"N": 5, "K": 7}),
    Case("y = MatMul(a, b)", {"a": "float[N,2,3,4]", "b": "float[N,1,4,5]"}),
    Case("y = MatMul(a, b)", {"a": "float[2,3,4]", "b": "float[N,1,4,5]"}),
    Case("y = MatMul(a, b)", {"a": "float[5]", "b": "float[3,5,4]"}),
    Case("y = MatMul(a, b)", {"a": "float[3,4,5]", "b": "float[5]"}),
    Case("y = MatMul(a, b)", {"a": "float[5]", "b": "float[5]"}),
    Case("y = MatMul(a, b)", {"a": "float[1,6]", "b": "float[6,4]"}),
    Case("y = Gemm(a, b, c)", {"a": "float[N,6]", "b": "float[6,4]", "c": "float[4]"}),
    Case(
        "y = Gemm<transA=1, transB=1, alpha=0.5, beta=2.0>(a, b, c)",
        {"a": "float[K,N]", "b": "float[4,K]", "c": "float[N,1]"},
        sizes={"N": 5, "K": 7},
    ),
    Case("y = Gemm<transB=1>(a, b)", {"a": "float[N,6]", "b": "float[5,6]"}),
    Case("y = Gemm(a, b, c)", {"a": "float[N,6]", "b": "float[6,4]", "c": "float[N,4]"}),
)

VIEW = (
    Case("y = Reshape(x, s)", {"x": "float[N,6]"}, {"s": ints(0, 2, 3)}),
    Case(
        "y = Reshape(x, s)", {"x": "float[N,S,12]"}, {"s": ints(0, 0, 4, 3)}, sizes={"N": 3, "S": 5}
    ),
    Case(
        "y = Reshape(x, s)", {"x": "float[N,4,S,2]"}, {"s": ints(-1, 4, 2)}, sizes={"N": 3, "S": 5}
    ),
    Case("y = Reshape(x, s)", {"x": "float[6,4]"}, {"s": ints(8, 3)}),
    Case("y = Reshape(x, s)", {"x": "float[N,2,3]"}, {"s": ints(-1)}),
    Case("y = Reshape(x, s)", {"x": "float[N,1,2,2]"}, {"s": ints(0, 4)}),
    Case("y = Reshape(x, s)", {"x": "float[4,N,3]"}, {"s": ints(2, 2, -1)}),
    Case("y = Reshape(x, s)", {"x": "float[6]"}, {"s": ints(1, 6, 1)}),
    Case("y = Reshape(x, s)", {"x": "float[12,5]"}, {"s": ints(4, 3, 5)}),
    Case("y = Flatten<axis=2>(x)", {"x": "float[N,2,3,2]"}),
    Case("y = Flatten<axis=0>(x)", {"x": "float[N,2]"}),
    Case("y = Flatten<axis=-1>(x)", {"x": "float[N,2,3]"}),
    Case("y = Transpose<perm=[2,0,1]>(x)", {"x": "float[N,2,3]"}),
    Case("y = Transpose(x)", {"x": "float[N,2,3]"}),
    Case("y = Squeeze(x, a)", {"x": "float[N,1,3,1]"}, {"a": ints(1)}),
    Case("y = Squeeze(x)", {"x": "float[3,1,5,1]"}),
    Case("y = Squeeze<axes=[1]>(x)", {"x": "float[N,1,3]"}, opset=11),
    Case("y = Squeeze(x)", {"x": "float[3,1,5]"}, opset=11),
    Case("y = Unsqueeze(x, a)", {"x": "float[N,3]"}, {"a": ints(0, -1)}),
    Case("y = Unsqueeze<axes=[1]>(x)", {"x": "float[N,3]"}, opset=11),
)

SLICE = (
    Case("y = Slice(x, s, e)", {"x": "float[N,6]"}, {"s": ints(0, 1), "e": ints(2**63 - 1, 5)}),
    Case(
        "y = Slice(x, s, e, a)",
        {"x": "float[N,6,3]"},
        {"s": ints(0, 1), "e": ints(6, 2), "a": ints(1, 2)},
    ),
    Case("y = Slice(x, s, e, a)", {"x": "float[N,6]"}, {"s": ints(0), "e": ints(6), "a": ints(-1)}),
    Case(
        "y = Slice(x, s, e, a, t)",
        {"x": "float[N,6]"},
        {"s": ints(-1), "e": ints(-7), "a": ints(1), "t": ints(-1)},
    ),
    Case(
        "y = Slice(x, s, e, a, t)",
        {"x": "float[N,6]"},
        {"s": ints(0, 0), "e": ints(6, 2**31 - 1), "a": ints(1, 0), "t": ints(2, 1)},
    ),
    Case("a, b, c = Split<axis=1>(x, s)", {"x": "float[N,12]"}, {"s": ints(4, 4, 4)}),
    Case("a, b, c = Split<axis=1, num_outputs=3>(x)", {"x": "float[N,15]"}),
    Case("a, b = Split<axis=-1>(x, s)", {"x": "float[N,6]"}, {"s": ints(2, 4)}),
    Case("a, b = Split<axis=1, split=[3,3]>(x)", {"x": "float[N,6]"}, opset=11),
    Case("a, b = Split<axis=1>(x)", {"x": "float[N,6]"}, opset=13),
    Case("y = Concat<axis=1>(a, b)", {"a": "float[N,3]", "b": "float[N,3]"}),
    Case("y = Concat<axis=-1>(a, b)", {"a": "float[N,2]", "b": "float[N,4]"}),
    Case("y = Concat<axis=0>(a, b, c)", {k: "float[N,3]" for k in "abc"}),
    Case("y = Expand(x, s)", {"x": "float[N,1,3]"}, {"s": ints(2, 1, 4, 1)}),
    Case("y = Expand(x, s)", {"x": "float[1]"}, {"s": ints(5, 6)}),
)

SHAPE = (
    Case("y = Shape(x)", {"x": "float[N,6]"}),
    Case("y = Shape<start=1>(x)", {"x": "float[N,6,2]"}),
    Case("y = Shape<start=0, end=-1>(x)", {"x": "float[N,6,2]"}),
    Case("y = Size(x)", {"x": "float[N,6]"}),
    Case("y = ConstantOfShape(s)", {}, {"s": ints(5, 6)}),
    Case("y = Range(a, b, c)", {}, {"a": scalar(3), "b": scalar(-8), "c": scalar(-2)}),
    Case(
        "y = Range(a, b, c)",
        {},
        {k: scalar(v, np.float32) for k, v in {"a": 0.5, "b": 4, "c": 0.5}.items()},
    ),
    Case("y = EyeLike<k=1>(x)", {"x": "float[N,6]"}),
    Case("y = Trilu(x)", {"x": "float[2,N,6]"}),
    Case("y = Trilu(x)", {"x": "bool[N,6]"}),
    Case("y = Trilu<upper=0>(x, k)", {"x": "float[N,6]"}, {"k": scalar(-1)}),
)

GATHER = (
    *(
        Case("y = Gather(d, i)", {"d": f"{kind}[7,3]", "i": "int64[N,2]"})
        for kind in ("double", "int16", "uint16", "uint64", "int8")
    ),
    # Three parts of up to 10 in float16 lose 2^-11 each when they are summed.
    Case("y = Gather(d, i)", {"d": "float16[7,3]", "i": "int64[N,2]"}, rtol=1e-2),
    Case("y = Gather(d, i)", {"d": "float[7,3]", "i": "int64[N,2]"}),
    Case("y = Gather(d, i)", {"d": "float[7,3]", "i": "int64[N,2]"}, opset=11),
    Case(
        "y = Gather<axis=1>(d, i)",
        {"d": "float[N,6,3]", "i": "int64[4]"},
        feeds={"i": ints(-1, 0, 5, -6)},
    ),
    Case("y = Gather<axis=1>(d, i)", {"d": "float[N,6]"}, {"i": scalar(-2)}),
    Case("y = Gather(d, i)", {"d": "int32[V,3]", "i": "int32[N]"}, sizes={"N": 3, "V": 8}),
    Case("y = Gather(d, i)", {"d": "bool[7,3]", "i": "int64[N]"}),
    Case(
        "y = Gather(d, i)",
        {"d": "float[12,4]", "i": "int64[6]"},
        feeds={"i": ints(11, 0, 3, 7, -1, 6)},
    ),
)


def _reduce(opset: int) -> list[Case]:
    cases = []
    for name in _REDUCE:
        given = opset >= 18 or (name == "Sum" and opset >= 13)
        forms = ((ints(1), 1), (ints(-1, 0), 0), (None, 0), (None, 1))
        for axes, keep in forms:
            kind = {"x": "float[N,6,3]"}
            consts = {} if axes is None or not given else {"a": axes}
            operand = "x, a" if consts else "x"
            attr = "" if axes is None or given else f", axes={axes.tolist()}"
            text = f"y = Reduce{name}<keepdims={keep}{attr}>({operand})"
            cases.append(Case(text, kind, consts, opset=opset))
    return cases


REDUCE = (
    *_reduce(18),
    *_reduce(13)[:8],
    Case(
        "y = ReduceLogSum<keepdims=0>(x, a)",
        {"x": "float[N,6]"},
        {"a": ints(1)},
        {"x": np.arange(1, 31, dtype=np.float32).reshape(5, 6)},
        opset=18,
    ),
    Case("y = ReduceSum<noop_with_empty_axes=1>(x)", {"x": "float[N,6]"}, opset=18),
    Case("y = ReduceSum(x, a)", {"x": "int64[N,6]"}, {"a": ints(0)}, opset=18),
    Case("y = ReduceMax(x, a)", {"x": "int32[N,6]"}, {"a": ints(0)}, opset=18),
    Case("y = ReduceMean(x, a)", {"x": "int32[N,6]"}, {"a": ints(0)}, opset=18),
    Case(
        "y = ReduceMean(x, a)",
        {"x": "float16[N,6]"},
        {"a": ints(0)},
        opset=18,
        reference=True,
        rtol=HALF,
    ),
    Case(
        "y = ReduceLogSumExp(x, a)",
        {"x": "float[4,2]"},
        {"a": ints(0)},
        {"x": np.array([[-np.inf, 1], [-np.inf, np.inf], [-np.inf, 2], [-np.inf, 3]])},
        opset=18,
    ),
    Case("y = CumSum(x, a)", {"x": "float[N,6]"}, {"a": scalar(1)}),
)

NORM = (
    Case("y = Softmax(x)", {"x": "float[N,7]"}),
    Case("y = Softmax<axis=1>(x)", {"x": "float[2,N,3]"}),
    Case("y = LogSoftmax<axis=0>(x)", {"x": "float[N,6]"}),
    Case("y = Softmax(x)", {"x": "float16[N,7]"}, rtol=HALF),
    # Exponentials, a sum of seven and a quotient in float64: some 20 units of 2^-53.
    Case("y = Softmax(x)", {"x": "double[N,7]"}, rtol=20 * 2.0**-53),
    Case(
        "y = Softmax(x)",
        {"x": "float[2,5]"},
        feeds={"x": np.array([[-np.inf, -np.inf, 0, 1, -np.inf], [1e4, 2, 3, -1e4, 5]])},
    ),
    Case(
        "y = LayerNormalization(x, s, b)", {"x": "float[N,3,7]", "s": "float[7]", "b": "float[7]"}
    ),
    Case(
        "y, m, v = LayerNormalization<axis=1, epsilon=0.1>(x, s)",
        {"x": "float[N,3,5]", "s": "float[3,5]"},
    ),
    # A mean of 1000 against a deviation of 4: a rounded mean is off by 1000/4 · 2^-24 = 1.5e-5, and
    # onnxruntime's own kernel by much more, as E[x²] - E[x]², so it is no reference here.
    Case(
        "y = LayerNormalization<axis=-1>(x, s)",
        {"x": "float[4,6]", "s": "float[6]"},
        feeds={"x": 1000 + np.arange(24, dtype=np.float32).reshape(4, 6) ** 2 / 2},
        rtol=1e-4,
        reference=True,
    ),
)


def _loss(op: str, reduction: str, *, weights: bool, ignore: bool, keep: bool, deep: bool) -> Case:
    rest = ",3" if deep else ""
    inputs = {"x": f"float[N,6{rest}]", "t": f"int64[N{rest}]"}
    if weights:
        inputs["w"] = "float[6]"
    attributes = f'reduction="{reduction}"' + (", ignore_index=2" if ignore else "")
    outputs = "y, p" if keep else "y"
    return Case(f"{outputs} = {op}<{attributes}>({', '.join(inputs)})", inputs, opset=13)


_SCE, _NLL = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
LOSS = (
    *(
        _loss(_SCE, r, weights=w, ignore=i, keep=k, deep=d)
        for r in ("mean", "sum", "none")
        for w, i, k, d in (
            (False, False, False, False),
            (False, True, False, True),
            (True, True, False, False),
            (True, False, True, True),
            (False, True, True, False),
        )
    ),
    *(
        _loss(_NLL, r, weights=w, ignore=i, keep=False, deep=d)
        for r in ("mean", "sum", "none")
        for w, i, d in ((False, False, True), (True, True, False))
    ),
)

_CHANCES = {"x": np.linspace(0, 1, 30).reshape(5, 6)}

RANDOM = (
    Case(
        "y = Dropout(x, r, t)",
        {"x": "float[N,6]"},
        {"r": scalar(0.3, np.float32), "t": np.array(True)},
    ),
    Case(
        "y, m = Dropout(x, r, t)",
        {"x": "float[N,2,6]", "t": "bool"},
        {"r": scalar(0.3, np.float32)},
        {"t": np.array(True)},
    ),
    Case(
        "y, m = Dropout(x, r, t)",
        {"x": "float[N,6]", "t": "bool"},
        {"r": scalar(0.3, np.float32)},
        {"t": np.array(False)},
    ),
    Case("y = RandomUniform<shape=[5,6], low=-2.0, high=3.0>()"),
    Case("y = RandomNormal<shape=[4,7], mean=-2.0, scale=3.0, dtype=11>()"),
    Case("y = RandomNormal<shape=[5,6], dtype=10>()"),
    Case("y = RandomNormalLike(x)", {"x": "float"}),
    Case("y = RandomUniformLike<dtype=11>(x)", {"x": "int64[N,6]"}),
    Case("y = RandomNormalLike(x)", {"x": "float[N,2,7]"}),
    Case("y = RandomNormalLike<seed=7.0>(x)", {"x": "float16[N,6]"}),
    Case("y = Bernoulli(x)", {"x": "float[N,6]"}, feeds=_CHANCES),
    Case("y = Bernoulli<dtype=9>(x)", {"x": "double[N,6]"}, feeds=_CHANCES),
    Case("y = Bernoulli<dtype=7>(x)", {"x": "float16[N,6]"}, feeds=_CHANCES),
)

ALL = (
    *ELEMENTWISE,
    *MATMUL,
    *VIEW,
    *SLICE,
    *SHAPE,
    *GATHER,
    *REDUCE,
    *NORM,
    *FURTHER,
    *FURTHER_NORMS,
    *LOSS,
    *RANDOM,
    *INDEX,
    *QUANTIZED,
    *RESIZE,
    *SAMPLE,
    *SIGNAL,
    *CONTRIB,
    *CONV,
    *POOL,
    *CONTROL,
)
