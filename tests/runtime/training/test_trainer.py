"""One training run: steps, micro-batches, evaluation, states; all ranks in this process."""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxpar_format.dtypes import DTYPES
from onnxpar_runtime import Trainer, TrainerGroup
from onnxpar_runtime.errors import (
    DirectoryError,
    InputError,
    LaunchError,
    OnnxparRuntimeError,
    RankError,
    SymbolValueError,
    TrainingError,
)
from tests.runtime import hand_made, hand_trained
from tests.runtime.hand_trained import Reference, batch_of, regression

Array = NDArray[Any]
FREE = {"lr": 0.1, "momentum": 0.9, "clip_norm": float("inf")}
# float64 sums of some ten terms of size 1 in another order: a few units of 1e-16 each, and few
# steps. Loss weights are float32, so where they are not powers of two they add 2^-24 = 6e-8.
EXACT = {"rtol": 1e-12, "atol": 1e-13}
WEIGHTED = {"rtol": 5e-7, "atol": 1e-7}


def scalars(step: int, **changes: float) -> dict[str, float]:
    return {**FREE, "momentum_first": float(step == 1), **changes}


def joined(*batches: Mapping[str, Array]) -> dict[str, Array]:
    return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}


@pytest.mark.parametrize(("ranks", "clip"), [(2, float("inf")), (2, 1.0), (3, 0.5)])
def test_steps_equal_one_device(tmp_path: Path, ranks: int, clip: float) -> None:
    reference = Reference()
    with TrainerGroup(regression(tmp_path / "a", ranks)) as group:
        # Batches that come again, uneven ones, and more shapes than bindings are kept.
        for step, count in enumerate((4, 5, 5, 4, 1, 6, 7, 8, 9, 10, 11, 12, 13, 5), 1):
            batch, hyper = batch_of(count, step), scalars(step, clip_norm=clip)
            got = group.train_step([batch], hyper)
            loss, norm = reference.step(batch, hyper)
            np.testing.assert_allclose([got.loss, got.grad_norm], [loss, norm], **EXACT)
            np.testing.assert_allclose(group.gather("w"), reference.w, **EXACT)
            np.testing.assert_allclose(
                group.gather("onnxpar.moment1.w"), reference.velocity, **EXACT
            )


def test_micro_batches_are_weighted_by_what_they_hold(tmp_path: Path) -> None:
    reference = Reference()
    with TrainerGroup(regression(tmp_path / "a")) as group:
        for step, sizes in enumerate([(3, 1), (2, 5, 3), (4,), (1, 1, 1)], 1):
            micro = [batch_of(n, 10 * step + i) for i, n in enumerate(sizes)]
            got = group.train_step(micro, scalars(step))
            loss, norm = reference.step(joined(*micro), scalars(step))
            np.testing.assert_allclose([got.loss, got.grad_norm], [loss, norm], **WEIGHTED)
            np.testing.assert_allclose(group.gather("w"), reference.w, **WEIGHTED)


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    reference = Reference()
    first, second = batch_of(3, 1), batch_of(3, 2)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        loss = group.forward_backward(first)
        expected, gradient = reference.gradient(first)
        np.testing.assert_allclose(loss, expected, **EXACT)
        # Partial over the data ranks: no rank has all of it, and gather adds it up.
        part = group.members[0].state("onnxpar.grad.w")
        assert np.abs(part - gradient).max() > 0.01
        np.testing.assert_allclose(group.gather("onnxpar.grad.w"), gradient, **EXACT)

        loss = group.forward_backward(first, weight=0.5)
        loss += group.forward_backward(second, weight=0.5, accumulate=True)
        both, gradient = reference.gradient(joined(first, second))
        np.testing.assert_allclose(loss, both, **EXACT)
        np.testing.assert_allclose(group.gather("onnxpar.grad.w"), gradient, **EXACT)
        norm = group.step(scalars(1))
        expected, size = reference.step(joined(first, second), scalars(1))
        np.testing.assert_allclose(norm, size, **EXACT)
        np.testing.assert_allclose(group.gather("w"), reference.w, **EXACT)
        assert [t.steps for t in group.members] == [1, 1]


