"""A trained model as one ONNX file, and as PyTorch loads it: what the ranks evaluate."""

from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from onnxpar.cli import main
from tests.onnxpar.parameters.declared import read
from tests.training_cases import after_training, batch_of, shard

Array = NDArray[Any]


def trained_output(directory: Path, batch: dict[str, Array]) -> Array:
    """Trains for a few steps with checkpoints in `ck`; returns the output for the batch then."""
    with after_training(directory, batch, lr=0.05, epochs=2) as group:
        outputs = group.evaluate(batch, outputs=True)["outputs"]
    assert outputs is not None
    (output,) = outputs.values()
    return output


def run(model: Path, x: Array) -> Array:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    (name,) = [i.name for i in session.get_inputs()]
    found: Array = session.run(None, {name: x})[0]
    return found


def exported(folder: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    out = folder / "trained.onnx"
    capsys.readouterr()
    arguments = ["export", str(folder / "ck"), "-o", str(out), "--model", str(model)]
    assert main(["checkpoint", *arguments]) == 0
    onnx.checker.check_model(str(out))
    return capsys.readouterr().out


def test_the_file_keeps_its_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shard(tmp_path / "m", mlp.build(hidden=(8, 8)), "dp=2,tp=2", freeze=("fc1.*",))
    batch = batch_of(directory, np.random.default_rng(0), batch=8)
    wanted = trained_output(directory, batch)
    printed = exported(tmp_path, tmp_path / "m.onnx", capsys)
    assert "2 trained tensors, 1 unchanged; after step 4" in printed
    x = next(a for n, a in batch.items() if n != "labels")
    got = run(tmp_path / "trained.onnx", x)
    # float32 sums in another order.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert np.abs(run(tmp_path / "m.onnx", x) - wanted).max() > 1e-2 * np.abs(wanted).max()
    before, after = onnx.load(tmp_path / "m.onnx"), onnx.load(tmp_path / "trained.onnx")
    assert [n.name for n in before.graph.node] == [n.name for n in after.graph.node]
    assert {t.name for t in before.graph.initializer} == {t.name for t in after.graph.initializer}
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def merged_norms() -> ir.Model:
    """Two LayerNormalizations and a BatchNormalization whose ones an exporter has merged."""
    from onnxpar.frontend.load import in_memory

    text = """<ir_version: 10, opset_import: ["" : 18]>
    net (float[batch, 8] x) => (float[batch, 8] y)
    <float[8] ones = {1,1,1,1,1,1,1,1}, float[8] zeros = {0,0,0,0,0,0,0,0}> {
        a = LayerNormalization<axis = -1>(x, ones, zeros)
        b = BatchNormalization(a, ones, zeros, zeros, ones)
        c = Sin(b)
        y = LayerNormalization<axis = -1>(c, ones, zeros)
    }"""
    proto = onnx.parser.parse_model(text)
    return in_memory(proto, Path("net.onnx"))


def test_merged_tensors_have_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shard(tmp_path / "m", merged_norms(), "dp=2", loss="mse", optimizer="adamw")
    batch = batch_of(directory, np.random.default_rng(0), batch=8)
    batch["x"] *= np.arange(1, 9, dtype=np.float32)
    wanted = trained_output(directory, batch)
    printed = exported(tmp_path, tmp_path / "m.onnx", capsys)
    assert "8 trained tensors, 0 unchanged; the graph is the one that was trained" in printed
    got = run(tmp_path / "trained.onnx", batch["x"])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    names = {t.name for t in onnx.load(tmp_path / "trained.onnx").graph.initializer}
    assert {"ones", "ones.1", "ones.2", "zeros", "zeros.1"} <= names


def test_tied_tensors_are_both_as_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A head whose weight is the transpose of the table, as an exporter folds it."""
    table = np.random.default_rng(0).standard_normal((12, 8)).astype(np.float32)
    text = """net (int64[batch] ids) => (float[batch, 12] y)
    <float[12, 8] "embed.weight", float[8, 12] "onnx::MatMul_7">
    { e = Gather("embed.weight", ids) h = Tanh(e) y = MatMul(h, "onnx::MatMul_7") }"""
    model = read(text, **{"embed.weight": table, "onnx::MatMul_7": table.T})
    directory = shard(tmp_path / "m", model, "tp=2")
    batch = batch_of(directory, np.random.default_rng(0), batch=8)
    wanted = trained_output(directory, batch)
    printed = exported(tmp_path, tmp_path / "m.onnx", capsys)
    assert "1 trained tensors, 0 unchanged; the graph is the one that was trained" in printed
    got = run(tmp_path / "trained.onnx", batch["ids"])
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def test_another_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = shard(tmp_path / "m", mlp.build(hidden=(8, 8)), "dp=2")
    trained_output(directory, batch_of(directory, np.random.default_rng(0), batch=8))
    for name, model, message in (
        ("wider", mlp.build(hidden=(8, 9)), "initializer 'fc2.weight': expected float32["),
        ("norms", merged_norms(), "it has no initializers 'fc1.weight', 'fc2.weight'"),
    ):
        ir.save(model, tmp_path / f"{name}.onnx")
        capsys.readouterr()
        out = tmp_path / "out.onnx"
        arguments = ["export", str(tmp_path / "ck"), "-o", str(out)]
        code = main(["checkpoint", *arguments, "--model", str(tmp_path / f"{name}.onnx")])
        printed = capsys.readouterr().err
        assert code == 2 and message in printed and "is not the model that was trained" in printed
        assert not out.exists()


@pytest.mark.full
def test_pytorch_loads_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    export_module = pytest.importorskip("onnxpar.api.pytorch.export_module")
    from safetensors.torch import load_file

    def net() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4), torch.nn.ReLU(),
            torch.nn.Flatten(), torch.nn.Linear(144, 10), torch.nn.LayerNorm(10),
            torch.nn.Linear(10, 10),
        )  # fmt: skip

    example = export_module.Example(
        net().train(), {"input": torch.zeros(3, 1, 8, 8)}, {"input": {0: "batch"}}
    )
    directory = shard(tmp_path / "m", export_module.export(example), "dp=2", optimizer="adamw")
    batch = batch_of(directory, np.random.default_rng(0), batch=8)
    wanted = trained_output(directory, batch)
    out = tmp_path / "w.safetensors"
    assert main(["checkpoint", "export", str(tmp_path / "ck"), "-o", str(out)]) == 0
    module = net()
    module.load_state_dict(load_file(out))
    with torch.no_grad():
        got = module.eval()(torch.from_numpy(batch["input"])).numpy()
    # PyTorch's convolution sums in another order.
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
