"""What options a node has."""

import onnx.parser
import onnx_ir as ir

from onnxpar.api.shard_model import analyse
from onnxpar.core.machine import PRESETS
from onnxpar.core.mesh import Mesh
from onnxpar.cost.cost_model import CostModel
from onnxpar.frontend.load import normalise
from onnxpar.search.node_options import options
from onnxpar.search.value_flow import flow

TEXT = """<ir_version: 10, opset_import: ["": 21]>
g (float[64,64] x, float[64,64] w, float[64,64] v, float[64,64] bias) => (float[64,64] y) {
    a = MatMul(x, w)
    b = MatMul(x, v)
    s = Add(a, b)
    y = Add(s, bias)
}"""


def test_only_what_a_node_made_may_wait_for_a_sum() -> None:
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(TEXT))), {})
    mesh = Mesh.of({"x": 2})
    cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
    *_, both, biased = flow(program).items
    partials = [o for o in options(both, [mesh.axis_atoms("x")], cost) if o.plan.carried]
    assert partials
    assert not [o for o in options(biased, [mesh.axis_atoms("x")], cost) if o.plan.carried]


HEADS = """<ir_version: 11, opset_import: ["": 23]>
g (float[4,8,16,8] q, float[4,8,16,8] k, float[4,8,16,8] v) => (float[4,8,16,8] y) {
    y = Attention(q, k, v)
}"""


def test_a_rule_may_say_a_size_that_is_no_factor_of_its_operands() -> None:
    """Each head of keys has one of queries, and there is no dim of queries of a head."""
    program = analyse(normalise(ir.from_proto(onnx.parser.parse_model(HEADS))), {})
    mesh = Mesh.of({"x": 2})
    cost = CostModel(PRESETS["cpu"], mesh, program.env.table)
    (item,) = flow(program).items
    assert item.rule.sizes.keys() - item.rule.kinds.keys()
    counts = {o.plan.outputs[0].strategy(mesh) for o in options(item, [mesh.axis_atoms("x")], cost)}
    assert {(2, 1, 1, 1), (1, 2, 1, 1)} <= counts
