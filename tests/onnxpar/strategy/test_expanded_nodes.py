"""A strategy for a node which was replaced by its body reaches the body."""

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import StrategyError
from onnxpar.graph.plan import Plan
from onnxpar.propagation.propagate import propagate
from onnxpar.strategy import Strategy, resolve

MODEL = """<ir_version: 10, opset_import: ["": 20]>
g (float[n, 8, 6] x, float[6, 3] w) => (float[n, 4, 3] y) <int64[1] t = {4}> {
  [crop] c = CenterCropPad<axes=[1]>(x, t)
  [mm] y = MatMul(c, w)
}"""
WIDE = MODEL.replace("t = {4}", "t = {14}").replace("n, 4, 3", "n, 14, 3")


def planned(text: str, nodes: str) -> Plan:
    analysed = analyse(ir.from_proto(onnx.parser.parse_model(text)), {})
    strategy = Strategy.from_text(
        f"mesh: {{dp: 2, tp: 3}}\ndataset: full_batch\nnodes:\n{nodes}", source="test.yaml"
    )
    seeds = resolve(strategy, analysed)
    return propagate(analysed, seeds)


def strategies(plan: Plan, name: str) -> list[tuple[int, ...]]:
    return [s.strategy(plan.mesh) for s in plan.nodes[name].inputs if s is not None and s.rank > 1]


@pytest.mark.parametrize(
    "entry",
    [
        "  crop: {in: [[dp, ~, tp], ~]}",
        "  'cr*': {in: [[dp, ~, tp], ~]}",
        "  crop: {in: [[2, 1, 3], ~]}",
        "  crop: {out: [[dp, ~, tp]]}",
        "  crop/Slice: {in: [[dp, ~, tp]]}",
    ],
)
@pytest.mark.parametrize("text", [MODEL, WIDE], ids=["narrowed", "widened"])
def test_operands_and_results_are_those_of_the_node(entry: str, text: str) -> None:
    inner = "crop/Slice" if text is MODEL else "crop/Pad"
    plan = planned(text, entry.replace("crop/Slice", inner))
    assert strategies(plan, inner) == [(2, 1, 3)]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            "  crop: {in: [[dp, ~, tp]]}",
            r"'crop', which was replaced .* each of its 2 .*'in'.* "
            r"got 1",
        ),
        ("  crop: {in: [[dp, ~], ~]}", r"expected 3 entries for the shape \(n, 8, 6\), got 2"),
        ("  crap: {in: [[dp, ~, tp], ~]}", "nearest: 'crop'"),
    ],
)
def test_mistakes(entry: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        planned(MODEL, entry)
