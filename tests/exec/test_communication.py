"""What divided networks send is the least that is known to do: counted, and results compared."""

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import block_models
import onnx_ir as ir
import pytest
import transformer
from block_models import HIDDEN, VOCAB
from training_cases import cut

from onnxpar_runtime.expressions import evaluate_exact
from onnxpar_runtime.manifest import Collective, Manifest
from onnxpar_runtime.training.verify import TrainingSettings, verify_training

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


def is_statistic(collective: Collective, tokens: int, ways: int) -> bool:
    """Whether it sends one float for each token, 2·(n-1)/n times as a ring does."""
    return evaluate_exact(collective.bytes, SIZES) == Fraction(2 * 4 * tokens * (ways - 1), ways)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("name", DECODERS)
def test_two_reductions_a_layer_in_each_direction(tmp_path: Path, name: str, ways: int) -> None:
    """Megatron-LM's count (Shoeybi et al., 2019), with the vocabulary split as well."""
    out = cut(tmp_path / "out", DECODERS[name](), f"tp={ways}")
    found = Manifest.load(out).program("training_model").collectives
    assert {c.op for c in found} == {"AllReduce"}, Counter(c.op for c in found)
    statistics = [c for c in found if is_statistic(c, 10, ways)]
    # Of the logits: the greatest, the sum of exponentials, and the label's own.
    assert len(statistics) == 3, statistics
    assert all("SoftmaxCrossEntropyLoss" in c.reason for c in statistics)
    whole = [c for c in found if c not in statistics]
    # Two a layer, and one for the embedding forward, one for the head backward.
    backward = [c for c in whole if "/grad/" in c.reason]
    assert len(whole) - len(backward) == len(backward) == 2 * LAYERS + 1, whole
    one = cut(tmp_path / "one", DECODERS[name](), "dp=1")
    (case,) = verify_training(out, one, [SIZES], settings=TrainingSettings(steps=1))
    assert case.ok, case.problems
