"""RMS norms, rotary positions and gated units become operators, and train as before."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.strategy.schema import Strategy
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


def model(text: str = MODEL) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape) / 2 for name, shape in WEIGHTS.items()}
    if "wb" in text:
        tensors["wb"] = rng.standard_normal(WIDTH) / 8
    # The halves of a row have angles of their own.
    tensors["angles"] = rng.standard_normal((32, SIZE))
    for name, array in tensors.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    return ir.from_proto(proto)


def shard(
    out: Path, given: ir.Model, strategy: str | Path | Strategy, compute: str | None = None
) -> Path:
    return training_cases.shard(
        out,
        given,
        strategy,
        loss="mse",
        compute=compute,
        freeze=("angles",),
        trainable=tuple({"scale", "wb"} & set(given.graph.initializers)),
    )


def kinds(directory: Path, program: str = "training_model") -> Counter[str]:
    graph = onnx.load(directory / f"rank0000.{program}.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


Results = tuple[list[float], dict[str, np.ndarray]]


def trained(directory: Path) -> Results:
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


def unfused(out: Path, given: ir.Model) -> Results:
    """What a program trains in which nothing is found."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm_gradient", "silu_gradient", "gated_gradient", "rotary_gradient"):
            module = "onnxpar.ops.elementwise.elementwise_gradient"
            patch.setattr(f"{module}.{name}", lambda node: None)
        directory = shard(out, given, "dp=1")
    assert not {*GRADIENTS, *FORWARD} & set(kinds(directory))
    return trained(directory)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return unfused(tmp_path_factory.mktemp("plain") / "m", model())


def check(results: Results, wanted: Results) -> None:
    (losses, weights), (others, expected) = results, wanted
    # Sums of at most 128 terms, in another order, of three steps.
    np.testing.assert_allclose(losses, others, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, expected[key], rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("strategy", STRATEGIES if FULL else STRATEGIES[1:3])
def test_it_trains_as_before(tmp_path: Path, plain: Results, strategy: str) -> None:
    directory = shard(tmp_path / "m", model(), strategy)
    found = kinds(directory)
    assert [found[op] for op in (*FORWARD, *GRADIENTS)] == [1] * 6
    assert not found["Reciprocal"] and not found["Neg"] and not found["Sigmoid"]
    assert not {*FORWARD} & set(kinds(directory, "eval_model"))
    check(trained(directory), plain)


def test_recomputed_nodes(tmp_path: Path, plain: Results) -> None:
    """The gradients read recomputed nodes, which are found; the first ones stay."""
    directory = shard(
        tmp_path / "m", model(), Strategy.from_dict({"mesh": {"dp": 2}, "recompute": ["*"]})
    )
    found = kinds(directory)
    assert (found[NORM], found["RMSNormalizationGrad"]) == (1, 1)
    check(trained(directory), plain)


def test_mixed_precision_has_them_too(tmp_path: Path) -> None:
    """Then casts are between the nodes."""
    found = kinds(shard(tmp_path / "m", model(), "dp=1", compute="bfloat16"))
    assert [found[op] for op in (*FORWARD, *GRADIENTS)] == [1] * 6


def test_norms_that_share_a_deviation(tmp_path: Path) -> None:
    """x · inverse is written twice, with two scales: one norm has the operator, the other nodes."""
    both = """h0 = Mul (scale, normal)  other = Mul (inverse, e)  h1 = Mul (other, wb)
    h = Sub (h0, h1)"""
    text = MODEL.replace("h = Mul (scale, normal)", both)
    directory = shard(tmp_path / "m", model(text), "dp=2")
    found = kinds(directory)
    assert (found[NORM], found["RMSNormalizationGrad"]) == (1, 2)
    check(trained(directory), unfused(tmp_path / "plain", model(text)))


def test_rows_that_are_divided_keep_their_nodes(tmp_path: Path, plain: Results) -> None:
    """The norm of a divided row all-reduces its sum."""
    strategy = tmp_path / "rows.yaml"
    strategy.write_text("devices: 2\nnodes:\n  Mul_normal: {in: [[1, 1, 2], ~]}\n")
    named = model()
    (node,) = (node for node in named.graph if node.outputs[0].name == "normal")
    node.name = "Mul_normal"
    directory = shard(tmp_path / "m", named, strategy)
    found = kinds(directory)
    assert (found[NORM], found["Reciprocal"]) == (0, 1)
    check(trained(directory), plain)


def test_stages_of_a_pipeline(tmp_path: Path, plain: Results) -> None:
    directory = shard(tmp_path / "m", model(), "pp=2")
    found = sum((kinds(directory, f"{way}_model.0") for way in ("forward", "backward")), Counter())
    assert (found[NORM], found["RMSNormalizationGrad"]) == (1, 1)
    check(trained(directory), plain)


def test_a_cut_between_the_nodes(tmp_path: Path, plain: Results) -> None:
    """The stage of the last node lacks the others, so each has a gradient of its own."""
    named, later = model(), False
    for node in named.graph:
        later = later or node.outputs[0].name == "normal"
        node.name = f"{'late' if later else 'early'}_{node.outputs[0].name}"
    pipeline = {"stages": 2, "assign": {"early_*": 0, "late_*": 1}}
    given = Strategy.from_dict({"devices": 2, "pipeline": pipeline})
    directory = shard(tmp_path / "m", named, given)
    programs = directory.glob("rank*.onnx")
    found = Counter(n.op_type for path in programs for n in onnx.load(path).graph.node)
    assert found["RMSNormalizationGrad"] == found[NORM] == 0
    check(trained(directory), plain)
