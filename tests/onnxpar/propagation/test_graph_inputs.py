"""How graph inputs enter: as the user said, else split where all that read them want it."""

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.facts.program import Program
from onnxpar.strategy import Strategy, resolve

WEIGHT = ", ".join(str(i) for i in range(256))
CACHE = """
<ir_version: 11, opset_import: ["" : 23]>
g (float[batch, 16] x, float[batch, 4, past, 4] k) => (float[batch, 4, length, 4] y)
<int64[4] target = {0, 1, 4, 4}, float[16, 16] w = {WEIGHT}> {
    [product] p = MatMul(x, w)
    [heads] h = Reshape(p, target)
    [turned] t = Transpose<perm = [0, 2, 1, 3]>(h)
    [joined] y = Concat<axis = 2>(k, t)
}
"""


def cache() -> Program:
    text = CACHE.replace("WEIGHT", WEIGHT)
    return analyse(ir.from_proto(onnx.parser.parse_model(text)), {})


def enters(strategy: str) -> str:
    """How the cache of keys is split on the mesh dp=2, tp=2."""
    analysed = cache()
    text = f"mesh: {{dp: 2, tp: 2}}\n{strategy}"
    given = Strategy.from_text(text, source="s")
    seeds = resolve(given, analysed)
    plan = propagate_and_partition(analysed, seeds).plan
    # The product is split by columns, whatever is said of the cache.
    assert plan.nodes["product"].inputs[1].describe(plan.mesh) == "[~, tp]"
    return plan.inputs["k"].describe(plan.mesh)


@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        ("", "[dp, tp, ~, ~]"),
        ("dataset: data_parallel", "[dp, tp, ~, ~]"),
        ("dataset: {x: [dp, ~]}", "[~, ~, ~, ~]"),
        ("dataset: {k: [dp, ~, ~, ~], x: [dp, ~]}", "[dp, ~, ~, ~]"),
        ("dataset: {k: [dp, tp, ~, ~], x: [dp, ~]}", "[dp, tp, ~, ~]"),
        ("dataset: full_batch", "[~, ~, ~, ~]"),
    ],
)
def test_what_the_user_said_of_an_input_holds(strategy: str, split: str) -> None:
    assert enters(strategy) == split
