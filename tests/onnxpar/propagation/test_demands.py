"""A node between two nodes with strategies: what its reader then sends counts, too."""

import onnx.parser
import onnx_ir as ir

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.strategy import Strategy, resolve

TILE = """<ir_version: 10, opset_import: ["" : 20]>
g (float[1024, 256] x, float[256, 256] w, float[1024, 2048] v) => (float[1024, 2048] y)
<int64[2] repeats = {1, 8}> {
    [product] a = MatMul(x, w)
    [tile] b = Tile(a, repeats)
    [sum] y = Add(b, v)
}"""


def test_the_operand_of_a_tile_is_resharded_rather_than_its_result() -> None:
    program = analyse(ir.from_proto(onnx.parser.parse_model(TILE)), {})
    text = """{devices: 8, dataset: full_batch, nodes: {
        product: {in: [[2, 1], [1, 4]]}, sum: {in: [[4, 2], [4, 2]]}}}"""
    seeds = resolve(Strategy.from_text(text), program)
    parted = propagate_and_partition(program, seeds)
    assert [c.value for c in parted.builder.collectives] == ["a", "a"]
    # The result is eight times as large: two AllToAlls would send 1,048,576 bytes.
    assert sum(int(c.bytes) for c in parted.builder.collectives) == 98_304 + 131_072
