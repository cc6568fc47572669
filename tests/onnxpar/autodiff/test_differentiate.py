"""Differentiation of complete graphs: what is reached, what is added up, and what is refused."""

from collections import Counter

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from onnxpar.autodiff.differentiate import Differentiated, differentiate
from onnxpar.core.errors import ModelError
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.shapes import ShapeEnv, shapes
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY


def read(nodes: str, inputs: str, opset: int = 18) -> tuple[ir.Model, ShapeEnv]:
    """A model whose last result, `loss`, is its output."""
    text = (
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({inputs}) => (double loss) {{{nodes}}}'
    )
    model = normalise(ir.from_proto(onnx.parser.parse_model(text)))
    return model, shapes(model, symbol_table(model, {}))


def derive(nodes: str, inputs: str, *by: str) -> tuple[ir.Model, Differentiated]:
    model, env = read(nodes, inputs)
    return model, differentiate(model, env, REGISTRY, "loss", by)


def run(model: ir.Model, **feeds: object) -> dict[str, np.ndarray]:
    proto = ir.to_proto(model)
    values = ReferenceEvaluator(proto).run(None, {n: np.asarray(v) for n, v in feeds.items()})
    return {o.name: v for o, v in zip(proto.graph.output, values, strict=True)}


def test_cotangents_of_all_uses_are_added() -> None:
    # loss = Σ (x² + x + 3x·y): ∂x = 2x + 1 + 3y, ∂y = 3x.
    model, done = derive(
        """a = Mul(x, x) three = Constant<value = double {3.0}>() b = Mul(x, three) c = Mul(b, y)
           d = Sum(a, x, c) loss = ReduceSum<keepdims=0>(d)""",
        "double[4] x, double[4] y",
        *("x", "y"),
    )
    x, y = np.array([1.0, -2, 3, 0]), np.array([0.5, 1, -1, 2])
    made = run(model, x=x, y=y)
    # Halves and small integers are exact in float64; 1e-15 is five units.
    np.testing.assert_allclose(made["onnxpar.grad.x"], 2 * x + 1 + 3 * y, rtol=1e-15)
    np.testing.assert_allclose(made["onnxpar.grad.y"], 3 * x, rtol=1e-15)
    assert [o.name for o in model.graph.outputs] == ["loss", "onnxpar.grad.x", "onnxpar.grad.y"]
    assert dict(done.gradients) == {"x": "onnxpar.grad.x", "y": "onnxpar.grad.y"}
    assert not done.unreached


def test_every_output_is_a_value_of_its_own() -> None:
    # ∂x, ∂y and ∂z are one and the same cotangent.
    model, done = derive(
        "a = Add(x, y) b = Add(a, z) loss = ReduceSum<keepdims=0>(b)",
        "double[4] x, double[4] y, double[4] z",
        *("x", "y", "z"),
    )
    assert len(set(done.gradients.values())) == 3
    made = run(model, x=np.ones(4), y=np.ones(4), z=np.ones(4))
    for name in done.gradients.values():
        np.testing.assert_array_equal(made[name], np.ones(4))


def test_loss_by_itself() -> None:
    model, done = derive("loss = Identity(x)", "double x", "x")
    assert run(model, x=2.0)[done.gradients["x"]] == 1


def test_links_lead_from_cotangents_to_primals() -> None:
    model, done = derive(
        "a = Mul(x, y) b = Tanh(a) loss = ReduceSum<keepdims=0>(b)",
        "double[N,4] x, double[4] y",
        *("x", "y"),
    )
    made = {v.name: v for node in model.graph for v in node.outputs}
    for cotangent, primals in done.links.items():
        assert {done.env.shapes[p] for p in primals} == {done.env.shapes[cotangent]}
        assert cotangent in made or cotangent in model.graph.initializers
    assert done.links["onnxpar.grad.x"] == ("x",)
    assert {"a", "b", "x", "y", "loss"} <= {p for found in done.links.values() for p in found}
    marked = {n.metadata_props[GRADIENT_OF] for n in model.graph if GRADIENT_OF in n.metadata_props}
    assert marked == {n.name for n in list(model.graph)[:3]}


def test_what_is_not_reached_has_a_reason() -> None:
    _, done = derive(
        "a = Floor(f) b = Mul(a, x) loss = ReduceSum<keepdims=0>(b)",
        "double[4] x, double[4] f, double[4] u",
        *("x", "f", "u"),
    )
    assert set(done.gradients) == {"x"}
    assert dict(done.unreached) == {
        "f": "the loss depends on it only through nodes without a derivative",
        "u": "the loss does not depend on it",
    }


def test_nothing_is_computed_for_what_is_not_asked() -> None:
    model, _ = derive(
        "a = Mul(x, y) b = Tanh(a) c = Mul(b, z) loss = ReduceSum<keepdims=0>(c)",
        "double[4] x, double[4] y, double[4] z",
        "z",
    )
    added = [node.op_type for node in model.graph if GRADIENT_OF in node.metadata_props]
    assert sorted(added) == ["Expand", "Mul"]


def test_one_branch_without_derivative_does_not_stop_the_other() -> None:
    # loss = Σ x·sign(x) = Σ |x|.
    model, _ = derive(
        "s = Sign(x) a = Mul(x, s) loss = ReduceSum<keepdims=0>(a)", "double[4] x", "x"
    )
    x = np.array([1.0, -2, 3, -4])
    np.testing.assert_array_equal(run(model, x=x)["onnxpar.grad.x"], np.sign(x))


