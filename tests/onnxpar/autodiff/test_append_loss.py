"""Losses appended to small models and run on one device, against numpy in float64 and PyTorch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx.reference
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from onnxpar.autodiff.append_loss import (
    CORRECT,
    LOSS,
    LOSS_WEIGHT,
    LossKind,
    LossSpec,
    append_loss,
    append_metrics,
    parse_loss,
)
from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import as_dim
from onnxpar.frontend.load import normalise

Array = NDArray[Any]
CLASSES = 5
SHAPES = {"rows": (6,), "positions": (3, 4)}
NAMES = {"rows": "n", "positions": "b, s"}


def read(text: str, opset: int = 18) -> ir.Model:
    head = f'<ir_version: 10, opset_import: ["": {opset}]>\n'
    return normalise(ir.serde.deserialize_model(onnx.parser.parse_model(head + text)))


def identity(form: str, dtype: str = "float", opset: int = 18, more: str = "") -> ir.Model:
    """A model whose output `y` is its input `x`, with the classes last."""
    dims = f"{NAMES[form]}, {CLASSES}"
    return read(f"g ({dtype}[{dims}] x{more}) => ({dtype}[{dims}] y) {{ y = Identity(x) }}", opset)


REPLICATED = {LOSS_WEIGHT: np.array(1, np.float32)}
"""One micro-batch is all of its step."""


def run(model: ir.Model, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Runs a model, checked against ONNX's own inference first."""
    proto = ir.serde.serialize_model(model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(
        proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    names = [output.name for output in session.get_outputs()]
    feed = {**REPLICATED, **feed} if LOSS in names else feed
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def reference(model: ir.Model, feed: Mapping[str, Array]) -> dict[str, Array]:
    """Runs a model in ONNX's own evaluator."""
    evaluator = onnx.reference.ReferenceEvaluator(ir.serde.serialize_model(model))
    feed = {**REPLICATED, **feed} if LOSS in evaluator.output_names else feed
    return dict(zip(evaluator.output_names, evaluator.run(None, dict(feed)), strict=True))


def shapes_are_inferred(model: ir.Model) -> None:
    """What inference finds for the new values is what was set on them."""
    again = normalise(ir.serde.deserialize_model(ir.serde.serialize_model(model)))
    found = {out.name: out for node in again.graph for out in node.outputs}
    for node in model.graph:
        for out in node.outputs:
            assert out.shape is not None and out.dtype is not None
            other = found[out.name]
            assert other.shape is not None
            assert other.dtype == out.dtype
            assert [size(d) for d in out.shape] == [size(d) for d in other.shape], out.name


def size(dim: int | ir.SymbolicDim) -> object:
    return as_dim(dim if isinstance(dim, int) else dim.value)


def draw(form: str, seed: int = 0, spread: float = 3.0) -> Array:
    rng = np.random.default_rng(seed)
    return spread * rng.standard_normal((*SHAPES[form], CLASSES))


def labels_of(form: str, ignored: int | None) -> Array:
    """Labels of every class; two of them the ignored one."""
    labels = np.arange(np.prod(SHAPES[form]), dtype=np.int64) % CLASSES
    if ignored is not None:
        labels[[1, -1]] = ignored
    return labels.reshape(SHAPES[form])


def cross_entropy(x: Array, labels: Array, ignored: int | None) -> float:
    rows, wanted = x.reshape(-1, CLASSES), labels.ravel()
    kept = np.ones(len(rows), bool) if ignored is None else wanted != ignored
    powers = np.exp(rows[kept])
    picked = powers[np.arange(kept.sum()), wanted[kept]]
    return float(np.mean(-np.log(picked / powers.sum(1))))


def softplus(x: Array) -> Array:
    return np.logaddexp(0, x)


ELEMENTWISE = {
    LossKind.MSE: lambda x, y: np.mean((x - y) ** 2),
    LossKind.MAE: lambda x, y: np.mean(np.abs(x - y)),
    LossKind.BCE: lambda x, y: np.mean(y * softplus(-x) + (1 - y) * softplus(x)),
}

# Rounding of a mean of some 60 terms of like size, computed in float32 (16-bit types included: the
# operands are widened) or float64.
TOLERANCE = {"float": 1e-6, "float16": 1e-6, "double": 1e-14}
NUMPY = {"float": np.float32, "float16": np.float16, "double": np.float64}


@pytest.mark.parametrize("weight", [1.0, 0.25])
@pytest.mark.parametrize("ignored", [None, -100, 2])
@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("form", SHAPES)
def test_softmax_cross_entropy(form: str, dtype: str, ignored: int | None, weight: float) -> None:
    spec = LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY, ignore_index=ignored)
    info = append_loss(identity(form, dtype), spec)
    shapes_are_inferred(info.model)
    x, labels = draw(form).astype(NUMPY[dtype]), labels_of(form, ignored)
    feed = {"x": x, "labels": labels, LOSS_WEIGHT: np.array(weight, np.float32)}
    got = run(info.model, feed)[LOSS]
    assert got.dtype == np.float32 and got.shape == ()
    expected = weight * cross_entropy(x.astype(np.float64), labels, ignored)
    assert float(got) == pytest.approx(expected, rel=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("form", SHAPES)
@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_elementwise_losses(kind: LossKind, form: str, dtype: str) -> None:
    info = append_loss(identity(form, dtype), LossSpec(kind))
    shapes_are_inferred(info.model)
    x = draw(form).astype(NUMPY[dtype])
    y = np.random.default_rng(1).random(x.shape).astype(x.dtype)
    feed = {"x": x, "labels": y, LOSS_WEIGHT: np.array(0.5, np.float32)}
    # onnxruntime has no float64 Softplus on a CPU.
    evaluate = reference if kind is LossKind.BCE and dtype == "double" else run
    got = evaluate(info.model, feed)[LOSS]
    assert got.dtype == (np.float64 if dtype == "double" else np.float32)
    expected = 0.5 * ELEMENTWISE[kind](x.astype(np.float64), y.astype(np.float64))
    assert float(got) == pytest.approx(float(expected), rel=TOLERANCE[dtype])


@pytest.mark.parametrize("form", SHAPES)
def test_losses_are_pytorchs(form: str) -> None:
    torch = pytest.importorskip("torch")
    functions = torch.nn.functional
    x = draw(form).astype(np.float32)
    y = np.random.default_rng(1).random(x.shape).astype(np.float32)
    labels = labels_of(form, -100)
    flat = torch.from_numpy(x).reshape(-1, CLASSES)
    theirs = {
        LossKind.SOFTMAX_CROSS_ENTROPY: functions.cross_entropy(
            flat, torch.from_numpy(labels).ravel(), ignore_index=-100
        ),
        LossKind.MSE: functions.mse_loss(torch.from_numpy(x), torch.from_numpy(y)),
        LossKind.MAE: functions.l1_loss(torch.from_numpy(x), torch.from_numpy(y)),
        LossKind.BCE: functions.binary_cross_entropy_with_logits(
            torch.from_numpy(x), torch.from_numpy(y)
        ),
    }
    for kind, value in theirs.items():
        classes = kind is LossKind.SOFTMAX_CROSS_ENTROPY
        spec = LossSpec(kind, ignore_index=-100 if classes else None)
        info = append_loss(identity(form), spec)
        got = run(info.model, {"x": x, "labels": labels if classes else y})[LOSS]
        # Both sides round.
        assert float(got) == pytest.approx(float(value), rel=2 * TOLERANCE["float"])


def test_binary_cross_entropy_of_sure_predictions_is_exact() -> None:
    info = append_loss(
        read("g (float[n] x) => (float[n] y) { y = Identity(x) }"),
        LossSpec(LossKind.BCE),
    )
    for x, label in ((-80.0, 0.0), (80.0, 1.0), (-20.0, 0.0), (20.0, 1.0), (200.0, 0.0)):
        feed = {"x": np.full(3, x, np.float32), "labels": np.full(3, label, np.float32)}
        expected = np.logaddexp(0, x if label == 0 else -x)
        got = float(run(info.model, feed)[LOSS])
        # An exponential, a logarithm and a mean of three: a few roundings of 2^-24. At -200 the
        # exponential is 0 in float32, whose least normal number is 1e-38.
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-37)


@pytest.mark.parametrize("opset", [13, 17, 18, 22])
@pytest.mark.parametrize("kind", [k for k in LossKind if k is not LossKind.OUTPUT])
def test_opsets(kind: LossKind, opset: int) -> None:
    info = append_loss(identity("positions", opset=opset), LossSpec(kind))
    append_metrics(info)
    shapes_are_inferred(info.model)
    x = draw("positions").astype(np.float32)
    classes = kind is LossKind.SOFTMAX_CROSS_ENTROPY
    labels = labels_of("positions", None) if classes else np.full_like(x, 0.5)
    feed = {"x": x, "labels": labels, LOSS_WEIGHT: np.array(1, np.float32)}
    assert np.isfinite(run(info.model, feed)[LOSS])


# -- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("ignored", [None, -100, 2])
@pytest.mark.parametrize("form", SHAPES)
def test_correct_counts_what_argmax_hits(form: str, ignored: int | None, dtype: str) -> None:
    spec = LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY, ignore_index=ignored)
    info = append_loss(identity(form, dtype), spec)
    assert append_metrics(info) == (CORRECT,)
    shapes_are_inferred(info.model)
    # Few different numbers, so that there are ties, of which the first counts.
    rng = np.random.default_rng(0)
    rows = {"rows": (40,), "positions": (5, 8)}[form]
    x = rng.integers(-1, 2, (*rows, CLASSES)).astype(NUMPY[dtype])
    labels = rng.integers(0, CLASSES, rows)
    if ignored is not None:
        labels[::3] = ignored
    got = run(info.model, {"x": x, "labels": labels})
    assert list(got) == ["y", LOSS, CORRECT]
    hits = np.argmax(x, axis=-1) == labels
    ties = (x == x.max(-1, keepdims=True)).sum(-1) > 1
    assert (ties & hits).any() and (ties & ~hits).any()
    if ignored is not None:
        assert (hits & (labels == ignored)).any() or ignored < 0
        hits &= labels != ignored
    assert got[CORRECT].dtype == np.int64
    assert int(got[CORRECT]) == hits.sum() > 0


