"""In which opset, and as what, graphs are written so that CUDA has kernels for their nodes."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import shape_inference
from onnx.reference import ReferenceEvaluator

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.emit.rank_graph import fill, template
from onnxpar.emit.weight_layout import layout
from onnxpar.graph.body_captures import every_node
from onnxpar.ops.device.cuda_form import cuda_form
from onnxpar.ops.table import REGISTRY
from onnxpar.report.device_placement import device_data
from onnxpar.strategy import strategy_for
from onnxpar.strategy.resolve_strategy import resolve

POOL = "MaxPool<kernel_shape = [2, 2]>"


def text(opset: int, inputs: str, body: str) -> str:
    head = f'<ir_version: 10, opset_import: ["" : {opset}]>'
    return f"{head} g ({inputs}) => (float[a,b,c,d] y) {{{body}}}"


def graph(opset: int, inputs: str, body: str) -> ir.Graph:
    proto = onnx.parser.parse_model(text(opset, inputs, body))
    return ir.from_proto(shape_inference.infer_shapes(proto)).graph


X = "float[2,3,8,8] x"


@pytest.mark.parametrize(
    ("opset", "inputs", "body", "expected", "ours"),
    [
        # Nothing is gained by another opset.
        (26, X, "y = Relu(x)", 26, ()),
        (21, X, f"y = {POOL}(x)", 21, ()),
        *((v, X, f"y = {POOL}(x)", 21, ()) for v in (22, 23, 24, 25, 26)),
        (26, X, "y = Elu(x)", 21, ()),
        (26, X, "y = Selu(x)", 21, ()),
        (26, X, "y = ThresholdedRelu(x)", 21, ()),
        (22, X, "y = EyeLike(x)", 21, ()),
        (24, X + ", float[3] s", "y = InstanceNormalization(x, s, s)", 21, ()),
        (26, X, f"z = Cast<to = 10>(x) a = {POOL}(z) y = Cast<to = 1>(a)", 21, ()),
        # Another node needs the newer opset: its operator, its attribute, or its type.
        (26, X, f"z = Swish(x) y = {POOL}(z)", 26, ("MaxPool",)),
        (26, X, 'z = Cast<to = 1, round_mode = "up">(x) y = Elu(z)', 26, ("Elu",)),
        (
            22,
            "bfloat16[2,3,8,8] x, bfloat16[4,3,3,3] w",
            f"z = Conv(x, w) y = {POOL}(z)",
            22,
            ("MaxPool",),
        ),
        # Before 22 a last window in the padding counted.
        (22, X, "y = MaxPool<kernel_shape = [2, 2], ceil_mode = 1>(x)", 22, ("MaxPool",)),
        # Never had a kernel: only the library has.
        (26, X, "y = Celu(x)", 26, ("Celu",)),
        (13, X, "y = Atan(x)", 13, ("Atan",)),
        (26, X, f"z = Acos(x) y = {POOL}(z)", 21, ("Acos",)),
        # The library has none either.
        (26, "int8[2,3,8,8] x", f"z = Swish(x) y = {POOL}(x)", 26, ()),
        (26, X, "z = Swish(x) y, i = MaxPool<kernel_shape = [2, 2], storage_order = 1>(z)", 26, ()),
    ],
)
def test_forms(opset: int, inputs: str, body: str, expected: int, ours: tuple[str, ...]) -> None:
    nodes = list(graph(opset, inputs, body))
    form = cuda_form(nodes, opset, REGISTRY)
    assert (form.opset, sorted(n.op_type for n in form.ours)) == (expected, sorted(ours))


@pytest.mark.parametrize(
    ("inputs", "body", "wide"),
    [
        ("bfloat16[2,3] x", "z = Greater(x, x) y = Cast<to = 1>(z)", ["Greater"]),
        ("bfloat16[2,3] x", "z = Clip(x) y = Add(z, z)", ["Clip"]),
        ("bfloat16[2,3] x", "y = ReduceMax(x)", ["ReduceMax"]),
        ("bfloat16[2,3] x, int64[4] p", "y = Pad(x, p)", ["Pad"]),
        ("bfloat16[2,3] x", "y = Elu(x)", []),  # ours
        ("bfloat16[2,3] x", "y = Hardmax(x)", []),  # of no type
        ("int8[2,3] x", "y = Equal(x, x)", []),
    ],
)
def test_what_has_kernels_in_float32_alone(inputs: str, body: str, wide: list[str]) -> None:
    form = cuda_form(list(graph(24, inputs, body)), 24, REGISTRY)
    assert [n.op_type for n in form.wide] == wide


def test_casts_around_a_node_without_a_kernel_in_16_bits() -> None:
    source = """<ir_version: 10, opset_import: ["" : 21]>
    g (bfloat16[2,6] x, bool more) => (bfloat16[2,6] y, bfloat16[2] w) {
      z = Add(x, x) w = ReduceMax<keepdims = 0>(x, last)
      y = If(more) <
        then_branch = then () => (bfloat16[2,6] p) { p = Clip(z, low) },
        else_branch = other () => (bfloat16[2,6] q) { q = Identity(z) } >
    }"""
    constants = "<int64[1] last = {1}, bfloat16 low = {0}>"
    proto = emitted(source.replace("w) {", f"w) {constants} {{"))
    onnx.checker.check_model(proto, full_check=True)
    model = ir.from_proto(proto)
    assert device_data({"model": model})["programs"]["model"]["fallbacks"] == []
    x = np.random.default_rng(2).uniform(-1, 1, (2, 6)).astype(ml_dtypes.bfloat16)
    session = ReferenceEvaluator(proto)
    y, w = session.run(None, {"x": x, "more": np.array(True)})
    np.testing.assert_array_equal(y, np.maximum(x + x, 0))
    np.testing.assert_array_equal(w, x.max(axis=1))


def emitted(source: str) -> onnx.ModelProto:
    model = ir.from_onnx_text(source)
    analysed = analyse(model, {})
    strategy = strategy_for("dp", 1, model, "the model")
    pm = propagate_and_partition(analysed, resolve(strategy, analysed))
    return fill(template(pm, layout(pm.parameters, pm.plan.mesh)), 0)


IN_A_BODY = """
    one = Constant<value = float {1.0}>() s = ReduceSum<keepdims = 0>(x) more = Greater(s, one)
    y = If(more) <
      then_branch = then () => (float[2,3,7,7] p) { z = Swish(x)
        p = MaxPool<kernel_shape = [2, 2]>(z) },
      else_branch = other () => (float[2,3,7,7] q) { q = MaxPool<kernel_shape = [2, 2]>(x) }
    >