def test_batches_prepared_ahead(tmp_path: Path) -> None:
    reference, batch = Reference(), batch_of(5)
    with TrainerGroup(regression(tmp_path / "a", 2, {"max": 5})) as group:

        def step(rank: int) -> float:
            trainer = group.members[rank]
            return trainer.train_step([trainer.prepare(batch)], scalars(1)).loss

        loss, _ = reference.step(batch, scalars(1))
        assert group.each(step)[1] == pytest.approx(loss, rel=EXACT["rtol"])

        # What is wrong with it is raised where it is used, by all ranks.
        def bad(rank: int) -> None:
            prepared = group.members[rank].prepare(batch_of(6))
            with pytest.raises(SymbolValueError, match="'batch' is 6"):
                group.members[rank].forward_backward(prepared)

        group.each(bad)


def test_evaluation_changes_nothing(tmp_path: Path) -> None:
    reference, batch = Reference(), batch_of(5)
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.forward_backward(batch)
        before = group.on_each(lambda member: [member.state(n) for n in ("w", "onnxpar.grad.w")])
        found = group.evaluate(batch_of(7), outputs=True)
        assert found["count"] == 14 and found["correct"] is None
        assert found["loss"] == pytest.approx(reference.gradient(batch_of(7))[0], rel=EXACT["rtol"])
        outputs = found["outputs"]
        assert outputs is not None and set(outputs) == {"p"}
        np.testing.assert_allclose(outputs["p"], batch_of(7)["x"] @ reference.w, **EXACT)
        assert group.evaluate(batch)["outputs"] is None
        after = group.on_each(lambda member: [member.state(n) for n in ("w", "onnxpar.grad.w")])
        np.testing.assert_array_equal(before, after)


def test_states_keep_their_memory(tmp_path: Path) -> None:
    """Bindings point into it, and it must begin where vector kernels like it."""
    with TrainerGroup(regression(tmp_path / "a")) as group:
        names = ("w", "onnxpar.grad.w", "onnxpar.moment1.w")

        def places(rank: int) -> list[int]:
            states = group.members[rank].states
            return [states.value(name).data_ptr() for name in names]

        group.train_step([batch_of(4)], scalars(1))
        before = group.each(places)
        assert all(place % 4096 == 0 for rank in before for place in rank)
        group.train_step([batch_of(5), batch_of(4)], scalars(2))
        group.load_parameters({"w": np.zeros((3, 2))})
        assert group.each(places) == before
        copy = group.members[0].state("w")
        copy += 1  # a copy, not the state's own memory
        np.testing.assert_array_equal(group.gather("w"), np.zeros((3, 2)))


def test_parameters_of_all_ranks(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        parts = group.on_each(lambda member: member.parameters())
        for part in parts:
            np.testing.assert_array_equal(part["w"], hand_trained.start())
        new = np.arange(6, dtype=np.float32).reshape(3, 2)
        group.load_parameters({"w": new})  # float32 widens without loss
        np.testing.assert_array_equal(group.gather("w"), new)
        for wrong, message in (
            ({"v": new}, r"no trained parameters and statistics v; there are w"),
            ({"w": new.T}, r"'w': expected float64 \(3, 2\), got float32 \(2, 3\)"),
            ({"w": new.astype(np.int64)}, "expected float64"),
        ):
            with pytest.raises(InputError, match=message):
                group.load_parameters(wrong)
        with pytest.raises(InputError, match="no state 'v'"):
            group.gather("v")
        np.testing.assert_array_equal(group.gather("w"), new)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_all(tmp_path: Path, value: float) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.train_step([batch_of(4)], scalars(1))
        before = group.gather("w")
        bad = batch_of(4)
        bad["x"][3, 0] = value  # on the last rank alone
        seen: list[str] = []

        def run(rank: int) -> None:
            try:
                group.members[rank].train_step([batch_of(2), bad], scalars(2))
            except TrainingError as error:
                assert error.agreed and error.exit_code == 1
                seen.append(str(error))

        group.each(run)
        assert len(seen) == 2 and seen[0] == seen[1]
        assert seen[0].startswith("step 2: the loss is ")
        np.testing.assert_array_equal(group.gather("w"), before)
        with pytest.raises(TrainingError, match="step 2"):
            group.forward_backward(bad)


WrongStep = Callable[[TrainerGroup], object]


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (lambda g: g.train_step([{"x": np.zeros((4, 3))}], scalars(1)), InputError, "missing"),
        (lambda g: g.train_step([batch_of(3)], scalars(1)), SymbolValueError, r"2\*N, N >= 1"),
        (lambda g: g.train_step([batch_of(4), batch_of(1)], scalars(1)), SymbolValueError, "is 1"),
        (
            lambda g: g.train_step([batch_of(4)], {"lr": 1.0}),
            InputError,
            r"optimizer momentum reads \['lr', .*missing \['momentum', 'momentum_first', 'clip_n",
        ),
        (lambda g: g.step({}), InputError, "reads"),
        (lambda g: g.train_step([], scalars(1)), InputError, "the step has no micro-batch"),
        (lambda g: g.train_step([(batch_of(4),)], scalars(1)), InputError, "of 2 parts"),
        (lambda g: g.evaluate(batch_of(3)), SymbolValueError, "which violates"),
    ],
)
def test_mistakes_are_reported_and_nothing_has_happened(
    tmp_path: Path, wrong: WrongStep, kind: type[OnnxparRuntimeError], message: str
) -> None:
    with TrainerGroup(regression(tmp_path / "a", 2, {"divisor": 2})) as group:
        with pytest.raises(kind, match=message) as caught:
            wrong(group)
        assert caught.value.agreed
        np.testing.assert_array_equal(group.gather("w"), hand_trained.start())
        # All ranks agreed, so the group goes on.
        reference = Reference()
        reference.step(batch_of(4), scalars(1))
        group.train_step([batch_of(4)], scalars(1))
        np.testing.assert_allclose(group.gather("w"), reference.w, **EXACT)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            lambda rank: [batch_of(4)] * (rank + 1),
            r"number and sizes of batches on all ranks, got \[.*\] on this rank",
        ),
        (lambda rank: [batch_of(4), batch_of(2 + 2 * rank)], "number and sizes of batches"),
        (lambda rank: [batch_of(2 + 2 * rank)], "'batch': expected one value on all ranks"),
    ],
)
def test_ranks_with_different_batches(
    tmp_path: Path, batches: Callable[[int], list[dict[str, Array]]], message: str
) -> None:
    start = time.monotonic()
    with (
        TrainerGroup(regression(tmp_path / "a")) as group,
        pytest.raises(SymbolValueError, match=message),
    ):
        group.each(lambda r: group.members[r].train_step(batches(r), scalars(1)))
    assert time.monotonic() - start < 10


