"""Data ranks with sequences of different lengths in one step equal one device that takes both."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import parser

from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ShardingError
from onnxpar.core.symbols import Symbol
from onnxpar_runtime import TrainerGroup

Array = NDArray[Any]
WIDTH, HIDDEN, CLASSES = 6, 5, 3
TEXT = f"""<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, seq, {WIDTH}] x) => (float[batch, seq, {CLASSES}] y)
{{ a = MatMul(x, w1)  c = Relu(a)  [second] y = MatMul(c, w2) }}"""
HYPER = {"lr": 0.1, "clip_norm": 1.0, "weight_decay": 0.0}


def model(path: Path) -> Path:
    proto = parser.parse_model(TEXT)
    rng = np.random.default_rng(3)
    for name, shape in (("w1", (WIDTH, HIDDEN)), ("w2", (HIDDEN, CLASSES))):
        values = rng.standard_normal(shape, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    onnx.save(proto, path)
    return path


def part(
    rng: np.random.Generator, rows: int, length: int, loss: str, ignored: int | None
) -> dict[str, Array]:
    x = rng.standard_normal((rows, length, WIDTH), np.float32)
    if loss == "softmax_cross_entropy":
        # About a quarter do not count, where one label is ignored.
        least = 0 if ignored is None else ignored
        return {"x": x, "labels": rng.integers(least, CLASSES, (rows, length))}
    return {"x": x, "labels": rng.standard_normal((rows, length, CLASSES), np.float32)}


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        ("mse", None),
        ("mae", None),
        ("softmax_cross_entropy", None),
        ("softmax_cross_entropy", -1),
    ],
)
def test_two_lengths_in_one_step(tmp_path: Path, loss: str, ignored: int | None) -> None:
    spec = TrainingSpec(parse_loss(loss, ignore_index=ignored), parse_optimizer("sgd"))
    path = model(tmp_path / "m.onnx")
    for devices in (1, 2):
        shard_model(
            path,
            "dp",
            tmp_path / str(devices),
            devices=devices,
            symbols={"seq": Symbol(per_rank=True)},
            training=spec,
        )
    rng = np.random.default_rng(0)
    with TrainerGroup(tmp_path / "1") as one, TrainerGroup(tmp_path / "2") as two:
        for rows, first, second in ((1, 3, 7), (2, 4, 5), (2, 5, 5), (3, 6, 2)):
            pair = tuple(part(rng, rows, n, loss, ignored) for n in (first, second))
            expected = one.train_step(pair, HYPER)
            got = two.train_step([pair], HYPER)
            # float32 sums of up to 100 terms in another order, and rounded weights: some 2^-24.
            np.testing.assert_allclose(got.loss, expected.loss, rtol=1e-5)
            np.testing.assert_allclose(got.grad_norm, expected.grad_norm, rtol=1e-5)
            for name in ("w1", "w2"):
                want = one.gather(name)
                np.testing.assert_allclose(
                    two.gather(name), want, rtol=0, atol=1e-5 * np.abs(want).max()
                )


def test_what_would_move_between_ranks_of_two_lengths_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "m.onnx")
    strategy = tmp_path / "s.yaml"
    strategy.write_text("mesh: {dp: 2}\nnodes: {second: {in: [[~, ~, dp], [dp, ~]]}}\n")
    with pytest.raises(ShardingError, match=r"second operand 0: .* 'c' .* AllToAll .* 'seq'.* dp"):
        shard_model(path, strategy, tmp_path / "2", symbols={"seq": Symbol(per_rank=True)})
    assert not (tmp_path / "2").exists()
    # Ranks that are given one size may move it.
    shard_model(path, strategy, tmp_path / "2")


def test_the_weight_moves_where_the_data_may_not(tmp_path: Path) -> None:
    """Of a large weight, split over the data axis, the few rows of data would meet all parts."""
    text = f"""<ir_version: 10, opset_import: ["" : 21]>
    g (float[batch, seq, {WIDTH}] x) => (float[batch, seq, 20000] y) {{ y = MatMul(x, w) }}"""
    proto = parser.parse_model(text)
    w = np.random.default_rng(3).standard_normal((WIDTH, 20000), np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    strategy = tmp_path / "s.yaml"
    strategy.write_text("mesh: {dp: 2}\nparameters: {w: [~, dp]}\n")
    moved = {}
    for per_rank in (False, True):
        symbols = {"seq": Symbol(per_rank=per_rank)}
        done = shard_model(path, strategy, tmp_path / str(per_rank), symbols=symbols)
        moved[per_rank] = {c.value for c in done.partitioned.builder.collectives}
    assert moved == {False: {"x"}, True: {"w"}}
