"""The rules themselves, as text, and what happens where one cannot be stated."""

import onnx
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import ModelError, RuleError, SymbolError
from onnxpar.core.rule import format_rule
from onnxpar.core.symbols import Symbol
from onnxpar.ops.fallback import replicated_rule
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.report.operator_table import operator_table
from tests.onnxpar.ops.op_cases import ints, scalar
from tests.onnxpar.ops.op_harness import Case

NS = {"N": 5, "S": 3}
ANY = ", ".join(f"{r} 0" for r in ("sum", "max", "min", "prod"))


def reshape(shape: str, *target: int) -> Case:
    return Case("y = Reshape(x, s)", {"x": f"float[{shape}]"}, {"s": ints(*target)}, sizes=NS)


def slice_to(end: int, shape: str) -> Case:
    bounds = {"s": ints(0), "e": ints(end), "a": ints(0)}
    return Case("y = Slice(x, s, e, a)", {"x": f"int8[{shape}]"}, bounds, sizes=NS)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (reshape("N,S,12", 0, 0, 4, 3), "f0 f1 (f2 f3), . -> f0 f1 f2 f3"),
        (reshape("N,4,S,2", -1, 4, 2), "f0 f1 f3 f5, . -> (f0 f2) f4 f5; replicated: f1 f3 f2 f4"),
        (reshape("N,1,28,28", 0, 784), "f0 1 f1 f2, . -> f0 (f1 f2)"),
        (reshape("6,4", 8, 3), "(f0 f1) f3, . -> (f0 f2) f4; replicated: f1 f3 f2 f4"),
        (reshape("5,7", 7, 5), "f0 f2, . -> f1 f3; replicated: f0 f2 f1 f3"),
        (reshape("1,6", 6, 1), "1 f0, . -> f0 1"),
        # 2^31 - 1 is the end of a symbolic dim, but not of a larger one.
        (slice_to(2**31 - 1, "N,4"), "a b, ., ., . -> a b"),
        (slice_to(2**31 - 1, "2147483647,4"), "a b, ., ., . -> a b"),
        (
            slice_to(2**31 - 1, "2147483648,4"),
            "a b, ., ., . -> a_cut b; replicated: a a_cut",
        ),
        (
            Case(
                "a, b, c = Split<axis=-1>(x, s)",
                {"x": "float[N,12]"},
                {"s": ints(4, 4, 4)},
                sizes=NS,
            ),
            "_a (t d), . -> _a d, _a d, _a d; replicated: t",
        ),
        (
            Case("a, b = Split<axis=-1>(x, s)", {"x": "float[N,6]"}, {"s": ints(2, 4)}, sizes=NS),
            "_a p, . -> _a p0, _a p1; replicated: p p0 p1",
        ),
        (
            Case(
                "y = Slice(x, s, e)",
                {"x": "float[N,6]"},
                {"s": ints(0, 1), "e": ints(99, 5)},
                sizes=NS,
            ),
            "a b, ., . -> a_cut b_cut; replicated: a b a_cut b_cut",
        ),
        (
            Case("y = Expand(x, s)", {"x": "float[N,1]"}, {"s": ints(2, 1, 4)}, sizes=NS),
            "b 1, . -> a b c",
        ),
    ],
    ids=lambda value: value.node if isinstance(value, Case) else "",
)
def test_rules_of_views(case: Case, text: str) -> None:
    left, _, linear = format_rule(case.rule).partition("; linear: ")
    assert left == text
    assert linear == ANY


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            Case("y = MatMul(a, b)", {"a": "float[N,1,S,4]", "b": "float[2,4,3]"}, sizes=NS),
            "a 1 M K, b K N -> a b M N; sum: K; linear: sum 0, sum 1",
        ),
        (Case("y = Softmax(x)", {"x": "float[N,S]"}, sizes=NS), "a b -> a b; special: b"),
        (
            Case("y = Gather<axis=1>(d, i)", {"d": "float[N,6,3]", "i": "int64[S,2]"}, sizes=NS),
            f"a V b, c d -> a c d b; sum: V; linear: {ANY}",
        ),
        (Case("y = Shape(x)", {"x": "float[N,S]"}, sizes=NS), "* -> ."),
        (
            Case("y = Range(a, b, c)", {}, {"a": scalar(0), "b": scalar(9), "c": scalar(2)}),
            "., ., . -> n",
        ),
        (
            Case(
                "y = ReduceMax<keepdims=0>(x, a)", {"x": "float[N,S,4]"}, {"a": ints(-1)}, sizes=NS
            ),
            "a b c, . -> a b; max: c; linear: max 0",
        ),
        (
            Case("y = LayerNormalization(x, s)", {"x": "float[N,S,4]", "s": "float[4]"}, sizes=NS),
            "a b c, c -> a b c; special: c",
        ),
    ],
    ids=lambda value: value.node if isinstance(value, Case) else "",
)
def test_rules_of_other_operators(case: Case, text: str) -> None:
    assert format_rule(case.rule) == text


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("y = Reshape(x, s)", {"x": "float[N]", "s": "int64[2]"}), "sizes of the inputs"),
        (
            Case("y = ReduceSum(x, a)", {"x": "float[N,3]", "a": "int64[1]"}),
            "must be constant",
        ),
        (Case("y = Squeeze(x, a)", {"x": "float[N,1]", "a": "int64[1]"}), "must be constant"),
        (
            Case("y = Slice(x, s, e)", {"x": "float[N,4]", "s": "int64[k]", "e": "int64[k]"}),
            "number of starts",
        ),
        (Case("y = Range(a, b, c)", {k: "int64" for k in "abc"}), "number of elements"),
        (Case("y = Transpose(x)", {"x": f"float[{','.join('2' * 27)}]"}), "at most 26 dims"),
    ],
    ids=lambda value: value.node if isinstance(value, Case) else "",
)
def test_a_rule_that_cannot_be_stated_says_why(case: Case, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        _ = case.rule
    rule = replicated_rule(case.view)
    assert {o.mode for o in rule.inputs} == {"."}
    assert {o.mode for o in rule.outputs} == {"."}


SQUEEZED = """
  <ir_version: 10, opset_import: ["" : 20]>
  g (float[batch,1,3] x) => (float[batch,3] y) { [r] y = Squeeze (x) }"""


def test_squeeze_without_axes_is_refused_where_a_dim_may_be_1_at_run_time() -> None:
    """The undivided model would lose dim 0 of a batch of 1; what follows is planned with it."""
    model = onnx.parser.parse_model(SQUEEZED)
    with pytest.raises(SymbolError, match=r"'r' \(Squeeze\).*dim 0 \(batch\).*min: 2.*axes"):
        analyse(ir.from_proto(model), {})
    analysed = analyse(ir.from_proto(model), {"batch": Symbol(min=2)})
    assert format_rule(analysed.rules.by_node["r"]).startswith("a 1 c -> a c;")


def test_squeeze_without_axes_of_a_size_that_depends_on_data_is_refused() -> None:
    text = """
      <ir_version: 10, opset_import: ["" : 20]>
      g (float[N,4] x) => (int64[K] y) { i = NonZero (x) [r] y = Squeeze (i) }"""
    with pytest.raises(SymbolError, match=r"'r' \(Squeeze\).*dim 1"):
        analyse(ir.from_proto(onnx.parser.parse_model(text)), {})


def test_a_size_that_depends_on_data_is_replicated() -> None:
    text = """
      <ir_version: 10, opset_import: ["" : 20]>
      g (float[N,4] x) => (float[K,N] y) {
        [found] i = NonZero (x)
        [flip] t = Transpose (i)
        [cast] y = Cast <to=1> (t)
      }"""
    analysed = analyse(ir.from_proto(onnx.parser.parse_model(text)), {})
    assert analysed.rules.by_node["cast"].kinds["a"] == "replicated"
    assert analysed.rules.by_node["cast"].kinds["b"] == "parallel"
    assert set(analysed.rules.reasons) == {"found"}


def test_every_slot_is_filled_or_says_why() -> None:
    for definition in REGISTRY.defs:
        for slot in (definition.gradient, definition.cost):
            assert not isinstance(slot, Missing) or slot.reason
    for row in operator_table():
        assert row.rule and row.local, row


def test_an_operator_has_one_definition_for_each_version() -> None:
    first = REGISTRY.defs[0]
    with pytest.raises(RuleError, match="defined twice"):
        Registry((first, first))
    old, new = (OpDef("", "X", version, first.rule) for version in (1, 13))
    table = Registry((old, new))
    assert table.find("ai.onnx", "X", 12) is old
    assert table.find("", "X", 13) is new
    assert table.find("", "Y", 13) is None
    assert table.find("other", "X", 13) is None
