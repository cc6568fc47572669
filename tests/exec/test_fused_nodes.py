"""RMS norms, rotary positions and gated units of exporters in operators train as before."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar_runtime.training.group import TrainerGroup
from tests import training_cases
from tests.tiers import FULL
from tests.training_cases import hyper

WIDTH, HEADS, SIZE = 8, 2, 4
MODEL = """<ir_version: 10, opset_import: ["": 20]>
g (float[batch, seq, 8] x) => (float[batch, seq, 8] y)
<float two = {2.0}, float small = {1e-5}, int64[1] last = {-1}, int64[4] apart = {0, 0, 2, 4},
 int64[3] together = {0, 0, 8}, int64[1] zero = {0}, int64[1] half = {2}, int64[1] end = {9},
 int64[1] steps = {1}> {
    e = MatMul (x, we)  square = Pow (e, two)  mean = ReduceMean <keepdims = 1> (square, last)
    added = Add (mean, small)  root = Sqrt (added)  inverse = Reciprocal (root)
    normal = Mul (e, inverse)  h = Mul (scale, normal)
    q0 = MatMul (h, wq)  q1 = Reshape (q0, apart)  q = Transpose <perm = [0, 2, 1, 3]> (q1)
    size = Shape <start = 1, end = 2> (x)  angle = Slice (angles, zero, size, zero)
    cos = Cos (angle)  sin = Sin (angle)
    a = Slice (q, zero, half, last, steps)  b = Slice (q, half, end, last, steps)
    opposite = Neg (b)  turned = Concat <axis = -1> (opposite, a)
    along = Mul (q, cos)  across = Mul (turned, sin)  r = Add (along, across)
    r1 = Transpose <perm = [0, 2, 1, 3]> (r)  r2 = Reshape (r1, together)
    gate = MatMul (r2, wg)  up = MatMul (h, wu)
    s = Sigmoid (gate)  active = Mul (gate, s)  z = Mul (active, up)
    o = MatMul (z, wo)  y = Add (o, e)
}"""
WEIGHTS = {"we": (8, 8), "scale": (8,), "wq": (8, 8), "wg": (8, 12), "wu": (8, 12), "wo": (12, 8)}


def model() -> ir.Model:
    proto = onnx.parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape) / 2 for name, shape in WEIGHTS.items()}
    # The halves of a row have angles of their own.
    tensors["angles"] = rng.standard_normal((32, SIZE))
    for name, array in tensors.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    return ir.from_proto(proto)


def shard(out: Path, given: ir.Model, strategy: str | Path, compute: str | None = None) -> Path:
    trained = {"freeze": ("angles",), "trainable": ("scale",)}
    return training_cases.shard(out, given, strategy, loss="mse", compute=compute, **trained)


def kinds(directory: Path, program: str = "training_model") -> Counter[str]:
    graph = onnx.load(directory / f"rank0000.{program}.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def trained(directory: Path) -> tuple[list[float], dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    with TrainerGroup(directory) as group:
        losses = []
        for step, seq in enumerate((5, 32, 1), 1):
            x, labels = (rng.standard_normal((4, seq, WIDTH)).astype(np.float32) for _ in "xy")
            batches = [{"x": x, "labels": labels}]
            losses.append(group.train_step(batches, hyper("sgd", step, lr=0.1)).loss)
        return losses, {name: group.gather(name) for name in WEIGHTS}


NORM = "SimplifiedLayerNormalization"
FORWARD = (NORM, "RotaryEmbedding", "GatedSilu")
GRADIENTS = ("RMSNormalizationGrad", "RotaryEmbeddingGrad", "GatedSiluGrad")
STRATEGIES = ["dp=1", "dp=2", "tp=2", "dp=2,tp=2"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, np.ndarray]]:
    """What a program trains in which nothing was found."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm_gradient", "silu_gradient", "gated_gradient", "rotary_gradient"):
            module = "onnxpar.ops.elementwise.elementwise_gradient"
            patch.setattr(f"{module}.{name}", lambda node: None)
        out = shard(tmp_path_factory.mktemp("plain") / "m", model(), "dp=1")
    found = kinds(out)
    assert not {*GRADIENTS, *FORWARD} & set(found)
    return trained(out)


@pytest.mark.parametrize("strategy", STRATEGIES if FULL else STRATEGIES[1:3])
def test_it_trains_as_before(
    tmp_path: Path, plain: tuple[list[float], dict[str, np.ndarray]], strategy: str
) -> None:
    directory = shard(tmp_path / "m", model(), strategy)
    found = kinds(directory)
    assert [found[op] for op in (*FORWARD, *GRADIENTS)] == [1] * 6
    assert not found["Reciprocal"] and not found["Neg"] and not found["Sigmoid"]
    assert not {*FORWARD} & set(kinds(directory, "eval_model"))
    (losses, weights), (wanted, others) = trained(directory), plain
    # Sums of at most 128 terms, in another order, of three steps.
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, others[key], rtol=0, atol=2e-5, err_msg=key)


def test_mixed_precision_has_them_too(tmp_path: Path) -> None:
    """Then casts are between the nodes."""
    found = kinds(shard(tmp_path / "m", model(), "dp=1", compute="bfloat16"))
    assert [found[op] for op in (*FORWARD, *GRADIENTS)] == [1] * 6


def test_rows_that_are_divided_keep_their_nodes(
    tmp_path: Path, plain: tuple[list[float], dict[str, np.ndarray]]
) -> None:
    """The norm of a divided row all-reduces its sum."""
    strategy = tmp_path / "rows.yaml"
    strategy.write_text("devices: 2\nnodes:\n  Mul_normal: {in: [[1, 1, 2], ~]}\n")
    named = model()
    (node,) = (node for node in named.graph if node.outputs[0].name == "normal")
    node.name = "Mul_normal"
    directory = shard(tmp_path / "m", named, strategy)
    found = kinds(directory)
    assert (found[NORM], found["Reciprocal"]) == (0, 1)
    (losses, weights), (wanted, others) = trained(directory), plain
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, others[key], rtol=0, atol=2e-5, err_msg=key)


def test_stages_of_a_pipeline(
    tmp_path: Path, plain: tuple[list[float], dict[str, np.ndarray]]
) -> None:
    directory = shard(tmp_path / "m", model(), "pp=2")
    found = sum((kinds(directory, f"{way}_model.0") for way in ("forward", "backward")), Counter())
    assert (found[NORM], found["RMSNormalizationGrad"]) == (1, 1)
    (losses, weights), (wanted, others) = trained(directory), plain
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, others[key], rtol=0, atol=2e-5, err_msg=key)
