"""A plan whose bytes grow faster than in proportion to a symbol is not taken silently."""

from pathlib import Path

import onnx.parser
import pytest

from onnxpar.api.plan_strategy import plan_strategy
from onnxpar.cli import main
from onnxpar.report.found_strategy import FoundStrategy
from onnxpar.strategy import Strategy

SCORES = """
<ir_version: 11, opset_import: ["" : 23]>
g (float[batch, seq, DEPTH] q, float[batch, DEPTH, seq] k) => (float[batch, seq, seq] y)
{ [score] y = MatMul(q, k) }
"""
FEATURES = """
mesh: {tp: 2}
dataset: {q: [~, ~, tp], k: [~, tp, ~]}
rest: search
search: {machine: h100, sizes: SIZES}
"""


def planned(folder: Path, depth: int, sizes: str = "{}") -> FoundStrategy:
    """The plan of a product whose operands are sharded in the dim that is contracted.

    Either the product is reduced, which sends 4·batch·seq² bytes, or its operands are brought to
    another layout, which sends 3·depth·batch·seq.
    """
    model = folder / "scores.onnx"
    onnx.save(onnx.parser.parse_model(SCORES.replace("DEPTH", str(depth))), model)
    strategy = Strategy.from_text(FEATURES.replace("SIZES", sizes), source="s")
    return plan_strategy(model, strategy)


def reduced(plan: FoundStrategy) -> bool:
    return "K" in plan.plan.nodes["score"].factors


def test_a_plan_that_grows_more_slowly_and_needs_no_more_memory_is_taken(tmp_path: Path) -> None:
    plan = planned(tmp_path, 96)
    assert not reduced(plan)
    best, other = plan.ways[:2]
    assert (best.name, best.growth, other.growth) == ("found at large sizes", (), ("seq",))
    assert best.seconds > other.seconds
    assert best.large < other.large
    assert best.peak <= other.peak


def test_a_plan_that_grows_faster_is_taken_if_it_saves_memory_and_the_report_says_so(
    tmp_path: Path,
) -> None:
    plan = planned(tmp_path, 256)
    assert reduced(plan)
    assert plan.ways[0].peak < plan.ways[1].peak
    share = plan.ways[1].large / plan.ways[0].large
    assert share < 0.5
    assert (
        " The plan found sends bytes that grow faster than in proportion to seq. "
        f"At batch=1024, seq=1024, the plan found at large sizes takes {share:.2f} times as long."
    ) in plan.reason()


def test_shard_says_what_grows_faster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, 96)
    strategy = tmp_path / "s.yaml"
    strategy.write_text("mesh: {tp: 2}\nnodes: {score: {in: [[~, ~, tp], [~, tp, ~]]}}")
    model, out = str(tmp_path / "scores.onnx"), str(tmp_path / "out")
    assert main(["shard", model, "--strategy", str(strategy), "-o", out]) == 0
    shown = capsys.readouterr().out
    assert "4*batch*seq*seq bytes (growing faster than seq) in a run" in shown


@pytest.mark.parametrize(("sizes", "seq"), [("{seq: 64}", 64), ("{seq: 1024}", 1024)])
def test_a_symbol_whose_size_is_given_does_not_grow(tmp_path: Path, sizes: str, seq: int) -> None:
    plan = planned(tmp_path, 96, sizes)
    assert reduced(plan) == (seq == 64)
    assert all("large" not in way.name for way in plan.ways)
    assert "grow" not in plan.reason()
