"""The loop against numpy on one device, all ranks in this process; its ends and its reports."""

import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_format.options import Settings
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import InputError, LaunchError, TrainingError
from onnxpar_runtime.training.batches import (
    BatchDim,
    EvaluationData,
    TrainingData,
    evaluation_data,
    training_data,
)
from onnxpar_runtime.training.hyper import hyperparameters
from onnxpar_runtime.training.learning_rate import LearningRateSchedule
from onnxpar_runtime.training.log import Reporter
from onnxpar_runtime.training.loop import evaluate, fit, total_steps
from onnxpar_runtime.training.permutation import permutation
from onnxpar_runtime.training.results import Evaluated, Fitted
from onnxpar_runtime.training.sources import Batch, Request, Samples, Stream, samples
from tests.runtime.hand_trained import Reference, batch_of, regression

# float64 sums of some ten terms of size 1 in another order, over a dozen steps of momentum; loss
# weights of micro-batches are float32 and add 2^-24 = 6e-8 where they are no powers of two.
EXACT = {"rtol": 1e-11, "atol": 1e-12}
WEIGHTED = {"rtol": 2e-6, "atol": 5e-7}
HYPER = hyperparameters("momentum", Settings(momentum=0.5))


def made(group: TrainerGroup, count: int) -> Samples:
    specs = group.manifest.program("training_model").inputs
    return samples("made", batch_of(count, 3), specs)


def data_of(group: TrainerGroup, source: Any, **options: Any) -> TrainingData:
    specs = group.manifest.program("training_model").inputs
    return training_data(source, specs, BatchDim.of(group.manifest, specs), **options)


def evaluation_of(group: TrainerGroup, source: Any, **options: Any) -> EvaluationData:
    specs = group.manifest.program("eval_model").inputs
    return evaluation_data(source, specs, BatchDim.of(group.manifest, specs), **options)


def fitted(
    group: TrainerGroup,
    data: TrainingData,
    schedule: LearningRateSchedule,
    log: Path | None = None,
    out: io.StringIO | None = None,
    **options: Any,
) -> Fitted:
    """Runs `fit` on all ranks; rank 0 reports."""

    def body(rank: int) -> Fitted:
        with Reporter(rank == 0, log=log, out=out or io.StringIO(), live=False) as reporter:
            return fit(group.members[rank], data, HYPER, schedule, reporter, **options)

    results = group.each(body)
    assert all(result.steps == results[0].steps for result in results)
    return results[0]


@pytest.mark.parametrize(("ranks", "accumulate"), [(2, 1), (3, 1), (2, 3)])
def test_equals_one_device(tmp_path: Path, ranks: int, accumulate: int) -> None:
    reference, losses = Reference(), []
    everything = batch_of(17, 3)
    schedule = LearningRateSchedule(0.2, "cosine", warmup=2, total=15)
    for epoch in (1, 2, 3):
        indices = permutation(17, 5, epoch)(np.arange(17))
        for start in range(0, 17, 4):
            rows = indices[start : start + 4]
            step = len(losses) + 1
            hyper = HYPER.at(step, schedule.at(step))
            losses.append(reference.step({n: a[rows] for n, a in everything.items()}, hyper))
    with TrainerGroup(regression(tmp_path / "a", ranks)) as group:
        data = data_of(group, made(group, 17), batch=4, accumulate=accumulate, seed=5)
        out, log = io.StringIO(), tmp_path / "log.jsonl"
        result = fitted(group, data, schedule, log, out, epochs=3)
        weight = group.gather("w")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    close = EXACT if accumulate == 1 else WEIGHTED
    np.testing.assert_allclose([[k["loss"], k["grad_norm"]] for k in lines], losses, **close)
    np.testing.assert_allclose(weight, reference.w, **close)
    assert [(k["epoch"], k["step"]) for k in lines] == [
        (e, s) for e in (1, 2, 3) for s in range(1, 6)
    ]
    assert [k["lr"] for k in lines] == [schedule.at(t) for t in range(1, 16)]
    assert all(k["samples_per_s"] > 0 for k in lines)
    printed = out.getvalue().splitlines()
    assert printed[-1].startswith("epoch: 3 step: 5, loss is ") and len(printed) == 15
    assert (result.epochs, result.steps, result.loss) == (3, 15, lines[-1]["loss"])


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(None, None, (1, 3)), (2, None, (2, 6)), (None, 7, (3, 7)), (5, 4, (2, 4)), (1, 9, (1, 3))],
)
def test_how_many_steps(
    tmp_path: Path, epochs: int | None, steps: int | None, expected: tuple[int, int]
) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, made(group, 12), batch=4)
        assert total_steps(data, epochs, steps) == expected[1]
        result = fitted(group, data, LearningRateSchedule(0.1), epochs=epochs, steps=steps)
    assert (result.epochs, result.steps) == expected


def test_numbers_that_are_none(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, made(group, 12), batch=4)
        with pytest.raises(LaunchError, match="--epochs: expected a number >= 1, got 0"):
            total_steps(data, 0, None)
        with pytest.raises(LaunchError, match="--steps: expected a number >= 1, got -1"):
            total_steps(data, None, -1)
        assert total_steps(data_of(group, stream(), batch=None), 3, None) is None


