"""Rows that are named by their own numbers are a batch: devices do not communicate."""

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.rule import format_rule
from onnxpar.facts.program import Program
from onnxpar.strategy import Strategy, resolve
from tests.lockstep import evaluator, run_model

# As torch.onnx writes mask[arange(batch)[:, None, None, None], arange(seq)[None, None, None, :]].
MASK = """
<ir_version: 10, opset_import: ["" : 20]>
g (bool[batch, seq] mask) => (bool[batch, 1, 1, seq] picked)
<int64 zero = {0}, int64 one = {1}, int64[2] axes1 = {1, 2}, int64[1] axes2 = {3},
 int64[2] axes3 = {0, 1}, int64[1] axes4 = {2}, int64[1] last = {-1}> {
    s0 = Shape<start = 0, end = 1>(mask)
    rows = Squeeze(s0)
    s1 = Shape<start = 1, end = 2>(mask)
    places = Squeeze(s1)
    r = Range(zero, rows, one)
    r1 = Unsqueeze(r, axes1)
    r2 = Unsqueeze(r1, axes2)
    c = Range(zero, places, one)
    c1 = Unsqueeze(c, axes3)
    c2 = Unsqueeze(c1, axes4)
    both = Max(r2, c2)
    shape = Shape(both)
    r3 = Expand(r2, shape)
    r4 = Unsqueeze(r3, last)
    c3 = Expand(c2, shape)
    c4 = Unsqueeze(c3, last)
    index = Concat<axis = -1>(r4, c4)
    picked = GatherND(mask, index)
}
"""
# And cache[arange(batch), position] = value.
CACHE = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, 7, 4] cache, int64[batch] position, float[batch, 4] value)
    => (float[batch, 7, 4] after)
<int64 zero = {0}, int64 one = {1}, int64[1] last = {-1}> {
    s0 = Shape<start = 0, end = 1>(position)
    rows = Squeeze(s0)
    r = Range(zero, rows, one)
    r1 = Unsqueeze(r, last)
    p1 = Unsqueeze(position, last)
    index = Concat<axis = -1>(r1, p1)
    after = ScatterND(cache, index, value)
}
"""


def rule_of(model: Program, op: str) -> str:
    (name,) = (n.name for n in model.model.graph if n.op_type == op)
    return format_rule(model.rules.by_node[name or ""]).partition("; linear")[0]


JOIN = "index = Concat<axis = -1>(r4, c4)"
CAST = "index1 = Concat<axis = -1>(r4, c4)\n index = Cast<to = 7>(index1)"


@pytest.mark.parametrize("join", [JOIN, CAST])
def test_a_mask_is_picked_row_by_row(join: str) -> None:
    assert JOIN in MASK
    proto = onnx.parser.parse_model(MASK.replace(JOIN, join))
    model = analyse(ir.from_proto(proto), {})
    assert rule_of(model, "GatherND") == "a d, a b c d 1 -> a b c d"
    data = {"mesh": {"dp": 2, "sp": 2}, "dataset": {"mask": ["dp", "sp"]}}
    seeds = resolve(Strategy.from_dict(data), model)
    parted = propagate_and_partition(model, seeds)
    rng = np.random.default_rng(0)
    for batch, seq in ((4, 6), (5, 3)):
        feeds = {"mask": rng.random((batch, seq)) < 0.5}
        want = evaluator(proto, reference=False)(feeds)["picked"]
        got = run_model(parted, feeds, {"batch": batch, "seq": seq})["picked"]
        np.testing.assert_array_equal(got, want)
    assert not parted.builder.collectives


@pytest.mark.parametrize("batch", [2, 5])
def test_a_cache_is_written_row_by_row(batch: int) -> None:
    proto = onnx.parser.parse_model(CACHE)
    model = analyse(ir.from_proto(proto), {})
    assert rule_of(model, "ScatterND") == "a V1 b, a 1, a b -> a V1 b; special: V1"
    rows = {"cache": ["dp", None, "tp"], "position": ["dp"], "value": ["dp", "tp"]}
    data = {"mesh": {"dp": 2, "tp": 2}, "dataset": rows}
    seeds = resolve(Strategy.from_dict(data), model)
    parted = propagate_and_partition(model, seeds)
    assert not parted.builder.collectives
    rng = np.random.default_rng(0)
    feeds = {
        "cache": rng.standard_normal((batch, 7, 4)).astype(np.float32),
        "position": rng.integers(-7, 7, batch),
        "value": rng.standard_normal((batch, 4)).astype(np.float32),
    }
    want = evaluator(proto, reference=False)(feeds)["after"]
    got = run_model(parted, feeds, {"batch": batch})["after"]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (("Range(zero, rows, one)", "Range(one, rows, one)"), "it begins at 1"),
        (("p1 = Unsqueeze(position, last)", "p1 = Identity(r1)"), "a diagonal"),
        (("r1 = Unsqueeze(r, last)", "r0 = Neg(r)\n r1 = Unsqueeze(r0, last)"), "it counts down"),
    ],
)
def test_other_numbers_are_looked_up(change: tuple[str, str], why: str) -> None:
    text = CACHE.replace(*change)
    assert text != CACHE
    rule = rule_of(analyse(ir.from_proto(onnx.parser.parse_model(text)), {}), "ScatterND")
    assert ("V0" in rule) == (why != "a diagonal") and "V1" in rule, why
