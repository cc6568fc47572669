"""Functions and loaders that make only the rows of one data rank, against complete batches."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxpar_format.options import Settings
from onnxpar_runtime import Trainer, TrainerGroup
from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.training.batches import (
    BatchDim,
    TrainingData,
    evaluation_data,
    training_data,
)
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.log import Reporter
from onnxpar_runtime.training.loop import evaluate, fit
from onnxpar_runtime.training.metrics import Metrics
from onnxpar_runtime.training.results import Fitted
from onnxpar_runtime.training.sources import Batch, Stream, open_source, shard_of, stream_of
from tests.runtime.hand_trained import Reference, batch_of, regression

HYPER = hyperparameters("momentum", Settings(momentum=0.5))
BODY = """
import numpy as np
from tests.runtime.hand_trained import batch_of
asked = []
def batches(seed, shard):
    asked.append(shard)
    index, count = shard
    for size in (8, 4):
        rows = slice(index * size // count, (index + 1) * size // count)
        yield {name: array[rows] for name, array in batch_of(size, seed).items()}
def uneven(shard):
    yield batch_of(2 + shard[0], 1)
def short(shard):
    rows = batch_of(2, 1)
    yield {**rows, "labels": rows["labels"][:1]}
def integers(shard):
    yield {**batch_of(2, 1), "x": np.ones((2, 3), np.int64)}
def pairs(shard):
    yield batch_of(2, 1), batch_of(2, 2)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"rows_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(BODY)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def data_of(manifest: Manifest, rank: int, source: Stream, accumulate: int = 1) -> TrainingData:
    """What a rank trains on."""
    specs = manifest.program("training_model").inputs
    return training_data(
        source,
        specs,
        BatchDim.of(manifest, specs),
        batch=None,
        accumulate=accumulate,
        seed=3,
        shard=shard_of(specs, manifest.atoms, rank, manifest.trained().loss, source),
    )


def fitted(member: Trainer, source: Stream, accumulate: int = 1) -> Fitted:
    """Trains an epoch."""
    data = data_of(member.manifest, member.rank.index, source, accumulate)
    with Reporter(False) as reporter:
        return fit(member, data, HYPER, LearningRateSchedule(0.1), reporter)


def opened(member: Trainer, text: str) -> Stream:
    """The stream of a function."""
    source = open_source(text, member.manifest.program("training_model").inputs, "labels")
    assert isinstance(source, Stream)
    return source


def expected() -> tuple[float, Any]:
    """Loss of the last step and weights on one device, with complete batches."""
    reference = Reference()
    steps = [reference.step(batch_of(n, 3), HYPER.at(t, 0.1)) for t, n in enumerate((8, 4), 1)]
    return steps[-1][0], reference.w


# float64 sums of some ten terms in another order; weights of micro-batches are exact halves.
EXACT = {"rtol": 1e-11, "atol": 1e-12}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_function_that_takes_shard(tmp_path: Path, module: str, accumulate: int) -> None:
    loss, weight = expected()
    with TrainerGroup(regression(tmp_path / "a")) as group:
        results = group.on_each(
            lambda member: fitted(member, opened(member, f"{module}:batches"), accumulate)
        )
        assert sorted(__import__(module).asked) == [(0, 2), (1, 2)]
        np.testing.assert_allclose([r.loss for r in results], loss, **EXACT)
        np.testing.assert_allclose(group.gather("w"), weight, **EXACT)


class Loader:
    """Batches of its rank, as a DataLoader with PyTorch's DistributedSampler makes them."""

    def __init__(self, rank: int, replicas: int) -> None:
        self.sampler = SimpleNamespace(rank=rank, num_replicas=replicas)

    def __iter__(self) -> Iterator[Batch]:
        rank, replicas = self.sampler.rank, self.sampler.num_replicas
        for size in (8, 4):
            own = slice(rank * size // replicas, (rank + 1) * size // replicas)
            yield {name: array[own] for name, array in batch_of(size, 3).items()}


@pytest.mark.parametrize("complete", [False, True])
def test_a_loader_with_a_distributed_sampler(tmp_path: Path, complete: bool) -> None:
    loss, weight = expected()

    def body(member: Trainer) -> Fitted:
        assert member.shard == (member.rank.index, 2)
        loader = Loader(0, 1) if complete else Loader(*member.shard)
        specs = member.manifest.program("training_model").inputs
        return fitted(member, stream_of("data Loader", loader, specs))

    with TrainerGroup(regression(tmp_path / "a")) as group:
        results = group.on_each(body)
        np.testing.assert_allclose([r.loss for r in results], loss, **EXACT)
        np.testing.assert_allclose(group.gather("w"), weight, **EXACT)


def test_mistakes(tmp_path: Path, module: str) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:

        def raises(message: str, text: str) -> None:
            with pytest.raises(Exception, match=re.escape(message)):
                group.on_each(lambda member: fitted(member, opened(member, f"{module}:{text}")))

        raises("expected a dict of the rows of one data rank, got a tuple", "pairs")
        raises("step 1: expected as many rows from each of 2 data ranks, got from 2 to 3", "uneven")
        # Both ranks fail; either may be the first.
        raises(" of 2, got 2 of 'x', 1 of 'labels'", "short")
        raises("'x': expected float64, got int64, which is not", "integers")
        raises("; the complete batch has 4 samples, 2 from each of 2 data ranks", "integers")
        specs = group.manifest.program("training_model").inputs
        with pytest.raises(
            InputError,
            match=re.escape("(rank, num_replicas) = (1, 2), as Trainer.shard says, got (0, 2)"),
        ):
            list(data_of(group.manifest, 1, stream_of("data Loader", Loader(0, 2), specs)).epoch(1))


def test_labels_that_do_not_count_must_be_known_to_all(tmp_path: Path, module: str) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        manifest = group.manifest
        specs = manifest.program("training_model").inputs
        source = opened(group.members[0], f"{module}:batches")
        loss = replace(manifest.trained().loss, labels="labels", ignore_index=-100)
        shard = shard_of(specs, manifest.atoms, 0, loss, source)
        assert shard is not None
        rows = {"x": np.ones((2, 3)), "labels": np.array([[1, 2], [3, 4]])}
        assert shard.whole(rows, "batch 1")["labels"].tolist() == [[1, 2], [3, 4], [0, 0], [0, 0]]
        rows["labels"][1, 0] = -100
        with pytest.raises(InputError, match="batch 1: expected labels that all count"):
            shard.whole(rows, "batch 1")


def test_metrics_need_complete_batches(tmp_path: Path, module: str) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        manifest = group.manifest
        specs = manifest.program("eval_model").inputs
        source = opened(group.members[0], f"{module}:batches")
        loss = manifest.trained().loss

        def data(rank: int, metrics: Metrics) -> Any:
            shard = shard_of(specs, manifest.atoms, rank, loss, source)
            dim = BatchDim.of(manifest, specs)
            return evaluation_data(source, specs, dim, seed=3, metrics=metrics, shard=shard)

        found = group.each(lambda rank: evaluate(group.members[rank], data(rank, Metrics({}))))
        terms = [Reference().gradient(batch_of(n, 3))[0] * n for n in (8, 4)]
        np.testing.assert_allclose([f.loss for f in found], sum(terms) / 12, **EXACT)
        assert [f.samples for f in found] == [12, 12]
        with pytest.raises(LaunchError, match="--metric: own read complete batches"):
            data(0, Metrics({"own": ("--metric own", dict)}))  # type: ignore[dict-item]
