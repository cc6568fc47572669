"""Attention in the form of exporters becomes one operator, and trains as before."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar_runtime.training.group import TrainerGroup
from tests.tiers import FULL
from tests.training_cases import hyper, shard

HEADS, SIZE, WIDTH = 2, 3, 6
# What stands between the product and the Softmax, and behind it.
FORMS = {
    "plain": ("", ""),
    "scaled": ("scores = Mul(product, scale)", ""),
    "divided": ("scores = Div(product, scale)", ""),
    "bias": ("scaled = Mul(product, scale)  scores = Add(causal, scaled)", ""),
    "safe": (
        "scores = Add(product, padding)",
        "none = IsNaN(soft)  shares = Where(none, zero, soft)",
    ),
    "masked": ("scaled = Mul(product, scale)  scores = Where(seen, scaled, lowest)", ""),
    "filled": (
        "scaled = Mul(product, scale)  scores = Where(later, lowest, scaled)",
        "",
    ),
    "filled where it is not": (
        "scaled = Mul(product, scale)  unseen = Not(seen)  scores = Where(unseen, lowest, scaled)",
        "",
    ),
    "replaced": ("scaled = Mul(product, scale)  scores = Where(seen, scaled, half)", ""),
}
MODEL = """<ir_version: 10, opset_import: ["": 20]>
g (float[batch, seq, 6] x, float[batch, seq] hidden) => (float[batch, seq, 6] y)
<float zero = {0.0}, float lowest = {-3.4e38}, int64[4] apart = {0, 0, 2, 3},
 int64[3] together = {0, 0, 6}, int64[1] one = {1}, int64[2] outer = {1, 2}, float half = {0.5}> {
    scale = Constant <value = float {0.6}> ()
    q0 = MatMul (x, wq)  q1 = Reshape (q0, apart)  q = Transpose <perm = [0, 2, 1, 3]> (q1)
    k0 = MatMul (x, wk)  k1 = Reshape (k0, apart)  kt = Transpose <perm = [0, 2, 3, 1]> (k1)
    v0 = MatMul (x, wv)  v1 = Reshape (v0, apart)  v = Transpose <perm = [0, 2, 1, 3]> (v1)
    size = Shape <start = 1, end = 2> (x)
    square = Concat <axis = 0> (size, size)
    ones = Expand (one, square)  lower = Trilu <upper = 0> (ones)  seen = Cast <to = 9> (lower)
    later = Less (lower, one)
    causal = Where (seen, zero, inf)
    away = Greater (hidden, half)  away4 = Unsqueeze (away, outer)
    padding = Where (away4, inf, zero)
    product = MatMul (q, kt)
    BEFORE
    soft = Softmax <axis = -1> (scores)
    BEHIND
    z = MatMul (shares, v)
    z1 = Transpose <perm = [0, 2, 1, 3]> (z)  z2 = Reshape (z1, together)
    y = MatMul (z2, wo)
}"""


def model(form: str) -> ir.Model:
    before, behind = FORMS[form]
    text = MODEL.replace("BEFORE", before).replace("BEHIND", behind)
    text = text.replace("(scores)", "(scores)" if before else "(product)")
    text = text.replace("(shares, v)", "(shares, v)" if behind else "(soft, v)")
    proto = onnx.parser.parse_model(text)
    inf = onnx.numpy_helper.from_array(np.array(-np.inf, np.float32), "inf")
    proto.graph.initializer.append(inf)
    rng = np.random.default_rng(0)
    for name in ("wq", "wk", "wv", "wo"):
        w = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(w, name))
    return ir.from_proto(proto)


def kinds(directory: Path, program: str = "training_model") -> Counter[str]:
    graph = onnx.load(directory / f"rank0000.{program}.onnx", load_external_data=False).graph
    return Counter(node.op_type for node in graph.node)


def trained(directory: Path, seqs: tuple[int, ...]) -> tuple[list[float], dict[str, np.ndarray]]:
    rng = np.random.default_rng(1)
    with TrainerGroup(directory) as group:
        losses = []
        for step, seq in enumerate(seqs, 1):
            x, labels = (rng.standard_normal((4, seq, WIDTH)).astype(np.float32) for _ in "xy")
            hidden = np.zeros((4, seq), np.float32)
            hidden[1, 1 + seq // 2 :] = 1
            feeds = {"x": x, "hidden": hidden, "labels": labels}
            given = {i.name for i in group.manifest.program("training_model").inputs}
            feeds = {name: array for name, array in feeds.items() if name in given}
            losses.append(group.train_step([feeds], hyper("sgd", step, lr=0.1)).loss)
        return losses, {n: group.gather(n) for n in ("wq", "wk", "wv", "wo")}


PREFIX = dict.fromkeys(FORMS, "") | {"safe": "Safe"}
PREFIX |= dict.fromkeys(("masked", "filled", "filled where it is not", "replaced"), "Masked")


CASES = [(form, strategy) for form in FORMS for strategy in ("dp=1", "dp=2", "tp=2")]
# Recognition depends on the form alone, and so does the operator.
QUICK = [(form, strategy) for form, strategy in CASES if strategy == "dp=1"]
QUICK += [("bias", "tp=2"), ("safe", "dp=2"), ("filled", "tp=2")]


@pytest.mark.parametrize(("form", "strategy"), CASES if FULL else QUICK)
def test_it_trains_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, strategy: str
) -> None:
    fused = shard(tmp_path / "fused", model(form), strategy, loss="mse")
    monkeypatch.setattr("onnxpar.partition.fuse_nodes.find_attentions", lambda *_: iter(()))
    plain = shard(tmp_path / "plain", model(form), strategy, loss="mse")
    name = f"{PREFIX[form]}ScaledDotProductAttention"
    found = kinds(fused)
    assert (found[name], found[f"{name}Grad"], found["Softmax"]) == (1, 1, 0)
    assert kinds(plain)["Softmax"] == kinds(plain)["SoftmaxGrad"] == 1
    # The operator's mask is the other way round, once for each direction.
    assert found["Not"] == (2 if form == "filled" else 0)
    assert kinds(fused, "eval_model")["Softmax"] == 1
    seqs = (5, 40, 1)
    (losses, weights), (wanted, others) = trained(fused, seqs), trained(plain, seqs)
    # Sums of at most 160 terms, in another order, of three steps.
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, others[key], rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("form", ["masked", "filled"])
def test_a_stage_that_computes_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Without the operator, the stage computes the mask again for the backward."""
    fused = shard(tmp_path / "fused", model(form), "pp=2", loss="mse")
    monkeypatch.setattr("onnxpar.partition.fuse_nodes.find_attentions", lambda *_: iter(()))
    plain = shard(tmp_path / "plain", model(form), "pp=2", loss="mse")
    name = "MaskedScaledDotProductAttention"
    assert kinds(fused, "forward_model.0")[name] == kinds(plain, "forward_model.0")["Softmax"] == 1
    found = kinds(fused, "backward_model.0")
    assert (found[f"{name}Grad"], found["SoftmaxGrad"], found["Barrier"]) == (1, 0, 0)
    assert kinds(plain, "backward_model.0")["Barrier"] == 1
    (losses, weights), (wanted, others) = trained(fused, (5, 40)), trained(plain, (5, 40))
    # As above.
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, others[key], rtol=0, atol=2e-5, err_msg=key)


