"""Trainers of pipelines that were made by hand, all ranks in this process, beside numpy."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar_format.calls import COLLECTIVE
from onnxpar_format.trace import ACTION, CALL
from onnxpar_format.trace_times import PARTS, times
from onnxpar_runtime.checkpoint.layout import written
from onnxpar_runtime.errors import (
    DirectoryError,
    InputError,
    OnnxparRuntimeError,
    RankError,
    ReplicaError,
    ScheduleError,
    TrainingError,
)
from onnxpar_runtime.group import ThreadsGroup
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.tracing.recording import Recording
from onnxpar_runtime.training.group import TrainerGroup
from onnxpar_runtime.training.programs import TRAINING
from onnxpar_runtime.training.replicas import check_replicas
from onnxpar_runtime.training.runner import Pipelined
from tests.runtime.hand_made import tensor
from tests.runtime.hand_staged import N, Reference, Shape, batch_of, staged
from tests.runtime.hand_trained import Program, write

RATE = {"lr": 0.1}
# The weights of micro-batches are float32.
RTOL = 2.0**-22
SCHEDULES = {
    "gpipe": Shape(stages=3, schedule="gpipe"),
    "1f1b": Shape(stages=3, schedule="1f1b"),
    "interleaved": Shape(stages=2, chunks=2, schedule="interleaved"),
    "zb-h1": Shape(stages=3, split=True, schedule="zb-h1"),
}


def train(group: TrainerGroup, reference: Reference, sizes: Sequence[int], steps: int = 2) -> None:
    """Trains on both sides and compares losses, norms and states."""
    for step in range(steps):
        batches = [batch_of(size, 10 * step + k) for k, size in enumerate(sizes)]
        loss, norm = reference.step(batches, RATE["lr"])
        for result in group.each(lambda r, b=batches: group.members[r].train_step(b, RATE)):
            assert (result.loss, result.grad_norm) == pytest.approx((loss, norm), rel=RTOL)
        for norms in group.on_each(lambda member: member.gradient_norms(["*"])):
            assert norms["*"] == pytest.approx(norm, rel=RTOL)
    for name, array in reference.weights.items():
        np.testing.assert_allclose(group.gather(name), array, atol=RTOL * np.abs(array).max())
    np.testing.assert_array_equal(group.gather("seen"), reference.seen)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_equal_one_device(tmp_path: Path, name: str, size: int) -> None:
    """Micro-batches of several numbers, of sizes that differ and that the mesh does not divide."""
    shape = replace(SCHEDULES[name], size=size)
    reference = Reference(shape)
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        for sizes in ((4,), (3, 3), (5, 1, 2), (1, 4, 2, 3)):
            train(group, reference, sizes, steps=1)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(tied=True),
        Shape(stages=3, size=2, tied=True, split=True),
        Shape(stages=2, chunks=2, schedule="interleaved", tied=True),
        Shape(stages=1, chunks=3, schedule="interleaved", tied=True),
    ],
    ids=["2", "3x2", "2x2 chunks", "one rank"],
)
def test_a_tied_parameter_has_one_gradient(tmp_path: Path, shape: Shape) -> None:
    """On stages of their own its gradients are added up, and on one rank, too."""
    reference = Reference(shape)
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        train(group, reference, (2, 3, 4))
        batches = [batch_of(4, 50), batch_of(2, 51)]
        _, wanted = reference.gradients(batches)
        group.train_step(batches, RATE)
        got = group.gather("onnxpar.grad.w0")
        np.testing.assert_allclose(got, wanted["w0"], atol=RTOL * np.abs(wanted["w0"]).max())


def test_micro_batches_that_come_one_by_one(tmp_path: Path) -> None:
    shape = Shape(stages=2, size=2)
    reference = Reference(shape)
    batches = [batch_of(4, 0), batch_of(3, 1)]
    loss, norm = reference.step(batches, RATE["lr"])
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        got = group.forward_backward(batches[0], weight=4 / 7)
        got += group.forward_backward(batches[1], weight=3 / 7, accumulate=True)
        assert got == pytest.approx(loss, rel=RTOL)
        assert group.step(RATE) == pytest.approx(norm, rel=RTOL)


def test_what_counts_nothing_is_left_out(tmp_path: Path) -> None:
    """The others keep their numbers, which random numbers are keyed by."""
    shape = Shape(stages=2)
    reference = Reference(shape)
    batches = [batch_of(4, 0), batch_of(3, 1), batch_of(2, 2)]
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:

        def step(rank: int) -> float:
            trainer = group.members[rank]
            prepared = [trainer.prepare(batch) for batch in batches]
            prepared[1] = replace(prepared[1], count=0, divisor=0)
            return trainer.train_step(prepared, RATE).loss

        got = group.each(step)
    wanted = 0.0
    for number in (0, 2):
        error = reference.forward(batches[number], number)[1] - batches[number]["labels"]
        wanted += (error**2).sum() / (6 * N)
    assert got == pytest.approx([wanted] * 2, rel=RTOL)


def test_evaluation_brings_outputs_from_the_last_stage(tmp_path: Path) -> None:
    shape = Shape(stages=2, chunks=2, size=2, schedule="interleaved")
    batch = batch_of(5)
    _, p = Reference(shape).forward(batch)
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        found = group.on_each(lambda member: member.evaluate(batch, outputs=True))
    # Float64 products of few terms, through four virtual stages: some units of 1e-16.
    np.testing.assert_allclose(found[0]["outputs"]["p"], p, rtol=1e-12)  # type: ignore[index]
    losses = [f["loss"] for f in found]
    assert losses == pytest.approx([((p - batch["labels"]) ** 2).mean()] * 4, rel=1e-12)


def test_each_stage_has_its_own_states(tmp_path: Path) -> None:
    shape = Shape(stages=2, tied=False)
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        first, last = group.members
        assert set(first.parameters()) == {"w0"} and set(last.parameters()) == {"w1"}
        assert first.holds("seen") and not last.holds("seen")
        with pytest.raises(InputError, match=r"'w1' is held by the stages \[1\], but rank 0 is in"):
            first.state("w1")
        arrays = {name: np.full((N, N), float(number)) for number, name in enumerate(("w0", "w1"))}
        group.load_parameters(arrays)
        for name, array in arrays.items():
            np.testing.assert_array_equal(group.gather(name), array)
        with pytest.raises(OnnxparRuntimeError, match="no trained parameters"):
            group.load_parameters({"w2": arrays["w1"]})


def test_stages_that_share_a_state_are_replicas(tmp_path: Path) -> None:
    shape = Shape(stages=3, size=2, tied=True)
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        group.train_step([batch_of(3)], RATE)

        def check(rank: int) -> None:
            check_replicas(group.members[rank], ["w0", "w1", "seen"], "step 1")

        group.each(check)
        group.members[4].states.set("w0", np.zeros((N, N)))
        with pytest.raises(ReplicaError, match=r"'w0': .* ranks 0, 1, 5 and rank 4 differ"):
            group.each(check)


def test_a_checkpoint_has_every_state_once(tmp_path: Path) -> None:
    """Written by a rank that holds it; states that stages share are not written twice."""
    shape = Shape(stages=3, size=2, tied=True)
    manifest = Manifest.load(staged(tmp_path / "a", shape))
    parts = list(written(manifest))
    assert sorted(p.state.name for p in parts) == ["seen", "w0", "w1"]
    assert all(manifest.stage_of(p.rank) in p.state.stages for p in parts)


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("gpipe", (4, 4, 4)), ("1f1b", (3, 2, 1))], ids=str
)
def test_values_live_as_long_as_the_schedule_says(
    tmp_path: Path, schedule: str, in_flight: tuple[int, ...]
) -> None:
    """Bytes of activations: those of as many micro-batches as are under way at a time."""
    shape, rows = Shape(stages=3, schedule=schedule), 8
    value = 8 * rows * N
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        group.train_step([batch_of(rows, k) for k in range(4)], RATE)
        peaks = []
        for member in group.members:
            running = member._opened.runner
            assert isinstance(running, Pipelined)
            peaks.append(running._stages[TRAINING].peak_bytes)
    # What a micro-batch keeps between forward and backward: h0; h0 and h1; h1 and the error. The
    # last of them has cotangents beside: two; one, and h1 for the rest; none.
    kept, more = (1, 2, 2), (2, 1, 0)
    # Receives that are there before their turn add a value at most.
    for peak, count, each, extra in zip(peaks, in_flight, kept, more, strict=True):
        least = value * count * each
        assert least <= peak <= least + value * (extra + 2)


def test_a_trace_of_a_trainer(tmp_path: Path) -> None:
    with TrainerGroup(staged(tmp_path / "a", Shape(size=2))) as group:
        recordings = group.on_each(lambda member: Recording(member.rank))
        for step in range(2):
            group.train_step([batch_of(2, 10 * step + k) for k in range(3)], RATE)
        own = {recording.rank.index: recording for recording in recordings}
        trace, *others = group.on_each(lambda m: own[m.rank.index].finish("train", 2))
        assert trace is not None and others == [None] * 3
        assert group.members[0].even_bubble() == pytest.approx(1 / 4)
    found = times(trace)
    assert found.steps == 1 and found.idle is not None and 0 < found.idle < 1
    # Each of 4 ranks has a forward and a backward of 3 micro-batches in 2 steps.
    assert sum(span.kind == ACTION for span in trace.spans) == 4 * 2 * 3 * 2
    # The two ranks of a stage reduce the gradients: both see the same calls, met at the same time.
    calls = [s for s in trace.spans if s.kind == CALL and s.more["ranks"] == [0, 1]]
    assert calls and {s.rank for s in calls} == {0, 1}
    assert all(s.more["last"] in (0, 1) for s in calls if s.more["op"] == COLLECTIVE)
    for rank in found.ranks:
        assert sum(getattr(rank, part) for part in PARTS) == pytest.approx(rank.step)
        assert min(getattr(rank, part) for part in PARTS) > -1e-4


def change(directory: Path, edit: Callable[[dict[str, Any]], object]) -> Path:
    """Edits the manifest."""
    path = directory / "manifest.json"
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))
    return directory


def _of(raw: dict[str, Any], name: str, key: str) -> Any:
    return raw["programs"][name][key]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["pipeline"].update(stages=5), "stages: expected a divisor of the 4 devices"),
        (lambda m: m["pipeline"].update(chunks=0), r"pipeline.chunks: expected a number >= 1"),
        (lambda m: m["mesh"].update(atoms=[2, 2]), "mesh.atoms: expected .* product is 2"),
        (
            lambda m: m["pipeline"]["programs"]["training_model"].pop(),
            "training_model: expected 2 entries, got 1",
        ),
        (
            lambda m: m["pipeline"]["programs"]["training_model"][0].update(forward="f"),
            "pipeline.programs: expected one of .*, got 'f'",
        ),
        (
            lambda m: m["pipeline"]["programs"]["training_model"][0].update(
                forward=None, backward=None
            ),
            "training_model: expected a program under 'forward' or 'backward', got",
        ),
        (
            lambda m: _of(m, "forward_model.0", "files").reverse(),
            r"forward_model.0.files: expected files for the ranks of stage 0 alone, got \[2, 3\]",
        ),
        (
            lambda m: _of(m, "forward_model.1", "handed_in")[0].update(name="h7"),
            "forward_model.1.handed_in 'h7': expected 'forward_model.0' to make it with the "
            "same type and shape",
        ),
        (
            lambda m: _of(m, "forward_model.0", "handed_out")[0].update(dtype="float8"),
            "handed_out 'h0'.dtype: expected one of",
        ),
        (
            lambda m: _of(m, "forward_model.0", "handed_out")[0].update(shape="batch"),
            "handed_out 'h0'.shape: expected list, got 'batch'",
        ),
        (
            lambda m: m["training"]["states"][0].update(stages=[2]),
            r"states 'w0'.stages: expected different stages of \[0, 1\], got \[2\]",
        ),
    ],
)
def test_a_manifest_that_is_wrong(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    directory = change(staged(tmp_path / "a", Shape(size=2)), edit)
    with pytest.raises(DirectoryError, match=message):
        TrainerGroup(directory)


def _hand_back(raw: dict[str, Any]) -> None:
    """Makes a forward take what a backward makes."""
    taken = {**_of(raw, "backward_model.1", "handed_out")[0], "from": "backward_model.1"}
    _of(raw, "forward_model.0", "handed_in").append(taken)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (_hand_back, DirectoryError, "forward_model.0: takes 'dh0' from 'backward_model.1'"),
        (
            lambda m: _of(m, "backward_model.0", "files").__setitem__(0, None),
            RankError,
            "the graph of rank 0 was not written",
        ),
        (
            lambda m: _of(m, "forward_model.1", "outputs").clear(),
            DirectoryError,
            "output 'onnxpar.loss' of training_model: expected one stage that computes it, got ",
        ),
    ],
    ids=["way", "graph", "output"],
)
def test_parts_that_do_not_fit_together(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], error: type, message: str
) -> None:
    directory = change(staged(tmp_path / "a", Shape()), edit)
    with pytest.raises(error, match=message):
        TrainerGroup(directory)


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        ("2f2b", ScheduleError, "expected a schedule of gpipe, 1f1b"),
        ("zb-h1", DirectoryError, "the backward pass of a stage is one program"),
    ],
)
def test_a_schedule_that_cannot_be_played(
    tmp_path: Path, schedule: str, error: type, message: str
) -> None:
    directory = staged(tmp_path / "a", Shape(schedule=schedule))
    with TrainerGroup(directory) as group, pytest.raises(error, match=message):
        group.train_step([batch_of(2)], RATE)


def test_a_value_that_is_not_as_promised_ends_all_ranks(tmp_path: Path) -> None:
    def edit(raw: dict[str, Any]) -> None:
        for name, key in (("forward_model.1", "handed_out"), ("backward_model.1", "handed_in")):
            entries = _of(raw, name, key)
            next(e for e in entries if e["name"] == "error")["shape"] = ["batch + 1", N]

    directory = change(staged(tmp_path / "a", Shape()), edit)
    with (
        TrainerGroup(directory) as group,
        pytest.raises(
            RankError, match=r"r1 \| 'error', handed .* expected the local shape \(5, 3\), got \(4,"
        ),
    ):
        group.train_step([batch_of(4), batch_of(4, 1)], RATE)


def test_a_loss_that_is_no_number_is_known_on_all_ranks(tmp_path: Path) -> None:
    shape = Shape(size=2)
    with TrainerGroup(staged(tmp_path / "a", shape)) as group:
        wrong = batch_of(4)
        wrong["labels"][0, 0] = np.inf
        with pytest.raises(TrainingError, match="step 1: the loss is inf"):
            group.train_step([batch_of(4), wrong], RATE)
        np.testing.assert_array_equal(group.gather("w1"), Reference(shape).weights["w1"])


# -- programs without states -----------------------------------------------------------------------


def two_stages(directory: Path, *, size: int = 1) -> Path:
    """Writes h = 2 x, made by stage 0, and of stage 1 y = h + 1 and a = NonZero(z).

    Nothing but the run says how large a is.
    """
    split = [[("batch", [0] if size > 1 else [])], [(N, [])]]
    x = tensor("x", "float64", ["batch", N], split)
    y, h = {**x, "name": "y"}, {**x, "name": "h"}
    z = tensor("z", "float32", [2, N], [[(2, [])], [(N, [])]])
    a = tensor("a", "int64", [2, "found"], [[(2, [])], [("found", [])]])
    head = f"double[rows, {N}]"
    first = f"g ({head} x) => ({head} h) {{ h = Add(x, x) }}"
    last = (
        f"g ({head} h, float[2, {N}] z) => ({head} y, int64[2, found] a)"
        " { one = Constant<value_float = 1.0>()  d = Cast<to: int = 11>(one)  y = Add(h, d)"
        "  a = NonZero(z) }"
    )
    rows = "batch" if size == 1 else f"ceil(batch/{size})"
    given = {"name": "h", "dtype": "float64", "shape": [rows, N]}
    nothing: list[str | None] = [None] * size
    return write(
        directory,
        {
            "model": Program(nothing * 2, [x, z], [a, h, y]),
            "model.0": Program([first] * size + nothing, [x], [h], handed_out=[given]),
            "model.1": Program(
                nothing + [last] * size, [z], [a, y], handed_in=[{**given, "from": "model.0"}]
            ),
        },
        atoms=[size] if size > 1 else [],
        states=[],
        loss={"kind": "mse", "labels": None, "ignore_index": None, "count": None},
        shards={},
        symbols={"batch": {}},
        pipeline={
            "stages": 2,
            "chunks": 1,
            "schedule": "1f1b",
            "micro_batches": 4,
            "programs": {"model": [{"forward": "model.0"}, {"forward": "model.1"}]},
        },
    )


@pytest.mark.parametrize("size", [1, 2])
def test_a_session_runs_forward_through_the_stages(tmp_path: Path, size: int) -> None:
    """Outputs come to rank 0 from where they are made, of sizes that depend on data, too."""
    with ThreadsGroup(two_stages(tmp_path / "a", size=size)) as group:
        for rows in (5, 2, 5):
            x = np.random.default_rng(rows).standard_normal((rows, N))
            z = np.array([[0, rows % 2, 0], [1, 0, 2]], np.float32)
            got = group.run_global({"x": x, "z": z})
            np.testing.assert_array_equal(got["h"], 2 * x)
            np.testing.assert_array_equal(got["y"], 2 * x + 1)
            np.testing.assert_array_equal(got["a"], np.nonzero(z))
        parts = group.each(
            lambda r: group.members[r].run({"x": x[:2], "z": z}, {"batch": 2 * size})
        )
        assert [set(p) for p in parts] == [{"h"}] * size + [{"a", "y"}] * size
