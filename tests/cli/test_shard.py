"""`onnxpar shard`: what it writes and prints, and that a mistake writes nothing."""

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import two_layer

from onnxpar.cli import main

STRATEGY = """\
devices: 8
symbols: {batch: {divisor: 8}}
nodes:
  /matmul1/MatMul: {in: [[2, 4], [4, 1]]}
  /matmul2/MatMul: {in: [[2, 4], [4, 1]]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a strategy."""
    monkeypatch.chdir(tmp_path)
    ir.save(two_layer.build(), tmp_path / "model.onnx")
    (tmp_path / "s.yaml").write_text(STRATEGY)
    return tmp_path


def shard(*more: str) -> int:
    return main(["shard", "model.onnx", "-o", "out", *more])


def test_strategy_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("--strategy", "s.yaml") == 0
    printed = capsys.readouterr().out
    assert "devices       8\n" in printed
    assert "nodes         3: 3 sharded\n" in printed
    # 32x16 + 16x16 float32 weights; each device has a quarter of both.
    assert "parameters    2, 768 B of 3 KiB on each device" in printed
    assert "1 ReduceScatter" in printed
    assert "onnxpar launch -- run out --inputs" in printed
    manifest = json.loads((here / "out" / "manifest.json").read_text())
    assert manifest["symbols"]["batch"]["divisor"] == 8
    assert manifest["strategy"]["nodes"]["/matmul1/MatMul"]["in"][0]["pieces"] == [2, 4]
    for rank in range(8):
        onnx.checker.check_model(here / "out" / f"rank{rank:04}.model.onnx")


