"""`onnxpar inspect`: the report of a sharded model, and of a model that has not been sharded."""

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from onnxpar.cli import main
from tests.cli import two_products
from tests.decoders import encoder_decoder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and its directory."""
    monkeypatch.chdir(tmp_path)
    two_products.shard(tmp_path)
    return tmp_path


def test_json_of_a_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", "out", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["devices"] == 8
    assert report["mesh"] == {"axes": {}, "atoms": [2, 2, 2]}
    first = report["nodes"][0]
    assert (first["name"], first["op_type"], first["stage"], first["pinned"]) == (
        "/matmul1/MatMul",
        "MatMul",
        0,
        True,
    )
    x, w = first["inputs"]
    assert (x["shape"], x["local_shape"], x["strategy"]) == (
        ["batch", 32],
        ["batch//2", 8],
        [2, 4],
    )
    assert (w["shape"], w["local_shape"], w["strategy"]) == ([32, 16], [8, 16], [4, 1])
    y = first["outputs"][0]
    assert y["partial"]["reduction"] == "sum"
    assert y["strategy"] == [2, 1]
    assert y["resharded"]["strategy"] == [8, 1]
    assert y["resharded"]["partial"] is None
    ops = {item["op"]: item for item in report["collectives"]}
    assert ops["ReduceScatter"]["groups"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Each device sends 3 of 4 blocks of its (batch/2, 16) float32: 3/4 * batch/2 * 64 bytes.
    assert ops["ReduceScatter"]["bytes"] == "24*batch"
    totals = report["totals"]
    assert totals["collectives"] == len(report["collectives"]) == 2
    assert totals["nodes"] == totals["sharded"] == 3
    assert totals["parameter_bytes"] == (32 * 16 + 16 * 16) * 4
    # The first weight has four shards; the second node is sharded only by the batch.
    assert totals["parameter_bytes_per_device"] == (8 * 16 + 16 * 16) * 4


def test_tables_of_a_directory(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines]
    assert next(row[:5] for row in rows if row[:1] == ["/matmul1/MatMul"]) == [
        "/matmul1/MatMul",
        "*",
        "MatMul",
        "(batch,",
        "16)",
    ]
    assert any("{0,1,2,3} {4,5,6,7}" in line for line in lines)
    assert "symbol        batch: divisor=8" in lines
    # The mesh has no names.
    assert "4@1           over 4 devices that are 1 rank apart" in lines


def test_operands_of_chosen_nodes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", "out", "--node", "/matmul1/*"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ["/matmul1/MatMul", "*", "MatMul"]
    assert rows[2][:7] == ["x", "(batch,", "32)", "(batch//2,", "8)", "2,4", "[2@4,"]
    assert ["after:", "/matmul1/MatMul_output_0"] in [row[:2] for row in rows]
    assert not any("/matmul2/MatMul" in row for row in rows)
    assert main(["inspect", "out", "--node", "/matmul1/*", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [node["name"] for node in found["nodes"]] == ["/matmul1/MatMul"]
    assert found["layers"] == [
        {"first": "/matmul1/MatMul", "last": "/matmul2/MatMul", "nodes": 3, "count": 1}
    ]
    for target in ("out", "model.onnx"):
        assert main(["inspect", target, "--node", "/matmul3/*"]) == 2
        assert "--node /matmul3/*: matches no node; nearest" in capsys.readouterr().err


def test_one_part_of_a_report(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", "out", "--collectives"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("collective ") and "ReduceScatter" in text and "devices" not in text[:80]
    assert main(["inspect", "out", "--layers"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:3] == [
        "/matmul1/MatMul", "/matmul2/MatMul", "3"
    ]  # fmt: skip
    assert main(["inspect", "model.onnx", "--layers"]) == 0
    assert "/matmul1/MatMul" in capsys.readouterr().out
    assert main(["inspect", "model.onnx", "--collectives"]) == 2
    assert "expected the output of `onnxpar shard`, got a model" in capsys.readouterr().err


def test_groups_of_one_rank(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", "out", "--rank", "5", "--json"]) == 0
    collectives = json.loads(capsys.readouterr().out)["collectives"]
    assert [item["groups"] for item in collectives] == [[[4, 5, 6, 7]]] * len(collectives)
    assert main(["inspect", "out", "--rank", "8"]) == 2
    assert "expected a rank from 0 to 7, got 8" in capsys.readouterr().err


def test_replicated_nodes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[batch, 4] x) => (int64[2, n] y) { [where] y = NonZero(x) }
    """
    onnx.save(onnx.parser.parse_model(text), here / "c.onnx")
    assert main(["shard", "c.onnx", "--strategy", "dp=2", "-o", "c"]) == 0
    capsys.readouterr()
    assert main(["inspect", "c", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (item,) = report["replicated"]
    assert (item["name"], item["op_type"]) == ("where", "NonZero")
    assert report["totals"]["sharded"] == 0
    assert main(["inspect", "c"]) == 0
    assert "how many elements are found" in capsys.readouterr().out
    assert main(["inspect", "c.onnx"]) == 0
    assert "how many elements are found" in capsys.readouterr().out


def test_what_of_a_model_can_be_sharded(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["inspect", "model.onnx", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["inputs"] == [{"name": "x", "dtype": "float", "shape": ["batch", 32]}]
    assert list(data["symbols"]) == ["batch"]
    node = data["nodes"][0]
    assert node["operands"] == ["x", "matmul1.weight"]
    assert node["factors"] == [
        {"name": "M", "size": "batch", "kind": "parallel"},
        {"name": "K", "size": 32, "kind": "sum"},
        {"name": "N", "size": 16, "kind": "parallel"},
    ]
    assert main(["inspect", "model.onnx"]) == 0
    assert "M=batch, K=32 sum, N=16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "expected a directory that `onnxpar shard` wrote"),
        ("{", "not valid JSON"),
        ("[]", "manifest: expected an object, got []"),
        ('{"report": {"nodes": []}}', "'schema' is missing"),
    ],
)
def test_directories_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "manifest.json").write_text(content)
    assert main(["inspect", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


FALLS = """
<ir_version: 10, opset_import: ["" : 21]>
g (float[n, 4] x) => (float[n, 4] y, float[m] u, float[o, p] z) {
  [shape] s = Shape(x)
  [twice] t = Mul(s, s)
  [grow] z = Expand(x, t)
  [distinct] u = Unique(x)
  [y] y = Relu(x)
}
"""


def test_what_a_model_leaves_to_the_cpu(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(onnx.parser.parse_model(FALLS), "falls.onnx")
    capsys.readouterr()
    assert main(["inspect", "falls.onnx", "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["device"]
    assert found["device"] == "cuda"
    (program,) = found["programs"].values()
    assert [(f["name"], f["op_type"], f["types"]) for f in program["fallbacks"]] == [
        ("distinct", "Unique", ["float"])
    ]
    assert program["sizes"] == [{"name": "twice", "op_type": "Mul"}]
    assert main(["inspect", "falls.onnx", "--device", "cuda"]) == 0
    text = capsys.readouterr().out
    assert "distinct  Unique    float  the provider has no kernel for it" in text
    assert "falls.onnx: 1 of 5 nodes would fall back to the CPU; 1 more compute sizes there" in text


def test_what_graphs_of_ranks_leave_to_the_cpu(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["inspect", "out", "--device", "cuda", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["device"]["programs"]
    assert list(found) == ["rank0000.model.onnx"]
    assert found["rank0000.model.onnx"]["fallbacks"] == []


def test_a_device_that_is_none(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "out", "--device", "tpu"]) == 2
    assert "--device: expected cuda, got 'tpu'" in capsys.readouterr().err


def test_what_an_encoder_supplies_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = encoder_decoder(tmp_path / "model"), str(tmp_path / "out")
    files = [str(folder / "decoder.onnx"), "--encoder", str(folder / "encoder.onnx")]
    assert main(["shard", *files, "--strategy", "tp=2", "-o", out]) == 0
    printed = capsys.readouterr().out
    assert "encoder       16 nodes, runs once: 7 parameters" in printed
    assert "4 inputs from it, such as past_key_cross_0 from present_key_cross_0, [~, tp" in printed
    assert main(["inspect", out]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "_cross_*" in line]
    assert ["2", "past_value_cross_*", "encoder", "present_value_cross_*"] in [
        row[:4] for row in rows
    ]
    assert main(["inspect", out, "--program", "encoder", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["program"] == "encoder" and len(report["nodes"]) == 16
    assert report["supplied"] == []


def test_weights_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model without its weights can be shown; `shard` refuses it with the same words."""
    weight = onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "w")
    values = [onnx.helper.make_tensor_value_info(n, weight.data_type, ("n", 8)) for n in "xy"]
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "product")
    graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], [weight])
    opsets = [onnx.helper.make_opsetid("", 21)]
    model, path = onnx.helper.make_model(graph, opset_imports=opsets), tmp_path / "m.onnx"
    onnx.save(model, path, save_as_external_data=True, location="w", size_threshold=0)

    def notices() -> tuple[list[str], str]:
        assert main(["inspect", str(path), "--json"]) == main(["inspect", str(path)]) == 0
        data, _, shown = capsys.readouterr().out.partition("\n}\n")
        return json.loads(data + "}")["notices"], shown

    found, shown = notices()
    assert not found and "notice" not in shown
    data = tmp_path / "w"
    os.truncate(data, 255)
    found, shown = notices()
    assert found == [
        f"tensor 'w': its data file {data} is truncated: expected at least 256 bytes (256 from "
        "byte 0), got 255; `onnxpar shard` needs it"
    ]
    assert f"notice        {found[0]}\n" in shown
    data.unlink()
    assert notices()[0] == [
        f"tensor 'w': its data file {data} is missing; `onnxpar shard` needs it"
    ]


def test_files_that_are_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is shown all the same; nothing is read but the manifest."""
    files = json.loads((here / "out/manifest.json").read_text())["files"]
    graph, size = "out/rank0001.model.onnx", files["rank0001.model.onnx"]["bytes"]

    def shown() -> str:
        capsys.readouterr()
        assert main(["inspect", "out"]) == 0
        return capsys.readouterr().out

    assert "notice" not in shown()
    os.truncate(graph, 9)
    said = (
        f"notice        {graph}: truncated, expected {size} bytes, got 9 bytes; `onnxpar run` needs"
    )
    assert said in shown()
    os.remove(graph)
    assert f"{graph}: missing, though the manifest names it; `onnxpar run` needs it" in shown()
