"""What onnxruntime's own tool quantises is sharded, and computes what the undivided model does."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)

from onnxpar.api.shard_model import shard_model
from onnxpar.strategy import Strategy
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from tests.tiers import covering

RNG = np.random.default_rng(0)
CNN = """<ir_version: 9, opset_import: ["": 17]> g (float[N,3,8,8] x) => (float[N,10] y) {
    a = Conv<pads=[1,1,1,1]>(x, w1, b1)
    b = Relu(a)
    c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)
    d = Conv<pads=[1,1,1,1]>(c, w2, b2)
    e = Relu(d)
    f = GlobalAveragePool(e)
    h = Flatten(f)
    y = Gemm<transB=1>(h, w3, b3)
}"""
BLOCK = """<ir_version: 9, opset_import: ["": 17]> g (float[N,6,16] x) => (float[N,6,16] y) {
    n = LayerNormalization(x, gain, zero)
    q0 = MatMul(n, wq)
    k0 = MatMul(n, wk)
    v0 = MatMul(n, wv)
    q1 = Reshape(q0, heads)
    k1 = Reshape(k0, heads)
    v1 = Reshape(v0, heads)
    q = Transpose<perm=[0,2,1,3]>(q1)
    k = Transpose<perm=[0,2,3,1]>(k1)
    v = Transpose<perm=[0,2,1,3]>(v1)
    s0 = MatMul(q, k)
    s1 = Mul(s0, half)
    s = Softmax(s1)
    o0 = MatMul(s, v)
    o1 = Transpose<perm=[0,2,1,3]>(o0)
    o2 = Reshape(o1, merged)
    o = MatMul(o2, wo)
    r = Add(x, o)
    m = LayerNormalization(r, gain, zero)
    f0 = MatMul(m, wu)
    f1 = Add(f0, bu)
    f2 = Relu(f1)
    f3 = MatMul(f2, wd)
    y = Add(r, f3)
}"""


def weights(*shape: int) -> np.ndarray:
    """Random weights whose products stay of the size of what they multiply."""
    return (RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


CONTENT = {
    "cnn": {
        **{"w1": weights(8, 3, 3, 3), "w2": weights(12, 8, 3, 3), "w3": weights(10, 12)},
        **{name: weights(size, 1)[:, 0] for name, size in (("b1", 8), ("b2", 12), ("b3", 10))},
    },
    "block": {
        **{name: weights(16, 16) for name in ("wq", "wk", "wv", "wo")},
        **{"wu": weights(16, 32), "wd": weights(32, 16), "bu": weights(32, 1)[:, 0]},
        **{"gain": np.ones(16, np.float32), "zero": np.zeros(16, np.float32)},
        **{"heads": np.array([0, 0, 4, 4]), "merged": np.array([0, 0, 16])},
        "half": np.array(0.5, np.float32),
    },
}
SHAPES = {"cnn": (4, 3, 8, 8), "block": (4, 6, 16)}
# Megatron's: columns, then rows; the products of the latter are summed before they are rounded.
COLUMNS, ROWS = ("wq", "wk", "wv", "wu"), ("wo", "wd")


class Samples(CalibrationDataReader):  # type: ignore[misc]
    """Four random batches."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        rng = np.random.default_rng(1)
        batches = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
        self.feeds: Iterator[dict[str, np.ndarray]] = iter([{"x": b} for b in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.feeds, None)


def quantised(folder: Path, name: str, kind: str) -> Path:
    """The model as the tool writes it: in QDQ form, as QLinear operators, or dynamically."""
    model = onnx.parser.parse_model(CNN if name == "cnn" else BLOCK)
    for key, array in CONTENT[name].items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    source, target = folder / "float.onnx", folder / "quantised.onnx"
    onnx.save(model, source)
    if kind == "dynamic":
        quantize_dynamic(source, target)
        return target
    quantize_static(
        source,
        target,
        Samples(SHAPES[name]),
        quant_format=QuantFormat.QOperator if kind == "operators" else QuantFormat.QDQ,
        per_channel=kind == "qdq by channel",
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    return target


SIZES = (4, 5)
# Values have at most 127 steps and are sums of at most 32 terms: 127 sqrt(32) 2^-24 = 4.3e-5 steps.
APART = 5e-5


def seed_without_ties(path: Path) -> int:
    """A seed of `verify` for which rounding in another order does not change the step of a value.

    The steps of values half-way between two depend on the order of a sum, and so on the processor.
    """
    model = onnx.load(path)
    fixed = {i.name: onnx.numpy_helper.to_array(i) for i in model.graph.initializer}
    rounded = {n.input[0]: n.input[1] for n in model.graph.node if n.op_type == "QuantizeLinear"}
    steps = {n: fixed[s] for n, s in rounded.items() if n not in fixed and s in fixed}
    shown = {value.name for value in model.graph.output} | {"x"}
    for name in steps.keys() - shown:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [name for name in steps if name != "x"]
    shape = session.get_inputs()[0].shape[1:]

    def apart(seed: int) -> float:
        rng, least = np.random.default_rng(seed), 1.0
        for size in SIZES:
            x = rng.standard_normal((size, *shape)).astype(np.float32)
            values = dict(zip(names, session.run(names, {"x": x}), strict=True)) if names else {}
            for name, array in values.items():
                least = min(least, float(np.abs((array / steps[name]) % 1 - 0.5).min()))
        return least

    return next(seed for seed in range(1000) if apart(seed) > APART)


def check(folder: Path, model: Path, strategy: str | Strategy) -> Manifest:
    shard_model(model, strategy, folder / "sharded")
    options = VerifyOptions(seed=seed_without_ties(model))
    cases = verify(folder / "sharded", model, [{"N": n} for n in SIZES], options=options)
    assert [problem for case in cases for problem in case.problems] == []
    return Manifest.load(folder / "sharded")


@pytest.mark.parametrize(
    ("name", "kind"), covering(["cnn", "block"], ["qdq", "qdq by channel", "operators", "dynamic"])
)
def test_presets(tmp_path: Path, name: str, kind: str) -> None:
    manifest = check(tmp_path, quantised(tmp_path, name, kind), "dp=2,tp=2")
    (batch,) = manifest.program("model").inputs
    assert batch.name == "x"
    collectives = [c.op for c in manifest.program("model").collectives]
    if kind == "operators":
        assert collectives == []
    elif kind != "dynamic":
        # Columns then rows through each pair of products, as without quantisation.
        assert collectives == ["AllReduce"] * (1 if name == "cnn" else 2)


@pytest.mark.parametrize("kind", ["qdq", "operators", "dynamic"])
def test_columns_and_rows(tmp_path: Path, kind: str) -> None:
    model = quantised(tmp_path, "block", kind)
    held = {v.name for v in onnx.load(model).graph.initializer}
    split = {f"{n}_quantized": [None, "tp"] for n in COLUMNS}
    split |= {f"{n}_quantized": ["tp", None] for n in ROWS}
    assert set(split) <= held
    # With tp as a parameter axis, activations of 8 bits are gathered instead: fewer bytes.
    content = {"mesh": {"dp": 2, "tp": 2}, "parameters": split, "parameter_axes": []}
    if kind == "operators":
        # These activations, too: a sum has 32 bits, so they would be gathered with the weight.
        rows = {"in": [["dp", None, "tp"], *[None] * 7]}
        content["nodes"] = {f"QLinearMatMul_{n}_quantized": rows for n in ("o", "f3")}
    strategy = Strategy.from_dict(content)
    manifest = check(tmp_path, model, strategy)
    assert "AllReduce" in {c.op for c in manifest.program("model").collectives}