def test_heads_that_the_devices_do_not_divide(tmp_path: Path) -> None:
    """Two heads on three devices: one holds padding alone."""
    fused = shard(tmp_path / "fused", model("bias"), "tp=3", loss="mse")
    one = shard(tmp_path / "one", model("bias"), "dp=1", loss="mse")
    (losses, weights), (wanted, others) = trained(fused, (7,)), trained(one, (7,))
    np.testing.assert_allclose(losses, wanted, rtol=2e-5)
    for key, weight in weights.items():
        np.testing.assert_allclose(weight, others[key], rtol=0, atol=2e-5, err_msg=key)


@pytest.mark.parametrize("strategy", ["dp=1", "tp=2"] if FULL else ["tp=2"])
def test_a_sample_that_sees_nothing_changes_no_weight(tmp_path: Path, strategy: str) -> None:
    """Its shares are no numbers and count as zeros, and so do their gradients, as in PyTorch."""
    directory = shard(tmp_path / "m", model("safe"), strategy, loss="mse")
    rng = np.random.default_rng(2)
    x, labels = (rng.standard_normal((4, 9, WIDTH)).astype(np.float32) for _ in "xy")
    hidden = np.zeros((4, 9), np.float32)
    hidden[0, 5:] = 1
    hidden[3] = 1
    found = []
    # The mean is over four samples or three.
    for count, lr in ((4, 0.1), (3, 0.1 * 3 / 4)):
        feeds = {"x": x[:count], "hidden": hidden[:count], "labels": labels[:count]}
        with TrainerGroup(directory) as group:
            group.train_step([feeds], hyper("sgd", 1, lr=lr))
            found.append({n: group.gather(n) for n in ("wq", "wk", "wv", "wo")})
    for key, weight in found[0].items():
        # Sums of at most 100 terms below 10, times the rate.
        np.testing.assert_allclose(weight, found[1][key], rtol=0, atol=1e-5, err_msg=key)
