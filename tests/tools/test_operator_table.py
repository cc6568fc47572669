"""The page of operators shows the table of operators and the results of the node tests."""

import re

from onnxpar.ops.table import REGISTRY
from tools.operators import page
from tools.operators.backend import FAILED, PASSED, WRONG, Outcome


def test_the_page_is_up_to_date() -> None:
    """If this fails, run `tools/operator_table.py` and review the diff."""
    assert page.PAGE.read_text("utf-8") == page.render(page.load())


def test_the_page_names_every_operator() -> None:
    text = page.PAGE.read_text("utf-8")
    for definition in REGISTRY.defs:
        name = f"{definition.domain}::{definition.op_type}".removeprefix("::")
        assert f"| {name} | {definition.since_version} |" in text


def test_no_result_is_wrong() -> None:
    results = page.load()
    assert not [bad for bad in results.bad if bad[1] != FAILED]
    assert results.sharded >= 0.8 * results.shardable
    # Each replicated test has a reason, and the counts agree.
    replicated = sum(results.reasons.values())
    refused = len(results.bad)
    assert results.shardable - refused <= results.sharded + replicated <= results.shardable


def test_outcomes_are_summed() -> None:
    relu, top = ("ai.onnx::Relu 14",), ("ai.onnx::TopK 24",)
    why = ("TopK", "node 'a' (TopK): the size must be constant, got _d0, _d1")
    outcomes = [
        Outcome("a", relu, PASSED, True, 3, 4),
        Outcome("b", relu, PASSED, True, 0, 4, [("Relu", "every dim has size 1")]),
        Outcome("c", relu, PASSED, False, 0, 1),
        Outcome("d", (*relu, *top), PASSED, True, 0, 2, [why, why]),
        Outcome("e", top, WRONG, True, detail="differs"),
    ]
    results = page.summary(outcomes, 9, "1.0")
    assert (results.total, results.passed, results.shardable, results.sharded) == (9, 5, 4, 1)
    one = {"ai.onnx::Relu": 1}
    assert results.sharded_by_operator == results.replicated_by_operator == one
    assert results.bad == [("e", WRONG, "differs")]
    assert set(results.reasons) == {
        "Relu: every dim has size 1",
        "TopK: the size must be constant, got sizes that depend on data",
    }
    text = page.render(results)
    assert "wrong results: 1" in text and "1 (25.0 %)" in text
    assert re.search(r"^\| Relu \| \d+ \|.*\| 1 \| 1 \|$", text, re.MULTILINE)
