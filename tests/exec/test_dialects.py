"""Graphs with the collectives of other runtimes equal the undivided model."""

import json
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import transformer
import two_layer

from onnxpar.api.runtime import verify
from onnxpar.api.shard_model import shard_model
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.cli import main
from onnxpar.core.errors import DialectError
from onnxpar.ops.collective.dialects import Dialect
from tests.runtime import hand_made


def saved(folder: Path, model: ir.Model) -> Path:
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("strategy", "dialect"),
    [("dp=2,tp=2", Dialect.TENSORRT), ("tp=2", Dialect.ONNXRUNTIME)],
)
def test_a_transformer(
    tmp_path: Path, strategy: str, dialect: Dialect, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"layers": 1, "d_model": 16, "heads": 4, "vocab": 24, "max_positions": 16}
    model = saved(tmp_path, transformer.build(**sizes))
    summary = shard_model(model, strategy, tmp_path / "out", dialect=dialect)
    out = summary.out
    assert json.loads(json.dumps(summary.report))["dialect"] == dialect
    # 5 does not divide by the ranks: shards are padded.
    cases = verify(out, model, ["batch=4,seq=8", "batch=5,seq=3"])
    assert [case.ok for case in cases] == [True, True]
    assert json.loads((out / "manifest.json").read_text())["dialect"] == dialect
    assert main(["inspect", str(out)]) == 0
    assert f"{dialect}: its collectives" in capsys.readouterr().out
    assert main(["inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dialect"] == dialect
    graph = onnx.load(out / "rank0001.model.onnx", load_external_data=False).graph
    assert "onnxpar" not in {node.domain for node in graph.node}


def test_what_cannot_be_said_writes_nothing(tmp_path: Path) -> None:
    model, out = saved(tmp_path, two_layer.build()), tmp_path / "out"
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"))
    for strategy, training, why in [
        ("dp=2,tp=2", None, r"AllReduce\): .* its only group has all 4 ranks"),
        ("dp=2", spec, "expected a forward program, got one to train"),
    ]:
        with pytest.raises(DialectError, match=why):
            shard_model(model, strategy, out, training=training, dialect=Dialect.ONNXRUNTIME)
        assert not out.exists()


def test_a_model_with_bodies(tmp_path: Path) -> None:
    text = (
        "g (float[n, 4] x, bool c) => (float[n, 4] y) {"
        " y = If(c) <then_branch = a () => (float[n, 4] p) {"
        " w = Constant<value = float[4, 4] {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}>()"
        " p = MatMul(x, w) }, else_branch = b () => (float[n, 4] q) { q = Identity(x) }> }"
    )
    model = hand_made.undivided(tmp_path / "model.onnx", text)
    out = shard_model(model, "dp=2", tmp_path / "out", dialect=Dialect.TENSORRT).out
    assert all(case.ok for case in verify(out, model))
