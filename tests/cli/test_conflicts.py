"""Reshards between neighbours: found, priced in both layouts, and shown by `inspect`."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import transformer
import two_layer
from _exporter import save

from onnxpar.cli import main

STRATEGY = """\
devices: 8
symbols: {batch: {divisor: 8}}
nodes:
  /matmul1/MatMul: {in: [[2, 1], [1, 4]]}
  /matmul2/MatMul: {in: [[8, 1], [1, 1]]}
"""
BATCH = 32  # a typical size of a symbol of which nothing more is known, in multiples of 8


def shard(
    folder: Path, strategy: str, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[str, dict[str, Any]]:
    """What `shard` prints, and what `inspect --json` does."""
    if "\n" in strategy:
        (folder / "s.yaml").write_text(strategy)
        strategy = str(folder / "s.yaml")
    out = str(folder / "out")
    capsys.readouterr()
    command = ["shard", str(folder / "m.onnx"), "--strategy", strategy, "-o", out, "--force"]
    assert main([*command, *more]) == 0
    printed = capsys.readouterr().out
    assert main(["inspect", out, "--json"]) == 0
    return printed, json.loads(capsys.readouterr().out)


def test_two_strategies_of_the_user(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ir.save(two_layer.build(), tmp_path / "m.onnx")
    printed, report = shard(tmp_path, STRATEGY, capsys)
    first, second = report["conflicts"]
    # x [batch, 32] float32 is gathered from eighths to halves: 3 of 4 blocks come from others.
    assert (first["value"], first["node"], first["made_by"]) == ("x", "/matmul1/MatMul", "")
    assert (first["from"], first["to"]) == ("[8@1, ~]", "[2@4, ~]")
    assert (first["steps"], first["bytes"]) == (["AllGather"], "48*batch")
    assert first["chosen"] == "strategy" and first["cost_in_current_layout"] == 0
    # An eighth of the hidden [batch, 16] float32, 3 of 4 parts of which go to others.
    assert (second["value"], second["made_by"]) == ("/relu/Relu_output_0", "/relu/Relu")
    assert (second["steps"], second["bytes"]) == (["AllToAll"], "6*batch")
    # Taken in its current layout, (2, 4), the product [batch/2, 16] is a sum over four: 3/4 of it
    # are sent.
    typical = second["cost"] // 6
    assert second["cost"] == 6 * typical
    assert second["cost_in_current_layout"] == typical // 2 * 16 * 4 * 3 // 4
    assert report["totals"]["conflicts"] == 2
    assert report["totals"]["conflict_bytes"] == "54*batch"
    assert "conflicts     2 reshards between neighbours, 54*batch bytes\n" in printed
    lines = printed.splitlines()
    conflict = lines[lines.index("conflicts     2 reshards between neighbours, 54*batch bytes") + 2]
    assert conflict.strip() == (
        "/relu/Relu_output_0 [2@4, 4@1] -> [8@1, ~] for /matmul2/MatMul operand 0: AllToAll, "
        "6*batch bytes (the strategy requires this layout; at typical sizes, a device sends "
        f"{second['cost']:,} bytes for the node, and would send "
        f"{second['cost_in_current_layout']:,} in the value's layout)"
    )
    reasons = {c["value"]: c["reason"] for c in report["collectives"]}
    assert reasons["x"] == f"/matmul1/MatMul operand 0: {first['reason']}"
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert second["reason"] in capsys.readouterr().out


SUM = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[16, ROWS] a, float[16, 4] b, float[ROWS, 4] w) => (float[16, 4] y) {
    [product] p = MatMul(a, w)
    [sum] y = Add(p, b)
}
"""


@pytest.mark.parametrize("rows", [8, 64])
def test_the_cheaper_side_gives_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rows: int
) -> None:
    """A sum of a product sharded by rows and a value sharded by columns: one is resharded."""
    onnx.save(onnx.parser.parse_model(SUM.replace("ROWS", str(rows))), tmp_path / "m.onnx")
    strategy = "devices: 2\ndataset: {a: [2, 1], b: [1, 2]}\n"
    _, report = shard(tmp_path, strategy, capsys)
    moved = {c["value"]: c for c in report["conflicts"]}
    assert set(moved) <= {"b", "p", "w"}
    (chosen,) = [c for c in report["conflicts"] if c["node"] == "sum"]
    # Half of the 16 x 4 float32 that a device has go to the other one, whichever is moved.
    assert (chosen["steps"], chosen["bytes"]) == (["AllToAll"], 16 * 4 * 4 // 4)
    assert chosen["chosen"] == "cost"
    assert chosen["cost"] == chosen["cost_in_current_layout"] == 64
    assert chosen["reason"].startswith("this layout costs no more than the value's; at typical")


def test_an_operator_that_needs_a_dim_replicated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[8, 16] x, int64[16] n) => (float[8, 16] y) {
            [turned] y = ReverseSequence<time_axis = 0, batch_axis = 1>(x, n)
        }
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    _, report = shard(tmp_path, "devices: 2\ndataset: {x: [2, 1]}\n", capsys)
    (item,) = report["conflicts"]
    assert (item["node"], item["chosen"], item["cost_in_current_layout"]) == (
        "turned",
        "operator",
        None,
    )
    assert item["reason"] == "the operator cannot be computed in the value's layout"


@pytest.mark.parametrize("strategy", ["dp=4", "tp=4", "dp=2,tp=2"])
def test_agreement_is_no_conflict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: str
) -> None:
    """Columns and then rows: their sums are what the split costs, not a conflict."""
    config = transformer.Config(layers=1, d_model=32, heads=4, vocab=64, max_positions=16)
    save(transformer.build(config), tmp_path / "m.onnx")
    for train in ([], ["--train", "--loss", "softmax_cross_entropy", "--optimizer", "sgd"]):
        printed, report = shard(tmp_path, strategy, capsys, *train)
        assert report["conflicts"] == [] and "conflicts" not in printed
        for program in report["programs"].values():
            assert program["conflicts"] == []


def test_the_most_expensive_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = "\n".join(f"[n{i}] v{i + 1} = Softmax<axis=-1>(v{i})" for i in range(0, 8))
    text = f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g (float[8, 16] v0) => (float[8, 16] v8) {{ {nodes} }}
    """
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    strategy = "devices: 4\nnodes:\n" + "\n".join(
        f"  n{i}: {{in: [[{4 if i % 2 else 2}, 1]]}}" for i in range(8)
    )
    printed, report = shard(tmp_path, strategy + "\n", capsys)
    sent = [c["bytes"] for c in report["conflicts"]]
    assert len(sent) == 4 and sent == sorted(sent, reverse=True)
    assert [c["value"] for c in report["conflicts"]] == ["v0", "v2", "v4", "v6"]
    (line,) = [line for line in printed.splitlines() if line.startswith("conflicts")]
    assert line == f"conflicts     4 reshards between neighbours, {sum(sent)} bytes"
