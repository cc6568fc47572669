"""`rest: mindspore`: strategies spread as MindSpore's tutorials and tests say."""

import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import StrategyError
from onnxpar.propagation.propagate import propagate
from onnxpar.strategy import Strategy, resolve

HEAD = '<ir_version: 10, opset_import: ["" : 20]>'
QUICKSTART = """g (float[16, 32] x, float[32, 16] w, float[16, 16] w2) => (float[16, 16] y) {
    [matmul] h = MatMul(x, w)
    [relu] a = Relu(h)
    [matmul2] y = MatMul(a, w2)
}"""
CHAIN = """g (float[16, 32] x, float[32, 16] w, float[16, 16] w2, float[16, 16] w3)
    => (float[16, 16] y) {
    [matmul] h = MatMul(x, w)
    [matmul2] k = MatMul(h, w2)
    [matmul3] y = MatMul(k, w3)
}"""
ACTIVATIONS = """g (float[64, 32] x, float[64, 32] w) => (float[64, 32] y) {
    [mul] m = Mul(x, w)
    [sigmoid] s = Sigmoid(m)
    [relu] y = Relu(s)
}"""
LARGEST = """g (float[64, 32000] x, float[64, 32000] w) => (float[64, 32000] y)
    <int64[1] axes = {-1}> {
    [add] a = Add(x, w)
    [relu] r = Relu(a)
    [max] m = ReduceMax(r, axes)
    [sub] y = Sub(r, m)
}"""
DYNAMIC = """g (float[batch, 784] x, float[784, 512] w1, float[512, 512] w2, float[512, 10] w3)
    => (float[batch, 10] y) {
    [matmul1] a = MatMul(x, w1)
    [relu1] b = Relu(a)
    [matmul2] c = MatMul(b, w2)
    [relu2] d = Relu(c)
    [matmul3] y = MatMul(d, w3)
}"""


def spread(model: str, devices: int, nodes: str) -> dict[str, list[tuple[int, ...] | None]]:
    """The numbers of shards of the operands of every node."""
    program = analyse(ir.from_proto(onnx.parser.parse_model(f"{HEAD}\n{model}")), {})
    text = f"{{devices: {devices}, dataset: full_batch, rest: mindspore, nodes: {nodes}}}"
    plan = propagate(program, resolve(Strategy.from_text(text), program))
    return {
        name: [None if s is None else s.strategy(plan.mesh) for s in found.inputs]
        for name, found in plan.nodes.items()
    }


@pytest.mark.parametrize(
    ("model", "devices", "nodes", "expected"),
    [
        # The quick start prints these strategies.
        (
            QUICKSTART,
            8,
            "{matmul: {in: [[2, 4], [4, 1]]}}",
            {"relu": [(2, 4)], "matmul2": [(2, 4), (4, 1)]},
        ),
        # With no node between products, the next one can read the result (2, 1) as it is.
        (
            CHAIN,
            8,
            "{matmul: {in: [[2, 4], [4, 1]]}}",
            {"matmul2": [(2, 1), (1, 4)], "matmul3": [(2, 4), (4, 1)]},
        ),
        # The tutorial on dynamic shapes leaves the last product open.
        (
            DYNAMIC,
            8,
            "{matmul1: {in: [[2, 4], [4, 1]]}, relu1: {in: [[4, 1]]}, "
            "matmul2: {in: [[1, 8], [8, 1]]}, relu2: {in: [[8, 1]]}}",
            {"relu1": [(4, 1)], "matmul3": [(8, 1), (1, 1)]},
        ),
        # From the first node on, from the middle both ways, and between two that contradict.
        (
            ACTIVATIONS,
            16,
            "{mul: {in: [[4, 4], [4, 4]]}}",
            {"sigmoid": [(4, 4)], "relu": [(4, 4)]},
        ),
        (
            ACTIVATIONS,
            16,
            "{sigmoid: {in: [[4, 4]]}}",
            {"mul": [(4, 4), (4, 4)], "relu": [(4, 4)]},
        ),
        (
            ACTIVATIONS,
            16,
            "{mul: {in: [[4, 4], [4, 4]]}, relu: {in: [[8, 2]]}}",
            {"sigmoid": [(4, 4)], "relu": [(8, 2)]},
        ),
        # The first of two readers with a strategy decides what they read.
        (
            LARGEST,
            8,
            "{max: {in: [[8, 1]]}, sub: {in: [[1, 8], [1, 1]]}}",
            {"relu": [(8, 1)], "add": [(8, 1), (8, 1)]},
        ),
        (
            LARGEST,
            8,
            "{relu: {in: [[1, 8]]}, max: {in: [[1, 1]]}, sub: {in: [[1, 8], [1, 1]]}}",
            {"add": [(1, 8), (1, 8)], "max": [(1, 1), (1,)]},
        ),
        # Sizes that do not divide: as many devices as they allow.
        (
            "g (float[6, 2] x) => (float[6, 2] y) { [one] a = Relu(x) [two] y = Relu(a) }",
            8,
            "{one: {in: [[2, 1]]}}",
            {"two": [(2, 2)]},
        ),
    ],
)
def test_strategies_that_mindspore_prints(
    model: str, devices: int, nodes: str, expected: dict[str, list[tuple[int, ...] | None]]
) -> None:
    found = spread(model, devices, nodes)
    assert {name: found[name] for name in expected} == expected


def test_without_an_entry_nothing_can_spread() -> None:
    with pytest.raises(StrategyError, match="at least one entry under 'nodes', from which"):
        spread(QUICKSTART, 8, "{}")