def test_a_rank_that_fails_in_the_middle_ends_all(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        group.train_step([batch_of(4)], scalars(1))

        def run(rank: int) -> None:
            if rank == 1:
                raise OSError("the disk is full")
            group.members[rank].train_step([batch_of(4)], scalars(2))

        with pytest.raises(RankError, match=r"r1 \| OSError: the disk is full"):
            group.each(run)


def test_random_numbers_differ_by_step_and_micro_batch(tmp_path: Path) -> None:
    """What they are keyed by, as the graph sees it: seed, step and micro-batch as digits."""
    names = ("seed", "step", "micro_batch")
    directory = hand_trained.one_weight(
        tmp_path / "a",
        " hundred = Constant<value_ints = [100]>()  ten = Constant<value_ints = [10]>()"
        " s1 = Mul(seed, hundred)  s2 = Mul(step, ten)  s3 = Add(s1, s2)"
        " s4 = Add(s3, micro_batch)  s5 = Cast<to: int = 11>(s4)  s6 = Squeeze(s5)"
        " two = Constant<value_float = 0.5>()  half = Cast<to: int = 11>(two)"
        " s7 = Mul(s6, half)  mine = Mul(s7, lw)  slope = Mul(w, lw)",
        head="double[n] x, " + ", ".join(f"int64[1] {n}" for n in names),
        inputs=[hand_trained.tensor("x", "float64", ["n"], [[("n", [])]])],
        system_inputs=[{"name": n, "kind": "counter", "counter": n} for n in names],
        loss={"kind": "output", "labels": None, "ignore_index": None, "count": None},
        symbols={"n": {}},
    )
    x = {"x": np.zeros(2)}
    with TrainerGroup(directory, seed=3) as group:
        assert group.train_step([x], {"lr": 0.0}).loss == 300
        # Three quarters of the step's samples are in the second micro-batch, number 1.
        assert group.train_step([x, {"x": np.zeros(6)}], {"lr": 0.0}).loss == 310.75
        assert [group.forward_backward(x) for _ in range(2)] == [320, 320]
        assert [group.forward_backward(x, accumulate=True) for _ in range(2)] == [321, 322]
        group.step({"lr": 0.0})
        assert group.forward_backward(x) == 330


def test_labels_that_do_not_count(tmp_path: Path) -> None:
    """Micro-batches are weighted by their labels that count, and left out where none does."""
    directory = hand_trained.one_weight(
        tmp_path / "a",
        " minus = Constant<value_int = -100>()  same = Equal(labels, minus)  keep = Not(same)"
        " mask = Cast<to: int = 11>(keep)  here = ReduceSum<keepdims: int = 0>(mask)"
        ' count, t1 = onnxpar.AllReduce<reduction: string = "sum", group: ints = [0, 1]>(here)'
        " xs = Mul(x, mask)  s1 = ReduceSum<keepdims: int = 0>(xs)  s2 = Div(s1, count)"
        " s3 = Mul(s2, lw)  w0 = Squeeze(w)  mine = Mul(s3, w0)"
        " one = Constant<value_ints = [1]>()  slope = Reshape(s3, one)",
        head="double[n] x, int64[n] labels",
        inputs=[
            hand_trained.tensor("x", "float64", ["n"], [[("n", [0])]]),
            hand_trained.tensor("labels", "int64", ["n"], [[("n", [0])]]),
        ],
        loss={
            "kind": "softmax_cross_entropy",
            "labels": "labels",
            "ignore_index": -100,
            "count": "n",
        },
        symbols={"n": {"divisor": 2}},
    )

    def batch(*kept: int) -> dict[str, Array]:
        labels = np.array([0 if k else -100 for k in kept])
        return {"x": np.arange(1.0, len(kept) + 1), "labels": labels}

    with TrainerGroup(directory) as group:
        nothing = batch(0, 0)
        got = group.train_step([nothing, batch(1, 0, 0, 0), nothing, batch(1, 1, 0, 1)], {"lr": 1})
        mean = (1 + 1 + 2 + 4) / 4
        np.testing.assert_allclose([got.loss, got.grad_norm], [1.5 * mean, mean], **EXACT)
        np.testing.assert_allclose(group.gather("w"), [1.5 - mean], **EXACT)
        with pytest.raises(InputError, match="no micro-batch with labels that count"):
            group.train_step([nothing], {"lr": 1.0})
        with pytest.raises(InputError, match="the micro-batch has no labels that count"):
            group.forward_backward(nothing)
        assert group.evaluate(batch(1, 1, 0, 1))["count"] == 3
        assert group.evaluate(nothing)["count"] == 0


def sequences(directory: Path, *, weighed: bool = True) -> Path:
    """The loss is the mean of w x over a batch of sequences, whose length is each rank's own."""
    return hand_trained.one_weight(
        directory,
        " size = Mul(b, s)  n = Cast<to: int = 11>(size)  count = Squeeze(n)"
        " s1 = ReduceSum<keepdims: int = 0>(x)  s2 = Div(s1, count)"
        " s3 = Mul(s2, lw)  w0 = Squeeze(w)  mine = Mul(s3, w0)"
        " one_1 = Constant<value_ints = [1]>()  slope = Reshape(s3, one_1)",
        head="double[n, m] x, int64[1] b, int64[1] s",
        inputs=[
            hand_trained.tensor("x", "float64", ["batch", "seq"], [[("batch", [0])], [("seq", [])]])
        ],
        system_inputs=[
            {"name": "b", "kind": "symbol", "symbol": "batch"},
            {"name": "s", "kind": "symbol", "symbol": "seq"},
        ],
        loss={"kind": "output", "labels": None, "ignore_index": None, "count": "batch*seq"},
        symbols={"batch": {}, "seq": {"per_rank": True, "max": 8}},
        weighed=weighed,
    )


def test_sizes_of_each_data_rank(tmp_path: Path) -> None:
    """Data ranks with different `seq` in one step equal one device that takes them in turn."""
    directory = sequences(tmp_path / "a")
    rng = np.random.default_rng(1)
    parts = [{"x": rng.standard_normal(shape)} for shape in ((2, 5), (2, 3), (1, 7), (1, 2))]
    with TrainerGroup(directory) as group:
        got = group.train_step([(parts[0], parts[1])], {"lr": 0.1})
        mean = np.concatenate([p["x"].ravel() for p in parts[:2]]).mean()
        w = 1.5
        np.testing.assert_allclose([got.loss, got.grad_norm], [w * mean, abs(mean)], **WEIGHTED)
        w -= 0.1 * mean
        # As well over several micro-batches, one of them with one size for all.
        got = group.train_step([(parts[0], parts[1]), (parts[2], parts[3]), parts[0]], {"lr": 0.1})
        mean = np.concatenate([p["x"].ravel() for p in [*parts, parts[0]]]).mean()
        np.testing.assert_allclose(got.loss, w * mean, **WEIGHTED)
        np.testing.assert_allclose(group.gather("w"), [w - 0.1 * mean], **WEIGHTED)
        found = group.evaluate((parts[0], parts[1]))
        mean = np.concatenate([p["x"].ravel() for p in parts[:2]]).mean()
        np.testing.assert_allclose(found["loss"], group.gather("w")[0] * mean, **WEIGHTED)
        assert found["count"] == 16
        with pytest.raises(InputError, match=r"data rank 0 has 1 of 3 rows, expected 2"):
            group.train_step([(parts[2], parts[1])], {"lr": 0.1})
        with pytest.raises(SymbolValueError, match="'seq' is 9"):
            group.train_step([(parts[0], {"x": np.zeros((2, 9))})], {"lr": 0.1})
        with pytest.raises(InputError, match="a batch of 2 parts"):
            group.train_step([tuple(parts[:3])], {"lr": 0.1})


def test_evaluation_that_cannot_weigh_data_ranks(tmp_path: Path) -> None:
    ones, twos = {"x": np.ones((1, 3))}, {"x": np.full((1, 5), 2.0)}
    with TrainerGroup(sequences(tmp_path / "a", weighed=False)) as group:
        assert group.evaluate((ones, {"x": np.full((1, 3), 2.0)}))["loss"] == 1.5 * 1.5
        with pytest.raises(InputError, match="equal size on all data ranks") as caught:
            group.evaluate((ones, twos))
        assert caught.value.agreed
    with TrainerGroup(sequences(tmp_path / "b")) as group:
        found = group.evaluate((ones, twos))
        np.testing.assert_allclose(found["loss"], 1.5 * 13 / 8, **WEIGHTED)


def uneven(directory: Path, dtype: str) -> Path:
    """A weight of 3 columns over 2 ranks: each holds 2, and rank 1's second is padding.

    The optimizer negates it.
    """
    element = DTYPES[dtype]
    w = np.arange(6, dtype=element.dtype).reshape(2, 3)
    spec = hand_trained.tensor("w", dtype, [2, 3], [[(2, [])], [(3, [0])]])
    name = {"float32": "float", "float64": "double"}.get(dtype, dtype)
    text = (
        f'g ({name}[2, 2] w) => ({name}[2, 2] negative, float "onnxpar.grad_norm") {{'
        # What reads the old value comes before what writes the new one into its memory.
        ' f = Cast<to: int = 1>(w)  "onnxpar.grad_norm" = ReduceMax<keepdims = 0>(f)'
        f"  m = Neg(f)  negative = Cast<to: int = {element.code}>(m) }}"
    )
    program = hand_trained.Program(
        [text] * 2,
        outputs=[hand_trained.tensor("onnxpar.grad_norm", "float32", [], [])],
        state_inputs=["w"],
        state_outputs={"negative": "w"},
    )
    names = ("training_model", "optimizer_model", "eval_model")
    return hand_trained.write(
        directory,
        dict.fromkeys(names, program),
        atoms=[2],
        states=[
            hand_trained.state("w", "parameter", "w", spec),
            hand_trained.state("g", "gradient", "w", {**spec, "dims": spec["dims"][:1] * 2}, [0])
            | {"shape": [2, 2]},
        ],
        loss={"kind": "mse", "labels": None, "ignore_index": None, "count": None},
        shards={"w": (spec, [w[:, :2].copy(), np.pad(w[:, 2:], [(0, 0), (0, 1)])])},
    )


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_a_parameter_split_unevenly(tmp_path: Path, dtype: str) -> None:
    with TrainerGroup(uneven(tmp_path / "a", dtype)) as group:
        # Small integers, exact in every type.
        w = np.arange(6, dtype=DTYPES[dtype].dtype).reshape(2, 3)
        np.testing.assert_array_equal(group.gather("w"), w)
        assert group.on_each(lambda member: member.step({})) == [4, 5]
        np.testing.assert_array_equal(group.gather("w"), -w)
        group.load_parameters({"w": w * 2})
        np.testing.assert_array_equal(group.gather("w"), w * 2)
        parts = group.on_each(lambda member: member.state("w"))
        assert parts[1].dtype == DTYPES[dtype].dtype
        np.testing.assert_array_equal(parts[1], np.array([[4, 0], [10, 0]], parts[1].dtype))
        # A sum over both ranks' parts.
        for rank, trainer in enumerate(group.members):
            trainer.states.set("g", np.full((2, 2), rank + 1, DTYPES[dtype].dtype))
        np.testing.assert_array_equal(group.gather("g"), np.full((2, 2), 3, DTYPES[dtype].dtype))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw.pop("training"), "expected states of 'training', got 'w'"),
        (
            lambda raw: raw["training"]["states"][0].update(kind="weight"),
            r"states 'w'.kind: expected one of \['parameter', .*, got 'weight'",
        ),
        (
            lambda raw: raw["training"]["states"][1].update(partial=[1]),
            r"'onnxpar\.grad\.w'.partial: expected atoms that do not shard it",
        ),
        (
            lambda raw: raw["training"]["states"][1].update(name="w"),
            "training.states: expected each name once, got 'w'",
        ),
        (
            lambda raw: raw["training"]["states"][0].update(parameter="v"),
            "'w'.parameter: expected one of the parameters .*, got 'v'",
        ),
        (
            lambda raw: raw["training"]["states"][0]["dims"][0][0].update(size="n"),
            "'w'.dims: expected integer sizes",
        ),
        (lambda raw: raw["training"].pop("loss"), "training: 'loss' is missing"),
        (lambda raw: raw["training"]["loss"].update(labels=3), "labels: expected str, got 3"),
        (lambda raw: raw["training"].update(notices=[1]), r"notices\[0\]: expected str, got 1"),
        (lambda raw: raw["programs"].pop("optimizer_model"), "no program 'optimizer_model'"),
        (
            lambda raw: raw["parameters"]["w"]["shards"][1].update(ranks=[0]),
            "the shard of rank 1 was not written",
        ),
        (
            lambda raw: raw["training"]["states"][0].update(dtype="float32"),
            r"parameter 'w': expected float32 \(3, 2\) in weights.*, got float64",
        ),
        (
            lambda raw: raw["training"]["states"].pop(2),
            "programs.training_model: expected states of 'training', got 'onnxpar.micro.w'",
        ),
        (
            lambda raw: raw["training"]["states"][2].update(kind="moment2"),
            r"no micro_gradient state for the parameters \['w'\]",
        ),
        (
            lambda raw: raw["programs"]["training_model"]["state_outputs"][0].update(name="g"),
            r"training_model.onnx: does not match its manifest: .*outputs \['g'\]",
        ),
    ],
)
def test_damaged_directories(
    tmp_path: Path, damage: Callable[[dict[str, Any]], object], message: str
) -> None:
    directory = regression(tmp_path / "a")
    path = directory / "manifest.json"
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with (
        pytest.raises((DirectoryError, RankError), match=message),
        TrainerGroup(directory) as group,
    ):
        group.train_step([batch_of(4), batch_of(4)], scalars(1))