@pytest.mark.parametrize(
    ("dims", "rows"), [("n, n", (5,)), ("n, c", (7,)), ("b, s, s", (3, 5)), ("b, s, c", (3, 4))]
)
def test_how_many_classes_may_be_symbolic(dims: str, rows: tuple[int, ...]) -> None:
    """As of the logits of a contrastive loss, [batch, batch]."""
    text = f"g (float[{dims}] x) => (float[{dims}] y) {{ y = Identity(x) }}"
    info = append_loss(read(text), LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY, ignore_index=-100))
    append_metrics(info)
    shapes_are_inferred(info.model)
    assert info.count == as_dim(dims.rpartition(",")[0].replace(",", "*"))
    rng = np.random.default_rng(0)
    x = rng.integers(-1, 2, (*rows, CLASSES)).astype(np.float32)
    # A label is right, wrong or ignored.
    labels = np.where(rng.random(rows) < 0.5, np.argmax(x, -1), rng.integers(0, CLASSES, rows))
    labels.flat[0] = -100
    got = run(info.model, {"x": x, "labels": labels})
    expected = cross_entropy(x.astype(np.float64), labels, -100)
    assert float(got[LOSS]) == pytest.approx(expected, rel=TOLERANCE["float"])
    assert int(got[CORRECT]) == (np.argmax(x, -1) == labels).sum() > 0


