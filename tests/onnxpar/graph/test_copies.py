"""Copies of models."""

import onnx_ir as ir
import pytest

from onnxpar.graph.copies import copied

PLAIN = """
<ir_version: 10, opset_import: ["" : 18]>
g (float[N, 4] x) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> {
  [first] a, unread = Split <axis = 1, num_outputs = 2> (x)
  [second] c = Clip (x, , w)
  y = Add (c, w)
}
"""
BODY = """
<ir_version: 10, opset_import: ["" : 18]>
g (bool b, float[4] x) => (float[4] y) {
  y = If (b) <
    then_branch = t () => (float[4] p) { p = Neg (x) },
    else_branch = e () => (float[4] q) { q = Abs (x) }
  >
}
"""


@pytest.mark.parametrize("text", [PLAIN, BODY])
def test_copy_is_equal_and_shares_no_node_or_value(text: str) -> None:
    model = ir.from_onnx_text(text)
    node = model.graph[0]
    node.metadata_props["from"] = "test"
    node.outputs[0].metadata_props["value"] = "1"
    made, count = copied(model), len(model.graph)
    assert ir.to_proto(made) == ir.to_proto(model)
    assert set(made.graph).isdisjoint(model.graph)
    made.graph[0].metadata_props["from"] = "changed"
    made.graph[0].outputs[0].name = "renamed"
    made.graph.remove(made.graph[-1])
    assert node.metadata_props["from"] == "test"
    assert "renamed" not in str(ir.to_proto(model))
    assert len(model.graph) == count
