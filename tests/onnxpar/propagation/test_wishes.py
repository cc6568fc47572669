"""What later readers need passes back one node in each walk."""

import onnx.parser
import onnx_ir as ir

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.strategy import load_strategy, resolve

GATE = """<ir_version: 10, opset_import: ["" : 21]>
g (float[batch, 32] x, float[32, 64] gate, float[32, 64] up) => (float[batch, 64] y)
<int64[3] heads = {0, 8, 8}, int64[2] rows = {0, 64}, int64[3] groups = {0, 2, 32},
 int64[1] last = {2}> {
    a = MatMul(x, gate)
    b = Identity(a)
    c = Sigmoid(b)
    d = Mul(b, c)
    e = MatMul(x, up)
    f = Reshape(e, heads)
    g = Relu(f)
    h = Reshape(g, rows)
    i = Mul(h, d)
    j = Reshape(i, groups)
    k = ReduceMean(j, last)
    l = Div(j, k)
    y = Reshape(l, rows)
}"""


def test_a_gate_is_sharded_over_all_devices_although_its_norm_has_two_groups() -> None:
    proto = onnx.parser.parse_model(GATE)
    weights = [v for v in proto.graph.input if v.name != "x"]
    for value in weights:
        proto.graph.input.remove(value)
        data = onnx.helper.make_tensor(value.name, 1, (32, 64), [0.5] * 2048)
        proto.graph.initializer.append(data)
    program = analyse(ir.from_proto(proto), {})
    plan = propagate_and_partition(program, resolve(load_strategy("tp=4"), program)).plan
    assert [plan.parameters[name].dims[1][0].atoms for name in ("gate", "up")] == [(0, 1)] * 2
