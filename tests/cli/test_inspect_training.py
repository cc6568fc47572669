"""`onnxpar inspect` and `--dump` for training: all programs, and what is trained."""

import json
from pathlib import Path
from typing import Any

import mlp
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper, parser

from onnxpar.cli import main
from onnxpar.cli.view import graph_file
from onnxpar.core.errors import DirectoryError

# The matrix `w` is read twice, `held` is frozen, and the loss does not depend on `unread`.
MODEL = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 6] x) => (float[batch, 6] y, float[batch, 6] z) {
  [first] a = MatMul(x, w)
  [second] b = MatMul(a, w)
  [last] y = MatMul(b, held)
  [other] z = MatMul(x, unread)
}"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for training on two data ranks, and beside it the dump."""
    folder = tmp_path_factory.mktemp("training")
    proto = parser.parse_model(MODEL)
    rng = np.random.default_rng(0)
    for name in ("w", "held", "unread"):
        values = rng.standard_normal((6, 6), np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    onnx.save(proto, folder / "m.onnx")
    arguments = ["shard", str(folder / "m.onnx"), "--strategy", "dp=2", "-o", str(folder / "out")]
    arguments += ["--train", "--loss", "mse", "--optimizer", "momentum", "--freeze", "held"]
    assert main([*arguments, "--dump", str(folder / "dump")]) == 0
    return folder / "out"


def inspected(out: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    capsys.readouterr()
    assert main(["inspect", str(out), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_of_all_programs(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspected(out, capsys)
    programs = report["programs"]
    assert list(programs) == ["training_model", "eval_model", "optimizer_model"]
    assert report["program"] == "training_model"
    assert report["collectives"] == programs["training_model"]["collectives"]
    # The gradient of w is reduced once, at the beginning of the optimizer: 2 (2 - 1) / 2 of 6 x 6
    # float32.
    (reduction,) = programs["optimizer_model"]["collectives"]
    assert (reduction["op"], reduction["value"]) == ("AllReduce", "onnxpar.grad.w")
    assert (reduction["groups"], reduction["bytes"]) == ([[0, 1]], 144)
    assert programs["optimizer_model"]["totals"]["collectives_by_op"] == {"AllReduce": 1}
    training = report["training"]
    assert training["optimizer"] == {"kind": "momentum"}
    tensors = {t["name"]: (t["trained"], t["reason"], t["used_by"]) for t in training["tensors"]}
    assert tensors == {
        "w": (True, "", ["first", "second"]),
        "held": (False, "frozen", ["last"]),
        "unread": (False, "the loss does not depend on it", ["other"]),
    }


def test_json_of_one_program_and_rank(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = inspected(out, capsys, "--program", "optimizer_model", "--rank", "1")
    assert report["program"] == "optimizer_model"
    update = next(node for node in report["nodes"] if node["op_type"] == "MomentumStep")
    assert update["inputs"][0]["name"] == "w"
    assert update["inputs"][0]["local_shape"] == [6, 6]
    assert report["collectives"][0]["groups"] == [[0, 1]]
    # The keys of the directory are there, too.
    assert {"mesh", "devices", "symbols", "training"} <= set(report)


def test_tables(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        "trained       36 of 108 parameters, in 1 of 3 tensors, with momentum on mse; the labels "
        "are the input labels"
    ) in lines
    # The summary of the programs is first, then the tensors, then the nodes.
    end = next(number for number, line in enumerate(lines) if line.split()[-1:] == ["layout"])
    assert lines.index("program       training_model") < end
    rows = {line.split()[0]: line.split()[1:] for line in lines[:end] if line}
    assert " ".join(rows["w"]) == ("36 yes first, second (shared) it has the name of a parameter")
    assert " ".join(rows["held"]) == "36 no: frozen last it is the weight of node 'last'"
    assert rows["unread"][:3] == ["36", "no:", "the"]
    assert rows["optimizer_model"][2:] == ["1", "AllReduce", "144"]
    assert not any("MomentumStep" in line for line in lines)
    assert main(["inspect", str(out), "--program", "optimizer_model"]) == 0
    assert "MomentumStep" in capsys.readouterr().out


def test_users_mistakes(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inspect", "view"):
        assert main([command, str(out), "--program", "model"]) == 2
        assert "no program 'model'; it has eval_model" in capsys.readouterr().err
    assert main(["inspect", str(out.parent / "m.onnx"), "--program", "model"]) == 2
    assert "is a model, which has no programs" in capsys.readouterr().err


def test_the_dump_has_every_program(out: Path) -> None:
    folder = out.parent / "dump"
    assert sorted(path.name for path in folder.glob("*.txt")) == [
        "00.loaded.txt",
        "01.normalised.txt",
        "02.planned.txt",
        "03.partitioned.training_model.rank0.txt",
        "04.partitioned.eval_model.rank0.txt",
        "05.partitioned.optimizer_model.rank0.txt",
    ]
    for path in folder.glob("*.onnx"):
        onnx.load(path, load_external_data=False)
    planned = (folder / "02.planned.txt").read_text(encoding="utf-8")
    # The backward half is planned with the forward one.
    assert "first (MatMul)" in planned and "first/grad/" in planned


def in_stages(folder: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> tuple[Path, str]:
    """Shards the training of an MLP of 5 -> 10 -> 7 -> 10; the directory, and what was printed."""
    path, file, out = folder / "m.onnx", folder / "s.yaml", folder / "out"
    ir.save(mlp.build(image=5, hidden=(10, 7)), path)
    file.write_text(strategy)
    options = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd", "-o", str(out)]
    assert main(["shard", str(path), "--strategy", str(file), *options]) == 0
    return out, capsys.readouterr().out


def test_stages_and_transfers_of_a_pipeline_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second stage begins with the second product."""
    strategy = "mesh: {dp: 2}\npipeline: {stages: 2, assign: {'/relu1/*': 0, '/fc2/*': 1}}\n"
    out, printed = in_stages(tmp_path, strategy, capsys)
    assert "stage 1       ranks 2, 3: " in printed and "560 B on each device" in printed
    assert main(["inspect", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second = report["stage_totals"]
    # 25x10 float32; 10x7 and 7x10.
    assert (first["parameters"], first["parameter_bytes_per_device"]) == (1, 1000)
    assert (second["parameters"], second["parameter_bytes_per_device"]) == (2, 560)
    assert (first["ranks"], second["ranks"]) == ([0, 1], [2, 3])
    assert first["nodes"] + second["nodes"] == len(report["nodes"])
    # The loss and its gradient are divided by counts of all data ranks; the first stage has a sum.
    assert first["collectives"] + second["collectives"] == report["totals"]["collectives"]
    assert "bytes" in first and "bytes" in second
    there, back = report["transfers"]
    assert (there["from"], there["to"], back["from"], back["to"]) == (0, 1, 1, 0)
    # Half the batch, padded up, of 10 float32.
    assert there["bytes"] == back["bytes"] == "40*((batch + 1)//2)"
    assert report["programs"]["eval_model"]["transfers"] == [there]
    assert main(["inspect", str(out)]) == 0
    assert "bytes per rank and micro-batch" in capsys.readouterr().out


def test_with_chunks_transfers_are_shown_by_chunk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = (
        "devices: 2\npipeline: {stages: 2, chunks: 2, schedule: interleaved, assign: "
        "{'/fc1/*': 0, '/relu1/*': 1, '/fc2/*': 2, '/relu2/*': 3}}\n"
    )
    out, printed = in_stages(tmp_path, strategy, capsys)
    assert "to 1 (chunk 0 to 0)" in printed and "to 0 (chunk 0 to 1)" in printed
    assert main(["inspect", str(out), "--json"]) == 0
    transfers = json.loads(capsys.readouterr().out)["transfers"]
    ways = [(t["from"], t["from_chunk"], t["to"], t["to_chunk"]) for t in transfers]
    there = [(0, 0, 1, 0), (1, 0, 0, 1), (0, 1, 1, 1)]
    assert sorted(ways) == sorted([*there, *((c, d, a, b) for a, b, c, d in there)])
    assert main(["inspect", str(out)]) == 0
    assert "1, chunk 0" in capsys.readouterr().out


def test_each_rank_of_a_pipeline_has_graphs_to_view(tmp_path: Path) -> None:
    path, out = tmp_path / "m.onnx", tmp_path / "out"
    ir.save(mlp.build(image=5, hidden=(10, 7)), path)
    options = ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd", "-o", str(out)]
    assert main(["shard", str(path), "--strategy", "pp=2,dp=2", *options]) == 0
    for rank, stage in enumerate((0, 0, 1, 1)):
        first, backward = (
            ("forward_backward_model", "forward_backward_model")
            if stage
            else ("forward_model", "backward_model")
        )
        for program, shown in (
            (None, first),
            ("training_model", first),
            ("optimizer_model", "optimizer_model"),
            (f"{backward}.{stage}", backward),
        ):
            name = graph_file(out, program, rank).name
            assert name == f"rank{rank:04}.{shown}.{stage}.onnx"
    with pytest.raises(DirectoryError, match="rank 3 does not run 'forward_model"):
        graph_file(out, "forward_model.0", 3)
    with pytest.raises(DirectoryError, match="from 0 to 3, got 4"):
        graph_file(out, None, 4)
    assert main(["inspect", str(out), "--rank", "3"]) == 0


def test_calls_with_several_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each tensor has an entry; those of one call have one node."""
    ir.save(mlp.build(hidden=(6,)), tmp_path / "m.onnx")
    arguments = ["shard", str(tmp_path / "m.onnx"), "--strategy", "dp=2", "--train"]
    more = ["--loss", "softmax_cross_entropy", "--optimizer", "sgd", "-o", str(tmp_path / "out")]
    assert main([*arguments, *more]) == 0
    program = inspected(tmp_path / "out", capsys)["programs"]["optimizer_model"]
    totals = program["totals"]
    assert totals["collectives_by_op"] == {"AllReduce": 2} and totals["calls"] == 1
    assert len({item["value"] for item in program["collectives"]}) == 2
    assert len({item["node"] for item in program["collectives"]}) == 1
    assert main(["inspect", str(tmp_path / "out"), "--program", "optimizer_model"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 AllReduce in 1 call" in shown and shown.count("in one call with 1 more") == 2


SHARED = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 6] x) => (float[batch, 4] y) {
  [turned] t = Transpose<perm = [1, 0]>(w)
  [first] a = MatMul(x, t)
  [act] r = Relu(a)
  [last] y = MatMul(r, v)
}"""


def test_a_pair_is_announced_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nodes of two micro-batches count twice; those that depend on parameters alone, once."""
    proto = parser.parse_model(SHARED)
    for name, shape in (("w", (8, 6)), ("v", (8, 4))):
        proto.graph.initializer.append(numpy_helper.from_array(np.ones(shape, np.float32), name))
    onnx.save(proto, tmp_path / "m.onnx")
    out, strategy = tmp_path / "out", tmp_path / "s.yaml"
    strategy.write_text("{mesh: {tp: 2}, pair_micro_batches: true}")
    options = ["--train", "--loss", "mse", "--optimizer", "sgd", "-o", str(out)]
    assert main(["shard", str(tmp_path / "m.onnx"), "--strategy", str(strategy), *options]) == 0
    said = capsys.readouterr().out
    programs = inspected(out, capsys)["programs"]
    one, pair = programs["training_model"]["totals"], programs["paired_model"]["totals"]
    nodes = {node["name"] for node in inspected(out, capsys, "--program", "paired_model")["nodes"]}
    written = {node.name for node in onnx.load(out / "rank0000.paired_model.onnx").graph.node}
    twice = {name for name in nodes if f"{name}.second" in written}
    assert "first" in twice and "turned" in nodes - twice
    assert (pair["nodes"], pair["once"]) == (len(nodes) + len(twice), len(nodes - twice))
    assert one["nodes"] == len(nodes) and "once" not in one
    assert pair["collectives"] == 2 * one["collectives"]
    text = f"take turns: {len(twice)} nodes for each of them, and {len(nodes - twice)} that both"
    assert main(["inspect", str(out)]) == 0
    for shown in (said, capsys.readouterr().out):
        assert f"paired_model, two micro-batches {text} share" in " ".join(shown.split())
    assert main(["inspect", str(out), "--program", "paired_model"]) == 0
    assert f"nodes         {pair['nodes']}: " in capsys.readouterr().out
