"""How propagation chooses a node's layout: ties of bytes, and bytes that grow fast."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.machine import WIRE
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL
from onnxpar.graph.plan import Plan
from onnxpar.parameters.recognise import read_parameters
from onnxpar.search.workload import Workload
from onnxpar.strategy import Strategy, load_strategy, resolve

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


BIASED = """
<ir_version: 11, opset_import: ["" : 23]>
g (float[batch, 8, seq, 4] q, float[batch, 8, 4, seq] k, int64[seq, seq] near, float[64, 8] bias)
    => (float[batch, 8, seq, seq] y)
{
    [score] s = MatMul(q, k)
    [table] t = Gather<axis = 0>(bias, near)
    [turned] u = Transpose<perm = [2, 0, 1]>(t)
    [y] y = Add(s, u)
}
"""
TOKENS = """
<ir_version: 11, opset_import: ["" : 23]>
g (int64[batch, seq] ids, float[64, 8] bias) => (float[batch, seq, 8] y)
{
    [table] t = Gather<axis = 0>(bias, ids)
    [y] y = Relu(t)
}
"""


def model(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    # The table is a parameter, not an input.
    (table,) = [v for v in proto.graph.input if v.name == "bias"]
    proto.graph.input.remove(table)
    weight = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "bias"))
    return ir.from_proto(proto)


def sent(workload: Workload, plan: Plan, seq: int) -> float:
    """Bytes that a device sends with so many positions."""
    return workload.price(plan, WIRE, {"seq": seq}).communicating


@pytest.mark.parametrize(("text", "table"), [(TOKENS, "[tp, ~]"), (BIASED, "[~, tp]")])
def test_the_square_of_a_symbol_is_not_reduced(text: str, table: str) -> None:
    """A vocabulary is sharded by its rows; a table that is read seq·seq times, by its columns."""
    workload = Workload.inference(analyse(model(text), {}))
    plan = workload.plan(resolve(load_strategy("tp=2"), workload.program))
    layout = plan.nodes["table"].inputs[0]
    assert layout is not None and layout.describe(plan.mesh) == table
    if text == TOKENS:
        assert sent(workload, plan, 1024) == 16 * sent(workload, plan, 64) > 0


def test_a_gradient_stays_partial_where_its_bytes_would_be_quadratic() -> None:
    """The cotangent of the bias of scores becomes the gradient of a table, reduced once a step."""
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"))
    prepared = prepare_training(read_parameters(model(BIASED)), {}, spec)
    workload = Workload.training(prepared, spec, NOT_PARALLEL)
    inputs = "q: [dp, ~, ~, ~], k: [dp, ~, ~, ~], labels: [dp, ~, ~, ~], near: [~, ~]"
    strategy = Strategy.from_text(f"mesh: {{dp: 2}}\ndataset: {{{inputs}}}", source="s")
    plan = workload.plan(resolve(strategy, workload.program))
    assert sent(workload, plan, 1024) == sent(workload, plan, 64)
