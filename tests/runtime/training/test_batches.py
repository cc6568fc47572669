"""Batches and micro-batches: sizes that constraints allow, the order by the seed, the thread."""

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np
import pytest

from onnxpar_format.entries import SymbolEntry, TensorEntry
from onnxpar_format.manifest import Loss
from onnxpar_runtime.errors import InputError, LaunchError
from onnxpar_runtime.training.batches import (
    Ahead,
    BatchDim,
    EpochPlan,
    evaluation_data,
    plan_evaluation,
    plan_training,
    training_data,
)
from onnxpar_runtime.training.permutation import permutation
from onnxpar_runtime.training.sources import Batch, Request, Samples, Stream, places
from onnxpar_runtime.training.sources import samples as samples_of

X = TensorEntry("x", "float32", ("batch", 2), ((("batch", (0,)),), ((2, ()),)))
MASK = TensorEntry("mask", "float32", (2,), (((2, ()),),))


def dim(**constraint: int) -> BatchDim:
    return BatchDim("batch", SymbolEntry(**constraint))


def samples(count: int) -> Samples:
    rows = {"x": np.arange(2 * count, dtype=np.float32).reshape(count, 2)}
    return Samples("--data made", rows, {"mask": np.ones(2, np.float32)}, count)


# -- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraint", "count", "parts", "sizes"),
    [
        ({}, 10, 3, (4, 3, 3)),
        ({}, 2, 3, None),
        ({"divisor": 4}, 20, 3, (8, 8, 4)),
        ({"divisor": 4}, 18, 2, None),
        ({"divisor": 4, "remainder": 1}, 14, 2, (9, 5)),
        ({"divisor": 4, "remainder": 1}, 13, 2, None),
        ({"divisor": 4, "max": 8}, 20, 2, None),
        ({"min": 3}, 5, 2, None),
        ({"min": 3}, 7, 2, (4, 3)),
    ],
)
def test_micro_batches(
    constraint: dict[str, int], count: int, parts: int, sizes: tuple[int, ...] | None
) -> None:
    assert dim(**constraint).split(count, parts) == sizes


def test_micro_batches_exist_where_any_do() -> None:
    def exists(dim: BatchDim, count: int, parts: int) -> bool:
        if parts == 0:
            return count == 0
        return any(dim.admits(n) and exists(dim, count - n, parts - 1) for n in range(1, count + 1))

    for divisor in (1, 2, 3):
        for remainder in range(divisor):
            for smallest, largest in ((1, 0), (4, 0), (2, 7)):
                case = dim(divisor=divisor, remainder=remainder, min=smallest, max=largest)
                for count in range(1, 16):
                    for parts in (1, 2, 3):
                        sizes = case.split(count, parts)
                        assert (sizes is not None) == exists(case, count, parts)
                        if sizes is not None:
                            assert sum(sizes) == count and len(sizes) == parts
                            assert max(sizes) - min(sizes) in (0, divisor)


def test_a_fixed_batch() -> None:
    fixed = BatchDim(8)
    assert fixed.split(24, 3) == (8, 8, 8)
    assert fixed.split(20, 2) is None
    assert plan_training(20, 8, 1, fixed).notice == (
        "the last 4 samples of each epoch are left out: the model's batch is 8"
    )
    with pytest.raises(LaunchError, match="--batch-size 16: the model's batch is 8"):
        plan_training(20, 16, 1, fixed)
    assert plan_evaluation(20, None, fixed) == EpochPlan(
        (8,), 2, (8,), "4 samples of 20 are left out: the model's batch is 8"
    )


# -- plans ---------------------------------------------------------------------------------------


def sizes_of(plan: EpochPlan) -> list[tuple[int, ...]]:
    return list(plan.sizes())


def test_the_last_batch_is_kept() -> None:
    plan = plan_training(10, 4, 2, dim())
    assert (sizes_of(plan), plan.notice) == ([(2, 2), (2, 2), (1, 1)], "")
    assert sizes_of(plan_training(9, 4, 2, dim())) == [(2, 2), (2, 2), (1,)]
    assert sizes_of(plan_training(3, 4, 1, dim())) == [(3,)]
    assert sizes_of(plan_training(8, 4, 1, dim())) == [(4,), (4,)]