def test_only_classes_have_metrics() -> None:
    info = append_loss(identity("rows"), LossSpec(LossKind.MSE))
    assert append_metrics(info) == ()


# -- inputs, outputs, counts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "kind", "count", "labels"),
    [
        ("rows", LossKind.SOFTMAX_CROSS_ENTROPY, "n", ["n"]),
        ("positions", LossKind.SOFTMAX_CROSS_ENTROPY, "b*s", ["b", "s"]),
        ("positions", LossKind.MSE, "5*b*s", ["b", "s", 5]),
    ],
)
def test_labels_have_the_dims_of_the_output(
    form: str, kind: LossKind, count: str, labels: list[object]
) -> None:
    info = append_loss(identity(form), LossSpec(kind))
    (value,) = [v for v in info.model.graph.inputs if v.name == info.labels]
    assert value.shape is not None
    assert [d if isinstance(d, int) else d.value for d in value.shape] == labels
    assert info.count == as_dim(count)
    assert info.spec.output == "y"
    assert [v.name for v in info.model.graph.inputs] == ["x", "labels", LOSS_WEIGHT]
    assert [v.name for v in info.model.graph.outputs] == ["y", LOSS]


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_labels_may_be_an_input_of_the_model(dtype: str) -> None:
    model = identity("positions", more=f", {dtype}[b, s] wanted")
    spec = LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY, label_input="wanted")
    info = append_loss(model, spec)
    append_metrics(info)
    assert info.labels == "wanted"
    assert [v.name for v in info.model.graph.inputs] == ["x", "wanted", LOSS_WEIGHT]
    x, labels = draw("positions").astype(np.float32), labels_of("positions", None)
    got = run(info.model, {"x": x, "wanted": labels.astype(dtype)})
    # A log-softmax of 5 classes and a mean of 12 rows: at most 17 roundings of 2^-24.
    assert float(got[LOSS]) == pytest.approx(cross_entropy(x, labels, None), rel=1e-6)
    assert int(got[CORRECT]) == (np.argmax(x, -1) == labels).sum()


@pytest.mark.parametrize("dims", ["", "[1]", "[1, 1]"])
@pytest.mark.parametrize("weight", [0.5, 1.0])
def test_a_scalar_of_the_model(dims: str, weight: float) -> None:
    model = read(
        f"g (float[n] x, float{dims} scale) => (float[n] y, float{dims} total)"
        "{ y = Relu(x) s = ReduceSum<keepdims=0>(y) total = Mul(s, scale) }"
    )
    info = append_loss(model, LossSpec(LossKind.OUTPUT, output="total"))
    shapes_are_inferred(info.model)
    assert info.labels is None and info.count is None
    scale = np.full([1] * dims.count("1"), 2, np.float32)
    feed = {"x": np.array([1, -2, 3], np.float32), "scale": scale}
    feed[LOSS_WEIGHT] = np.array(weight, np.float32)
    got = run(info.model, feed)
    assert got[LOSS].shape == () and float(got[LOSS]) == 8 * weight
    assert got["total"].shape == scale.shape


