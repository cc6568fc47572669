"""Nodes that set padding are left out in runs that have none, and results stay the same."""

import json
from collections.abc import Sequence
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
from onnxpar_format.options import Saving, Settings, TrainingRun
from onnxpar_format.padding_mark import KEY, PaddingMark
from onnxpar_runtime import Session, TrainerGroup, executor
from onnxpar_runtime.errors import DirectoryError
from onnxpar_runtime.group import Ranks
from onnxpar_runtime.training.programs import EVALUATION, TRAINING
from onnxpar_runtime.training.run import train_with
from onnxpar_runtime.without_padding import needless

Array = NDArray[Any]
TEXT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 6] x) => (float[batch, 3] y, float[1, 3] total)
{ a = MatMul(x, w1)  c = Relu(a)  y = MatMul(c, w2)
  total = ReduceSum(y, axes) }"""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model for one device, for two, and for two that run it forward only."""
    folder = tmp_path_factory.mktemp("padding")
    proto, rng = parser.parse_model(TEXT), np.random.default_rng(3)
    for name, shape in (("w1", (6, 5)), ("w2", (5, 3))):
        values = rng.standard_normal(shape, np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, np.int64), "axes"))
    onnx.save(proto, folder / "m.onnx")
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))
    made = {name: folder / name for name in ("one", "two", "forward")}
    shard_model(folder / "m.onnx", "dp", made["one"], devices=1, training=spec)
    shard_model(folder / "m.onnx", "dp=2", made["two"], training=spec)
    shard_model(folder / "m.onnx", "dp=2", made["forward"])
    return made


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[bool]]:
    """Whether nodes of a rank's graph were left out, by file, of all times that it was asked."""
    asked: dict[str, set[bool]] = {}

    def spy(path: Path, graph: onnx.GraphProto, runs: Sequence[Any]) -> frozenset[PaddingMark]:
        marks = needless(path, graph, runs)
        asked.setdefault(path.name, set()).add(bool(marks))
        return marks

    monkeypatch.setattr(executor, "needless", spy)
    return asked


def data(count: int) -> dict[str, Array]:
    rng = np.random.default_rng(count)
    x = rng.standard_normal((count, 6), np.float32)
    return {"x": x, "labels": rng.integers(0, 3, count)}


def losses(directory: Path, folder: Path, batch: int) -> list[float]:
    wanted = TrainingRun(
        f"npz:{folder / 'd.npz'}", batch_size=batch, lr=0.1, epochs=2, validation=0.25,
        eval_batch_size=3, log=folder / "log", print_every=0, settings=Settings(),
        checkpoints=Saving(),
    )  # fmt: skip
    with TrainerGroup(directory) as group:
        group.on_each(lambda member: train_with(member, wanted))
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return [line.get("loss", line.get("evaluation_loss")) for line in lines]


@pytest.mark.parametrize(("batch", "left_out"), [(4, True), (6, True), (8, True), (5, False)])
def test_a_training_whose_batches_all_divide(
    directories: dict[str, Path],
    tmp_path: Path,
    found: dict[str, set[bool]],
    batch: int,
    left_out: bool,
) -> None:
    # A quarter of 32 samples is held out, and evaluated in batches of 3.
    np.savez(tmp_path / "d.npz", allow_pickle=False, **data(32))
    have = losses(directories["two"], tmp_path, batch)
    # On one device no graph sets padding.
    assert found == {
        f"rank000{rank}.{name}.onnx": {name == TRAINING and left_out}
        for rank in (0, 1)
        for name in (TRAINING, EVALUATION)
    }
    # Sums of at most 8 terms of size 1 in another order, over 12 steps.
    np.testing.assert_allclose(have, losses(directories["one"], tmp_path, batch), rtol=2e-6)


def test_a_batch_that_was_not_expected(directories: dict[str, Path]) -> None:
    hyper = {"lr": 0.1, "clip_norm": np.inf, "weight_decay": 0.0}
    batches = [data(size) for size in (4, 3, 4)]
    found = []
    for runs in ((), ({"batch": 4},)):
        with TrainerGroup(directories["two"]) as group:
            group.on_each(lambda member, runs=runs: member.expect({TRAINING: runs}))  # type: ignore[misc]
            found.append([group.train_step([batch], hyper).loss for batch in batches])
    assert found[0] == found[1]


def test_one_run(directories: dict[str, Path], found: dict[str, set[bool]]) -> None:
    x, results = data(4)["x"], []
    for more in ({}, {"runs": [{"batch": 4}]}):
        with Ranks(directories["forward"], Session, **more) as group:
            results += [group.on_each(lambda s, n=n: s.run_global({"x": x[:n]}))[0] for n in (4, 3)]
        assert found == {f"rank000{r}.model.onnx": {True} for r in (0, 1) if more}
    for have, want in zip(results[:2], results[2:], strict=True):
        for name in ("y", "total"):
            np.testing.assert_array_equal(have[name], want[name])


def test_marks(directories: dict[str, Path]) -> None:
    assert str(PaddingMark(1, "2*batch", 4)) == "1: 2*batch / 4"
    assert PaddingMark.read("1: 2*batch / 4") == PaddingMark(1, "2*batch", 4)
    for size, values, expected in (
        ("2*batch", {"batch": 2}, True),
        ("2*batch", {"batch": 3}, False),
        ("other", {"batch": 2}, False),
        ("a b", {"a b": 8}, True),
    ):
        assert PaddingMark(0, size, 4).needless(values) == expected
    path = directories["two"] / "rank0000.training_model.onnx"
    model = onnx.load(path, load_external_data=False)
    (entry, *_) = (p for node in model.graph.node for p in node.metadata_props if p.key == KEY)
    for text in ("", "1: batch", "-1: batch / 2", "9: batch / 2", "0: batch / 0", "x: y / 2"):
        entry.value = text
        with pytest.raises(DirectoryError, match=r"node '.*: onnxpar\.padding: expected"):
            needless(path, model.graph, [{"batch": 4}])