def test_evaluation_is_the_mean_over_all_that_counts(tmp_path: Path) -> None:
    everything = batch_of(11, 3)
    expected, _ = Reference().gradient(everything)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        # Batches of 4, 4 and 3 samples.
        data = evaluation_of(group, made(group, 11), batch=4)
        results = group.on_each(lambda member: evaluate(member, data))
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0].loss, expected, **EXACT)
    assert (results[0].samples, results[0].labels, results[0].correct) == (11, 22, None)
    assert results[0].text == f"loss is {expected:.7g}"


def test_what_an_evaluation_says_of_hits() -> None:
    result = Evaluated(loss=0.25, samples=8, correct=6, labels=8)
    assert result.accuracy == 0.75
    assert result.text == "loss is 0.25, accuracy is 75.00% (6 of 8)"
    assert replace(result, labels=0).accuracy is None


def test_evaluation_after_each_epoch(tmp_path: Path) -> None:
    out = io.StringIO()
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, made(group, 8), batch=4)
        held_out = evaluation_of(group, made(group, 6), batch=4)
        fitted(group, data, LearningRateSchedule(0.1), out=out, epochs=2, evaluation=held_out)
        last = group.on_each(lambda member: evaluate(member, held_out))[0]
    lines = [line for line in out.getvalue().splitlines() if "evaluated" in line]
    assert [line.split(":")[1].split()[0] for line in lines] == ["1", "2"]
    assert lines[1] == f"epoch: 2 evaluated on 6 samples: {last.text}"
    assert lines[0] != lines[1]


# -- streams and ends ----------------------------------------------------------------------------


def stream(*batches: Batch) -> Stream:
    def opened(request: Request) -> Iterator[Batch]:
        del request
        return iter(batches)

    return Stream("--data made", opened)


def test_a_stream(tmp_path: Path) -> None:
    reference = Reference()
    batches = [batch_of(4, 1), batch_of(5, 2)]
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, stream(*batches), batch=None)
        result = fitted(group, data, LearningRateSchedule(0.1), epochs=2)
        weight = group.gather("w")
    for step, batch in enumerate(batches * 2, 1):
        reference.step(batch, HYPER.at(step, 0.1))
    np.testing.assert_allclose(weight, reference.w, **EXACT)
    assert (result.epochs, result.steps) == (2, 4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_of_a_part_for_each_data_rank(tmp_path: Path, accumulate: int) -> None:
    reference = Reference()
    parts = batch_of(4, 1), batch_of(4, 2)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, stream(parts), batch=None, accumulate=accumulate)
        result = fitted(group, data, LearningRateSchedule(0.1))
        weight = group.gather("w")
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    loss, _ = reference.step(joined, HYPER.at(1, 0.1))
    # Micro-batches of equal size: weights of a half are exact.
    np.testing.assert_allclose(result.loss, loss, **EXACT)
    np.testing.assert_allclose(weight, reference.w, **EXACT)


def test_a_stream_of_nothing(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, stream(), batch=None)
        with pytest.raises(InputError, match="--data made: epoch 1 has no batches"):
            fitted(group, data, LearningRateSchedule(0.1))
    with TrainerGroup(regression(tmp_path / "b")) as group:
        held_out = evaluation_of(group, stream())
        with pytest.raises(InputError, match="expected data to evaluate on, got none"):
            group.on_each(lambda member: evaluate(member, held_out))


def test_a_stream_that_ends_on_one_rank(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        parts = [data_of(group, stream(*[batch_of(4)] * n), batch=None) for n in (2, 3)]

        def body(rank: int) -> Fitted:
            with Reporter(False) as reporter:
                return fit(
                    group.members[rank], parts[rank], HYPER, LearningRateSchedule(0.1), reporter
                )

        with pytest.raises(InputError, match="some ranks ran out of batches before others"):
            group.each(body)


def test_a_mistake_in_a_batch_is_raised_where_it_is_used(tmp_path: Path) -> None:
    wrong = {"x": np.zeros((4, 9)), "labels": np.zeros((4, 2))}
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, stream(batch_of(4), wrong), batch=None)
        out = io.StringIO()
        with pytest.raises(InputError, match="input 'x', dim 1: expected 3, got 9"):
            fitted(group, data, LearningRateSchedule(0.1), out=out)
    assert len(out.getvalue().splitlines()) == 1


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(tmp_path: Path) -> None:
    bad: Mapping[str, Any] = {**batch_of(4), "labels": np.full((4, 2), np.nan)}
    log = tmp_path / "log.jsonl"
    with TrainerGroup(regression(tmp_path / "a")) as group:
        data = data_of(group, stream(batch_of(4), bad), batch=None)
        with pytest.raises(TrainingError, match=r"^epoch 1, step 2: the loss is nan"):
            fitted(group, data, LearningRateSchedule(0.1), log)
        assert np.isfinite(group.gather("w")).all()
    assert len(log.read_text().splitlines()) == 1
