"""A fused gradient means the same as a kernel and as the function that its graph carries."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper

from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.contrib_schemas import MICROSOFT
from onnxpar.ops.function import VERSION
from onnxpar.ops.old_node import OPSET
from onnxpar.ops.table import REGISTRY
from onnxpar_runtime.library import custom_op_library
from onnxpar_runtime.wanted_operators import want_operators
from tests.lockstep import evaluator

FUNCTIONS = {d.op_type: d.function for d in REGISTRY.defs if d.function is not None}
Array = np.ndarray
RNG = np.random.default_rng(7)
ROWS, PLACES = np.array([3, -100, 0, 5, 3]), np.array([[3, 1], [1, 0], [5, 5]])


def numbers(*shape: int) -> Array:
    return RNG.standard_normal(shape)


def log_prob(*shape: int) -> Array:
    x = numbers(*shape)
    return np.asarray(x - np.log(np.exp(x).sum(1, keepdims=True)))


def softmax(axis: int) -> Array:
    x = np.exp(numbers(3, 4, 5))
    return np.asarray(x / x.sum(axis, keepdims=True))


def norm(axis: int) -> list[Array]:
    x = numbers(3, 4, 5) + 1
    axes = tuple(range(3 + axis, 3))
    mean = x.mean(axes, keepdims=True)
    inverse = 1 / np.sqrt(x.var(axes, keepdims=True) + 1e-5)
    return [numbers(3, 4, 5), x, numbers(*x.shape[axis:]), mean, inverse]


def channels(*shape: int) -> list[Array]:
    """The operands of BatchNormalizationInputGrad; those of the sums are the first ones."""
    inverse, total, slope = np.abs(numbers(shape[1])), numbers(shape[1]), numbers(shape[1])
    scale, mean, count = numbers(shape[1]), numbers(shape[1]), np.array([7.0])
    return [numbers(*shape), numbers(*shape), scale, mean, inverse, total, slope, count]


def rotation(*angles: int) -> list[Array]:
    return [numbers(2, 3, 5, 8), numbers(*angles, 8), numbers(*angles, 8)]


RMS = "RMSNormalizationGrad"
LN, BN = "LayerNormalizationGrad", "BatchNormalizationInputGrad"
LOSS = "SoftmaxCrossEntropyLossGrad"
ONE, UP = np.array(0.3), numbers(3, 5)
# Name of the operator, attributes, operands, number of outputs.
CASES: Mapping[str, tuple[str, Mapping[str, object], list[Array], int]] = {
    "relu": ("ReluGrad", {}, [numbers(3, 5), np.maximum(numbers(3, 5), 0)], 1),
    "tanh": ("TanhGrad", {}, [numbers(3, 5), np.tanh(numbers(3, 5))], 1),
    "sigmoid": ("SigmoidGrad", {}, [numbers(3, 5), 1 / (1 + np.exp(numbers(3, 5)))], 1),
    "gelu": ("GeluGrad", {}, [numbers(3, 5), 2 * numbers(3, 5)], 1),
    "gelu tanh": ("GeluTanhGrad", {}, [numbers(3, 5), 2 * numbers(3, 5)], 1),
    "silu": ("SiluGrad", {}, [numbers(3, 5), 2 * numbers(3, 5)], 1),
    **{
        f"gated {kind}": (f"Gated{kind}Grad", {}, [numbers(3, 5), 2 * numbers(3, 5), UP], 2)
        for kind in ("Gelu", "GeluTanh", "Silu")
    },
    **{
        f"gated {kind} forward": (f"Gated{kind}", {}, [2 * numbers(3, 5), UP], 1)
        for kind in ("Gelu", "GeluTanh", "Silu")
    },
    "rotary": ("RotaryEmbedding", {}, rotation(5), 1),
    "rotary gradient": ("RotaryEmbeddingGrad", {}, rotation(2, 1, 5), 1),
    "rms norm": (RMS, {"axis": -1}, [*norm(-1)[:3], norm(-1)[4]], 2),
    "rms norm of two dims": (RMS, {"axis": -2}, [*norm(-2)[:3], norm(-2)[4]], 2),
    "rms norm alone": (RMS, {"axis": -1}, [*norm(-1)[:3], norm(-1)[4]], 1),
    "softmax": ("SoftmaxGrad", {"axis": 2}, [numbers(3, 4, 5), softmax(2)], 1),
    "softmax before": ("SoftmaxGrad", {"axis": 1}, [numbers(3, 4, 5), softmax(1)], 1),
    "log softmax": ("LogSoftmaxGrad", {"axis": 1}, [numbers(5, 6), log_prob(5, 6)], 1),
    "norm": (LN, {"axis": -1}, norm(-1), 3),
    "norm of two dims": (LN, {"axis": -2}, norm(-2), 3),
    "norm of all dims": (LN, {"axis": -3}, norm(-3), 3),
    "norm without bias": (LN, {"axis": -1}, norm(-1), 2),
    "norm alone": (LN, {"axis": -1}, norm(-1), 1),
    "channels": (BN, {}, channels(3, 4, 5), 1),
    "channels alone": (BN, {}, channels(3, 4), 1),
    "turned": ("TurnedWeights", {"group": 2}, [numbers(6, 4, 3, 2)], 1),
    "sums": ("ChannelSums", {}, channels(2, 3, 4, 2)[:3], 2),
    "squares": ("ChannelSquareSum", {}, channels(2, 3, 4, 2)[1:3], 1),
    "loss": (LOSS, {"reduction": "sum", "ignore_index": -100}, [ONE, log_prob(5, 6), ROWS], 1),
    "loss of each": (
        LOSS,
        {"reduction": "none", "ignore_index": 1},
        [numbers(3, 2), log_prob(3, 6, 2), PLACES],
        1,
    ),
    "forward loss": (
        "SoftmaxCrossEntropyLoss",
        {"reduction": "mean", "ignore_index": 1},
        [numbers(3, 6, 2), PLACES],
        2,
    ),
    "lookup": ("GatherGrad", {}, [numbers(3, 2, 4), PLACES, numbers(7, 4)], 1),
    **{
        f"{form or 'Biased'} attention{grad}": (
            f"{form}ScaledDotProductAttention{grad}",
            {"scale": 0.5, **({"hidden": -1e4} if form == "Masked" else {})},
            [
                *([numbers(2, 3, 5, 2)] if grad else []),
                numbers(2, 3, 5, 4),
                numbers(2, 1, 4, 6),
                numbers(2, 1, 6, 2),
                mask,
            ],
            3 if grad else 1,
        )
        for form, mask in (
            ("", numbers(5, 6)),
            ("Safe", np.where(np.arange(30).reshape(5, 6) < 24, numbers(5, 6), -np.inf)),
            ("Masked", np.arange(30).reshape(5, 6) % 7 < 5),
        )
        for grad in ("", "Grad")
    },
}
# A sum of at most 60 products, each of less than 20 roundings: 80 units, and as much again for
# what cancels in the difference of sums.
UNITS = 160


# onnxruntime has no Erf in float64, where its Gelu has 7 digits, and scatters no sums in float16.
WITHOUT_FUNCTION = (
    ("GeluGrad", np.float64),
    ("GatedGeluGrad", np.float64),
    ("GatedGelu", np.float64),
    ("GatedGeluTanh", np.float64),
    (LOSS, np.float16),
    ("GatherGrad", np.float16),
)


def model(name: str, dtype: type[np.floating], opset: int) -> tuple[onnx.ModelProto, list[Array]]:
    op, attributes, operands, count = CASES[name]
    function = FUNCTIONS[op]
    arrays = [a.astype(dtype) if a.dtype.kind == "f" else a for a in operands]
    inputs, outputs = [f"i{i}" for i in range(len(arrays))], [f"o{i}" for i in range(count)]
    unread = [""] * (len(function.outputs) - count)
    node = helper.make_node(op, inputs, [*outputs, *unread], domain=DOMAIN, **attributes)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    graph = helper.make_graph(
        [node],
        "g",
        [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
            for n, a in zip(inputs, arrays, strict=True)
        ],
        [helper.make_tensor_value_info(n, kind, None) for n in outputs],
    )
    return helper.make_model(
        graph,
        opset_imports=[
            helper.make_opsetid("", opset),
            helper.make_opsetid(DOMAIN, VERSION),
            helper.make_opsetid(MICROSOFT, 1),
        ],
        functions=[ir.to_proto(function.made(opset))],
        ir_version=10,
    ), arrays


def run(proto: onnx.ModelProto, arrays: list[Array], *, kernel: bool) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if kernel:
        want_operators(options, proto)
        options.register_custom_ops_library(str(custom_op_library()))
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    made: list[Array] = session.run(None, {f"i{i}": a for i, a in enumerate(arrays)})
    return made


@pytest.mark.parametrize("opset", [OPSET, 24])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", CASES)
def test_kernel_and_function_agree(name: str, dtype: type[np.floating], opset: int) -> None:
    exact, operands = model(name, np.float64, opset)
    wanted = evaluator(exact, True)({f"i{i}": a for i, a in enumerate(operands)})
    proto, arrays = model(name, dtype, opset)
    found = {"kernel": run(proto, arrays, kernel=True)}
    if (CASES[name][0], dtype) not in WITHOUT_FUNCTION:
        found["function"] = run(proto, arrays, kernel=False)
    for how, results in found.items():
        for index, (got, want) in enumerate(zip(results, wanted.values(), strict=True)):
            assert got.dtype == dtype and got.shape == want.shape, how
            # Operands that were rounded move the result by as much as a rounding of its own.
            atol = UNITS * np.finfo(dtype).eps / 2 * np.abs(want).max()
            np.testing.assert_allclose(got, want, rtol=0, atol=atol, err_msg=f"{how} {index}")