"""
WRITTEN = [
    ("z = Tanh(x) y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(z)", 21, []),
    ("z = Swish(x) y = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(z)", 24, ["MaxPool"]),
    ("z = Swish(x) y = Elu<alpha = 1.5>(z)", 24, ["Elu"]),
    ("z = Swish(x) y = Selu(z)", 24, ["Selu"]),
    ("z = Tanh(x) a = Acos(z) y = Sinh(a)", 24, ["Acos", "Sinh"]),
    ("z = Swish(x) y, m = Dropout(z)", 24, []),
    ("z = Swish(x) a = Celu(z) y = Mish(a)", 24, ["Celu"]),
    ("y = MeanVarianceNormalization(x)", 24, []),
    ("y = Mean(x, x, x)", 24, []),
    (IN_A_BODY, 24, ["MaxPool"]),
]


@pytest.mark.parametrize(("body", "opset", "ours"), WRITTEN, ids=str)
def test_what_is_written_computes_the_same_and_leaves_nothing_to_the_host(
    body: str, opset: int, ours: list[str]
) -> None:
    source = text(24, X, body)
    proto = emitted(source)
    onnx.checker.check_model(proto)
    model = ir.from_proto(proto)
    assert model.opset_imports[""] == opset
    nodes = every_node(model.graph)
    assert sorted({n.op_type for n in nodes if n.domain == "onnxpar"}) == ours
    assert sorted(name for _, name, _ in model.functions) == ours
    assert set(ours) <= {d.op_type for d in REGISTRY.defs if d.device_function is not None}
    assert device_data({"model": model})["programs"]["model"]["fallbacks"] == []
    x = np.random.default_rng(1).uniform(-1, 1, (2, 3, 8, 8)).astype(np.float32)
    want, got = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(
            ["y"], {"x": x}
        )[0]
        for m in (onnx.parser.parse_model(source), proto)
    )
    # The same kernels but for normalisation and mean: 200 roundings at most of numbers near 1.
    np.testing.assert_allclose(got, want, rtol=0, atol=200 * 2.0**-24)
