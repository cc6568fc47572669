"""Sums that wait for a reduction meet before they are reduced."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar_runtime.manifest import Manifest
from onnxpar_runtime.verify.compare import verify
from tests.training_cases import shard

# Attention after a norm, as in BERT: the norm's result is read by queries, keys, values and the
# residual sum. The product of the three stands for attention.
POST_NORM = """<ir_version: 10, opset_import: ["": 20]>
g (float[batch, 8] x) => (float[batch, 8] y)
<float[8, 8] wq, float[8, 8] wk, float[8, 8] wv, float[8, 8] wo, float[8] scale> {
  h = LayerNormalization(x, scale)
  q = MatMul(h, wq)
  k = MatMul(h, wk)
  v = MatMul(h, wv)
  qk = Mul(q, k)
  a = Mul(qk, v)
  o = MatMul(a, wo)
  y = Add(h, o)
}"""


# A table that no sample changes passes a norm, and a weight that the samples pass, too. Views and
# sums are as in relative positions of attention.
TABLE = """<ir_version: 10, opset_import: ["": 20]>
g (float[batch, 6, 8] x) => (float[batch, 6, 8] y)
<float[6, 8] embedding_weight, float[8] scale, float[8] bias, float[8, 8] w, float[8, 8] v> {
  places = LayerNormalization(embedding_weight, scale, bias)
  p = MatMul(places, w)
  t = Transpose<perm = [1, 0]>(p)
  u = MatMul(v, t)
  up = Transpose<perm = [1, 0]>(u)
  q = MatMul(x, w)
  s = Add(q, up)
  y = Tanh(s)
}"""


DP = 0
"""The atom that shards the batch."""


def with_weights(text: str) -> ir.Model:
    proto = onnx.parser.parse_model(text)
    rng = np.random.default_rng(0)
    for info in proto.graph.value_info:
        shape = [d.dim_value for d in info.type.tensor_type.shape.dim]
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, info.name))
    del proto.graph.value_info[:]
    return ir.serde.deserialize_model(proto)


def test_cotangents_of_a_split_projection_are_reduced_once(tmp_path: Path) -> None:
    ranks = shard(
        tmp_path / "ranks", with_weights(POST_NORM), "tp=2", loss="mse", optimizer="adamw"
    )
    found = Manifest.load(ranks).program("training_model").collectives
    # One forward, of the rows of wo, and one backward, of what wq, wk and wv make together.
    assert Counter(c.op for c in found) == {"AllReduce": 2}
    reference = shard(
        tmp_path / "one",
        with_weights(POST_NORM),
        "replicate",
        loss="mse",
        optimizer="adamw",
        devices=1,
    )
    cases = verify(ranks, reference, [{"batch": 5}])
    assert [problem for case in cases for problem in case.problems] == []


@pytest.mark.parametrize("strategy", ["dp=2", "dp=2,tp=2"])
def test_cotangents_that_only_reach_gradients_wait_for_the_end_of_the_step(
    strategy: str, tmp_path: Path
) -> None:
    """The table's cotangent is a sum over samples, and passes the norm as one."""
    ranks = shard(tmp_path / "ranks", with_weights(TABLE), strategy, loss="mse", optimizer="adamw")
    found = Manifest.load(ranks).program("training_model").collectives
    across = [c.bytes for c in found if DP in c.atoms]
    # The loss, one number, is reduced in each micro-batch.
    assert len(across) == 1
    assert across[0] < 8
    reference = shard(
        tmp_path / "one", with_weights(TABLE), "replicate", loss="mse", optimizer="adamw", devices=1
    )
    cases = verify(ranks, reference, [{"batch": 5}])
    assert [problem for case in cases for problem in case.problems] == []
