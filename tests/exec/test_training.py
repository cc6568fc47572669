"""Example models trained on several devices, all ranks in this process, beside one device."""

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx_ir as ir
import pytest
import transformer
import two_layer

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime import Session
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.verify.compare import verify
from tests import training_cases as cases
from tests.tiers import FULL
from tests.training_cases import batch_of, hyper, shard

LAYERS = 4


def small(**fields: Any) -> ir.Model:
    return transformer.build(layers=1, d_model=32, heads=4, vocab=40, max_positions=16, **fields)


@dataclass(frozen=True)
class Example:
    """A model, how it is sharded and trained, and the values of its symbols."""

    build: Callable[[], ir.Model]
    strategy: str | Path
    optimizer: str
    symbols: list[dict[str, int]]
    options: Mapping[str, Any] = field(default_factory=dict)


UNEVEN = [{"batch": 3, "seq": 5}]
SHAPES = [{"batch": 4, "seq": 16}, {"batch": 3, "seq": 7}, {"batch": 1, "seq": 1}]
EXAMPLES = {
    "mlp, tutorial's strategy": Example(
        mlp.build, cases.MLP_STRATEGY, "sgd", [{"batch": 8}, {"batch": 24}]
    ),
    "mlp, uneven batch": Example(lambda: mlp.build(hidden=(24, 12)), "dp=4", "adam",
                                 [{"batch": 7}]),
    "two layers": Example(two_layer.build, "dp=8", "momentum", [{"batch": 16}, {"batch": 3}],
                          {"loss": "mse"}),
    "two layers, mae": Example(two_layer.build, "dp=2,tp=2", "lamb", [{"batch": 5}],
                               {"loss": "mae"}),
    "two layers, bce": Example(two_layer.build, "tp=3", "sgd", [{"batch": 5}], {"loss": "bce"}),
    "transformer, dp=4": Example(small, "dp=4", "momentum", UNEVEN),
    "transformer, tp=2": Example(small, "tp=2", "lamb", UNEVEN),
    "transformer, ignored labels": Example(small, "dp=2,tp=2", "adamw", UNEVEN,
                                           {"ignore_index": -100}),
    "transformer, tied head": Example(lambda: small(tied_head=True), "dp=2,tp=2", "adam", UNEVEN),
    "transformer, dropout": Example(lambda: small(dropout=0.2, training=True), "dp=2,tp=2", "adamw",
                                     UNEVEN),
    "transformer, frozen": Example(small, "dp=2,tp=2", "adamw", UNEVEN,
                                   {"freeze": ("w[tp]e.weight", "*.ln*", "*.bias")}),
    "transformer, loss of its own": Example(lambda: small(loss=True), "dp=2", "sgd", UNEVEN,
                                            {"loss": "output:loss"}),
    "transformer, fused projection": Example(lambda: small(fused_qkv=True), "tp=4", "adamw",
                                             UNEVEN),
    "transformer, merged heads": Example(lambda: small(merged_heads=True), "dp=2,tp=2", "sgd",
                                         UNEVEN),
}  # fmt: skip
QUICK = (*tuple(EXAMPLES)[:3], "transformer, dropout")
"""The others differ from these in what other tests have: ignored labels, a tied head."""


@pytest.mark.parametrize("name", EXAMPLES if FULL else QUICK)
def test_equals_one_device(tmp_path: Path, name: str) -> None:
    example = EXAMPLES[name]
    options = {"optimizer": example.optimizer, **example.options}
    ranks = shard(tmp_path / "ranks", example.build(), example.strategy, **options)
    found = runtime.verify(
        ranks,
        tmp_path / "ranks.onnx",
        cases=[",".join(f"{k}={v}" for k, v in case.items()) for case in example.symbols],
        options=runtime.VerifyOptions(steps=3),
    )
    assert [problem for case in found for problem in case.problems] == []
    for case in found:
        assert case.ok and case.bytes_counted == case.bytes_expected
        assert isinstance(case, runtime.TrainingCase)
        # Two micro-batches in the second step; what was compared is not all zero.
        assert [step.micro_batches for step in case.steps] == [1, 2, 1]
        assert all(0 < step.loss < 100 for step in case.steps)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["dp=2,tp=4", "dp=4", "tp=2", "tp=8"])
def test_transformer_of_four_layers(tmp_path: Path, strategy: str) -> None:
    ranks = shard(tmp_path / "ranks", transformer.build(), strategy, optimizer="adamw")
    reference = shard(
        tmp_path / "one", transformer.build(), "replicate", optimizer="adamw", devices=1
    )
    found = verify(ranks, reference, SHAPES, options=VerifyOptions(steps=5))
    assert [problem for case in found for problem in case.problems] == []


