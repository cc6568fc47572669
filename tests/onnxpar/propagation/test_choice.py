"""How propagation chooses a node's layout where several send equally many bytes."""

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.strategy import Strategy, resolve

GATED = """
<ir_version: 11, opset_import: ["" : 23]>
g (float[batch, 64] x, float[64, 128] w) => (float[batch, 64] y)
{
    [both] b = MatMul(x, w)
    [halves] gate, up = Split<axis = 1, num_outputs = 2>(b)
    [swish] s = Sigmoid(gate)
    [product] y = Mul(s, up)
}
"""
ROWS = "mesh: {tp: 2}\nnodes: {both: {in: [[~, tp], [tp, ~]]}}"


def test_a_partial_value_is_reduced_before_it_is_split_into_several() -> None:
    """One all-reduce of the halves together sends as much as two, in one collective."""
    analysed = analyse(ir.from_proto(onnx.parser.parse_model(GATED)), {})
    strategy = Strategy.from_text(ROWS, source="s")
    parted = propagate_and_partition(analysed, resolve(strategy, analysed))
    assert [(c.op, c.value) for c in parted.builder.collectives] == [("AllReduce", "b")]


@pytest.mark.parametrize("size", [64, 100])
def test_prices_are_bytes(size: int) -> None:
    """The price of a conflict is the number of bytes of its collectives, padding included."""
    text = f"""
        <ir_version: 11, opset_import: ["" : 23]>
        g (float[{size}, 8] x) => (float[{size}, 8] y)
        {{
            [first] a = Relu(x)
            [second] y = Softmax<axis = 1>(a)
        }}
    """
    analysed = analyse(ir.from_proto(onnx.parser.parse_model(text)), {})
    given = "mesh: {tp: 8}\nnodes: {first: {in: [[tp, ~]]}, second: {in: [[~, tp]]}}"
    strategy = Strategy.from_text(given, source="s")
    (conflict,) = propagate_and_partition(analysed, resolve(strategy, analysed)).conflicts
    rows = -(-size // 8)
    exchanged = 7 * rows * 4
    statistics = 2 * (2 * size * 4 * 7 // 8)
    assert conflict.typical == exchanged
    assert conflict.cost == exchanged + statistics
