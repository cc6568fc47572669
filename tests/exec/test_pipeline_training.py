"""Pipelines beyond plain layers: statistics, outputs on any stage, data ranks of unequal sizes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxpar.api import runtime
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.symbols import Symbol
from onnxpar.strategy import Strategy
from onnxpar_runtime import TrainerGroup
from onnxpar_runtime.manifest import Manifest

WIDTH, LAYERS, CLASSES = 6, 3, 4
HYPER = {"lr": 0.1, "clip_norm": 1.0, "weight_decay": 0.0}
SPEC = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))
INTERLEAVED = {
    "stages": 2,
    "chunks": 2,
    "schedule": "interleaved",
    "micro_batches": 3,
    "assign": {"head": 2, "onnxpar.loss*": 3},
}
"""The model's output and the hits are made on stage 0, the loss on stage 1."""


def normalised(path: Path) -> Path:
    """Writes three layers with BatchNormalization, and a head."""
    nodes, before = "", "x"
    for i in range(LAYERS):
        nodes += f" [mm{i}] a{i} = MatMul({before}, w{i})"
        nodes += f" [bn{i}] n{i} = BatchNormalization(a{i}, s{i}, b{i}, m{i}, v{i})"
        nodes += f" [tanh{i}] t{i} = Tanh(n{i})"
        before = f"t{i}"
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 18]>'
        f" g (float[batch, {WIDTH}] x) => (float[batch, {CLASSES}] y)"
        f" {{ {nodes} [head] y = MatMul({before}, w) }}"
    )
    rng = np.random.default_rng(1)
    weights = {"w": rng.standard_normal((WIDTH, CLASSES))}
    for i in range(LAYERS):
        weights[f"w{i}"] = rng.standard_normal((WIDTH, WIDTH))
        weights |= {f"s{i}": np.ones(WIDTH), f"b{i}": rng.standard_normal(WIDTH)}
        weights |= {f"m{i}": np.zeros(WIDTH), f"v{i}": np.ones(WIDTH)}
    for name, array in weights.items():
        tensor = onnx.numpy_helper.from_array(array.astype(np.float32), name)
        proto.graph.initializer.append(tensor)
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize(
    "pipeline",
    [
        {"stages": 2, "micro_batches": 3},
        INTERLEAVED,
        {"stages": 3, "schedule": "zb-h1", "micro_batches": 4},
    ],
    ids=lambda p: p.get("schedule", "1f1b"),
)
def test_statistics_are_those_of_the_micro_batches(
    tmp_path: Path, pipeline: dict[str, Any]
) -> None:
    path, out = normalised(tmp_path / "m.onnx"), tmp_path / "out"
    mesh = {"dp": 1 if pipeline.get("chunks") else 2}
    shard_model(path, Strategy.from_dict({"mesh": mesh, "pipeline": pipeline}), out, training=SPEC)
    (found,) = runtime.verify(out, path, cases=["batch=7"], options=runtime.VerifyOptions(steps=2))
    assert found.problems == () and found.bytes_counted == found.bytes_expected
    if pipeline.get("chunks"):
        parts = Manifest.load(out).programs
        assert [s.name for s in parts["eval_model.2"].outputs] == ["y", "onnxpar.correct"]


def test_data_ranks_of_sizes_of_their_own(tmp_path: Path) -> None:
    """Sequences of two lengths in one micro-batch, on the data ranks of every stage alike."""
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[batch, seq, {WIDTH}] x) => (float[batch, seq, {CLASSES}] y)
        {{ [first] a = MatMul(x, w1)  [relu] c = Relu(a)  [second] y = MatMul(c, w2) }}"""
    )
    rng = np.random.default_rng(3)
    for name, shape in (("w1", (WIDTH, WIDTH)), ("w2", (WIDTH, CLASSES))):
        array = rng.standard_normal(shape, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    stages = {"stages": 2, "assign": {"first": 0, "relu": 0, "second": 1}}
    staged = Strategy.from_dict({"mesh": {"dp": 2}, "pipeline": stages})
    symbols = {"seq": Symbol(per_rank=True)}
    shard_model(path, staged, tmp_path / "out", symbols=symbols, training=SPEC)
    shard_model(path, "dp", tmp_path / "one", devices=1, symbols=symbols, training=SPEC)

    def part(length: int) -> dict[str, np.ndarray]:
        x = rng.standard_normal((2, length, WIDTH), np.float32)
        return {"x": x, "labels": rng.integers(0, CLASSES, (2, length))}

    with TrainerGroup(tmp_path / "one") as one, TrainerGroup(tmp_path / "out") as group:
        pairs = [(part(3), part(7)), (part(5), part(5)), (part(2), part(4))]
        expected = one.train_step([b for pair in pairs for b in pair], HYPER)
        got = group.train_step(pairs, HYPER)
        # float32 sums of up to 100 terms in another order, and rounded weights: some 2^-24.
        assert (got.loss, got.grad_norm) == pytest.approx(
            (expected.loss, expected.grad_norm), rel=1e-5
        )
        for name in ("w1", "w2"):
            want = one.gather(name)
            np.testing.assert_allclose(group.gather(name), want, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_masks_are_computed_again_in_a_backward_alone(tmp_path: Path, schedule: str) -> None:
    """They depend on no weight. Otherwise they would be kept for each micro-batch."""
    proto = parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21]>
        g (float[batch, {WIDTH}] x, float[batch, {WIDTH}] z) => (float[batch, {CLASSES}] y) {{
          [exp] e = Exp(z)  [mask] m = Sigmoid(e)
          [first] a = MatMul(x, w1)  [one] b = Mul(a, m)
          [second] c = MatMul(b, w2)  [two] d = Mul(c, m)  [third] y = MatMul(d, w3)
        }}"""
    )
    rng = np.random.default_rng(4)
    for name, columns in (("w1", WIDTH), ("w2", WIDTH), ("w3", CLASSES)):
        array = rng.standard_normal((WIDTH, columns), np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path, out = tmp_path / "m.onnx", tmp_path / "out"
    onnx.save(proto, path)
    entry = {"stages": 2, "schedule": schedule, "micro_batches": 3, "assign": {"second": 1}}
    staged = Strategy.from_dict({"mesh": {"dp": 1}, "pipeline": entry})
    shard_model(path, staged, out, training=SPEC)
    backward = onnx.load(out / "rank0000.backward_model.0.onnx").graph
    given = {value.name for value in backward.input}
    assert "z" in given and not given & {"e", "m"}, given
    # The last stage's backward is in one program with the forward, which has the mask.
    both = onnx.load(out / "rank0001.forward_backward_model.1.onnx").graph
    assert [node.op_type for node in both.node].count("Sigmoid") == 1
    (found,) = runtime.verify(out, path, cases=["batch=7"], options=runtime.VerifyOptions(steps=2))
    assert found.problems == ()
