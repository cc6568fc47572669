"""What constants determine is computed when a model is read, as onnxruntime computes it."""

from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import onnxruntime as ort
import pytest

from onnxpar.api.shard_model import analyse
from onnxpar.frontend.load import normalise
from onnxpar.ops.sizes.constant_folding import FOLD_BYTES
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.recognise import read_parameters
from onnxpar.parameters.trainable import select

HEAD = '<ir_version: 10, opset_import: ["": 20]>\n'


def model_of(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD + text)


def folded(text: str) -> ir.Model:
    return normalise(ir.from_proto(model_of(text)))


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


CONSTANTS = """
  i = Constant<value_ints = [7, -3, 1, 12, 5, -8]>()
  j = Constant<value_ints = [2, 5, -4, 3, 1, 6]>()
  one = Constant<value_ints = [1]>()
  k = Constant<value_int = 3>()
  zero = Constant<value_int = 0>()
  step = Constant<value_int = 1>()
  shape = Constant<value_ints = [2, 3]>()
  m = Reshape(i, shape)
  n = Reshape(j, shape)
  pick = Constant<value_ints = [1, 0]>()
  rows = Constant<value = int64[2, 1] {1, 0}>()
  f = Constant<value_floats = [0.1, -2.5, 3.5, 1e-8, 7.0, 0.5]>()
  g = Constant<value_floats = [3.0, 0.7, -0.3, 1.1, 49.0, 2.5]>()
  b = Less(i, j)
  c = Greater(i, k)
"""
CASES = {
    "Abs": ["Abs(i)", "Abs(f)"],
    "Add": ["Add(i, k)", "Add(f, g)"],
    "And": ["And(b, c)"],
    "BitShift": ['BitShift<direction = "LEFT">(u, u)'],
    "BitwiseAnd": ["BitwiseAnd(i, j)"],
    "BitwiseNot": ["BitwiseNot(i)"],
    "BitwiseOr": ["BitwiseOr(i, j)"],
    "BitwiseXor": ["BitwiseXor(i, j)"],
    "Cast": [
        "Cast<to = 1>(i)", "Cast<to = 7>(f)", "Cast<to = 9>(i)", "Cast<to = 6>(m)",
        "Cast<to = 10>(f)", "Cast<to = 11>(f)", "Cast<to = 1>(b)", "Cast<to = 3>(i)",
    ],
    "CastLike": ["CastLike(i, f)", "CastLike(f, i)", "CastLike(i, b)"],
    "Ceil": ["Ceil(f)"],
    "Clip": ["Clip(i, zero, k)"],
    "Compress": ["Compress<axis = 0>(i, b)"],
    "Concat": ["Concat<axis = 1>(m, n)", "Concat<axis = 0>(f, g)"],
    "ConstantOfShape": ["ConstantOfShape<value = float[1] {2.5}>(shape)"],
    "CumSum": ["CumSum(m, k1)", "CumSum<exclusive = 1, reverse = 1>(i, zero)"],
    "Div": ["Div(i, j)", "Div(f, g)", "Div(i, k)"],
    "Equal": ["Equal(i, k)", "Equal(f, g)"],
    "Expand": ["Expand(k, shape)", "Expand(one, shape)"],
    "Flatten": ["Flatten(m)"],
    "Floor": ["Floor(f)"],
    "Gather": ["Gather<axis = 1>(m, pick)", "Gather(i, k)", "Gather(f, pick)"],
    "GatherND": ["GatherND(m, rows)"],
    "Greater": ["Greater(i, j)"],
    "GreaterOrEqual": ["GreaterOrEqual(f, g)"],
    "Identity": ["Identity(m)"],
    "Less": ["Less(f, g)"],
    "LessOrEqual": ["LessOrEqual(i, j)"],
    "Max": ["Max(i, j, k)", "Max(f, g)"],
    "Min": ["Min(i, k)", "Min(f, g)"],
    "Mod": ["Mod(i, j)", "Mod<fmod = 1>(i, j)", "Mod(i, k)"],
    "Mul": ["Mul(i, j)", "Mul(f, g)"],
    "Neg": ["Neg(i)", "Neg(f)"],
    "NonZero": ["NonZero(b)", "NonZero(m)"],
    "Not": ["Not(b)"],
    "Or": ["Or(b, c)"],
    "Range": ["Range(zero, k, step)", "Range(k, zero, minus)"],
    "ReduceMax": ["ReduceMax<keepdims = 0>(m)"],
    "ReduceMin": ["ReduceMin(m, one)"],
    "ReduceProd": ["ReduceProd<keepdims = 0>(i)"],
    "ReduceSum": ["ReduceSum<keepdims = 0>(m, one)"],
    "Reshape": ["Reshape(f, shape)"],
    "ScatterElements": ["ScatterElements(m, rows, rows)"],
    "ScatterND": ["ScatterND(m, rows, m)"],
    "Shape": ["Shape(m)", "Shape<start = 1>(w)"],
    "Sign": ["Sign(i)", "Sign(f)"],
    "Size": ["Size(w)"],
    "Slice": ["Slice(i, one, end, axis, two)", "Slice(m, one, end, one)"],
    "Split": ["Split<axis = 0>(i, parts)"],
    "Sqrt": ["Sqrt(g2)"],
    "Squeeze": ["Squeeze(rows, one)", "Squeeze(one)"],
    "Sub": ["Sub(i, j)", "Sub(f, g)"],
    "Tile": ["Tile(m, shape)"],
    "Transpose": ["Transpose(m)"],
    "Trilu": ["Trilu<upper = 0>(m)", "Trilu(m, k)"],
    "Unsqueeze": ["Unsqueeze(i, one)"],
    "Where": ["Where(b, i, j)", "Where(b, f, g)"],
    "Xor": ["Xor(b, c)"],
}  # fmt: skip
FURTHER = """
  u = Constant<value = uint8[3] {1, 2, 3}>()
  k1 = Constant<value_int = 1>()
  minus = Constant<value_int = -1>()
  end = Constant<value_ints = [9223372036854775807]>()
  axis = Constant<value_ints = [0]>()
  two = Constant<value_ints = [2]>()
  parts = Constant<value_ints = [2, 4]>()
  g2 = Constant<value_floats = [3.0, 0.7, 0.1, 1.1, 49.0, 2.5]>()
"""


