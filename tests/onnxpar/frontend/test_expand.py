"""Operators replaced by their bodies: names, shapes and results, forward and in training."""

import json
from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx.reference import ReferenceEvaluator

from onnxpar.api.shard_model import analyse, propagate_and_partition
from onnxpar.autodiff.differentiate import differentiate
from onnxpar.core.errors import ModelError
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.frontend.load import normalise, symbol_table
from onnxpar.graph.metadata_keys import EXPANDED_FROM, EXPANDED_OPERANDS
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.function import attach_functions
from onnxpar.ops.operator import BY_BODY, OpDef, expanded
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from tests.lockstep import check_branches, run_model


def parse(text: str, opset: int) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}, "test": 1]>\n{text}'
    )


def with_definitions(*definitions: OpDef) -> Registry:
    """The table with definitions in the place of those of the same operator and version."""
    keys = {(d.domain, d.op_type, d.since_version) for d in definitions}
    others = [d for d in REGISTRY.defs if (d.domain, d.op_type, d.since_version) not in keys]
    return Registry((*others, *definitions))


# Without the rules of Shrink and Swish, ONNX's bodies are all there is of them.
BODIES_ALONE = Registry(tuple(d for d in REGISTRY.defs if d.op_type not in ("Shrink", "Swish")))


FORWARD = {
    "bodies in a row": (
        "g (float[n, 6] x) => (float[n, 6] y) { a = Swish<alpha=1.5>(x) y = Shrink<lambd=0.3>(a) }",
        24,
    ),
    "a node of an opset that lacks operators of its body": (
        "g (float[n, 6] x) => (float[n, 6] y) { y = Shrink<lambd=0.3, bias=0.1>(x) }",
        13,
    ),
    "a result that is read and leaves": (
        "g (float[n, 6] x) => (float[n, 6] y, float[n, 6] z) { y = Shrink(x) z = Neg(y) }",
        20,
    ),
}


@pytest.mark.parametrize("title", FORWARD)
def test_sharded_through_its_body(title: str) -> None:
    text, opset = FORWARD[title]
    proto = parse(text, opset)
    del proto.opset_import[1:]
    analysed = analyse(ir.serde.deserialize_model(proto), {}, BODIES_ALONE)
    assert not analysed.rules.reasons
    mesh = Mesh.of(dp=2, tp=2)
    shape = analysed.env.shapes["x"]
    parted = propagate_and_partition(
        analysed, Seeds(mesh, {}, {"x": Sharding.of(shape, [(0,), (1,)])})
    )
    assert not parted.replicated
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    reference = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    made = run_model(parted, {"x": x}, {"n": 5})
    for output, want in zip(reference.get_outputs(), reference.run(None, {"x": x}), strict=True):
        # onnxruntime may fuse the body: up to 16 operations fewer, each rounded by 6e-8.
        np.testing.assert_allclose(made[output.name], want, rtol=1e-6, atol=1e-7)


def test_names_and_origin() -> None:
    model = normalise(
        ir.from_proto(parse("g (float[n] x) => (float[n] y) { a = Neg(x) y = Shrink(a) }", 20)),
        BODIES_ALONE,
    )
    first, *inner = list(model.graph)
    assert EXPANDED_FROM not in first.metadata_props
    assert {n.metadata_props[EXPANDED_FROM] for n in inner} == {"Shrink_y"}
    assert all((n.name or "").startswith("Shrink_y/") for n in inner)
    assert len({n.name for n in inner}) == len(inner)
    operands = json.loads(inner[0].metadata_props[EXPANDED_OPERANDS])
    assert operands == {"in": ["a"], "out": ["y"]}
    assert inner[-1].outputs[0].name == "y" == model.graph.outputs[0].name


def twice(node: BodyNode) -> list[ir.Value | None]:
    """Gives x + x, and x itself."""
    x = node.input(0)
    return [node.op("Add", x, x), x]


