"""Pipelines beside one device: what stages share, what skips them, uneven micro-batches.

The models are a few nodes long, and every node's stage is given by its name. `ONNXPAR_FULL` runs
all cases.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
from numpy.typing import NDArray
from onnx import parser

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import OnnxparError
from onnxpar.core.symbols import Symbol
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy import Strategy
from onnxpar_format.options import VerifyOptions
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.errors import InputError
from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.pipeline.schedule import Kind
from onnxpar_runtime.pipeline.schedule_kinds import make
from onnxpar_runtime.pipeline.simulate import Times, simulate
from onnxpar_runtime.pipeline.transfers import chain, with_transfers
from onnxpar_runtime.verify.compare import verify
from tests.runtime.pipeline.picture import activation_peaks
from tests.tiers import FULL
from tests.training_cases import CROSS_ENTROPY, hyper, shard

Array = NDArray[Any]
HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
WIDTH, CLASSES = 6, 5
SIGNATURE = f"{HEAD} g (float[batch, {WIDTH}] x) => (float[batch, {CLASSES}] y)"
WEIGHTS = {"w": (WIDTH, WIDTH), "v": (WIDTH, CLASSES), "b": (WIDTH,)}
CHAIN = f"""{SIGNATURE} {{
    [n0] a = MatMul(x, w)  [n1] c = Tanh(a)  [n2] d = Add(c, b)  [n3] y = MatMul(d, v) }}"""
HALVES = {"n[01]": 0, "n[23]": 1}
HYPER = {"lr": 0.1, "clip_norm": 1.0, "weight_decay": 0.0}
LAST = "forward_backward_model.1"
"""Of two stages, the last one's program of forward and backward."""


def model_of(text: str) -> ir.Model:
    """A model of a text, its weights drawn."""
    proto = parser.parse_model(text)
    rng = np.random.default_rng(3)
    nodes = [*proto.graph.node]
    nodes += [n for node in nodes for a in node.attribute for n in a.g.node]
    read = {name for node in nodes for name in node.input}
    for name, shape in WEIGHTS.items():
        if name in read:
            values = rng.standard_normal(shape, np.float32)
            proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.checker.check_model(proto)
    return ir.from_proto(proto)


def strategy_of(assign: Mapping[str, int], stages: int = 2, **more: Any) -> Strategy:
    axes = more.pop("axes", None)
    where: dict[str, Any] = {"mesh": axes} if axes else {"devices": stages}
    return Strategy.from_dict({**where, "pipeline": {"stages": stages, "assign": assign, **more}})


def check(
    tmp_path: Path,
    model: ir.Model,
    strategy: Strategy,
    symbols: Mapping[str, int] | None = None,
    **how: Any,
) -> Manifest:
    """Trains three steps beside one device, after an evaluation; the manifest of the pipeline."""
    how = {"optimizer": "adamw", **how}
    out = shard(tmp_path / "a", model.clone(), strategy, **how)
    one = shard(tmp_path / "one", model.clone(), "dp", devices=1, **how)
    settings = VerifyOptions(steps=3)
    (case,) = verify(out, one, [symbols or {"batch": 5}], options=settings)
    assert case.problems == ()
    assert case.bytes_counted == case.bytes_expected
    return Manifest.load(out)


def handed(manifest: Manifest, program: str) -> dict[str, str]:
    """What a program takes from others: the value, and which program makes it."""
    return {v.name: v.source for v in manifest.program(program).handed_in}


