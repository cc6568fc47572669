"""Operators that find elements: which dims may be sharded, and what devices send."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.facts.program import Program
from onnxpar.partition.partitioned_model import PartitionedModel
from onnxpar.strategy import Strategy, resolve
from tests.lockstep import evaluator, run_model

HEAD = '<ir_version: 10, opset_import: ["" : 20]>'


def analysed(text: str) -> tuple[onnx.ModelProto, Program]:
    proto = onnx.parser.parse_model(f"{HEAD} {text}")
    return proto, analyse(ir.from_proto(proto), {})


def sharded(
    model: Program, mesh: Mapping[str, int], dataset: Mapping[str, Any]
) -> PartitionedModel:
    """The model, partitioned as a strategy says for its inputs."""
    data = {"mesh": mesh, "dataset": dataset}
    return propagate_and_partition(model, resolve(Strategy.from_dict(data), model))


@pytest.mark.parametrize("batch", [1, 4, 7])
@pytest.mark.parametrize(
    ("node", "count"), [("Compress<axis = 1>(x, c)", 4), ("Compress(x, c)", 3)]
)
def test_compress_is_sharded_along_other_dims(node: str, count: int, batch: int) -> None:
    result = "[batch, n]" if "axis" in node else "[n]"
    proto, model = analysed(
        f"g (float[batch, 4] x, bool[{count}] c) => (float{result} z) {{\n"
        f"y = {node}\n z = Relu(y)\n}}"
    )
    assert not model.rules.reasons
    rule = next(r for name, r in model.rules.by_node.items() if "Compress" in name)
    assert bool(rule.splittable) == ("axis" in node)
    parted = sharded(model, {"dp": 2}, {"x": ["dp", None], "c": [None]})
    gathered = [c.op for c in parted.builder.collectives]
    assert gathered == ([] if "axis" in node else ["AllGather"])
    rng = np.random.default_rng(0)
    feeds = {
        "x": rng.standard_normal((batch, 4)).astype(np.float32),
        "c": np.array([True, False, True, True])[:count],
    }
    want = evaluator(proto, reference=False)(feeds)["z"]
    np.testing.assert_array_equal(run_model(parted, feeds, {"batch": batch})["z"], want)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[batch, 4] x) => (int64[2, n] y) { y = NonZero(x) }",
        "g (float[batch, 4] x) => (float[n] y) { y = Unique(x) }",
    ],
)
def test_what_depends_on_all_data_is_replicated_with_the_reason(text: str) -> None:
    proto, model = analysed(text)
    (reason,) = model.rules.reasons.values()
    assert "depends on the data of all devices" in reason
    parted = sharded(model, {"dp": 2}, {"x": ["dp", None]})
    feeds = {"x": np.random.default_rng(0).integers(0, 3, (5, 4)).astype(np.float32)}
    want = evaluator(proto, reference=False)(feeds)["y"]
    got = run_model(parted, feeds, {"batch": 5})["y"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("op", "count"), [("ArgMax<axis = 1>(x)", 1), ("TopK(x, k)", 3)])
def test_only_candidates_travel(op: str, count: int) -> None:
    """Bytes that 2 devices send for 5 rows of 64: those of candidates, never of the rows."""
    results = "v, y" if "TopK" in op else "y"
    _, model = analysed(
        f"g (float[5, 64] x) => (int64[5, {count}] y) <int64[1] k = {{3}}> {{ {results} = {op} }}"
    )
    parted = sharded(model, {"tp": 2}, {"x": [None, "tp"]})
    # A float and an int64 per candidate: each of 2 devices sends it once, by either collective.
    assert [c.bytes for c in parted.builder.collectives] == [5 * count * 4, 5 * count * 8]
    assert all("over a sharded dim" in c.reason for c in parted.builder.collectives)