def test_a_body_of_ours() -> None:
    registry = with_definitions(OpDef("test", "Twice", 1, expanded, body=twice))
    model = normalise(
        ir.from_proto(
            parse("g (float[n] x) => (float[n] y, float[n] z) { y, z = test.Twice(x) }", 20)
        ),
        registry,
    )
    assert [(n.name, n.op_type) for n in model.graph] == [
        ("Twice_y/Add", "Add"),
        ("Twice_y/same.1", "Identity"),
    ]
    assert [v.name for v in model.graph.outputs] == ["y", "z"]
    env = shapes(model, symbol_table(model, {}))
    assert env.shapes["y"] == env.shapes["z"] == env.shapes["x"]


def test_a_body_that_lacks_what_it_needs() -> None:
    def refuse(node: BodyNode) -> list[ir.Value | None]:
        node.op("Neg", node.input(0))
        raise node.fail("expected a constant")

    registry = with_definitions(OpDef("test", "Twice", 1, expanded, body=refuse))
    model = normalise(
        ir.from_proto(parse("g (float[n] x) => (float[n] y) { y = test.Twice(x) }", 20)),
        registry,
    )
    assert [n.op_type for n in model.graph] == ["Twice"]


def mish(node: BodyNode) -> list[ir.Value | None]:
    """Gives x tanh(softplus(x))."""
    x = node.input(0)
    return [node.op("Mul", x, node.op("Tanh", node.op("Softplus", x)))]


@pytest.mark.parametrize("body", [None, mish], ids=["schema", "ours"])
def test_differentiated_by_its_body(body: object) -> None:
    found = REGISTRY.find("", "Mish", 18)
    assert found is not None
    registry = with_definitions(replace(found, gradient=BY_BODY, body=body))
    # Only the one between w and the loss is replaced.
    model = normalise(
        ir.from_proto(
            parse(
                """g (double[n] x, double[n] w) => (double loss) {
                  a = Mish(x) b = Mul(a, w) c = Mish(b) loss = ReduceSum<keepdims=0>(c)
                }""",
                18,
            )
        ),
        registry,
    )
    env = shapes(model, symbol_table(model, {}))
    done = differentiate(model, env, registry, "loss", ["w"])
    assert [n.name for n in model.graph if n.op_type == "Mish"] == ["Mish_a"]
    replaced = [n.name or "" for n in model.graph if EXPANDED_FROM in n.metadata_props]
    assert replaced and all(name.startswith("Mish_c/") for name in replaced)
    assert done.env.shapes["c"] == env.shapes["x"]

    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(4), rng.standard_normal(4)

    def mish_of(v: np.ndarray) -> np.ndarray:
        return np.asarray(v * np.tanh(np.log1p(np.exp(v))))

    attach_functions(model, (d.function for d in REGISTRY.defs if d.function is not None))
    evaluator = ReferenceEvaluator(ir.to_proto(model))
    loss, gradient = evaluator.run(None, {"x": x, "w": w})
    # Fewer than 100 operations in float64, each rounded by 1.1e-16.
    np.testing.assert_allclose(loss, mish_of(mish_of(x) * w).sum(), rtol=1e-12)
    step = 1e-6
    slopes = (mish_of(mish_of(x) * (w + step)) - mish_of(mish_of(x) * (w - step))) / (2 * step)
    # A central difference errs by step² = 1e-12 of the third derivative, and 1e-16 / step = 1e-10.
    np.testing.assert_allclose(gradient, slopes, rtol=1e-8, atol=1e-9)


CALLS = "g (float[n, 6] x) => (float[n, 6] y) { [c1] a = l.F<k=2>(x) [c2] y = l.F<k=3>(a) }\n"


def called(functions: str, calls: str = CALLS) -> ir.Model:
    head = '<ir_version: 10, opset_import: ["": 20, "l": 1]>\n'
    return normalise(ir.from_proto(onnx.parser.parse_model(head + calls + functions)))