def test_a_clone_waits_for_a_cotangent_that_was_sent_in_another_sharding(tmp_path: Path) -> None:
    """A clone's Barrier reads a cotangent that is partial where it is made, and sent reduced."""
    model = model_of(f"""{SIGNATURE} {{
        [n0] a = MatMul(x, w)  [n1] c = Tanh(a)
        [n2] d = MatMul(c, v)  [n3] y = Tanh(d) }}""")
    by_columns = {"in": [[None, None], [None, "tp"]]}
    strategy = {
        "mesh": {"tp": 2},
        "recompute": ["n1"],
        "pipeline": {"stages": 2, "assign": HALVES},
        "nodes": {"n0": by_columns, "n2": by_columns},
    }
    check(tmp_path, model, Strategy.from_dict(strategy))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_crosses_a_border_is_recomputed_on_its_own_stage_alone(
    tmp_path: Path, schedule: str
) -> None:
    """The later stage keeps what it has received; what it was made of does not go there."""
    model = model_of(f"""{SIGNATURE} {{
        [n0] a = MatMul(x, w)  [n1] c = Tanh(a)  [n2] d = Add(c, b)  [n3] e = Tanh(c)
        [n4] f = Mul(d, e)  [n5] y = MatMul(f, v) }}""")
    pipeline = {"stages": 2, "assign": {"n[01]": 0, "n[2-5]": 1}, "schedule": schedule}
    strategy = {"devices": 2, "recompute": ["n[1-4]"], "pipeline": pipeline}
    manifest = check(tmp_path, model, Strategy.from_dict(strategy))
    border = {
        (source.rpartition(".")[2], name.rpartition(".")[2], value.name)
        for name, program in manifest.programs.items()
        for value in program.handed_in
        for source in [value.source]
        if source.rpartition(".")[2] != name.rpartition(".")[2] and "eval" not in name
    }
    assert {(a, b) for a, b, _ in border} == {("0", "1"), ("1", "0")}
    assert [value for a, _, value in border if a == "0"] == ["c"]
    assert len([value for a, _, value in border if a == "1"]) == 1


def test_a_value_that_skips_stages(tmp_path: Path) -> None:
    """It goes straight to its readers, and each stage adds its cotangent to the next one's."""
    text = f"""{SIGNATURE} {{
    [n0] a = MatMul(x, w)  [n1] c = Tanh(a)  [n2] d = Add(c, a)  [n3] e = Add(d, a)
    [n4] y = MatMul(e, v) }}"""
    strategy = strategy_of({"n0": 0, "n1": 1, "n2": 2, "n[34]": 3}, 4)
    manifest = check(tmp_path, model_of(text), strategy)
    for program in ("forward_model.1", "forward_model.2", "forward_backward_model.3"):
        assert handed(manifest, program)["a"] == "forward_model.0"


@pytest.mark.parametrize(
    "nodes",
    [
        # By one the loss has no derivative, in the later stage or in the first.
        "[n0] a = MatMul(x, w)  [n1] s = Sign(w)  [n2] c = MatMul(a, s)  [n3] y = MatMul(c, v)",
        "[n0] s = Sign(w)  [n00] a = MatMul(x, s)  [n1] c = MatMul(a, w)  [n3] y = MatMul(c, v)",
    ],
    ids=["later", "first"],
)
def test_a_parameter_that_has_no_derivative_in_one_stage(tmp_path: Path, nodes: str) -> None:
    strategy = strategy_of({"n0*": 0, "n[123]": 1})
    manifest = check(tmp_path, model_of(f"{SIGNATURE} {{ {nodes} }}"), strategy)
    assert manifest.trained().states["w"].stages == (0, 1)


def test_what_is_made_of_a_parameter_goes_where_that_is_not(tmp_path: Path) -> None:
    """A table made of weights and sizes alone, whose derivative goes back to its stage."""
    text = f"""{SIGNATURE} {{
    zero = Constant<value_ints: ints = [0]>()  one = Constant<value_ints: ints = [1]>()
    [n0] a = MatMul(x, w)  size = Shape(x)  rows = Slice(size, zero, one)
    shape = Concat<axis = 0>(rows, one)  [e] table = Expand(b, shape)
    [n1] c = Add(a, table)  [n2] d = Tanh(c)  [n3] f = Mul(d, table)  [n4] y = MatMul(f, v) }}"""
    manifest = check(tmp_path, model_of(text), strategy_of({"n[0-2]": 0, "e": 0, "n[34]": 1}))
    assert manifest.trained().states["b"].stages == (0,)


def test_frozen_parameters_are_in_every_stage_that_reads_them(tmp_path: Path) -> None:
    text = f"""{SIGNATURE} {{
    [n0] a = MatMul(x, w)  [n1] c = Add(a, b)  [n2] d = Mul(c, b)  [n3] y = MatMul(d, v) }}"""
    manifest = check(tmp_path, model_of(text), strategy_of({"n[01]": 0, "n[23]": 1}), freeze=("b",))
    assert "b" not in manifest.trained().states
    assert handed(manifest, LAST).keys() == {"c"}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"] if FULL else ["zb-h1"])
