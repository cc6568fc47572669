"""Notebooks show our objects as tables."""

import re
from html.parser import HTMLParser
from pathlib import Path

import two_layer
from _exporter import save

from onnxpar import Mesh, plan, shard_model
from onnxpar.core.html import MOST_ROWS, table


class Cells(HTMLParser):
    """The texts of a table, by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.open: list[str] = []
        self.title = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] == "caption":
            self.title += data
        else:
            self.rows[-1][-1] += data


def test_a_table_is_escaped_and_ends() -> None:
    found = Cells(table("<b>", ["a&b"], [["<i>"]] * (MOST_ROWS + 5)))
    assert found.title == "<b>" and found.rows[:2] == [["a&b"], ["<i>"]]
    assert found.rows[-1] == ["and 5 more"] and len(found.rows) == MOST_ROWS + 2


def test_a_mesh() -> None:
    found = Cells(Mesh.of(dp=2, tp=3)._repr_html_())
    assert found.title == "Mesh dp=2, tp=3"
    assert found.rows[0] == ["device", "dp", "tp"] and found.rows[5] == ["4", "1", "1"]


def test_a_plan_and_what_was_written(tmp_path: Path) -> None:
    save(two_layer.build(), tmp_path / "m.onnx")
    found = Cells(plan(tmp_path / "m.onnx", "tp=2")._repr_html_())
    assert found.title == "Plan for 2 devices (tp=2)" and len(found.rows) > 2
    done = Cells(shard_model(tmp_path / "m.onnx", "tp=2", tmp_path / "out")._repr_html_())
    assert re.fullmatch(
        r".*out: 2 ranks, \d+ nodes, of which \d+ are sharded; 1 coll.*", done.title
    )
    assert done.rows[1][0] == "AllReduce"