def test_a_directory_for_inference(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"not made for training; it has .*\['model'\]"):
        TrainerGroup(hand_made.data_parallel(tmp_path / "a"))


def test_one_device(tmp_path: Path) -> None:
    """Without a rank a trainer is a world of its own."""
    directory = hand_trained.one_weight(
        tmp_path / "a",
        " s1 = ReduceMean<keepdims: int = 0>(x)  s2 = Mul(s1, lw)  w0 = Squeeze(w)"
        " mine = Mul(s2, w0)  one = Constant<value_ints = [1]>()  slope = Reshape(s2, one)",
        ranks=1,
        head="double[n] x",
        inputs=[hand_trained.tensor("x", "float64", ["n"], [[("n", [])]])],
        loss={"kind": "output", "labels": None, "ignore_index": None, "count": None},
        symbols={"n": {}},
    )
    with Trainer(directory) as trainer:
        result = trainer.train_step([{"x": np.array([1.0, 3.0])}], {"lr": 0.25})
        # Powers of two throughout.
        assert (result.loss, result.grad_norm) == (3.0, 2.0)
        assert trainer.parameters()["w"].tolist() == [1.0]
        assert trainer.evaluate({"x": np.array([4.0])})["loss"] == 4.0


def test_a_closed_trainer_refuses(tmp_path: Path) -> None:
    with TrainerGroup(regression(tmp_path / "a")) as group:
        trainer = group.members[0]
        trainer.close()
        uses: list[Callable[[], object]] = [
            lambda: trainer.train_step([batch_of(4)], {"lr": 0.1}),
            lambda: trainer.evaluate(batch_of(4)),
            lambda: trainer.gather("w"),
            trainer.reset,
        ]
        for use in uses:
            with pytest.raises(LaunchError, match=r"the trainer of .* is closed"):
                use()


def test_wrong_world(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"was made for 2 ranks, got 1"):
        Trainer(regression(tmp_path / "a"))