@pytest.mark.parametrize("frozen", ["w", "[bv]"])
def test_stages_in_which_nothing_is_trained(tmp_path: Path, schedule: str, frozen: str) -> None:
    """The first has no backward to run, the last hands its cotangent back alone."""
    check(tmp_path, model_of(CHAIN), strategy_of(HALVES, schedule=schedule), freeze=(frozen,))


BODIES = {
    "If": f"""zero = Constant<value: tensor = float {{0}}>()  sum = ReduceSum<keepdims = 0>(a)
    p = Greater(sum, zero)
    [n1] c = If(p) <then_branch = t () => (float[batch, {WIDTH}] ct) {{ ct = Mul(a, b) }},
      else_branch = f () => (float[batch, {WIDTH}] ce) {{ ce = Add(a, b) }}>""",
    "Loop": f"""times = Constant<value_int = 3>()  on = Cast<to = 9>(times)
    [n1] c = Loop(times, on, a) <body = l (int64 i, bool k, float[batch, {WIDTH}] s) =>
      (bool k2, float[batch, {WIDTH}] s2) {{ k2 = Identity(k)  m = Mul(s, b)  s2 = Add(m, a) }}>""",
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_body_reads_what_an_earlier_stage_made(tmp_path: Path, kind: str) -> None:
    text = f"{SIGNATURE} {{ [n0] a = MatMul(x, w)  {BODIES[kind]}  [n2] y = MatMul(c, v) }}"
    manifest = check(tmp_path, model_of(text), strategy_of({"n0": 0, "n[12]": 1}))
    assert "a" in handed(manifest, LAST)


@pytest.mark.parametrize("axes", [None, {"dp": 2}, {"dp": 3}] if FULL else [{"dp": 2}], ids=str)
@pytest.mark.parametrize("ignored", [None, -1])
def test_uneven_micro_batches(
    tmp_path: Path, axes: dict[str, int] | None, ignored: int | None
) -> None:
    """Of 3, 1 and 4 rows; where labels are ignored, no row of the second one counts."""
    model, how = model_of(CHAIN), {"optimizer": "momentum", "ignore_index": ignored}
    out = shard(tmp_path / "a", model.clone(), strategy_of(HALVES, axes=axes), **how)
    one = shard(tmp_path / "one", model, "dp", devices=1, **how)
    rng = np.random.default_rng(0)
    with TrainerGroup(one) as reference, TrainerGroup(out) as ranks:
        for step in range(3):
            now = {**hyper("momentum", step + 1, lr=0.1, momentum=0.9), "clip_norm": 1.0}
            batches = []
            for rows in (3, 1, 4):
                labels = rng.integers(0, CLASSES, rows)
                if ignored is not None:
                    labels[: rows // 2 + (rows == 1)] = ignored
                batches.append(
                    {"x": rng.standard_normal((rows, WIDTH), np.float32), "labels": labels}
                )
            got, expected = ranks.train_step(batches, now), reference.train_step(batches, now)
            # Weights of micro-batches are float32.
            # Losses are means of at most 40 rows in float32: 16 roundings of 2^-24. The norm is of
            # gradients, which sum further terms in each layer: ten times as much.
            np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-6)
            np.testing.assert_allclose(got.grad_norm, expected.grad_norm, rtol=1e-5)
        for name in WEIGHTS:
            left = reference.gather(name)
            right = ranks.gather(name)
            np.testing.assert_allclose(right, left, rtol=0, atol=1e-5 * np.abs(left).max())


def test_sequences_of_two_lengths(tmp_path: Path) -> None:
    """Each data rank has a length of its own, in every stage."""
    text = CHAIN.replace("[batch, ", "[batch, seq, ")
    path = tmp_path / "m.onnx"
    ir.save(model_of(text), path)
    spec = TrainingSpec(parse_loss(CROSS_ENTROPY), parse_optimizer("sgd"))
    symbols = {"seq": Symbol(per_rank=True)}
    one, out = tmp_path / "1", tmp_path / "4"
    shard_model(path, "dp", one, devices=1, symbols=symbols, training=spec)
    shard_model(path, strategy_of(HALVES, axes={"dp": 2}), out, symbols=symbols, training=spec)
    rng = np.random.default_rng(0)

    def part(rows: int, length: int) -> dict[str, Array]:
        x = rng.standard_normal((rows, length, WIDTH), np.float32)
        return {"x": x, "labels": rng.integers(0, CLASSES, (rows, length))}

    with TrainerGroup(one) as reference, TrainerGroup(out) as ranks:
        for lengths in ((3, 7, 2, 2), (5, 4, 1, 9), (6, 6, 6, 6)):
            parts = [part(2, length) for length in lengths]
            pairs = [tuple(parts[:2]), tuple(parts[2:])]
            got, expected = ranks.train_step(pairs, HYPER), reference.train_step(parts, HYPER)
            np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-6)
            np.testing.assert_allclose(got.grad_norm, expected.grad_norm, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"] if FULL else ["zb-h1"])
def test_dropout_drops_what_one_device_drops(tmp_path: Path, schedule: str) -> None:
    model = transformer.build(
        layers=2, d_model=16, heads=4, vocab=40, max_positions=16, dropout=0.3, training=True
    )
    strategy = strategy_of({}, axes={"tp": 2}, schedule=schedule)
    check(tmp_path, model, strategy, {"batch": 3, "seq": 5})


def test_sixteen_bits(tmp_path: Path) -> None:
    """Activations and cotangents go from stage to stage as they are computed."""
    manifest = check(tmp_path, model_of(CHAIN), strategy_of(HALVES), compute="float16")
    (value,) = manifest.program(LAST).handed_in
    assert value.name.startswith("c") and value.dtype == "float16"


def test_a_forward_model_of_symbolic_output(tmp_path: Path) -> None:
    """Its output, of any number of rows, is made on the last stage; an early one on the first."""
    text = CHAIN.replace(
        f"(float[batch, {CLASSES}] y)", f"(float[batch, {WIDTH}] c, float[batch, {CLASSES}] y)"
    )
    path = tmp_path / "m.onnx"
    ir.save(model_of(text), path)
    for axes in (None, {"dp": 2}):
        shard_model(path, strategy_of(HALVES, axes=axes), tmp_path / "a", force=True)
        cases = runtime.verify(tmp_path / "a", path, cases=["batch=7", "batch=1", "batch=4"])
        assert all(case.ok for case in cases)


def test_one_node_for_each_stage_and_no_weights(tmp_path: Path) -> None:
    text = f"""{HEAD} g (float[batch, 4] x) => (float[batch, 4] y)
    {{ a = Tanh(x)  c = Exp(a)  y = Neg(c) }}"""
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(text), path)
    shard_model(path, strategy_of({}, 3), tmp_path / "a")
    (case,) = runtime.verify(tmp_path / "a", path, cases=["batch=3"])
    assert case.ok
    with pytest.raises(OnnxparError, match=r"at least 4 nodes, one for each virtual stage, got 3$"):
        shard_model(path, strategy_of({}, 4), tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_contradiction_is_reported_by_file_and_lines(tmp_path: Path) -> None:
    text = "devices: 2\npipeline:\n  stages: 2\n  assign:\n    n0: 1\n    n1: 0\n"
    with pytest.raises(OnnxparError) as caught:
        shard(tmp_path / "a", model_of(CHAIN), Strategy.from_text(text, source="s.yaml"))
    assert str(caught.value) == (
        "s.yaml:4: pipeline: node 'n1' (line 6) is assigned to virtual stage 0, but it reads a "
        "value from node 'n0' (line 5) of virtual stage 1; values can only flow to later stages"
    )


@pytest.mark.parametrize(
    ("assign", "message"),
    [
        ({"n0": 1, "n1": 0}, "it reads a value from node 'n0' of virtual stage 1; values can"),
        ({"nothing*": 0}, "nothing"),
        ({"n[0-2]": 0, "n[23]": 1}, "n2"),
        ({"*": 0}, "leaves no room for the stage boundary before virtual stage 1"),
        ({"n3": 1, "onnxpar.loss*": 0}, "is assigned to virtual stage 0, but it reads a value"),
        ({"n3": 1, "n3/grad*": 1}, "expected the name or a pattern of a node"),
    ],
    ids=["backwards", "matches nothing", "two stages", "empty stage", "loss", "backward nodes"],
)
def test_assignments_that_cannot_be(tmp_path: Path, assign: dict[str, int], message: str) -> None:
    with pytest.raises(OnnxparError) as caught:
        shard(tmp_path / "a", model_of(CHAIN), strategy_of(assign))
    assert message in str(caught.value)
    assert not (tmp_path / "a").exists()


def test_the_loss_alone_is_a_stage(tmp_path: Path) -> None:
    """Labels that are right are counted on another stage than the loss."""
    assign = {"n*": 0, "onnxpar.loss*": 1}
    out = shard(tmp_path / "a", model_of(CHAIN), strategy_of(assign))
    one = shard(tmp_path / "one", model_of(CHAIN), "dp", devices=1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((20, WIDTH), np.float32)
    batch = {"x": x, "labels": rng.integers(0, CLASSES, 20)}
    with TrainerGroup(one) as reference, TrainerGroup(out) as ranks:
        got, expected = ranks.evaluate(batch), reference.evaluate(batch)
    assert got["correct"] == expected["correct"] and 0 < (expected["correct"] or 0) < 20
    # A mean of 20 rows in float32: 16 roundings of 2^-24.
    np.testing.assert_allclose(got["loss"], expected["loss"], rtol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_the_last_stage_runs_one_program_if_nothing_comes_between(
    tmp_path: Path, schedule: str
) -> None:
    """What its forward makes for its backward does not leave the program."""
    strategy = strategy_of({}, schedule=schedule, chunks=2 if schedule == "interleaved" else 1)
    manifest = Manifest.load(shard(tmp_path / "a", model_of(CHAIN), strategy))
    pipeline = manifest.pipeline
    assert pipeline is not None
    first, *_, last = pipeline.programs["training_model"]
    assert first.forward == "forward_model.0"
    assert "eval_model.1" in manifest.programs
    if schedule not in ("1f1b", "zb-h1"):
        assert last.forward == f"forward_model.{pipeline.virtual_stages - 1}"
        return
    assert (last.forward, last.backward) == (None, LAST)
    taken = {
        name
        for program in (first.backward, last.weight)
        if program is not None
        for name, source in handed(manifest, program).items()
        if source == LAST
    }
    assert {value.name for value in manifest.program(LAST).handed_out} == taken
    assert last.weight is not None or len(taken) == 1
    for stages, count in product(range(1, 6), range(1, 11)):
        made = make(schedule, stages, count).ranks[-1]
        backward = Kind.BACKWARD_INPUT if last.weight else Kind.BACKWARD
        for action, after in pairwise(made):
            if action.kind is Kind.FORWARD:
                assert after == replace(action, kind=backward)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_the_planner_counts_what_schedules_keep(schedule: str) -> None:
    for stages, count, chunks in product(range(1, 6), range(1, 11), (2, 3)):
        chunks = chunks if schedule == "interleaved" else 1
        split = PipelineSplit(stages, count, schedule, chunks)
        found = tuple(split.kept(stage) for stage in range(stages))
        assert found == activation_peaks(make(schedule, stages, count, chunks)), split


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_the_planner_counts_how_long_schedules_take(schedule: str) -> None:
    forward, inputs, weights = 1.0, 0.75, 0.5
    for stages, count, chunks in product(range(1, 6), range(1, 11), (2, 3)):
        chunks = chunks if schedule == "interleaved" else 1
        split = PipelineSplit(stages, count, schedule, chunks)
        made = make(schedule, stages, count, chunks)
        times = Times.equal(stages * chunks, forward, inputs, weights)
        played = simulate(with_transfers(made, chain(made)), times).makespan
        stage = chunks * (forward + inputs + weights)
        assert split.step(stage, weights) == pytest.approx(played, rel=1e-12), split


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_elements_that_are_no_index_are_refused_before_a_step(name: str, tmp_path: Path) -> None:
    """Tokens are read by the first stage, and labels by the last."""
    model = transformer.build(layers=2, d_model=16, heads=4, vocab=41, max_positions=16)
    out = shard(tmp_path / "a", model, "pp=2", optimizer="sgd")
    batch = {"input_ids": np.zeros((2, 5), np.int64), "labels": np.zeros((2, 5), np.int64)}
    batch[name][1, 2] = 41
    with (
        TrainerGroup(out) as ranks,
        pytest.raises(
            InputError, match=rf"input '{name}': expected elements .*, got 41 at \[1, 2\]"
        ),
    ):
        ranks.evaluate(batch)
