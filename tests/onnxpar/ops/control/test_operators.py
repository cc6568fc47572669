"""Models with bodies: constants, captured values, dims that may not be sharded, and training."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition, shard_model
from onnxpar.autodiff.append_loss import LossKind, LossSpec
from onnxpar.autodiff.optimizer import OptimizerKind
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.body_captures import every_node
from onnxpar.graph.dump import Dumper
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.partition.partitioned_model import PartitionedModel
from tests.lockstep import Array, run_model

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'
NESTED = """g (float[n, 6] x, bool p, float[6] k) => (float[n, 6] y, float[4, n, 6] ys)
    <int64 m = {4}, bool t = {1}> {
  a = Relu(x)
  y, ys = Loop (m, t, x) < body = l (int64 i, bool go, float[n, 6] s)
      => (bool on, float[n, 6] u, float[n, 6] o) {
    on = Identity(go)
    c = Cast<to = 9>(i)
    u = If (c) <
      then_branch = d () => (float[n, 6] r) { two = Constant<value_float = 2.0>() q = Mul(a, two)
                                              v = Add(q, s) r = Mul(v, k) },
      else_branch = e () => (float[n, 6] z) { z = Sub(s, a) }
    >
    o = Exp(u)
  } >
}"""


def sharded(text: str, devices: int = 2) -> tuple[onnx.ModelProto, PartitionedModel]:
    """A model on a row of devices that split the first dim of its input x."""
    proto = onnx.parser.parse_model(HEAD + text)
    analysed = analyse(ir.serde.deserialize_model(proto), {})
    shape = analysed.env.shapes["x"]
    laid = Sharding.of(shape, [(0,), *[()] * (len(shape) - 1)])
    return proto, propagate_and_partition(analysed, Seeds(Mesh.of(dp=devices), {}, {"x": laid}))


def undivided(proto: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The results of the undivided program."""
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, dict(feeds)))


@pytest.mark.parametrize("batch", [4, 5])
def test_a_branch_in_a_loop_that_captures_from_both_graphs(batch: int) -> None:
    proto, parted = sharded(NESTED)
    assert not parted.replicated and not parted.builder.collectives
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((batch, 6)).astype(np.float32),
        "k": rng.standard_normal(6).astype(np.float32),
        "p": np.array(True),
    }
    got = run_model(parted, feeds, {"n": batch})
    # The same operations on the same numbers give the same bits.
    for name, want in zip(("y", "ys"), undivided(proto, feeds), strict=True):
        assert np.array_equal(got[name], want)


def test_a_branch_that_is_decided_beforehand_is_inlined() -> None:
    text = """g (float[n, 6] x) => (float[n, 6] y, float[n, 6] z) <bool t = {0}> {
      y = If (t) < then_branch = a () => (float[n, 6] r) { r = Neg(x) },
                   else_branch = b () => (float[n, 6] q) { q = Exp(x) } >
      z = If (t) < then_branch = c () => (float[n, 6] r) { r = Neg(x) },
                   else_branch = d () => (float[n, 6] q) { q = Identity(y) } >
    }"""
    model = normalise(ir.serde.deserialize_model(onnx.parser.parse_model(HEAD + text)))
    assert [node.op_type for node in model.graph] == ["Exp", "Identity"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]


def test_a_dim_that_a_step_changes_is_not_known_afterwards() -> None:
    text = """g (float[n, 6] x, int64 m, bool c) => (float[n, k] y, float[s, n, 6] z) {
      y, z = Loop (m, c, x) < body = l (int64 i, bool go, float[n, q] s)
          => (bool on, float[n, r] u, float[n, 6] o) {
        on = Identity(go) u = Concat<axis = 1>(s, x) o = Neg(x) } >
    }"""
    model = normalise(ir.serde.deserialize_model(onnx.parser.parse_model(HEAD + text)))
    env = shapes(model, symbol_table(model, {}))
    assert str(env.shapes["y"][0]) == "n" and str(env.shapes["y"][1]) not in env.table
    # The condition may end the loop, so nobody knows the number of steps.
    assert str(env.shapes["z"][0]) not in env.table


def test_what_runs_may_not_depend_on_a_shard() -> None:
    text = """g (float[n, 6] x, bool t) => (float[n, 6] y) <int64 m = {9}> {
      y = Loop (m, t, x) < body = l (int64 i, bool go, float[n, 6] s)
          => (bool on, float[n, 6] u) {
        u = Mul(s, s) e = Less(u, s) on = ReduceMax<keepdims = 0>(e) } >
    }"""
    _, parted = sharded(text)
    ((_, op_type, reason),) = parted.replicated
    assert op_type == "Loop" and "a reduction over it determines what runs" in reason


