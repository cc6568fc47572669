"""What evaluations report besides the loss, against scikit-learn on the logits of numpy."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import f1_score, top_k_accuracy_score

from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import OnnxparRuntimeError
from onnxpar_runtime.training.batches import BatchDim, evaluation_data
from onnxpar_runtime.training.loop import evaluate
from onnxpar_runtime.training.metrics import chosen_metrics
from onnxpar_runtime.training.results import Evaluated
from onnxpar_runtime.training.sources import Batch, Request, Stream, samples
from tests.cli import linear

IGNORED = 3
OWN = """
class Agreement:
    def __init__(self): self.right = self.rows = 0
    def update(self, outputs, batch):
        self.right += int((outputs["logits"].argmax(1) == batch["labels"]).sum())
        self.rows += len(batch["labels"])
    def compute(self): return {"right": self.right, "rows": self.rows}
def not_a_metric(): return 3
class Twice(Agreement):
    def compute(self): return {"loss": 7.0}
def f1(): return Agreement()
class Failing(Agreement):
    def update(self, outputs, batch): raise ZeroDivisionError("of mine")
class Leaving(Agreement):
    def update(self, outputs, batch): raise SystemExit("of mine")
class Writing(Agreement):
    def update(self, outputs, batch): batch["labels"][:] = 0
class Words(Agreement):
    def compute(self): return "many"
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data ranks; labels of class 3 do not count."""
    return linear.shard(tmp_path_factory.mktemp("m"), 2, "--ignore-index", str(IGNORED))


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of metrics."""
    name = f"metrics_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def digits(count: int = 360) -> tuple[linear.Array, linear.Array]:
    """Images and classes for testing."""
    x, classes = linear.digits(test=True)
    return x[:count], classes[:count]


def evaluated(
    directory: Path, names: Sequence[str], count: int = 360, parted: bool = False
) -> Evaluated:
    """Evaluates on both ranks, in batches of 50, each with a dict for each data rank or whole."""
    x, classes = digits(count)
    with TrainerGroup(directory) as group:
        manifest = group.manifest
        specs = manifest.program("eval_model").inputs
        arrays = {"x": x.astype(np.float32), "labels": classes}

        def halves(request: Request) -> Iterator[Batch]:
            for start in range(0, len(x), 50):
                rows = [slice(start, start + 25), slice(start + 25, start + 50)]
                yield tuple({n: a[r] for n, a in arrays.items()} for r in rows)

        source = Stream("halves", halves) if parted else samples("made", arrays, specs)
        data = evaluation_data(
            source,
            specs,
            BatchDim.of(manifest, specs),
            batch=50,
            metrics=chosen_metrics(names, manifest),
        )
        first, second = group.on_each(lambda member: evaluate(member, data))
    assert second.metrics == {} and (first.loss, first.correct) == (second.loss, second.correct)
    return first


@pytest.mark.parametrize(("count", "parted"), [(360, False), (350, True)])
def test_metrics_of_classes(directory: Path, own: str, count: int, parted: bool) -> None:
    names = ["accuracy", "perplexity", "f1", "top1", "top4", f"{own}:Agreement"]
    found = evaluated(directory, names, count, parted)
    x, classes = digits(count)
    logits = x @ linear.start().astype(float)
    counts = classes != IGNORED
    best, kept = logits.argmax(1), classes[counts]
    expected = {
        "perplexity": np.exp(linear.loss_of(linear.start(), x[counts], kept)[0]),
        "f1": f1_score(kept, best[counts], average="macro"),
        "top1": np.mean(best[counts] == kept),
        "top4": top_k_accuracy_score(kept, logits[counts], k=4, labels=range(10)),
        "right": np.count_nonzero(best == classes),
        "rows": count,
    }
    # The loss is float32, a mean of float32 terms: 2^-24 for each of some roundings.
    assert found.metrics == pytest.approx(expected, rel=1e-6)
    assert found.accuracy == expected["top1"]
    assert f"top4 is {expected['top4']:.7g}" in found.text


def test_metrics_that_cannot_be(directory: Path, own: str) -> None:
    cases = [
        (["recall"], "--metric: expected accuracy, perplexity, f1, topK (such as"),
        (["top0"], "got 'top0'"),
        (["f1", "f1"], "--metric f1: expected it once, got it 2 times"),
        (["f1", f"{own}:f1"], "expected a name that no other metric has, got 'f1'"),
        ([f"{own}:Twice"], "Twice: expected a name that no other result has, got 'loss'"),
        ([f"{own}:nothing"], f"--metric {own}:nothing: module"),
        ([f"{own}:not_a_metric"], "the methods update and compute, got int"),
        ([f"{own}:Words"], "Words: expected a number from compute, got 'many'"),
        ([f"{own}:Failing"], "ZeroDivisionError: of mine"),
        ([f"{own}:Leaving"], "SystemExit: of mine"),
        ([f"{own}:Writing"], "assignment destination is read-only"),
    ]
    for names, message in cases:
        with pytest.raises(OnnxparRuntimeError, match=re.escape(message)):
            evaluated(directory, names, 100)
