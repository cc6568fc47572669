"""The names of plans that are compared."""

from dataclasses import replace

import onnx.parser
import onnx_ir as ir

from onnxpar.api.shard_model import analyse
from onnxpar.propagation.propagate import propagate
from onnxpar.search.rival_plans import Way, named_apart
from onnxpar.strategy import Strategy, resolve

MODEL = """<ir_version: 10, opset_import: ["" : 20]>
g (float[8, 8] x, float[8, 8] w) => (float[8, 8] y) {
    [product] a = MatMul(x, w)
    [relu] y = Relu(a)
}"""


def way(name: str, mesh: str, product: str) -> Way:
    program = analyse(ir.from_proto(onnx.parser.parse_model(MODEL)), {})
    text = f"{{mesh: {{{mesh}}}, dataset: full_batch, nodes: {{product: {{in: {product}}}}}}}"
    plan = propagate(program, resolve(Strategy.from_text(text), program))
    return Way(name, None, plan=plan)


def test_plans_of_one_name_say_in_what_they_differ() -> None:
    rows = way("2 stages", "a: 2, b: 2", "[[a, ~], [~, ~]]")
    columns = way("2 stages", "a: 2, b: 2", "[[~, ~], [~, b]]")
    long = way("2 stages", "a: 4", "[[a, ~], [~, ~]]")
    other = replace(rows, name="4 stages")
    found = named_apart((rows, other, columns, long, columns))
    assert [each.name for each in found] == [
        "2 stages",
        "4 stages",
        "2 stages, 2 nodes sharded differently",
        "2 stages, mesh a=4",
        "2 stages, 2 nodes sharded differently (2)",
    ]