def test_functions_of_the_model() -> None:
    model = called(
        """<domain: "l", opset_import: ["": 18, "m": 1]> F <k> (x) => (y) {
          c = Constant<value_int: int = @k>() d = CastLike(c, x) [m] s = Mul(x, d) [n] y = m.G(s)
        }
        <domain: "m", opset_import: ["": 20]> G (x) => (y) { y = Neg(x) }"""
    )
    names = [n.name for n in model.graph if n.op_type != "CastLike"]
    assert names == ["c1/m", "c1/n/Neg", "c2/m", "c2/n/Neg"]
    assert {n.metadata_props[EXPANDED_FROM] for n in model.graph} == {"c1", "c2"}
    x = np.arange(6, dtype=np.float32).reshape(1, 6)
    (y,) = ReferenceEvaluator(ir.to_proto(model)).run(None, {"x": x})
    np.testing.assert_array_equal(y, 6 * x)
    assert not model.functions


def test_a_function_in_a_branch() -> None:
    model = called(
        '<domain: "l", opset_import: ["": 20]> F (x) => (y) { s = Neg(x) y = Exp(s) }',
        """g (float[n] x, bool p) => (float[n] y) {
          y = If (p) <then_branch = t () => (float[n] q) { [c] q = l.F(x) },
                      else_branch = e () => (float[n] r) { r = Neg(x) }>
        }""",
    )
    (node,) = model.graph
    names = [n.name for n in node.attributes["then_branch"].as_graph()]
    assert names == ["c/Neg", "c/Exp"]


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (
            '<domain: "l", opset_import: ["": 24]> F <k> (x) => (y) { y = Swish(x) }',
            r"l::F is of opset 24, in which Swish exists, unlike in opset 20",
        ),
        (
            '<domain: "l", opset_import: ["": 20, "l": 1]> F <k> (x) => (y) { y = l.F(x) }',
            "without end: 'l::F' -> 'l::F'",
        ),
        (
            """<domain: "l", opset_import: ["": 20, "m": 1]> F <k> (x) => (y) { y = m.G(x) }
            <domain: "m", opset_import: ["": 20, "l": 1]> G (x) => (y) { y = l.F(x) }""",
            "functions of the model call each other without end: ",
        ),
    ],
)
def test_functions_that_cannot_be_inlined(functions: str, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        called(functions)


def test_an_operator_in_a_branch() -> None:
    text = """g (float[n, 6] x, bool p) => (float[n, 4] y) <int64[1] t = {4}> {
      y = If (p) <
        then_branch = a () => (float[n, 4] q) { [c] q = CenterCropPad<axes=[1]>(x, t) },
        else_branch = b () => (float[n, 4] r) { z = Neg(x) [d] r = CenterCropPad<axes=[1]>(z, t) }>
    }"""
    proto = parse(text, 20)
    del proto.opset_import[1:]
    analysed = analyse(ir.from_proto(proto), {})
    nodes = list(ir.traversal.RecursiveGraphIterator(analysed.model.graph))
    assert "CenterCropPad" not in {n.op_type for n in nodes}
    assert {n.metadata_props.get(EXPANDED_FROM) for n in nodes} >= {"c", "d"}
    check_branches(analysed, slice(1, 5))


def test_a_branch_that_is_chosen_once_sequences_are_folded() -> None:
    text = """g (float[n, 6] x) => (float[n, 6] y) {
      o = Optional(x) p = OptionalHasElement(o)
      y = If (p) <then_branch = a () => (float[n, 6] q) { q = Neg(x) },
                  else_branch = b () => (float[n, 6] r) { r = Exp(x) }>
    }"""
    model = normalise(ir.from_proto(parse(text, 20)))
    operators = {n.op_type for n in model.graph}
    assert "Neg" in operators and not {"If", "Exp"} & operators
