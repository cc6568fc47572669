"""What options a node has."""

import onnx.parser
import onnx_ir as ir

from onnxpar.analysis.cost import CostModel
from onnxpar.analysis.search.flow import flow
from onnxpar.analysis.search.options import options
from onnxpar.machine import PRESETS
from onnxpar.mesh import Mesh
from onnxpar.passes.load import normalise
from onnxpar.pipeline import analyse

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
    *_, both, biased = flow(program.model, program.env, program.rules).items
    pending = [o for o in options(both, [mesh.axis_atoms("x")], cost) if o.plan.carried]
    assert pending
    assert not [o for o in options(biased, [mesh.axis_atoms("x")], cost) if o.plan.carried]