def test_the_output_is_the_one_that_is_named() -> None:
    model = read(
        "g (float[n, 3] x) => (float[n, 3] y, float[n, 3] z) { y = Neg(x) z = Identity(x) }"
    )
    info = append_loss(model, LossSpec(LossKind.MSE, output="z"))
    x = np.ones((2, 3), np.float32)
    assert float(run(info.model, {"x": x, "labels": x})[LOSS]) == 0


PLAIN = "g (float[n, 5] x) => (float[n, 5] y) { y = Identity(x) }"
REFUSED = {
    "no such output": (PLAIN, LossSpec(LossKind.MSE, "yy"), r"got 'yy'; nearest: 'y'"),
    "rank 1": (
        "g (float[n] x) => (float[n] y) { y = Identity(x) }",
        LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY),
        r"output 'y': expected \[N, C\] or .* got \[n\]",
    ),
    "rank 4": (
        "g (float[n, 5, 2, 2] x) => (float[n, 5, 2, 2] y) { y = Identity(x) }",
        LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY),
        r"got \[n, 5, 2, 2\]; for other forms",
    ),
    "integers": (
        "g (int64[n] x) => (int64[n] y) { y = Identity(x) }",
        LossSpec(LossKind.MSE),
        "expected a floating type, got int64",
    ),
    "no scalar": (PLAIN, LossSpec(LossKind.OUTPUT, "y"), r"output:y: expected a scalar"),
    "name taken by an input": (
        "g (float[n, 5] x, int64[n] labels) => (float[n, 5] y) { y = Identity(x) }",
        LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY),
        "name it with --label-input",
    ),
    "name taken by a value": (
        "g (float[n, 5] x) => (float[n, 5] y) { labels = Neg(x) y = Neg(labels) }",
        LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY),
        "rename it in the model",
    ),
    "no such label input": (
        PLAIN,
        LossSpec(LossKind.MSE, label_input="lab"),
        r"expected an input of the model for the labels, got 'lab'; there is only 'x'",
    ),
    "labels of another type": (
        "g (float[n, 5] x, float[n] l) => (float[n, 5] y) { y = Identity(x) }",
        LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY, label_input="l"),
        "label input 'l': expected int64 or int32, got float",
    ),
    "labels of another rank": (
        "g (float[n, 5] x, int64[n, 5] l) => (float[n, 5] y) { y = Identity(x) }",
        LossSpec(LossKind.SOFTMAX_CROSS_ENTROPY, label_input="l"),
        r"expected the shape \[n\] of output 'y' without its classes, got \[n, 5\]",
    ),
    "labels of another size": (
        "g (float[n, 5] x, float[n, 4] l) => (float[n, 5] y) { y = Identity(x) }",
        LossSpec(LossKind.MSE, label_input="l"),
        r"expected the shape \[n, 5\] of output 'y', got \[n, 4\]",
    ),
    "an ignored label without classes": (
        PLAIN,
        LossSpec(LossKind.MSE, ignore_index=-1),
        "--ignore-index needs the loss softmax_cross_entropy",
    ),
    "labels of a scalar": (
        PLAIN,
        LossSpec(LossKind.OUTPUT, "y", label_input="x"),
        "this loss takes no labels, got the label input 'x'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    text, spec, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        append_loss(read(text), spec)


def test_refused_for_reserved_names() -> None:
    model = append_loss(identity("rows"), LossSpec(LossKind.MSE)).model
    with pytest.raises(ModelError, match=r"the model uses the reserved name 'onnxpar.loss'"):
        append_loss(model, LossSpec(LossKind.MAE, output="y", label_input="labels"))


def test_the_command_lines_words() -> None:
    assert parse_loss("mse") == LossSpec(LossKind.MSE)
    assert parse_loss("output:a:b") == LossSpec(LossKind.OUTPUT, "a:b")
    assert parse_loss("softmax_cross_entropy:logits", label_input="t", ignore_index=3) == LossSpec(
        LossKind.SOFTMAX_CROSS_ENTROPY, "logits", "t", 3
    )
    for text, message in (
        ("hinge", "expected one of softmax_cross_entropy, mse, mae, bce, output, got 'hinge'"),
        ("mse:", "name of an output after the colon"),
        ("output", "expected output:NAME"),
    ):
        with pytest.raises(ModelError, match=message):
            parse_loss(text)
