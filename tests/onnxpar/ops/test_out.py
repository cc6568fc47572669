"""`out` on every operator: a result lies as asked, whatever node makes it, and is right.

The node is given no other strategy: what devices can compute divided follows from the layout asked
for, the rest is computed whole and cut.
"""

from pathlib import Path

import numpy as np
import onnx
import pytest
from op_cases import ALL
from op_harness import Case, chosen

from onnxpar import execute
from onnxpar.ops.fallback import draws
from onnxpar.pipeline import shard
from onnxpar.strategy import Strategy

DEVICES = 2
# Uneven splits are cut back by nodes of opset 11; ONNX's checker refuses the operator in opset 18.
CASES = [
    case
    for case in ALL
    if case.proto is None
    and not case.reference
    and case.opset >= 11
    and not (case.opset == 18 and "GroupNormalization" in case.node)
]


@pytest.mark.parametrize("case", chosen(CASES, 12), ids=str)
def test_a_result_lies_as_asked(case: Case, tmp_path: Path) -> None:
    if not case.stands_alone or draws(case.view.node):
        pytest.skip("other nodes stand in its place, or it draws random numbers")
    first, *others = [value.name or "" for value in case.view.node.outputs]
    model, feeds = tmp_path / "m.onnx", tmp_path / "in.npz"
    onnx.save(case.model, model)
    np.savez(feeds, **case.arrays)
    rank = len(case.env.shapes[first])
    for axis in range(rank):
        asked = [DEVICES if i == axis else 1 for i in range(rank)]
        nodes = {"node": {"out": [asked, *[None] * len(others)]}}
        data = {"devices": DEVICES, "dataset": "full_batch", "nodes": nodes}
        target = tmp_path / f"out{axis}"
        plan = shard(model, Strategy.from_dict(data), target).partitioned.plan
        left = plan.resharded.get(first, plan.nodes["node"].outputs[0])
        assert not left.partial and left.strategy(plan.mesh) == tuple(asked)
        for result in execute.verify(target, model, inputs=feeds, rtol=case.rtol):
            assert result.ok, (axis, result)
