"""Rules of views whose sizes cannot be proved to match."""

import onnx.parser
import onnx_ir as ir

from onnxpar.api.shard_model import analyse

MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, 8] x, float[32, 2] w) => (float[n, m] y)
<int64[1] zero = {0}, int64[2] rest = {4, -1}, int64[1] eight = {8}>
{
    size = Shape<start = 0, end = 1>(x)
    cut = Slice(w, zero, size, zero)
    rows = Shape<start = 0, end = 1>(cut)
    first = Concat<axis = 0>(rows, rest)
    tall = Reshape(x, first)
    second = Concat<axis = 0>(rows, eight)
    [last] y = Reshape(tall, second)
}
"""


def test_reshape_of_sizes_that_meet_only_if_the_model_is_right() -> None:
    """For batch > 32 there is no such Reshape, so only the first dims are known to meet."""
    rule = analyse(ir.from_proto(onnx.parser.parse_model(MODEL)), {}).rules.by_node["last"]
    assert rule.inputs[0].dims[0] == rule.outputs[0].dims[0]
    assert rule.splittable == (*rule.inputs[0].dims[0], *rule.inputs[0].dims[1])


HALVES = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, seq, 6] x) => (float[n, h, p, m] y)
<int64[1] two = {2}, int64[1] six = {6}>
{
    batch = Shape<start = 0, end = 1>(x)
    seq = Shape<start = 1, end = 2>(x)
    half = Div(seq, two)
    target = Concat<axis = 0>(batch, half, two, six)
    [last] y = Reshape(x, target)
}
"""


def test_dims_behind_a_size_that_is_halved_meet() -> None:
    """It runs where seq is even alone, so that 6 elements are 6 elements in both shapes."""
    analysed = analyse(ir.from_proto(onnx.parser.parse_model(HALVES)), {})
    rule = analysed.rules.by_node["last"]
    assert [str(d) for d in analysed.env.shapes["y"]] == ["batch", "floor(seq/2)", "2", "6"]
    (batch,), _, (features,) = rule.inputs[0].dims
    assert rule.outputs[0].dims[0] == (batch,) and rule.outputs[0].dims[3] == (features,)
    assert {batch, features} <= set(rule.splittable)
