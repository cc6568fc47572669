"""How onnxruntime sees the kernels: functions of the same name, shapes, memory and errors."""

from contextlib import nullcontext

import numpy as np
import onnxruntime
import pytest
from onnx import parser

from onnxpar_runtime.collectives import World
from onnxpar_runtime.library import custom_op_library
from onnxpar_runtime.wanted_operators import want_operators
from tests.runtime.kernels.one_node import Attribute, Run, model_of, session

HEADER = '<ir_version: 10, opset_import: ["" : 21, "onnxpar" : 1]>\n'
# A function that is wrong on purpose, so that it shows which of the two was taken.
MARKED = """
g ({0}[n] dy, {0}[n] y) => ({0}[n] dx) {{ dx = onnxpar.ReluGrad (dy, y) }}
<domain: "onnxpar", opset_import: ["" : 21]>
ReluGrad (dy, y) => (dx) {{ dx = Add (dy, y) }}
"""


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("level", ["ORT_DISABLE_ALL", "ORT_ENABLE_ALL"])
def test_kernel_before_function(dtype: type[np.floating], level: str) -> None:
    names = {np.float32: "float", np.float64: "double", np.float16: "float16"}
    model = parser.parse_model(HEADER + MARKED.format(names[dtype]))
    dy, y = np.array([1, 2], dtype), np.array([-3, 4], dtype)
    feeds = {"dy": dy, "y": y}
    (with_kernel,) = session(model).run(None, feeds)
    np.testing.assert_array_equal(with_kernel, np.array([0, 2], dtype))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    without = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    np.testing.assert_array_equal(without.run(None, feeds)[0], np.array([-2, 6], dtype))


def test_registered_with_a_rank() -> None:
    model = model_of("SquareSum", [np.ones(3, np.float32)], [True], {})
    with World.threads(1) as world:
        options = onnxruntime.SessionOptions()
        world.rank(0).register(options)
        made = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        assert made.run(None, {"i0": np.full(3, 2, np.float32)})[0] == 12


def test_only_what_the_options_name() -> None:
    model = model_of("SquareSum", [np.ones(3, np.float32)], [True], {})
    for names in ("SquareSum", "ReluGrad,SquareSum,NoSuchOperator", "ReluGrad", ""):
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("onnxpar.operators", names)
        options.register_custom_ops_library(str(custom_op_library()))
        absent = pytest.raises(Exception, match=r"SquareSum.* is not a registered")
        with nullcontext() if "SquareSum" in names.split(",") else absent:
            onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )


def test_operators_of_bodies_and_functions_are_wanted() -> None:
    text = """
    g (float[n] x, bool c) => (float[n] y) {
      z = own.F (x)
      y = If (c) <
        then_branch = t () => (a) { a = onnxpar.ReluGrad (z, z) },
        else_branch = e () => (b) { b = Neg (z) }
      >
    }
    <domain: "own", opset_import: ["" : 21, "onnxpar" : 1]>
    F (x) => (y) { y = onnxpar.TanhGrad (x, x) }"""
    options = onnxruntime.SessionOptions()
    want_operators(options, parser.parse_model(HEADER.replace("]>", ', "own" : 1]>') + text))
    found = options.get_session_config_entry("onnxpar.operators")
    assert found.split(",") == ["ReluGrad", "TanhGrad"]


def test_inferred_shapes() -> None:
    text = """
    g (float[a, 4, 5] x, float[5] scale, float[a, 4, 1] mean, float[a, 4, 1] inv, double[] one,
       float[] x0, int64[a, 5] labels, float[9, 4, 5] scale2)
      => (float loss, float lp, float each, float dl, float table, float total, float dx, float y,
          float db, float p, float q) {
      dx, ds, db = onnxpar.LayerNormalizationGrad (x, x, scale, mean, inv)
      y = onnxpar.GeluGrad (dx, x)
      p = onnxpar.SgdStep (scale, db, one, one)
      loss, lp = onnxpar.SoftmaxCrossEntropyLoss (x, labels)
      each = onnxpar.SoftmaxCrossEntropyLoss <reduction = "none"> (x, labels)
      dl = onnxpar.SoftmaxCrossEntropyLossGrad (loss, lp, labels)
      table = onnxpar.GatherGrad (y, labels, scale2)
      q = onnxpar.SgdStep (x0, x0, one, one)
      total = onnxpar.SquareSum (dx, ds, db)
    }"""
    model = parser.parse_model(HEADER + text)
    for output in model.graph.output:
        output.ClearField("type")
    found = {y.name: (y.type, y.shape) for y in session(model).get_outputs()}
    assert found == {
        "loss": ("tensor(float)", []),
        "lp": ("tensor(float)", ["a", 4, 5]),
        "each": ("tensor(float)", ["a", 5]),
        "dl": ("tensor(float)", ["a", 4, 5]),
        "table": ("tensor(float)", [9, 4, 5]),
        "total": ("tensor(float)", []),
        "dx": ("tensor(float)", ["a", 4, 5]),
        "y": ("tensor(float)", ["a", 4, 5]),
        "db": ("tensor(float)", [5]),
        "p": ("tensor(float)", [5]),
        "q": ("tensor(float)", []),
    }