def test_a_last_batch_that_violates_the_constraint_is_left_out() -> None:
    plan = plan_training(1437, 128, 1, dim(divisor=8))
    assert (plan.steps, plan.last) == (11, (128,))
    assert plan.notice == (
        "the last 29 samples of each epoch are left out: symbol 'batch' must be 8*N, N >= 1"
    )


@pytest.mark.parametrize(
    ("count", "batch", "accumulate", "message"),
    [
        (100, 12, 1, r"--batch-size 12: symbol 'batch' must be 8\*N, N >= 1"),
        (100, 24, 5, r"--batch-size 24 in 5 micro-batches: symbol 'batch' must be 8\*N"),
        (100, 24, 5, r"so at most 3 micro-batches can be formed \(--accumulate 3\)$"),
        (7, 8, 1, r"there are only 7 samples, and symbol 'batch' must be 8\*N"),
        (100, 0, 1, "expected numbers >= 1, got 0 and 1"),
        (100, 8, 0, "expected numbers >= 1, got 8 and 0"),
    ],
)
def test_impossible_plans(count: int, batch: int, accumulate: int, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        plan_training(count, batch, accumulate, dim(divisor=8))


def test_evaluation_leaves_out_as_little_as_it_can() -> None:
    assert sizes_of(plan_evaluation(600, None, dim())) == [(256,), (256,), (88,)]
    plan = plan_evaluation(359, 256, dim(divisor=8))
    assert sizes_of(plan) == [(256,), (96,)]
    assert plan.notice.startswith("7 samples of 359 are left out: symbol 'batch' must be 8*N")
    assert sizes_of(plan_evaluation(100, None, dim(divisor=64, max=64))) == [(64,)]
    with pytest.raises(LaunchError, match="there are only 5 samples"):
        plan_evaluation(5, None, dim(divisor=8))
    with pytest.raises(LaunchError, match="--batch-size 12"):
        plan_evaluation(100, 12, dim(divisor=8))


# -- order ---------------------------------------------------------------------------------------


def test_an_epoch_has_every_sample_once() -> None:
    data = training_data(samples(10), [X, MASK], dim(), batch=4, accumulate=2, seed=5)
    steps = list(data.epoch(2))
    assert [step.samples for step in steps] == [4, 4, 2]
    assert [len(step.micro_batches) for step in steps] == [2, 2, 2]
    parts = [part for step in steps for part in step.micro_batches]
    assert all(isinstance(part, Mapping) and part["mask"].shape == (2,) for part in parts)
    rows = np.concatenate([part["x"] for part in parts if isinstance(part, Mapping)])
    np.testing.assert_array_equal(rows[:, 0] // 2, permutation(10, 5, 2)(np.arange(10)))


def test_evaluation_keeps_the_order_of_the_source() -> None:
    data = evaluation_data(samples(5), [X, MASK], dim(), batch=2)
    rows = np.concatenate([step.micro_batches[0]["x"] for step in data.steps()])  # type: ignore[call-overload]
    np.testing.assert_array_equal(rows, samples(5).rows["x"])


@pytest.mark.parametrize("atoms", [(2,), (3,), (2, 2)])
def test_a_rank_gets_its_own_rows(atoms: tuple[int, ...]) -> None:
    by = tuple(range(len(atoms)))
    split = TensorEntry("x", "float32", ("batch", 2), ((("batch", by),), ((2, ()),)))
    labels = TensorEntry("labels", "int64", ("batch",), ((("batch", by),),))
    arrays = {
        "x": np.arange(22, dtype=np.float32).reshape(11, 2),
        "labels": np.arange(11),
        "mask": np.ones(2, np.float32),
    }
    source = samples_of("made", arrays, [split, labels, MASK])
    specs, counted = [split, labels, MASK], Loss("softmax_cross_entropy", "labels", -100, None)
    ranks = [places(specs, atoms, r, counted, source) for r in range(prod(atoms))]
    assert all(set(own) == {"x"} for own in ranks)
    # Without a label to ignore, nobody looks at the labels of other ranks.
    all_count = replace(counted, ignore_index=None)
    assert set(places(specs, atoms, 0, all_count, source)) == {"x", "labels"}
    for count in (1, 4, 5):
        indices = permutation(11, 0, 1)(np.arange(count))
        sharding = split.sharding(atoms, {"batch": count})
        expected = arrays["x"][indices]
        for rank, own in enumerate(ranks):
            batch = source.take(indices, own)
            assert batch["x"].shape == (count, 2)
            np.testing.assert_array_equal(
                sharding.take(batch["x"], rank), sharding.take(expected, rank)
            )
            np.testing.assert_array_equal(batch["labels"], indices)


def test_samples_need_a_batch_size() -> None:
    with pytest.raises(LaunchError, match="--batch-size: expected a number for --data made"):
        training_data(samples(5), [X], dim(), batch=None)


# -- streams -------------------------------------------------------------------------------------


def stream(*batches: Batch) -> Stream:
    def opened(request: Request) -> Iterator[Batch]:
        del request
        return iter(batches)

    return Stream("--data made", opened)


def rows(start: int, count: int) -> dict[str, Any]:
    return {"x": np.arange(start, start + count)[:, None] * np.ones(2), "mask": np.ones(2)}


def test_a_stream_in_micro_batches() -> None:
    data = training_data(
        stream(rows(0, 4), rows(4, 6)), [X, MASK], dim(divisor=2), batch=None, accumulate=2
    )
    assert data.steps_per_epoch is None
    steps = list(data.epoch(1))
    assert [step.samples for step in steps] == [4, 6]
    first = [part["x"][:, 0].tolist() for step in steps for part in step.micro_batches]  # type: ignore[call-overload]
    assert first == [[0, 1], [2, 3], [4, 5, 6, 7], [8, 9]]
    assert all(part["mask"].shape == (2,) for s in steps for part in s.micro_batches)  # type: ignore[call-overload]


def test_a_dict_for_each_data_rank_in_micro_batches() -> None:
    data = training_data(
        stream((rows(0, 4), rows(10, 4))), [X, MASK], dim(), batch=None, accumulate=2
    )
    (step,) = data.epoch(1)
    assert step.samples == 8
    parts = [[d["x"][:, 0].tolist() for d in micro] for micro in step.micro_batches]  # type: ignore[call-overload]
    assert parts == [[[0, 1], [10, 11]], [[2, 3], [12, 13]]]


def test_a_stream_that_cannot_be_split() -> None:
    data = training_data(stream(rows(0, 5)), [X], dim(divisor=2), batch=None, accumulate=2)
    with pytest.raises(LaunchError, match=r"batch 1: 5 samples in 2 micro-batches: symbol 'batch'"):
        list(data.epoch(1))
    data = training_data(stream({"y": np.ones(3)}), [X], dim(), batch=None)
    with pytest.raises(InputError, match=r"batch 1: expected arrays \['x'\] whose dim 0 are samp"):
        list(data.epoch(1))
    with pytest.raises(LaunchError, match="--accumulate: expected a number >= 1, got 0"):
        training_data(stream(), [X], dim(), batch=None, accumulate=0)


# -- the thread ----------------------------------------------------------------------------------


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "onnxpar-data"]


def test_all_items_come_in_order_and_the_thread_ends() -> None:
    with Ahead(range(100)) as items:
        assert list(items) == list(range(100))
    assert threads() == []


def test_what_the_iterator_raises_comes_after_its_items() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise InputError("broken")

    with Ahead(broken()) as items:
        assert next(items) == 1
        with pytest.raises(InputError, match="broken"):
            next(items)
    assert threads() == []


def test_it_works_ahead_but_not_without_end() -> None:
    made = []

    def numbers() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    with Ahead(numbers(), depth=2) as items:
        next(items)
        deadline = time.monotonic() + 10
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        # One was taken, two are ready, and the thread holds one.
        assert len(made) == 4
        time.sleep(0.15)
        assert len(made) == 4
    assert threads() == []


def test_leaving_early_ends_the_thread() -> None:
    with pytest.raises(KeyError), Ahead(iter(int, 1)) as items:
        next(items)
        raise KeyError
    assert threads() == []
