"""Nodes that no runtime could run are refused: node, attribute, expected and got."""

import re

import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import ModelError, NodeError

INPUTS = "float[b, 6] x, int64[b] labels, float[b, 4] w"
CONSTANTS = "int64[1] four = {4}, int64 scalar = {4}, int64[1] one = {1}, float[6] s"


def model(body: str, opset: int) -> ir.Model:
    text = (
        f'<ir_version: 8, opset_import: ["": {opset}]> g ({INPUTS}) => (float[n] y) <{CONSTANTS}>'
        f" {{ [bad] y = {body} }}"
    )
    proto = onnx.parser.parse_model(text.replace("float[6] s", "float[6] s = {1, 1, 1, 1, 1, 1}"))
    return ir.from_proto(proto)


@pytest.mark.parametrize(
    ("body", "opset", "message"),
    [
        ('Softmax<axis = "a">(x)', 13, "'axis': expected the type INT, got STRING"),
        ("Softmax<axis = 1.5>(x)", 13, "'axis': expected the type INT, got FLOAT"),
        ("Softmax<axes = 1>(x)", 13, "attribute 'axes': expected one of axis"),
        ("Relu<alpha = 1.0>(x)", 13, "attribute 'alpha': expected one of none"),
        ("Concat(x, x)", 13, "attribute 'axis' is missing"),
        ('Gemm<transA = "a">(x, w)', 13, "'transA': expected the type INT, got STRING"),
        ("Softmax<axis = 7>(x)", 13, "'axis' must be in [-2 , 1]. Its actual value is: 7"),
        ("Softmax<axis = 7>(x)", 11, "'axis' must be in [-2 , 1]. Its actual value is: 7"),
        ("Softmax<axis = -3>(x)", 13, "Its actual value is: -3, got axis=-3, 'x' of shape [b,6]"),
        ("Hardmax<axis = 9>(x)", 13, "'axis' must be in [-2 , 1]. Its actual value is: 9"),
        ("Concat<axis = 5>(x, x)", 13, "axis=5 is out of range for rank 2"),
        ("Gather<axis = 4>(x, one)", 13, "axis=4 is out of range [-2, 1]"),
        ("Flatten<axis = 3>(x)", 13, "axis=3 is out of range [-2, 2]"),
        ("Transpose<perm = [0, 0]>(x)", 13, "repeated value: 0, got perm=(0, 0)"),
        ("Transpose<perm = [0, 2]>(x)", 13, "Invalid attribute perm {0, 2}"),
        ("Transpose<perm = [0]>(x)", 13, "'perm': expected 2 axes, one for each dim, got [0]"),
        ("ReduceSum<axes = [4]>(x)", 12, "got 'x' of shape [b,6], 'bad/axes:0' = [4]"),
        ("ReduceSum(x, four)", 13, "got 'x' of shape [b,6], 'four' = [4]"),
        ("Slice(x, four, four, four)", 13, "axis value: 4. Expected range [-2, 2)"),
        ("CumSum(x, scalar)", 14, "'axis': expected -2 to 1 for a tensor with 2 dims, got [4]"),
        ("LayerNormalization<axis = 4>(x, s)", 17, "'axis': expected -2 to 1 for a tensor with"),
        ("Cast<to = 999>(x)", 13, "does not specify a valid type"),
        (
            'SoftmaxCrossEntropyLoss<reduction = "all">(x, labels)',
            13,
            "'reduction': expected one of none, mean, sum, got 'all'",
        ),
    ],
)
def test_refused(body: str, opset: int, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        analyse(model(body, opset), {})
    assert "node 'bad'" in str(caught.value) and message in str(caught.value)


def test_in_bodies_and_functions() -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20, "own": 1]>
        g (bool c, float[n] x) => (float[n] y) {
            y = If (c) <then_branch = t () => (float[n] a) { [inner] a = Elu<beta = 1.0>(x) },
                        else_branch = e () => (float[n] a) { a = Elu(x) }>
        }""")
    with pytest.raises(NodeError, match=r"node 'inner'.*'beta': expected one of alpha"):
        analyse(ir.from_proto(proto), {})
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20, "own": 1]>
        g (float[n] x) => (float[n] y) { y = own.twice(x) }
        <domain: "own", opset_import: ["": 20]>
        twice (x) => (y) { [inner] y = Elu<beta = 1.0>(x) }""")
    with pytest.raises(NodeError, match=r"node 'inner'.*'beta': expected one of alpha"):
        analyse(ir.from_proto(proto), {})


def test_an_attribute_that_refers_to_the_functions_own() -> None:
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20, "own": 1]>
        g (float[n] x) => (float[n] y) { y = own.elu<slope = 2.0>(x) }
        <domain: "own", opset_import: ["": 20]>
        elu <slope> (x) => (y) { y = Elu<alpha: float = @slope>(x) }""")
    assert not analyse(ir.from_proto(proto), {}).rules.reasons


def test_axes_that_some_runtimes_take_twice_are_replicated() -> None:
    reasons = analyse(model("ReduceMax<axes = [0, 0]>(x)", 13), {}).rules.reasons
    assert reasons == {"bad": "node 'bad' (ReduceMax): 'axes': expected distinct axes, got [0, 0]"}


@pytest.mark.parametrize(
    ("inputs", "body", "message"),
    [
        (
            "float[n, 3, 8, 8] x, float[4, 2, 3, 3] w",
            "Conv(x, w)",
            "filters of 2 channels in 1 groups: expected 2 channels of operand 0, got 3",
        ),
        (
            "float[n, 3, 8] x, float[4, 1, 3] w",
            "Conv<group = 2>(x, w)",
            "filters of 1 channels in 2 groups: expected 2 channels of operand 0, got 3",
        ),
        ("float[n, 2, 3] x", "Det(x)", "dimensions must have the same size"),
    ],
)
def test_shapes_that_contradict_the_operator(inputs: str, body: str, message: str) -> None:
    proto = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g ({inputs}) => (float y) {{ [bad] y = {body} }}'
    )
    with pytest.raises(NodeError, match=re.escape(message)):
        analyse(ir.from_proto(proto), {})


def test_a_reference_outside_of_functions() -> None:
    """As the value of a Constant, it ended with a TypeError of onnx_ir."""
    proto = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 20]>
        g (float[n] x) => (float[n] y) { [inner] c = Constant<value_float = 1.0>() y = Add(x, c) }
        """)
    attribute = proto.graph.node[0].attribute[0]
    attribute.name, attribute.type = "value", onnx.AttributeProto.TENSOR
    attribute.ref_attr_name = "v"
    message = "node 'inner'.*'value': expected a value, got a reference to an attribute 'v'"
    with pytest.raises(NodeError, match=message):
        analyse(ir.from_proto(proto), {})
