"""Sequences and optional values: folded if they are known, else replicated and right."""

from collections.abc import Mapping

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.core.errors import ModelError, NodeError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.emit.rank_graph import emit_rank
from onnxpar.frontend.load import normalise
from onnxpar.graph.metadata_keys import EXPANDED_FROM
from onnxpar.graph.seeds import Seeds
from tests.lockstep import check_branches, run_model


def parse(text: str, opset: int = 20) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]>\n{text}')


FOLDED: Mapping[str, tuple[str, int, set[str]]] = {
    "split in equal parts and taken": (
        """g (float[n, 6] x) => (float[n, 2] y) <int64 two = {2}, int64 i = {1}, int64 j = {-1}> {
          s = SplitToSequence<axis=1>(x, two)
          a = SequenceAt(s, i) b = SequenceAt(s, j) y = Sub(a, b)
        }""",
        20,
        {"Split", "Sub"},
    ),
    "split in given parts, before opset 13": (
        """g (float[n, 6] x) => (float[n, 2] y) <int64[2] p = {4, 2}, int64 i = {1}> {
          s = SplitToSequence<axis=-1>(x, p) y = SequenceAt(s, i)
        }""",
        12,
        {"Split"},
    ),
    "split in ones without the dim, joined on a new one": (
        """g (float[n, 3] x) => (float[n, 3] y) {
          s = SplitToSequence<axis=1, keepdims=0>(x)
          y = ConcatFromSequence<axis=1, new_axis=1>(s)
        }""",
        20,
        {"Split", "Squeeze", "Unsqueeze", "Concat"},
    ),
    "the last part is smaller": (
        """g (float[n, 7] x) => (float[n, 7] y) <int64 three = {3}> {
          s = SplitToSequence<axis=1>(x, three) y = ConcatFromSequence<axis=1>(s)
        }""",
        20,
        {"Split", "Concat"},
    ),
    "made, changed and counted": (
        """g (float[n, 6] x) => (float[n, 12] y, int64 k) <int64 at = {-1}, int64 first = {0}> {
          a = Neg(x) b = Exp(x)
          s = SequenceConstruct(a, b, x)
          t = SequenceInsert(s, x, at)
          u = SequenceErase(t, first)
          v = SequenceErase(u)
          e = SequenceEmpty()
          f = SequenceInsert(e, x)
          k = SequenceLength(f)
          y = ConcatFromSequence<axis=1>(v)
        }""",
        20,
        {"Exp", "Concat", "Identity"},
    ),
    "mapped": (
        """g (float[n, 6] x, float[6] w) => (float[n, 6] y) <int64 two = {2}> {
          s = SplitToSequence<axis=1>(x, two)
          t = SequenceMap(s, w) <body = b (float[n, 2] p, float[6] q) => (float[n, 2] r) {
            m = ReduceMax<keepdims=0>(q) r = Mul(p, m)
          }>
          y = ConcatFromSequence<axis=1>(t)
        }""",
        20,
        {"Split", "ReduceMax", "Mul", "Concat"},
    ),
    "optional values": (
        """g (float[n, 6] x) => (float[n, 6] y, bool has) {
          o = Optional(x) p = Identity(o) y0 = OptionalGetElement(p) y = Neg(y0)
          has = OptionalHasElement(p)
        }""",
        20,
        {"Neg", "Identity"},
    ),
}


@pytest.mark.parametrize("title", FOLDED)
@pytest.mark.parametrize("batch", [4, 5])
def test_folded_and_sharded(title: str, batch: int) -> None:
    text, opset, operators = FOLDED[title]
    proto = parse(text, opset)
    analysed = analyse(ir.from_proto(proto), {})
    assert {n.op_type for n in analysed.model.graph} == operators
    assert not analysed.rules.reasons
    mesh = Mesh.of(dp=2)
    inputs = {
        v.name: Sharding.of(shape, [(0,), *[()] * (len(shape) - 1)])
        for v in proto.graph.input
        if (shape := analysed.env.shapes[v.name])[0] != 6
    }
    partitioned = propagate_and_partition(analysed, Seeds(mesh, {}, inputs))
    rng = np.random.default_rng(0)
    feeds = {
        v.name: rng.standard_normal(
            [d.dim_value or batch for d in v.type.tensor_type.shape.dim]
        ).astype(np.float32)
        for v in proto.graph.input
    }
    made = run_model(partitioned, feeds, {"n": batch})
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    for output, want in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        # The same operations on the same numbers.
        assert np.array_equal(made[output.name], want), output.name