def test_every_operator_that_is_folded_has_a_case() -> None:
    assert set(CASES) == {d.op_type for d in REGISTRY.defs if d.folding is not None}


@pytest.mark.parametrize("call", [call for calls in CASES.values() for call in calls])
def test_a_folded_result_is_that_of_onnxruntime(call: str) -> None:
    outputs = "y, z" if call.startswith("Split") else "y"
    text = f"""g (float[n] x) => (float[n] r) <float[4, 5] w = {{{", ".join("1" * 20)}}}> {{
      {CONSTANTS} {FURTHER} {outputs} = {call} q = Cast<to = 1>(y) s = ReduceSum<keepdims = 0>(q)
      h = ReduceSum<keepdims = 0>(w) t = Add(s, h) r = Add(x, t)
    }}"""
    text = text.replace("q = Cast", "p = Identity(z) q = Cast") if "z" in outputs else text
    proto = model_of(text)
    model = folded(text)
    # Floating-point sums are the kernels' own, and the weight's, so the last nodes stay.
    assert "q" in model.graph.initializers, operators(model)
    names = ["y", *(["z"] if "z" in outputs else [])]
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("q", *names))
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options)
    expected, *_ = session.run(None, {"x": np.zeros(2, np.float32)})
    tensor = model.graph.initializers["q"].const_value
    assert tensor is not None
    np.testing.assert_array_equal(tensor.numpy(), expected, strict=True)


def kept_text(body: str, weights: str = "float[4, 4] w") -> str:
    return f"""g (float[n, 4] x) => (float[n, 4] y) <{weights} = {{{", ".join("1" * 16)}}}> {{
      {body}
    }}"""


@pytest.mark.parametrize(
    ("body", "left"),
    [
        # A weight stays, and what is made of it.
        ("t = Transpose(w) y = MatMul(x, t)", ["Transpose", "MatMul"]),
        ("c = Cast<to = 11>(w) d = Cast<to = 1>(c) y = MatMul(x, d)", ["Cast", "Cast", "MatMul"]),
        # Its sizes do not depend on its elements.
        ("s = Shape(w) e = Expand(x, s) t = MatMul(e, w) y = Add(x, t)",
         ["Expand", "MatMul", "Add"]),
        # A constant in the graph is no parameter.
        ("c = Constant<value_float = 16.0>() r = Sqrt(c) t = MatMul(x, w) y = Div(t, r)",
         ["MatMul", "Div"]),
        # What is drawn at random, or rounded by a kernel, is unknown before it runs.
        ("c = Constant<value_float = 16.0>() r = Exp(c) t = MatMul(x, w) y = Div(t, r)",
         ["Exp", "MatMul", "Div"]),
        ("c = Constant<value_ints = [4]>() r = RandomNormal<shape = [4]>() t = MatMul(x, w) "
         "y = Add(t, r)", ["RandomNormal", "MatMul", "Add"]),
    ],
)  # fmt: skip
def test_what_is_folded(body: str, left: list[str]) -> None:
    model = normalise(ir.from_proto(model_of(kept_text(body))))
    assert sorted(operators(model)) == sorted(left)


def test_a_result_of_the_model_is_still_made_by_a_node() -> None:
    model = folded(
        """g (float[n] x) => (float[n] y, int64[2] z) {
          c = Constant<value_ints = [1, 2]>() z = Add(c, c) y = Relu(x)
        }"""
    )
    assert sorted(operators(model)) == ["Add", "Relu"]


def test_what_is_large_stays() -> None:
    count = FOLD_BYTES // 8
    for length, expected in ((count, []), (count + 1, ["Range"])):
        model = folded(
            f"""g (int64[n, {length}] x) => (int64[n, {length}] y) {{
              zero = Constant<value_int = 0>() one = Constant<value_int = 1>()
              end = Constant<value_int = {length}>() r = Range(zero, end, one) y = Add(x, r)
            }}"""
        )
        assert operators(model) == [*expected, "Add"]


def test_a_type_that_inference_finds_is_folded_by() -> None:
    """As PyTorch writes `arange` without simplification; the sizes of its result are numbers."""
    text = """g (float[n, 128] x) => (float[n, 128] y) {
      start = Constant<value_int = 0>() end = Constant<value_int = 128>()
      one = Constant<value_int = 1>() h = Relu(x)
      a = CastLike(start, h) b = CastLike(end, h) d = CastLike(one, h)
      r = Range(a, b, d) y = Add(h, r)
    }"""
    model = model_of(text)
    for value in model.graph.value_info:
        model.graph.value_info.remove(value)
    env = analyse(ir.from_proto(model), {}).env
    assert [str(size) for size in env.shapes["r"]] == ["128"]


def test_folded_constants_are_not_reported_as_parameters() -> None:
    text = kept_text(
        "c = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>() k = Constant<value_float = 2.0>() "
        "p = Mul(c, k) t = MatMul(x, w) y = Add(t, p)"
    )
    found: Any = read_parameters(ir.from_proto(model_of(text)))
    assert "p" in found.model.graph.initializers
    selection = select(found.model, REGISTRY)
    assert [tensor.name for tensor in selection.tensors] == ["w"]