def test_gradient_takes_memory_only_where_nobody_reads_it() -> None:
    text = """
    g (float[n] x) => (float[n] a, float[n] b, float[n] c) {
      dy = Neg (x)
      a = onnxpar.TanhGrad (dy, x)
      dz = Neg (x)
      b = onnxpar.SigmoidGrad (dz, dz)
      c = Add (dy, dz)
    }"""
    x = np.linspace(-1, 1, 9, dtype=np.float32)
    a, b, c = session(parser.parse_model(HEADER + text)).run(None, {"x": x})
    # Three operations on each side, on numbers of at most 1: four roundings of 2^-24.
    np.testing.assert_allclose(a, -x * (1 - x * x), atol=4 * 2.0**-24)
    np.testing.assert_allclose(b, -x * -x * (1 + x), atol=4 * 2.0**-24)
    np.testing.assert_array_equal(c, -2 * x)


F = np.float32
X = np.zeros((2, 3), F)
LABELS = np.zeros(2, np.int64)
ONE = np.ones((), F)
D = np.ones(())
MISTAKES: dict[str, tuple[str, list[np.ndarray], dict[str, Attribute], str]] = {
    "shape": ("ReluGrad", [X, X[:1]], {}, r"y has shape \[1, 3\], expected \[2, 3\] as dy"),
    "types": ("ReluGrad", [X, X.astype(np.float64)], {}, "y is float64, expected float32"),
    "integers": ("TanhGrad", [LABELS, LABELS], {}, "dy is int64, expected float32, float64"),
    "axis": ("SoftmaxGrad", [X, X], {"axis": 2}, r"axis is 2 for a tensor of shape \[2, 3\]"),
    "no axis": ("LogSoftmaxGrad", [ONE, ONE], {}, r"axis is -1 for a tensor of shape \[\]"),
    "scale": (
        "LayerNormalizationGrad",
        [X, X, X[0, :2], X[:, :1], X[:, :1]],
        {},
        r"scale has shape \[2\], expected 3 elements",
    ),
    "mean": (
        "LayerNormalizationGrad",
        [X, X, X[0], X[0], X[:, :1]],
        {},
        r"mean has shape \[3\], expected 2 elements, one for each row",
    ),
    "reduction": ("SoftmaxCrossEntropyLossGrad", [ONE, X, LABELS], {"reduction": "max"}, "'max'"),
    "label": (
        "SoftmaxCrossEntropyLossGrad",
        [ONE, X, LABELS + 3],
        {},
        "label 0 is 3, expected one of 3 classes",
    ),
    "negative label": ("SoftmaxCrossEntropyLossGrad", [ONE, X, LABELS - 1], {}, "label 0 is -1"),
    "labels": (
        "SoftmaxCrossEntropyLossGrad",
        [ONE, X, np.zeros(3, np.int64)],
        {},
        r"labels has shape \[3\], expected \[2\]",
    ),
    "dloss": (
        "SoftmaxCrossEntropyLossGrad",
        [ONE, X, LABELS],
        {"reduction": "none"},
        r"dloss has shape \[\], expected \[2\] as labels",
    ),
    "weights": (
        "SoftmaxCrossEntropyLossGrad",
        [ONE, X, LABELS, X[0, :2]],
        {},
        r"weights has shape \[2\], expected 3 elements",
    ),
    "scores": (
        "SoftmaxCrossEntropyLoss",
        [X[0], LABELS],
        {},
        r"scores has shape \[3\], expected \[N, C, ...\]",
    ),
    "scores' label": ("SoftmaxCrossEntropyLoss", [X, LABELS + 3], {}, "label 0 is 3"),
    "index": ("GatherGrad", [X, LABELS - 5, X], {}, "index 0 is -5, expected one of 2 rows"),
    "rows": ("GatherGrad", [X, LABELS, X.T], {}, r"dy has shape \[2, 3\], expected \[2, 2\]"),
    "squares": ("SquareSum", [X, X.astype(np.float64)], {}, "an input is float64"),
    "lr": (
        "SgdStep",
        [X, X, D, X.astype(np.float64)],
        {},
        r"lr has shape \[2, 3\], expected one element",
    ),
    "gradient": ("SgdStep", [X, X[0], D, D], {}, r"g has shape \[3\], expected \[2, 3\] as p"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes(run: Run, mistake: str) -> None:
    op, inputs, attributes, message = MISTAKES[mistake]
    with pytest.raises(Exception, match=f"{op} 'node': .*{message}"):
        run(op, *inputs, **attributes)
