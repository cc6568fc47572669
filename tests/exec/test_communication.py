"""What sharded networks send is the least that is known to do: counted, and results compared."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import onnx_ir as ir
import pytest
import transformer

from onnxpar.api.shard_model import shard_model
from onnxpar.strategy import Strategy
from onnxpar_format.entries import CollectiveEntry
from onnxpar_format.expressions import evaluate_exact
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from tests import block_models
from tests.block_models import CHANNELS, HIDDEN, VOCAB
from tests.tiers import FULL
from tests.training_cases import shard

LAYERS = 2


def gpt(**options: bool) -> ir.Model:
    return transformer.build(layers=LAYERS, d_model=HIDDEN, heads=8, vocab=VOCAB, **options)


DECODERS: dict[str, Callable[[], ir.Model]] = {
    "gpt": gpt,
    "gpt, one projection for queries, keys and values": lambda: gpt(fused_qkv=True),
    "gpt, heads merged with the batch": lambda: gpt(merged_heads=True),
    "gpt, tied head": lambda: gpt(tied_head=True),
    "llama": lambda: block_models.llama(LAYERS),
}


SIZES = {"batch": 2, "seq": 5}


def without_loss(manifest: Manifest) -> list[CollectiveEntry]:
    """What the training program communicates but for the sum of the loss, which is one call."""
    sent = manifest.program("training_model").collectives
    others = [c for c in sent if c.value != "onnxpar.loss"]
    assert len(others) == len(sent) - 1, sent
    return others


def is_statistic(collective: CollectiveEntry, tokens: int, ways: int) -> bool:
    """Whether it sends one float for each token, 2·(n-1)/n times as a ring does."""
    return evaluate_exact(collective.bytes, SIZES) == Fraction(2 * 4 * tokens * (ways - 1), ways)


@pytest.mark.parametrize(
    ("name", "ways"),
    [
        pytest.param(
            name, ways, marks=() if ways == (4 if name == "llama" else 2) else pytest.mark.full
        )
        for name in DECODERS
        for ways in (2, 4)
    ],
)
def test_two_reductions_a_layer_in_each_direction(tmp_path: Path, name: str, ways: int) -> None:
    """Megatron-LM's count (Shoeybi et al., 2019), with the vocabulary split as well."""
    out = shard(tmp_path / "out", DECODERS[name](), f"tp={ways}")
    found = Manifest.load(out).program("training_model").collectives
    assert {c.op for c in found} == {"AllReduce"}, Counter(c.op for c in found)
    statistics = [c for c in found if is_statistic(c, 10, ways)]
    # Of the logits: the greatest, the sum of exponentials, and the label's own.
    assert len(statistics) == 3, statistics
    assert all("SoftmaxCrossEntropyLoss" in c.reason for c in statistics)
    others = [c for c in found if c not in statistics]
    # Two a layer, and one for the embedding forward, one for the head backward.
    backward = [c for c in others if "/grad/" in c.reason]
    assert len(others) - len(backward) == len(backward) == 2 * LAYERS + 1, others
    if name != "llama" and not FULL:
        return  # the numbers of the other are compared elsewhere
    one = shard(tmp_path / "one", DECODERS[name](), "dp=1")
    (case,) = verify(out, one, [SIZES], options=VerifyOptions(steps=1))
    assert case.ok, case.problems


@pytest.mark.parametrize("ways", [2, 4] if FULL else [2])
def test_data_parallel_training_sends_gradients_alone(tmp_path: Path, ways: int) -> None:
    out = shard(tmp_path / "out", gpt(), f"dp={ways}")
    manifest = Manifest.load(out)
    (loss,) = manifest.program("training_model").collectives
    assert loss.value == "onnxpar.loss"
    tensors = len(manifest.trained().tensors)
    sent = manifest.program("optimizer_model").collectives
    assert {c.op for c in sent} == {"AllReduce"} and len(sent) == tensors


@pytest.mark.parametrize("ways", [2, 4] if FULL else [2])
def test_a_residual_network_sends_statistics_and_gradients(tmp_path: Path, ways: int) -> None:
    out = shard(tmp_path / "out", block_models.residual(blocks=2), f"dp={ways}")
    manifest = Manifest.load(out)
    norms = without_loss(manifest)
    # Five norms: sum and squares forward, the two sums of the backward formula at once.
    assert len(norms) == 5 * (2 + 1)
    assert all("BatchNormalization" in c.reason for c in norms)
    most = Fraction(2 * 2 * 4 * CHANNELS * (ways - 1), ways)
    assert all(evaluate_exact(c.bytes, {"batch": 64}) <= most for c in norms)
    # Kernels and the head; the norms' gradients are replicated, being of the sums above.
    assert len(manifest.program("optimizer_model").collectives) == 5 + 2
    one = shard(tmp_path / "one", block_models.residual(blocks=2), "dp=1")
    for case in verify(out, one, [{"batch": 5}], options=VerifyOptions(steps=1)):
        assert case.ok, case.problems


def experts(ways: int) -> Strategy:
    """Tokens and experts are split over the same devices."""
    split = {"up": ["ep", None, None], "down": ["ep", None, None]}
    return Strategy.from_dict(
        {"mesh": {"ep": ways}, "dataset": {"x": ["ep", None, None]}, "parameters": split}
    )


@pytest.mark.parametrize("ways", [2, 4] if FULL else [2])
def test_split_experts_exchange_tokens(tmp_path: Path, ways: int) -> None:
    """GShard's: to the experts and back, and the same for the cotangents; no weight moves."""
    path, out = tmp_path / "model.onnx", tmp_path / "out"
    ir.save(block_models.mixture(), path)
    shard_model(path, experts(ways), out)
    sent = Manifest.load(out).program("model").collectives
    assert [c.op for c in sent] == ["AllToAll"] * 2
    sizes = [{"groups": g, "tokens": t} for g, t in ((ways, 6), (3, 5), (8, 20))]
    for case in verify(out, path, sizes):
        assert case.ok, case.problems
    trained = shard(tmp_path / "trained", block_models.mixture(), experts(ways), loss="mse")
    assert [c.op for c in without_loss(Manifest.load(trained))] == ["AllToAll"] * 4
    one = shard(tmp_path / "one", block_models.mixture(), "dp=1", loss="mse")
    settings = VerifyOptions(steps=1)
    for case in verify(trained, one, sizes[:2], options=settings):
        assert case.ok, case.problems