def test_padding_that_a_divisor_makes_unnecessary(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = ["--train", "--loss", "mse", "--optimizer", "sgd", "--force"]
    line = re.compile(
        r"^padding +set by (\d+) nodes?; if batch is always a multiple of 2, shard without them: "
        r"--symbol batch:divisor=2$",
        re.MULTILINE,
    )
    assert shard("--strategy", "dp=2", *training) == 0
    found = line.search(capsys.readouterr().out)
    assert found is not None
    graph = onnx.load(here / "out" / "rank0000.training_model.onnx").graph
    # Each chooses between the values and zero.
    assert int(found[1]) == sum(node.op_type == "Where" for node in graph.node)
    assert shard("--strategy", "dp=2", "--symbol", "batch:divisor=3", *training) == 0
    assert "--symbol batch:divisor=6" in capsys.readouterr().out
    assert shard("--strategy", "dp=2", "--symbol", "batch:divisor=2", *training) == 0
    assert "padding" not in capsys.readouterr().out
    graph = onnx.load(here / "out" / "rank0000.training_model.onnx").graph
    assert not any(node.op_type == "Where" for node in graph.node)


def test_json(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("--strategy", "s.yaml", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["directory"] == "out" and sum(printed["seconds"].values()) > 0
    assert printed["report"]["totals"]["parameter_bytes_per_device"] == 768
    manifest = json.loads((here / "out" / "manifest.json").read_text())
    assert printed["report"] == manifest["report"] | {"dialect": None}


def test_a_pipeline_tells_the_bytes_of_its_fullest_stage(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = {"stages": 2, "assign": {"/matmul1/MatMul": 0, "/matmul2/MatMul": 1}}
    (here / "p.yaml").write_text(json.dumps({"mesh": {"dp": 2}, "pipeline": pipeline}))
    assert shard("--strategy", "p.yaml") == 0
    printed = capsys.readouterr().out
    assert "devices       4 in 2 stages, each with the mesh dp=2\n" in printed
    # The first stage has 32x16 float32 weights, the second 16x16.
    sizes = "2 KiB of 3 KiB on each device of the fullest stage"
    assert f"parameters    2, {sizes}" in printed


def test_preset_symbols_ranks_and_dump(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--symbol", "batch:divisor=4,max=64", "--rank", "1", "--rank", "3", "--dump", "d")
    assert shard("--strategy", "dp", "--devices", "4", *options) == 0
    printed = capsys.readouterr().out
    assert "devices       4, mesh dp=4" in printed
    assert "collectives   none" in printed
    assert "next" not in printed
    graphs = sorted(p.name for p in (here / "out").glob("*.onnx"))
    assert graphs == ["rank0001.model.onnx", "rank0003.model.onnx"]
    symbol = json.loads((here / "out" / "manifest.json").read_text())["symbols"]["batch"]
    assert (symbol["divisor"], symbol["max"]) == (4, 64)
    assert any((here / "d").iterdir())


def test_a_dump_changes_no_graph(here: Path) -> None:
    """A dump leaves out large weights; the graphs still list all weights in the model's order."""
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, 32] x) => (float[batch, 32] y) { a = MatMul(x, large) y = Add(a, small) }
    """
    model = onnx.parser.parse_model(text)
    for name, shape in (("large", (32, 32)), ("small", (32,))):
        array = np.ones(shape, np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, here / "model.onnx")
    graphs = []
    for more in ((), ("--dump", "d")):
        assert shard("--strategy", "tp=2", "--force", *more) == 0
        graphs.append([path.read_bytes() for path in sorted((here / "out").glob("*.onnx"))])
    assert graphs[0] == graphs[1]


def test_replicated_nodes_are_named_with_the_reason(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, 4] x) => (int64[2, n] y) { [plus] a = Add(x, x) [where] y = NonZero(a) }
    """
    onnx.save(onnx.parser.parse_model(text), here / "model.onnx")
    assert shard("--strategy", "dp=2") == 0
    printed = capsys.readouterr().out
    assert "replicated    where (NonZero): node 'where' (NonZero): how many" in printed
    assert "nodes         2: 1 sharded, 1 replicated: no sharding rule (where)\n" in printed
    assert main(["inspect", "out"]) == 0
    printed = capsys.readouterr().out
    assert "nodes         2: 1 sharded, 1 replicated: no sharding rule (where)\n" in printed
    assert "collectives   1 AllGather; " in printed


def test_every_node_is_counted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[batch] x, float[1] c) => (float[batch] y, float[1] z)
        { y = Abs(x) z = Neg(c) }
    """
    onnx.save(onnx.parser.parse_model(text), here / "model.onnx")
    assert shard("--strategy", "dp=2") == 0
    assert "nodes         2: 1 sharded, 1 replicated: none of their dims is sharded\n" in (
        capsys.readouterr().out
    )


def test_the_next_step_is_the_same_for_every_mpi(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shard("--strategy", "dp=2") == 0
    printed = capsys.readouterr().out
    assert " onnxpar launch -- run out " in printed and "mpirun" not in printed


def test_one_device_needs_no_launch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("--strategy", "replicate", "--devices", "1") == 0
    printed = capsys.readouterr().out
    assert "launch" not in printed and " onnxpar run " in printed


def test_force(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shard("--strategy", "dp=2") == 0
    before = (here / "out" / "manifest.json").read_bytes()
    assert shard("--strategy", "dp=4") == 2
    assert (here / "out" / "manifest.json").read_bytes() == before
    assert shard("--strategy", "dp=4", "--force") == 0
    assert json.loads((here / "out" / "manifest.json").read_text())["devices"] == 4


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (["--strategy", "s.yaml"], "nodes: {/fc/MatMul: {in: [[1]]}}\ndevices: 2", "s.yaml:1: "),
        (["--strategy", "s.yaml"], "devices: 2\nnods: {}", "s.yaml:2: unknown key 'nods'"),
        (["--strategy", "s.yaml"], "devices: [", "s.yaml:1:11: not valid YAML"),
        (
            ["--strategy", "s.yaml", "--devices", "4"],
            STRATEGY,
            "expected 4 devices, as --devices has, got 8",
        ),
        (["--strategy", "s.yaml"], "devices: 8\nsymbols: {seq: {max: 4}}", "symbol 'seq'"),
        (["--strategy", "none.yaml"], "", "expected an existing file or a preset"),
        (["--strategy", "dp"], "", "--devices"),
        (["--strategy", "auto"], "", "expected a mesh, 'devices' or --devices"),
        (["--strategy", "dp=2", "--symbol", "batch=8"], "", "expected NAME:CONSTRAINTS"),
        (["--strategy", "dp=2", "--symbol", "batch:dv=8"], "", "per_rank, got 'dv'"),
        (
            ["--strategy", "dp=2", "--symbol", "batch:max=8", "--symbol", "batch:max=9"],
            "",
            "expected 'batch' once",
        ),
        (["--strategy", "dp=2", "--rank", "2"], "", "expected a rank from 0 to 1"),
    ],
)
def test_a_mistake_is_one_message_and_nothing_is_written(
    here: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    content: str,
    message: str,
) -> None:
    (here / "s.yaml").write_text(content)
    before = set(os.listdir(here))
    assert shard(*options) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert set(os.listdir(here)) == before


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"not onnx", "model.onnx"), (b"", "not an ONNX model")],
)
def test_models_that_are_none(
    here: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    (here / "model.onnx").unlink()
    if content is not None:
        (here / "model.onnx").write_bytes(content)
    assert shard("--strategy", "dp=2") == 2
    assert message in capsys.readouterr().err
    assert not (here / "out").exists()


def test_a_dump_to_a_full_disk(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages that were complete stay, no half of a file, and no directory."""
    write = onnx.save

    def full(proto: onnx.ModelProto, path: Path) -> None:
        write(proto, path)
        if "partitioned" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(onnx, "save", full)
    assert shard("--strategy", "dp=2", "--dump", "d") == 2
    error = capsys.readouterr().err
    assert error.startswith("onnxpar: error: ") and "the disk is full" in error
    assert "d/03.partitioned.model.rank0.onnx" in error
    assert not (here / "out").exists()
    left = sorted(path.name for path in (here / "d").iterdir())
    assert [name[3:] for name in left] == [
        "loaded.onnx", "loaded.txt", "normalised.onnx", "normalised.txt", "planned.txt",
    ]  # fmt: skip
