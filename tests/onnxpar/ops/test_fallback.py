"""Operators without a rule are replicated, named with the reason, and right."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.graph.seeds import Seeds
from onnxpar.partition.partitioned_model import PartitionedModel
from tests.lockstep import run_model

HEAD = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]>\n'

NO_RULE = "no sharding rule for com.microsoft::"

MODELS = {
    "an operator without a rule": (
        """g (float[n, 6] x) => (float y) <int32 axis = {0}, float[1, n, 6] v> {
          a = Neg(x)
          v = com.microsoft.ExpandDims(a, axis)
          y = ReduceMax<keepdims = 0>(v)
        }""",
        ("ExpandDims", NO_RULE),
    ),
    "sizes that depend on data": (
        """g (float[n, 6] x) => (float[m] y) <int64[1] flat = {-1}> {
          a = Relu(x)
          b = Reshape(a, flat)
          i = NonZero(b)
          s = Shape(i)
          f = Cast<to = 1>(s)
          t = Reshape(i, flat)
          c = Cast<to = 1>(t)
          y = Add(c, c)
        }""",
        ("NonZero", "depends on the data of all devices"),
    ),
    "control flow that captures sharded values and would communicate": (
        """g (float[n, 6] x, bool p) => (float[n, 6] y) <int64 zero = {0}, int64 one = {1}> {
          a = Relu(x)
          b = If (p) <
            then_branch = t () => (float[n, 6] r) { s = CumSum(a, zero) r = CumSum(s, one) },
            else_branch = e () => (float[n, 6] q) { q = Neg(a) }
          >
          y = Mul(b, a)
        }""",
        ("If", "(CumSum) would communicate"),
    ),
}


@pytest.mark.parametrize("title", MODELS)
@pytest.mark.parametrize("batch", [4, 5])
def test_replicated_and_named(title: str, batch: int) -> None:
    text, (op, reason) = MODELS[title]
    proto = onnx.parser.parse_model(HEAD + text)
    analysed = analyse(ir.serde.deserialize_model(proto), {})
    mesh = Mesh.of(dp=2, tp=2)
    shape = analysed.env.shapes["x"]
    partitioned = propagate_and_partition(
        analysed, Seeds(mesh, {}, {"x": Sharding.of(shape, [(0, 1), ()])})
    )
    named = {op_type: why for _, op_type, why in partitioned.replicated}
    assert (f"{reason}{op}" if reason == NO_RULE else reason) in named[op]
    rng = np.random.default_rng(0)
    feeds = {"x": rng.standard_normal((batch, 6)).astype(np.float32)}
    if len(proto.graph.input) > 1:
        feeds["p"] = np.array(True)
    reference = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    want = reference.run(None, feeds)[0]
    got = run_model(partitioned, feeds, {"n": batch})["y"]
    # The same operations on the same numbers: no sum has another order.
    assert np.array_equal(got, want)


def partitioned_on_two(text: str) -> tuple[onnx.ModelProto, PartitionedModel]:
    proto = onnx.parser.parse_model(HEAD + text)
    analysed = analyse(ir.serde.deserialize_model(proto), {})
    mesh = Mesh.of(dp=2)
    inputs = {
        v.name or "": Sharding.of(analysed.env.shapes[v.name or ""], [(0,), ()])
        for v in analysed.model.graph.inputs
    }
    return proto, propagate_and_partition(analysed, Seeds(mesh, {}, inputs))


def test_an_input_that_is_an_output_too() -> None:
    _, partitioned = partitioned_on_two(
        "g (float[n, 6] x) => (float[n, 6] x, float[n, 6] y) { y = Relu(x) }"
    )
    assert [node.op_type for node in partitioned.builder.nodes] == ["Relu"]
    assert partitioned.outputs[0].local is partitioned.inputs[0].local
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    got = run_model(partitioned, {"x": x}, {"n": 5})
    assert np.array_equal(got["x"], x)
    assert np.array_equal(got["y"], np.maximum(x, 0))


def test_a_symbol_that_a_weight_knows() -> None:
    weight = ", ".join(str(i - 3) for i in range(12))
    proto, partitioned = partitioned_on_two(
        f"g (float[n, k] x) => (float[n, 3] y) <float[4, 3] w = {{{weight}}}>{{ y = MatMul(x, w) }}"
    )
    x = np.random.default_rng(0).integers(-5, 5, (5, 4)).astype(np.float32)
    reference = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    got = run_model(partitioned, {"x": x}, {"n": 5, "k": 4})["y"]
    assert np.array_equal(got, reference.run(None, {"x": x})[0])


def test_a_domain_that_is_not_imported_is_replicated_and_named() -> None:
    proto = onnx.parser.parse_model(HEAD + "g (float[n, 6] x) => (float[n, 6] y) { y = Relu(x) }")
    proto.graph.node[0].domain = "elsewhere"
    analysed = analyse(ir.serde.deserialize_model(proto), {})
    (reason,) = analysed.rules.reasons.values()
    assert reason == "no sharding rule for elsewhere::Relu"


def test_values_keep_the_names_of_the_model() -> None:
    _, partitioned = partitioned_on_two(
        "g (float[n, 6] x) => (float[n, 6] z) { mine = Relu(x) yours = Exp(mine) z = Neg(yours) }"
    )
    assert [node.outputs[0].name for node in partitioned.builder.nodes] == ["mine", "yours", "z"]