def test_dims_that_change_places_are_not_sharded() -> None:
    text = """g (float[6, 6] x) => (float[6, 6] y) <int64 m = {3}, bool t = {1}> {
      y = Loop (m, t, x) < body = l (int64 i, bool go, float[6, 6] s) => (bool on, float[6, 6] u)
        { on = Identity(go) u = Transpose(s) } >
    }"""
    _, parted = sharded(text)
    ((_, _, reason),) = parted.replicated
    assert "two dims of 'l/Transpose' in its body must be sharded alike" in reason
    x = np.random.default_rng(0).standard_normal((6, 6)).astype(np.float32)
    assert np.array_equal(run_model(parted, {"x": x}, {})["y"], x.T)


def test_random_numbers_in_a_body_are_refused() -> None:
    text = """g (float[n, 6] x, bool c) => (float[n, 6] y) {
      y = If (c) < then_branch = a () => (float[n, 6] r) { u = RandomUniformLike(x) r = Mul(u, x) },
                   else_branch = b () => (float[n, 6] q) { q = Exp(x) } >
    }"""
    with pytest.raises(ShardingError, match=r"\(If\): 'u' .* draws random numbers|draws random"):
        sharded(text)


def test_a_dump_is_a_model_that_runtimes_take(tmp_path: Path) -> None:
    model = normalise(ir.serde.deserialize_model(onnx.parser.parse_model(HEAD + NESTED)))
    Dumper(tmp_path).model("normalised", model)
    (path,) = tmp_path.glob("*.onnx")
    onnx.checker.check_model(onnx.load(path))
    assert len(model.graph[1].inputs) > 3


def test_training_a_recurrent_network_sends_the_loss_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = """g (float[4, batch, 3] x) => (float[batch, 4] y) {
      a, h, c = LSTM<hidden_size = 4, direction = "bidirectional">(x, w, r, b)
      z, s = GRU<hidden_size = 4, linear_before_reset = 1>(a2, w2, r2, b2)
      f = Transpose<perm = [0, 2, 1, 3]>(a)
      a2 = Reshape(f, shape)
      y = Squeeze(s, first)
    }"""
    proto = onnx.parser.parse_model(HEAD + text)
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend([nodes[0], nodes[2], nodes[3], nodes[1], nodes[4]])
    sizes = {"w": (2, 16, 3), "r": (2, 16, 4), "b": (2, 32)}
    sizes |= {"w2": (1, 12, 8), "r2": (1, 12, 4), "b2": (1, 24)}
    for name, size in sizes.items():
        array = rng.standard_normal(size).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    for name, values in {"shape": [4, -1, 8], "first": [0]}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(values), name))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    (tmp_path / "s.yaml").write_text("mesh: {dp: 2}\ndataset: {x: [~, dp, ~]}\n")
    spec = TrainingSpec(LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY), OptimizerKind.ADAMW)
    done = shard_model(path, tmp_path / "s.yaml", tmp_path / "out", training=spec)
    sent = [(c.op, c.value) for c in done.partitioned.builder.collectives]
    assert sent == [("AllReduce", "onnxpar.loss")]
    assert not done.partitioned.replicated


def test_domains_that_only_a_body_has_are_imported(tmp_path: Path) -> None:
    text = """g (float[4, batch, 3] x) => (float[batch, 4] y) <int64[1] first = {0}> {
      a, s = GRU<hidden_size = 4, linear_before_reset = 1>(x, w, r)
      y = Squeeze(s, first)
    }"""
    proto = onnx.parser.parse_model(HEAD + text)
    rng = np.random.default_rng(0)
    for name, size in {"w": (1, 12, 3), "r": (1, 12, 4)}.items():
        array = rng.standard_normal(size).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    path = tmp_path / "model.onnx"
    onnx.save(proto, path)
    spec = TrainingSpec(LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY), OptimizerKind.SGD)
    shard_model(path, "dp", tmp_path / "out", devices=1, training=spec)
    made = onnx.load(tmp_path / "out" / "rank0000.training_model.onnx", load_external_data=False)
    inner = {n.domain for n in every_node(ir.serde.deserialize_model(made).graph)}
    assert "com.microsoft" in inner
    assert inner <= {"", *(i.domain for i in made.opset_import)}