def test_names_that_are_taken_are_left_alone() -> None:
    model, env = read(
        "a = Mul(x, taken) loss = ReduceSum<keepdims=0>(a)", "double[4] x, double[4] taken"
    )
    model.graph.inputs[1].name = "onnxpar.grad.x"
    shape = {**env.shapes, "onnxpar.grad.x": env.shapes["taken"]}
    done = differentiate(model, ShapeEnv(shape, env.contents, env.table), REGISTRY, "loss", ["x"])
    assert done.gradients["x"] == "onnxpar.grad.x.1"
    feeds = {"x": np.ones(4), "onnxpar.grad.x": np.arange(4.0)}
    assert run(model, **feeds)["onnxpar.grad.x.1"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("nodes", "by", "match"),
    [
        (
            "a = Mul(x, x) loss = ReduceSum<keepdims=0>(a)",
            "w",
            "'w': expected a parameter or input",
        ),
        ("a = Mul(x, x) loss = Relu(a)", "x", "'loss': expected one element, got the shape"),
        ("a = Mul(x, x) other = ReduceSum(a)", "x", "'loss': no node computes it"),
        ("a = Abs(x) loss = Shape<start=0, end=1>(a)", "x", "expected a float, got INT64"),
        (
            "a = Mul(x, x) n = IsNaN(a) m = Flatten<axis=0>(n) q = Squeeze(m) b = Tanh(a) "
            "c = Compress(b, q) loss = ReduceSum<keepdims=0>(c)",
            "x",
            r"\(Compress\) has no gradient: the shape of its.*'loss' <- … <- 'Compress_c' <- "
            "'Tanh_b' <- 'Mul_a' <- 'x'",
        ),
    ],
)
def test_refusals(nodes: str, by: str, match: str) -> None:
    text = nodes.split(")")[-2].split("=")[0].split()[-1]
    kind = "int64" if "INT64" in match else "double"
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> g (double[4,4] x) => ({kind} {text}) {{{nodes}}}'
    )
    ready = normalise(ir.from_proto(model))
    with pytest.raises(ModelError, match=match):
        differentiate(ready, shapes(ready, symbol_table(ready, {})), REGISTRY, "loss", [by])


def test_an_operator_that_is_not_known_is_refused() -> None:
    model, env = read("a = Det(x) loss = ReduceSum<keepdims=0>(a)", "double[4,4] x")
    known = Registry(tuple(d for d in REGISTRY.defs if d.op_type != "Det"))
    with pytest.raises(ModelError, match=r"\(Det\) has no gradient: .*onnx::Det is not known"):
        differentiate(model, env, known, "loss", ["x"])


def test_a_loop_that_a_condition_may_end_is_refused() -> None:
    model, env = read(
        """h = Mul(x, x)
           a = Loop(m, c, h) <body = b (int64 i, bool go, double[4] s) => (bool on, double[4] t)
               { t = Mul(s, h) n = ReduceSum<keepdims=0>(t) on = Less(n, n) }>
           loss = ReduceSum<keepdims=0>(a)""",
        "int64 m, bool c, double[4] x",
    )
    with pytest.raises(ModelError, match=r"\(Loop\): .* a condition that may end the loop"):
        differentiate(model, env, REGISTRY, "loss", ["x"])


def test_pieces_of_a_packed_projection_are_joined_and_not_added() -> None:
    # loss = Σ (x[:, 0:2] x[:, 2:4] + x[:, 5:6]): the fifth element has no reader.
    model, _ = derive(
        """axis = Constant<value_ints = [1]>() zero = Constant<value_ints = [0]>()
           two = Constant<value_ints = [2]>() four = Constant<value_ints = [4]>()
           five = Constant<value_ints = [5]>() six = Constant<value_ints = [6]>()
           q = Slice(x, zero, two, axis) v = Slice(x, five, six, axis) k = Slice(x, two, four, axis)
           qk = Mul(q, k) a = ReduceSum<keepdims=0>(qk) b = ReduceSum<keepdims=0>(v)
           loss = Add(a, b)""",
        "double[2,6] x",
        "x",
    )
    backward = [node for node in model.graph if GRADIENT_OF in node.metadata_props]
    kinds = Counter(node.op_type for node in backward)
    assert kinds["Concat"] == 1
    assert kinds["Add"] == 0
    x = np.arange(12.0).reshape(2, 6)
    q, k = x[:, 0:2], x[:, 2:4]
    want = np.concatenate([k, q, np.zeros((2, 1)), np.ones((2, 1))], axis=1)
    np.testing.assert_array_equal(run(model, x=x)["onnxpar.grad.x"], want)


def test_pieces_that_overlap_are_added() -> None:
    model, _ = derive(
        """axis = Constant<value_ints = [0]>() zero = Constant<value_ints = [0]>()
           one = Constant<value_ints = [1]>() two = Constant<value_ints = [2]>()
           three = Constant<value_ints = [3]>()
           a = Slice(x, zero, two, axis) b = Slice(x, one, three, axis)
           y = Mul(a, b) loss = ReduceSum<keepdims=0>(y)""",
        "double[3] x",
        "x",
    )
    x = np.array([2.0, 3, 5])
    np.testing.assert_array_equal(run(model, x=x)["onnxpar.grad.x"], [3, 7, 3])