def test_what_the_transformer_communicates(tmp_path: Path) -> None:
    """Two sums of activations in each layer forward, two backward; gradients once."""
    ranks = shard(tmp_path / "ranks", transformer.build(), "dp=2,tp=4", optimizer="adamw")
    manifest = Manifest.load(ranks)
    # The mesh is dp=2, tp=2·2: atom 0 is the data axis. Float32 activations [batch, seq, 64] of
    # half a batch: 4·64 bytes of each token, times 2·3/4 in a ring of four.
    activations = "384*seq*((batch + 1)//2)"
    found = manifest.program("training_model").collectives
    assert {c.op for c in found} == {"AllReduce"}
    layers = Counter(
        (match[0], "grad" in c.value) for c in found if (match := re.search(r"layer\d+", c.value))
    )
    assert layers == {(f"layer{i}", way): 2 for i in range(LAYERS) for way in (False, True)}
    # The embedding and the head's gradient are as large; the loss has three numbers of a token.
    rest = [c.bytes for c in found if "layer" not in c.value and 0 not in c.atoms]
    assert Counter(rest) == {activations: 2, "6*seq*((batch + 1)//2)": 3}
    assert Counter(c.bytes for c in found)[activations] == 4 * LAYERS + 2
    # Along the data axis the loss alone travels, one number; gradients wait for the optimizer.
    assert [(c.value, c.bytes) for c in found if 0 in c.atoms] == [("onnxpar.loss", 4)]

    updates = manifest.program("optimizer_model").collectives
    sums = [c for c in updates if 0 in c.atoms]
    states = manifest.trained().states.values()
    assert sorted(c.value for c in sums) == sorted(s.name for s in states if s.kind == "gradient")
    # The norm, one float over four ranks.
    assert [c.bytes for c in updates if 0 not in c.atoms] == [6]


# -- micro-batches -------------------------------------------------------------------------------


@pytest.mark.parametrize("ignored", [None, -100] if FULL else [-100])
def test_micro_batches_equal_one_batch(tmp_path: Path, ignored: int | None) -> None:
    """A batch of 7 in parts of 4, 2 and 1, which hold different numbers of labels that count."""
    model, rng = small(), np.random.default_rng(5)
    ranks = shard(tmp_path / "a", model, "dp=2,tp=2", ignore_index=ignored)
    batch = batch_of(ranks, rng, batch=7, seq=6)
    if ignored is not None:
        batch["labels"][rng.random((7, 6)) < 0.4] = ignored
        batch["labels"][6] = ignored  # the last part has nothing that counts
    edges = [0, 4, 6, 7]
    parts = [{n: a[i:j] for n, a in batch.items()} for i, j in pairwise(edges)]
    with TrainerGroup(ranks) as group:
        gradients = [s for s in group.manifest.trained().states if s.startswith("onnxpar.grad.")]
        # lr 0 leaves the parameters as they are.
        one = group.train_step([batch], hyper("sgd", 1, 0.0))
        wanted = {name: group.gather(name) for name in gradients}
        several = group.train_step(parts, hyper("sgd", 1, 0.0))
        # Means of some forty numbers of size 4, in float32.
        assert several.loss == pytest.approx(one.loss, rel=1e-6)
        assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        largest = max(np.abs(a).max() for a in wanted.values())
        for name in gradients:
            # As of one step in general: 1e-5 of the largest, and what rounding leaves of terms
            # that cancel.
            limit = 1e-5 * np.abs(wanted[name]).max() + 2e-6 * largest
            np.testing.assert_allclose(group.gather(name), wanted[name], rtol=0, atol=limit)
        assert np.abs(wanted["onnxpar.grad.lm_head.weight"]).max() > 1e-3


# -- what is trained -----------------------------------------------------------------------------


def test_frozen_parameters_stay(tmp_path: Path) -> None:
    frozen = ("wte.weight", "layer0.mlp.*")
    ranks = shard(tmp_path / "a", small(), "dp=2,tp=2", optimizer="adamw", freeze=frozen)
    rng = np.random.default_rng(0)
    with TrainerGroup(ranks) as group:
        training = group.manifest.trained()
        untrained = {t.name for t in training.tensors if not t.trained}
        assert untrained == {
            "wte.weight", *(f"layer0.mlp.fc{i}.{n}" for i in (1, 2) for n in ("weight", "bias"))
        }  # fmt: skip
        assert not untrained & {s.parameter for s in training.states.values()}
        names = {s.parameter for s in training.states.values()}
        before = {name: group.gather(name) for name in names}
        batch = batch_of(ranks, rng, batch=4, seq=8)
        first = group.evaluate(batch)["loss"]
        for step in range(1, 4):
            group.train_step([batch], hyper("adamw", step))
        assert group.evaluate(batch)["loss"] < first
        for name in names:
            if "k_proj.bias" in name:
                continue  # it shifts all scores of a row alike, so its gradient is rounding noise
            # AdamW moves an element by lr in the first step, decay aside.
            assert np.abs(group.gather(name) - before[name]).max() > 5e-4


