"""The report page: its data, its formulas, and that names from a model cannot become markup."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import transformer
from onnx import TensorProto, helper, numpy_helper

from onnxpar.cli import main
from onnxpar.core.machine import PRESETS
from onnxpar.core.symbols import Symbol
from onnxpar.report.page_data import directory_page, page_data
from onnxpar.report.tables import Tables
from onnxpar.report.write_page import page_html
from onnxpar_format.expressions import evaluate_exact
from tests.cli import two_products

Json = dict[str, Any]
HOSTILE = (
    "</script><script>document.title='bad'</script>",
    "<!--<script>",
    "\"'><img src=x onerror=document.title='bad'>",
    "{{data}} \xa0 & &lt;",
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    two_products.shard(tmp_path)
    return tmp_path


def hostile_model(path: Path) -> None:
    """A chain of products whose names are markup."""
    names = [f"{text}{i}" for i, text in enumerate(HOSTILE)]
    nodes, weights, value = [], [], "x<b>"
    for i, name in enumerate(names):
        weights.append(numpy_helper.from_array(np.ones((8, 8), np.float32), f"w{name}"))
        out = "y<b>" if i == len(names) - 1 else f"v{name}"
        nodes.append(helper.make_node("MatMul", [value, f"w{name}"], [out], name=name))
        value = out
    shape = ["my.batch", 8]
    graph = helper.make_graph(
        nodes,
        "<script>",
        [helper.make_tensor_value_info("x<b>", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y<b>", TensorProto.FLOAT, shape)],
        weights,
    )
    imports = [helper.make_opsetid("", 20)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), path)


class Elements(HTMLParser):
    """The elements of a page, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.scripts: list[str] = []
        self.title = ""
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        if self._inside == "title":
            self.title += data


def test_the_command_writes_a_page_with_all_that_inspect_shows(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["report", "out", "-o", "page.html", "--symbol", "batch=40"]) == 0
    page = (here / "page.html").read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"page.html: {len(page.encode()):,} bytes\n"
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    (directory,) = json.loads(Elements(page).scripts[0])["directories"]
    assert main(["inspect", "out", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (program,) = directory["programs"]
    texts, formulas = directory["texts"], directory["formulas"]
    assert [n["name"] for n in program["nodes"]] == [n["name"] for n in report["nodes"]]
    assert [texts[n["rule"]] for n in program["nodes"]] == [n["rule"] for n in report["nodes"]]
    x = program["nodes"][0]["inputs"][0]
    assert texts[x[0]] == "x"
    assert [formulas[directory["shapes"][x[1]][0][0]]["text"], directory["shapes"][x[1]][1]] == [
        "batch",
        32,
    ]
    layout = directory["layouts"][x[3]]
    assert layout["text"] == "[2@4, 4@1]"
    assert layout["dims"] == [[[None, [0]]], [[None, [1, 2]]]]
    assert [formulas[c["bytes"][0]]["text"] for c in program["collectives"]] == [
        c["bytes"] for c in report["collectives"]
    ]
    assert directory["symbols"][0]["value"] == 40
    assert {p["name"]: p["copies"] * p["shards"] for p in directory["parameters"]} == {
        name: 8 for name in (p["name"] for p in directory["parameters"])
    }
    # float32 [32, 64] in 8 shards, or [64, 16] in 2 and so on: what a device holds, in bytes.
    assert {p["name"]: p["local"] * p["shards"] for p in directory["parameters"]} == {
        p["name"]: 4 * int(np.prod(p["shape"])) for p in directory["parameters"]
    }


def test_names_of_a_model_stay_text(here: Path) -> None:
    hostile_model(here / "hostile.onnx")
    folder = "<img src=x onerror=document.title='bad'>"
    assert main(["shard", "hostile.onnx", "--strategy", "dp=2,tp=2", "-o", folder]) == 0
    assert main(["report", folder, "-o", "page.html"]) == 0
    harmless = page_html(page_data([directory_page(here / "out", {}, PRESETS["cpu"])]), "out")
    page = (here / "page.html").read_text(encoding="utf-8")
    found = Elements(page)
    assert found.names == Elements(harmless).names
    assert found.title == folder
    assert "<!--<script>" not in page
    (directory,) = json.loads(found.scripts[0])["directories"]
    assert directory["name"] == folder
    assert [n["name"] for n in directory["programs"][0]["nodes"]] == [
        f"{text}{i}" for i, text in enumerate(HOSTILE)
    ]
    # The symbol has a name that is no identifier; formulas with it still have a value.
    assert directory["symbols"][0]["name"] == "my.batch"
    assert all(formula["code"] for formula in directory["formulas"])


def run(code: list[Any], values: list[int]) -> float:
    """The evaluator of the page, in Python."""
    stack: list[float] = []
    for token in code:
        if isinstance(token, int):
            stack.append(token)
        elif isinstance(token, list):
            stack.append(values[token[0]])
        else:
            assert token in ("+", "-", "*", "/", "//", "%")
            right = stack.pop()
            stack.append(eval(f"a {token} b", {"a": stack.pop(), "b": right}))
    (result,) = stack
    return result


@pytest.mark.parametrize(
    "text",
    ["3*batch/2", "(batch + 1)//2 - seq % 7*2", "256*seq*((batch + 1)//2)", "my dim//4 + batch"],
)
def test_the_code_of_a_formula_is_worth_what_the_formula_is(text: str) -> None:
    names = ["batch", "seq", "my dim"]
    tables = Tables(dict.fromkeys(names, Symbol()))
    size = tables.size(text)
    assert isinstance(size, list)
    for values in ([5, 11, 9], [8, 128, 64]):
        found = run(tables.formulas[size[0]]["code"], values)
        known = dict(zip(["batch", "seq", "my_dim"], values, strict=True))
        assert found == evaluate_exact(text.replace("my dim", "my_dim"), known)


def test_a_formula_with_an_unknown_name_has_no_code() -> None:
    tables = Tables({"batch": Symbol()})
    tables.size("batch*other")
    tables.size("not python (")
    assert [f["code"] for f in tables.formulas] == [None, None]


def test_what_report_refuses(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["nothing"], "nothing: no such directory"),
        (["out", "out", "out"], "expected one directory or two to compare, got 3"),
        (["out", "--symbol", "batch"], "--symbol batch: expected a size, as in batch=32"),
        (["out", "--symbol", "bach=8"], "expected a symbol of the model, one of batch, got 'bach'"),
        (["out", "-o", "absent/page.html"], "its folder"),
    ):
        assert main(["report", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not (here / "report.html").exists()


def test_partial_sums_count_as_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ir.save(transformer.build(layers=2, d_model=16, heads=2, vocab=32), "gpt.onnx")
    assert main(["shard", "gpt.onnx", "--strategy", "tp=2", "-o", "out"]) == 0
    data = directory_page(tmp_path / "out", {}, PRESETS["cpu"])
    (program,) = data["programs"]
    sharded = [node for node in program["nodes"] if node["sharded"]]
    assert len(sharded) == program["totals"]["sharded"]

    def partial(node: Json) -> bool:
        places = [result[3] for result in node["outputs"]]
        return any(p is not None and data["layouts"][p]["partial"] for p in places)

    # The sum after attention adds partial sums; none of its dims is sharded.
    adds = [n for n in sharded if data["texts"][n["op"]] == "Add" and partial(n)]
    assert adds and data["micro_batches"] == 1
