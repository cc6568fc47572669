"""Contrastive training, whose logits are [batch, batch]: each row's class is a row of the batch.

Two towers, and the cosine of each pair of their rows. The loss is appended (the labels are then an
input), or it is a scalar of the model, as CLIP's mean over rows and columns.
"""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from onnxpar.api import runtime
from onnxpar.strategy import Strategy
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.training.group import TrainerGroup
from tests.tiers import covering
from tests.training_cases import hyper, shard

Array = NDArray[Any]
WIDTHS, DEPTH, SCALE = {"x": 3, "z": 5}, 4, 7.0
MODEL = f"""<ir_version: 10, opset_import: ["": 18]>
g (float[batch, {WIDTHS["x"]}] x, float[batch, {WIDTHS["z"]}] z)
    => (float[batch, batch] logits, float loss)
{{
    scale = Constant <value_float = {SCALE}> ()
    half = Constant <value_float = 0.5> ()
    zero = Constant <value_int = 0> ()
    one = Constant <value_int = 1> ()
    tx = MatMul (x, wx)
    tz = MatMul (z, wz)
    nx = LpNormalization (tx)
    nz = LpNormalization (tz)
    columns = Transpose <perm = [1, 0]> (nz)
    cosines = MatMul (nx, columns)
    logits = Mul (cosines, scale)
    first = Shape <start = 0, end = 1> (x)
    count = Squeeze (first)
    places = Range (zero, count, one)
    rows = SoftmaxCrossEntropyLoss (logits, places)
    turned = Transpose <perm = [1, 0]> (logits)
    columns_loss = SoftmaxCrossEntropyLoss (turned, places)
    both = Add (rows, columns_loss)
    loss = Mul (both, half)
}}"""
APPENDED, OWN = "softmax_cross_entropy", "output:loss"


def sharded(*sides: list[str | None]) -> Strategy:
    """A strategy that shards the product of the towers over a mesh of 2x2."""
    return Strategy.from_dict(
        {"mesh": {"dp": 2, "tp": 2}, "nodes": {"*cosines*": {"in": list(sides)}}}
    )


STRATEGIES: Mapping[str, str | Strategy] = {
    "one device": "dp=1",
    "dp": "dp=2",
    "tp": "tp=2",
    "both": "dp=2,tp=2",
    "classes": sharded([None, None], [None, "tp"]),
    "rows and classes": sharded(["dp", None], [None, "tp"]),
}


QUICK = (("tp", APPENDED), ("both", OWN), ("rows and classes", APPENDED))
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.full)
    for case in product(STRATEGIES, (APPENDED, OWN))
]


def towers() -> ir.Model:
    proto = onnx.parser.parse_model(MODEL)
    for node in proto.graph.node:
        node.name = f"/{node.output[0]}/{node.op_type}"
    rng = np.random.default_rng(0)
    for name, width in WIDTHS.items():
        weight = rng.standard_normal((width, DEPTH)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"w{name}"))
    return ir.serde.deserialize_model(proto)


def batches() -> list[dict[str, Array]]:
    """Batches of sizes that two devices divide and do not."""
    rng = np.random.default_rng(1)
    return [
        {n: rng.standard_normal((b, w)).astype(np.float32) for n, w in WIDTHS.items()}
        for b in (3, 4, 5, 2)
    ]


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_ranks_train_as_one_device(name: str, loss: str, tmp_path: Path) -> None:
    ranks = shard(tmp_path / "a", towers(), STRATEGIES[name], loss=loss, optimizer="adamw")
    sizes = [f"batch={b}" for b in (3, 4, 5)]
    cases = runtime.verify(
        ranks, tmp_path / "a.onnx", cases=sizes, options=runtime.VerifyOptions(steps=2)
    )
    assert len(cases) == len(sizes)
    for case in cases:
        assert case.ok, case.problems


@pytest.mark.parametrize(("name", "loss"), CASES)
def test_losses_and_gradients_are_pytorchs(name: str, loss: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    cross_entropy = torch.nn.functional.cross_entropy
    model = towers()
    weights = {
        n: torch.tensor(v.const_value.numpy().astype(np.float64), requires_grad=True)
        for n, v in model.graph.initializers.items()
        if n.startswith("w") and v.const_value is not None
    }
    ranks = shard(tmp_path / "a", model, STRATEGIES[name], loss=loss)
    with TrainerGroup(ranks) as group:
        assert set(weights) == {s.parameter for s in group.manifest.trained().states.values()}
        start = {n: group.gather(n) for n in weights}
        for batch in batches():
            towers_of = [
                torch.nn.functional.normalize(torch.tensor(x).double() @ weights[f"w{n}"])
                for n, x in batch.items()
            ]
            logits = SCALE * towers_of[0] @ towers_of[1].T
            labels = torch.arange(len(logits))
            value = cross_entropy(logits, labels)
            if loss == OWN:
                value = (value + cross_entropy(logits.T, labels)) / 2
            gradients = torch.autograd.grad(value, list(weights.values()))
            group.load_parameters(start)
            feeds = batch if loss == OWN else {**batch, "labels": labels.numpy()}
            got = group.train_step([feeds], hyper("sgd", 1, lr=1.0))
            # A mean of at most 5 terms of up to 2 SCALE, from float32 cosines: 2 SCALE times some
            # 10 roundings of 6e-8 on a loss of at least 1. Gradients are sums of like terms, read
            # off weights of up to 3 (a rounding of 3 is 2e-7).
            assert got.loss == pytest.approx(value.item(), rel=1e-5)
            for n, gradient in zip(weights, gradients, strict=True):
                step = start[n] - group.gather(n)
                scale = float(gradient.abs().max())
                np.testing.assert_allclose(step, gradient.numpy(), rtol=0, atol=1e-5 * scale + 1e-6)


@pytest.mark.parametrize(("name", "label"), covering(["one device", "both", "classes"], [3, -1]))
def test_labels_are_rows_of_the_batch(name: str, label: int, tmp_path: Path) -> None:
    """What is in range in one batch is not in a smaller one."""
    ranks = shard(tmp_path / "a", towers(), STRATEGIES[name])
    three, four = batches()[:2]
    with TrainerGroup(ranks) as group:
        group.train_step([{**four, "labels": np.array([3, 0, 1, 2])}], hyper("sgd", 1))
        before = group.gather("wx")
        message = f"'labels': expected elements from 0 to 2 for node .* got {label} at "
        with pytest.raises(OnnxparRuntimeError, match=message):
            group.train_step([{**three, "labels": np.array([0, label, 1])}], hyper("sgd", 2))
        np.testing.assert_array_equal(group.gather("wx"), before)