def test_a_shared_table_has_the_gradients_of_both_its_uses(tmp_path: Path) -> None:
    """The table of a tied head, against a head of its own with the same numbers."""
    tied, untied = small(tied_head=True), small()
    table = tied.graph.initializers["wte.weight"].const_value
    assert table is not None
    for name, value in untied.graph.initializers.items():
        source = table if name == "lm_head.weight" else tied.graph.initializers[name].const_value
        assert source is not None
        array = source.numpy().T.copy() if name == "lm_head.weight" else source.numpy()
        value.const_value = ir.tensor(array, name=name)
    found = []
    for name, model in (("tied", tied), ("untied", untied)):
        ranks = shard(tmp_path / name, model, "dp=2,tp=2")
        batch = batch_of(ranks, np.random.default_rng(1), batch=3, seq=5)
        with TrainerGroup(ranks) as group:
            group.forward_backward(batch)
            gradient = group.gather("onnxpar.grad.wte.weight")
            if name == "untied":
                other = group.gather("onnxpar.grad.lm_head.weight").T
                assert np.abs(other).max() > 1e-3 < np.abs(gradient).max()
                gradient = gradient + other
            found.append(gradient)
    # A sum of two float32 gradients of like size.
    np.testing.assert_allclose(*found, rtol=0, atol=1e-6 * np.abs(found[0]).max())


# -- dropout and evaluation ----------------------------------------------------------------------


def test_dropout_is_the_same_on_any_mesh(tmp_path: Path) -> None:
    losses, amounts = {}, set()
    for strategy, devices in (("replicate", 1), ("dp=4", None), ("tp=2", None)):
        ranks = shard(
            tmp_path / strategy, small(dropout=0.3, training=True), strategy, devices=devices
        )
        batch = batch_of(ranks, np.random.default_rng(2), batch=3, seq=8)
        with TrainerGroup(ranks, seed=5) as group:
            results = [group.train_step([batch, batch], hyper("sgd", n, 0.0)) for n in (1, 2)]
            single = [group.forward_backward(batch) for _ in range(2)]
            evaluated = [group.evaluate(batch)["loss"] for _ in range(2)]
        with TrainerGroup(ranks, seed=6) as group:
            other = group.forward_backward(batch)
        assert all(result.tokens == 2 * 3 * 8 for result in results)
        amounts.add(results[0].flops)
        steps = [result.loss for result in results]
        losses[strategy] = [*steps, *single, *evaluated, other]
        # Without dropout, evaluation; the same numbers within a step and micro-batch; others in
        # another step or by another seed.
        assert evaluated[0] == evaluated[1] and single[0] == single[1]
        assert len({round(n, 5) for n in losses[strategy]}) == 5
    assert len(amounts) == 1 and None not in amounts
    for found in losses.values():
        # Means over float32 logits, which are sums in another order: 34 roundings of 2^-24.
        np.testing.assert_allclose(found, losses["replicate"], rtol=2e-6)


def test_evaluation_is_the_model_itself(tmp_path: Path) -> None:
    model = small(dropout=0.3, training=True)
    ranks = shard(tmp_path / "a", model, "dp=2,tp=2", ignore_index=3)
    batch = batch_of(ranks, np.random.default_rng(3), batch=5, seq=7)
    ids, labels = batch["input_ids"], batch["labels"]
    with TrainerGroup(ranks) as group:
        found = group.evaluate(batch, outputs=True)
    with Session(plain(tmp_path / "plain", small()), device="cpu") as session:
        logits = session.run_global({"input_ids": ids})
    assert logits is not None and found["outputs"] is not None
    x = logits["logits"].astype(np.float64)
    # As the forward pass in general: 1e-5 of the largest.
    limit = 1e-5 * np.abs(x).max()
    np.testing.assert_allclose(found["outputs"]["logits"], x, rtol=0, atol=limit)
    log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
    counted = labels != 3
    mean = -np.take_along_axis(log_p, labels[..., None], -1)[..., 0][counted].mean()
    # The logits are those of the graph, so only log-softmax and the mean round: 16 times 2^-24.
    assert found["loss"] == pytest.approx(mean, rel=1e-6)
    assert found["correct"] == (x.argmax(-1) == labels)[counted].sum()
    assert found["count"] == counted.sum() < labels.size


def plain(out: Path, model: ir.Model) -> Path:
    """Shards a model for one device, forward only."""
    path = out.with_suffix(".onnx")
    ir.save(model, path)
    shard_model(path, "replicate", out, devices=1)
    return out
