"""Which nodes are marked for the host."""

import onnx_ir as ir
import pytest
from onnx import parser, shape_inference

from onnxpar.facts.host_nodes import host_nodes, is_small, size_nodes
from onnxpar.ops.table import REGISTRY

HEAD = '<ir_version: 10, opset_import: ["" : 21, "onnxpar" : 1]> '


def marked(inputs: str, outputs: str, body: str, given: str = "s") -> set[str]:
    """Names of the marked nodes of a graph; sizes in its inputs `given` are on the host."""
    text = f"{HEAD} g ({inputs}) => ({outputs}) <int64[1] two = {{2}}> {{ {body} }}"
    graph = ir.from_proto(shape_inference.infer_shapes(parser.parse_model(text))).graph
    values = {v.name: v for v in (*graph.inputs, *graph.initializers.values())}
    host = {values[name] for name in (*given.split(), "two")}
    return {node.name or "" for node in host_nodes(tuple(graph), host, REGISTRY)}


@pytest.mark.parametrize(
    ("inputs", "body", "expected"),
    [
        # A shape made of sizes; the Reshape itself is the device's.
        (
            "float[a, 6] x, int64[1] s",
            "[h] h = Div(s, two) [c] c = Concat<axis = 0>(h, two) [y] y = Reshape(x, c)",
            {"h", "c"},
        ),
        # Nobody reads it in host memory.
        ("float[a, 6] x, int64[1] s", "[h] h = Cast<to = 1>(s) [y] y = Mul(x, h)", set()),
        # What Shape gives is on the host, Shape itself is wherever its operand is.
        (
            "float[a, 6] x, int64[1] s",
            "[n] n = Shape(x) [h] h = Mul(n, s) [y] y = Expand(x, h)",
            {"h"},
        ),
        # Positions: read from sizes, as large as a sequence.
        (
            "float[a, 6] x, int64[1] s, int64 zero, int64 one",
            "[q] q = Squeeze(s) [r] r = Range(zero, q, one) [y] y = Cast<to = 1>(r)",
            {"q"},
        ),
        # From data of the device: it has to come down anyway.
        (
            "float[a, 6] x, int64[1] k, int64[1] s",
            "[h] h = Add(k, s) [c] c = Concat<axis = 0>(h, two) [y] y = Reshape(x, c)",
            set(),
        ),
        # The key of random numbers.
        (
            "float[a, 6] x, int64[1] s, int64[2] k, int64[2] l",
            "[h] h = Concat<axis = 0>(s, two) [y] y = onnxpar.Philox(h, k, l, l)",
            {"h"},
        ),
        # Two that are equal, from operands that are equal, of which one is needed.
        (
            "float[a, 6] x, int64[1] s",
            "[h] h = Mul(s, two) [k] k = Mul(s, two) [i] i = Add(h, s) [j] j = Add(k, s)"
            " [l] l = Add(k, two) [y] y = Reshape(x, i) [z] z = Cast<to = 1>(j)",
            {"h", "k", "i", "j"},
        ),
        # What another library makes is where that library puts it.
        (
            "float[a, 6] x, int64[1] s",
            "[h] h = onnxpar.Barrier(s, x) [y] y = ConstantOfShape(s) [z] z = Add(h, two)",
            set(),
        ),
    ],
)
def test_nodes_whose_result_kernels_read_in_host_memory(
    inputs: str, body: str, expected: set[str]
) -> None:
    assert marked(inputs, "float[b, c] y", body) == expected


def test_bodies_of_control_flow_are_read() -> None:
    body = """
    [h] h = Mul(s, two)
    [i] y = If(b) <then_branch = t () => (float[m] p) { p = ConstantOfShape(h) },
                   else_branch = e () => (float[n] q) { q = ConstantOfShape(s) }>
    """
    assert marked("bool b, int64[1] s", "float[k] y", body) == {"h"}


def test_nodes_that_only_compute_sizes() -> None:
    body = """
    [n] n = Shape(x)
    [h] h = Mul(n, two2)
    [y] y = Expand(x, h)
    [m] m = Shape(x)
    [f] f = Cast<to = 1>(m)
    [z] z = Mul(x, f)
    [s] s = Shape(z)
    [r] r = Reshape(z, s)
    """
    text = f"{HEAD} g (float[a, 2] x) => (float[b, c] y, float[a, 2] r) <int64[2] two2 = {{1, 2}}>"
    model = parser.parse_model(f"{text} {{ {body} }}")
    graph = ir.from_proto(shape_inference.infer_shapes(model)).graph
    # The sizes of `m` are factors of a product, so that they are more than sizes.
    assert {node.name for node in size_nodes(graph, REGISTRY)} == {"n", "h", "s"}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [([], True), ([10, 10], True), ([101], False), (["n"], False), ([0, 500], True), (None, False)],
)
def test_small_is_what_is_known_to_be(shape: list[int | str] | None, expected: bool) -> None:
    value = ir.Value(name="v", shape=None if shape is None else ir.Shape(shape))
    assert is_small(value) is expected
