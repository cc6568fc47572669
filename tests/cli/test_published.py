"""MindSpore's published cases, with the commands that docs/published_cases.md shows."""

import json
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import two_layer

from onnxpar.cli import main

Shards = list[list[int]]
HEAD = '<ir_version: 10, opset_import: ["" : 20]>'


def saved(folder: Path, text: str) -> Path:
    model = folder / "m.onnx"
    onnx.save(onnx.parser.parse_model(f"{HEAD}\n{text}"), model)
    return model


def strategies(directory: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Shards]:
    """The numbers of shards of every operand of every node, as `inspect` prints them."""
    capsys.readouterr()
    assert main(["inspect", str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    return {
        node["name"]: [i["strategy"] for i in node["inputs"] if i["strategy"] is not None]
        for node in report["nodes"]
    }


def sharded(
    folder: Path, model: Path, strategy: str, capsys: pytest.CaptureFixture[str]
) -> dict[str, Shards]:
    (folder / "s.yaml").write_text(strategy)
    out = folder / "out"
    command = ["shard", str(model), "--strategy", str(folder / "s.yaml"), "-o", str(out)]
    assert main(command) == 0
    return strategies(out, capsys)


def test_propagation_from_the_first_product(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense, ReLU, dense: the sharding of the first product's result continues in the second."""
    model = saved(
        tmp_path,
        """g (float[256, 784] x, float[784, 64] w1, float[64] b1, float[64, 10] w2)
             => (float[256, 10] y) {
             [dense1] h = MatMul(x, w1)
             [bias1] c = Add(h, b1)
             [relu] a = Relu(c)
             [dense2] y = MatMul(a, w2)
           }""",
    )
    text = "devices: 8\ndataset: full_batch\nnodes: {dense1: {in: [[2, 1], [1, 4]]}}\n"
    found = sharded(tmp_path, model, text, capsys)
    assert found["dense1"] == [[2, 1], [1, 4]]
    assert found["bias1"] == [[2, 4], [4]]
    assert found["relu"] == [[2, 4]]
    assert found["dense2"] == [[2, 4], [4, 1]]


def test_the_quick_start_in_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With `rest: mindspore`, the second product gets what the tutorial prints."""
    model = tmp_path / "two.onnx"
    ir.save(two_layer.build(), model)
    (tmp_path / "s.yaml").write_text(
        "devices: 8\nrest: mindspore\nnodes: {/matmul1/MatMul: {in: [[2, 4], [4, 1]]}}\n"
    )
    out = tmp_path / "out"
    training = ["--train", "--loss", "mse", "--optimizer", "momentum"]
    strategy = ["--strategy", str(tmp_path / "s.yaml")]
    assert main(["shard", str(model), *strategy, "-o", str(out), *training]) == 0
    found = strategies(out, capsys)
    assert found["/relu/Relu"] == [[2, 4]]
    assert found["/matmul2/MatMul"] == [[2, 4], [4, 1]]
    assert main(["verify", str(out), "--model", str(model), "--symbol", "batch=16"]) == 0
    # The strategy as resolved makes the same directory.
    again = tmp_path / "again"
    strategy = ["--strategy", str(out / "strategy.yaml")]
    assert main(["shard", str(model), *strategy, "-o", str(again), *training]) == 0
    for file in sorted(out.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_output_of_a_product_with_a_transposed_operand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = saved(
        tmp_path,
        """g (float[256, 784] x, float[512, 784] w, float[256, 512] b) => (float[256, 512] y) {
             [product] h = Gemm<transB = 1>(x, w)
             [sum] y = Add(h, b)
           }""",
    )
    text = (
        "devices: 8\ndataset: full_batch\nnodes: {product: {in: [[4, 2], [1, 2]], out: [[8, 1]]}}\n"
    )
    found = sharded(tmp_path, model, text, capsys)
    assert found["product"][:2] == [[4, 2], [1, 2]]
    assert found["sum"] == [[8, 1], [8, 1]]


def test_products_of_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both operands and the result are laid out over the devices as one matrix of 8 by 4."""
    model = saved(
        tmp_path,
        """g (float[128, 32] x, float[32, 64] w, float[64, 64] b) => (float[128, 64] y) {
             [first] h = MatMul(x, w)
             [second] y = MatMul(h, b)
           }""",
    )
    entry = "{in: [[8, 4], [8, 4]]}"
    text = f"devices: 32\ndataset: full_batch\nnodes: {{first: {entry}, second: {entry}}}\n"
    sharded(tmp_path, model, text, capsys)
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--json"]) == 0
    nodes = json.loads(capsys.readouterr().out)["nodes"]
    assert [node["outputs"][0]["strategy"] for node in nodes] == [[8, 4], [8, 4]]
    assert [node["inputs"][0]["strategy"] for node in nodes] == [[8, 1], [8, 1]]
    assert [node["inputs"][1]["strategy"] for node in nodes] == [[1, 4], [1, 4]]
    assert main(["verify", str(tmp_path / "out"), "--model", str(model)]) == 0


def planned(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[dict[str, Any], dict[str, Shards]]:
    """What `plan --json` prints, and the sharding that `shard` makes from its file."""
    file, out = folder / "found.yaml", folder / "out"
    capsys.readouterr()
    assert main(["plan", str(model), "-o", str(file), "--json", *more]) == 0
    data = json.loads(capsys.readouterr().out)
    assert main(["shard", str(model), "--strategy", str(file), "-o", str(out), "--force"]) == 0
    return data, strategies(out, capsys)


def seconds(data: dict[str, Any]) -> float:
    (found,) = (way for way in data["ways"] if way["name"] == "found")
    return float(found["seconds"])


DEVICES = ("--devices", "8", "--machine", "a100")


def test_the_plan_found_costs_no_more_than_the_published_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The published plan is priced by fixing it: nothing is then left to the search."""
    model = saved(
        tmp_path,
        """g (float[256, 784] x, float[512, 784] w) => (float[256, 512] y) {
             [product] y = Gemm<transB = 1>(x, w)
           }""",
    )
    found, chosen = planned(tmp_path, model, capsys, *DEVICES)
    pin = tmp_path / "pin.yaml"
    pin.write_text("devices: 8\nnodes: {product: {in: [[4, 2], [1, 2]]}}\n")
    options = ["--strategy", str(pin), "--machine", "a100"]
    published, kept = planned(tmp_path, model, capsys, *options)
    assert kept["product"][:2] == [[4, 2], [1, 2]]
    assert chosen["product"][:2] == kept["product"][:2] or seconds(found) < seconds(published)


PRODUCTS = """g (float[32768, 1024] x, float[1024, 1024] a, float[1024, 1024] b)
     => (float[32768, 1024] y) {
     [first] h = MatMul(x, a)
     [second] y = MatMul(h, b)
   }"""


def test_rows_through_two_products(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(tmp_path, PRODUCTS)
    _, found = planned(tmp_path, model, capsys, *DEVICES)
    assert found == {"first": [[8, 1], [1, 1]], "second": [[8, 1], [1, 1]]}


def test_a_first_product_with_fixed_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows after an AllToAll instead of the sum over columns, if the cost model prefers them."""
    model, pin = saved(tmp_path, PRODUCTS), tmp_path / "pin.yaml"
    first = "first: {in: [[1, 1], [1, 8]]}"
    cost = {}
    for name, second in (("rows", "[[8, 1], [1, 1]]"), ("columns", "[[1, 8], [8, 1]]"), ("", "")):
        nodes = f"{first}, second: {{in: {second}}}" if second else first
        pin.write_text(f"devices: 8\nnodes: {{{nodes}}}\n")
        data, found = planned(tmp_path, model, capsys, "--strategy", str(pin), "--machine", "a100")
        assert found["first"] == [[1, 1], [1, 8]]
        cost[name] = seconds(data)
    best = min(("rows", "columns"), key=lambda name: cost[name])
    wanted = {"rows": [[8, 1], [1, 1]], "columns": [[1, 8], [8, 1]]}
    assert found["second"] == wanted[best]
    assert cost[""] == pytest.approx(cost[best])


def test_the_dim_that_dominates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(
        tmp_path,
        """g (float[160, 320] x, float[320, 3200000] w) => (float[160, 3200000] y) {
             [product] y = MatMul(x, w)
           }""",
    )
    _, found = planned(tmp_path, model, capsys, *DEVICES)
    assert found["product"] == [[1, 1], [1, 8]]