def test_what_took_their_place_says_so() -> None:
    model = normalise(ir.from_proto(parse(FOLDED["mapped"][0])))
    origins = {n.op_type: n.metadata_props.get(EXPANDED_FROM) for n in model.graph}
    assert origins["Mul"] == "SequenceMap_t" and origins["Split"] == "SplitToSequence_s"


def test_a_position_that_is_not_there() -> None:
    text = """g (float[n, 6] x) => (float[n, 2] y) <int64 two = {2}, int64 i = {3}> {
      s = SplitToSequence<axis=1>(x, two) y = SequenceAt(s, i) }"""
    with pytest.raises(NodeError, match=r"'SequenceAt_y' \(SequenceAt\).*sequence of 3, got 3"):
        normalise(ir.from_proto(parse(text)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("g (seq(float[2]) s) => (int64 n) { n = SequenceLength(s) }", "input 's': .* Sequence"),
        ("g (float[2] x) => (seq(float[2]) s) { s = SequenceConstruct(x) }", "output 's': .* Seq"),
        ("g (optional(float[2]) o) => (bool y) { y = OptionalHasElement(o) }", "input 'o': .* Opt"),
    ],
)
def test_models_take_and_give_tensors(text: str, said: str) -> None:
    with pytest.raises(ModelError, match=f"{said}"):
        normalise(ir.from_proto(parse(text)))


def test_a_list_that_branches_read() -> None:
    proto = parse(
        """g (float[n, 6] x, bool p) => (float[n, 2] y) <int64 two = {2}, int64 i = {1}> {
          s = SplitToSequence<axis=1>(x, two)
          y = If (p) <then_branch = a () => (float[n, 2] q) { q = SequenceAt(s, i) },
                      else_branch = b () => (float[n, 2] r) { u = SequenceAt(s, i) r = Neg(u) }>
        }"""
    )
    analysed = analyse(ir.from_proto(proto), {})
    assert not analysed.rules.reasons
    check_branches(analysed, slice(2, 4))


LEFT = {
    "a length that depends on a symbol": (
        """g (float[n, 6] x) => (float[k, 6] y) <int64 i = {0}> {
          s = SplitToSequence<axis=0>(x) a = SequenceAt(s, i) y = Neg(a)
        }""",
        {"SplitToSequence", "SequenceAt"},
    ),
    "a position that is computed": (
        """g (float[n, 6] x, int64 i) => (float[n, 2] y) <int64 two = {2}> {
          s = SplitToSequence<axis=1>(x, two) a = SequenceAt(s, i) y = Neg(a)
        }""",
        {"SplitToSequence", "SequenceAt"},
    ),
}


@pytest.mark.parametrize("title", LEFT)
def test_replicated_where_not_known(title: str) -> None:
    text, operators = LEFT[title]
    proto = parse(text)
    analysed = analyse(ir.from_proto(proto), {})
    replicated = {
        v.name: Sharding.replicated(analysed.env.shapes[v.name]) for v in proto.graph.input
    }
    partitioned = propagate_and_partition(analysed, Seeds(Mesh.of(dp=2), {}, replicated))
    reasons = {op_type: reason for _, op_type, reason in partitioned.replicated}
    assert operators <= set(reasons)
    assert all("unknown before the model runs" in reasons[o] for o in operators)
    feeds = {"x": np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)}
    if len(proto.graph.input) > 1:
        feeds["i"] = np.array(1)
    # Nothing is sharded, so a rank's graph runs by itself.
    for model in (proto, ir.to_proto(emit_rank(partitioned, 1))):
        session = ort.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        (made,) = session.run(None, feeds)
        want = -feeds["x"][:1] if len(feeds) == 1 else -feeds["x"][:, 2:4]
        assert np.array_equal(made, want)
