"""Softmax cross-entropy and its gradient, and the gradient of Gather, against float64 numpy."""

from typing import NamedTuple

import numpy as np
import onnxruntime
import pytest

from tests.runtime.kernels.one_node import GATHERS, Attribute, Run, log_softmax, model_of

TYPES = [np.float32, np.float64]
UNIT = {np.float32: 2.0**-24, np.float64: 2.0**-53}
WEIGHTS = [(weighted, ignore) for weighted in (False, True) for ignore in (None, -100, 1)]
SHAPES = [(6, 5), (4, 8193), (3, 4, 7), (2, 3, 2, 200), (0, 4)]


class Case(NamedTuple):
    """Scores of a shape and type; their labels and weights, and the reduction of the loss."""

    shape: tuple[int, ...]
    reduction: str
    weighted: bool
    ignore: int | None
    dtype: type[np.floating]

    def sample(
        self,
    ) -> tuple[np.ndarray, np.ndarray, list[np.ndarray], dict[str, Attribute]]:
        """Returns scores, labels, the weights if any, and attributes."""
        rng = np.random.default_rng(6)
        places = (self.shape[0], *self.shape[2:])
        labels = rng.integers(0, self.shape[1], places)
        if self.ignore is not None:
            labels[rng.random(places) < 0.3] = self.ignore
        weights = [rng.random(self.shape[1]).astype(self.dtype)] if self.weighted else []
        attributes: dict[str, Attribute] = {"reduction": self.reduction}
        if self.ignore is not None:
            attributes["ignore_index"] = self.ignore
        scores = 4 * rng.standard_normal(self.shape)
        return scores.astype(self.dtype), labels, weights, attributes


CASES = [
    Case(shape, reduction, weighted, ignore, dtype)
    for shape in SHAPES
    for reduction in ("mean", "sum", "none")
    for weighted, ignore in WEIGHTS
    for dtype in TYPES
]


@pytest.mark.parametrize("case", [case for case in CASES if 0 not in case.shape], ids=str)
def test_forward(run: Run, case: Case) -> None:
    scores, labels, weights, attributes = case.sample()
    dtype, reduction, ignore = case.dtype, case.reduction, case.ignore
    name = "SoftmaxCrossEntropyLoss"
    inputs = [scores, labels, *weights]
    loss, log_prob = run(name, *inputs, outputs=[True, True], **attributes)
    assert loss.dtype == log_prob.dtype == dtype
    wanted = log_softmax(scores.astype(np.float64), 1)
    # Scores are below 32; the sum of exponentials errs by less than 64 units, as does its
    # logarithm, absolutely.
    bound = UNIT[dtype] * (32 + 64)
    np.testing.assert_allclose(log_prob, wanted, rtol=0, atol=bound)
    counted = labels != ignore
    safe = np.where(counted, labels, 0)
    weight = counted * (weights[0].astype(np.float64)[safe] if weights else 1.0)
    each = -np.take_along_axis(wanted, np.expand_dims(safe, 1), 1).squeeze(1) * weight
    total = {"none": each, "sum": each.sum(), "mean": each.sum() / weight.sum()}[reduction]
    atol = bound * (labels.size if reduction == "sum" else 1)
    # Losses and weights are added one after the other, in float64.
    rtol = 2 * UNIT[dtype] + 2 * labels.size * 2.0**-53
    np.testing.assert_allclose(loss, total, rtol=rtol, atol=atol)
    (alone,) = run(name, *inputs, **attributes)
    np.testing.assert_array_equal(alone, loss)
    if dtype == np.float32:
        # What the function of the same name says, onnxruntime's own operator.
        model = model_of(name, inputs, [True, True], attributes)
        model.graph.node[0].domain = ""
        own = onnxruntime.InferenceSession(
            model.SerializeToString(), providers=["CPUExecutionProvider"]
        )
        theirs = own.run(None, {f"i{i}": x for i, x in enumerate(inputs)})
        # Both have the error of a float32 loss; the sum over the rows adds some units of 2^-24.
        np.testing.assert_allclose(loss, theirs[0], rtol=1e-5, atol=2 * atol)
        np.testing.assert_allclose(log_prob, theirs[1], rtol=0, atol=2 * bound)


def test_mean_over_nothing_is_no_number(run: Run) -> None:
    scores, labels = np.ones((2, 3), np.float32), np.full(2, -1)
    (loss,) = run("SoftmaxCrossEntropyLoss", scores, labels, ignore_index=-1)
    assert np.isnan(loss)
    (loss,) = run("SoftmaxCrossEntropyLoss", scores, labels, ignore_index=-1, reduction="sum")
    assert loss == 0


def test_no_samples(run: Run) -> None:
    loss, log_prob = run(
        "SoftmaxCrossEntropyLoss",
        np.ones((0, 3), np.float32),
        np.ones(0, np.int64),
        outputs=[True, True],
        reduction="none",
    )
    assert loss.shape == (0,)
    assert log_prob.shape == (0, 3)


def test_long_rows(run: Run) -> None:
    # Equal terms round the same way each time: one running sum in each of 8 lanes is off by 519
    # units here, and a single one by 3590.
    scores = np.full((3, 50257), -1.1, np.float32)
    scores[:, 0] = 0
    _, log_prob = run(
        "SoftmaxCrossEntropyLoss", scores, np.zeros(3, np.int64), outputs=[True, True]
    )
    # Half of the last digit of numbers between 8 and 16, for the logarithm and for the result, is 8
    # units each; the sum is one of blocks of 256 and has a few times less than their number, 197.
    bound = 2.0**-24 * (8 + 8 + 197 / 3)
    np.testing.assert_allclose(log_prob, log_softmax(scores.astype(float), 1), rtol=0, atol=bound)


def test_large_scores(run: Run) -> None:
    scores = np.array([[1e4, 0, -1e4], [-1e30, -1e30, -1e30]], np.float32)
    (loss,) = run("SoftmaxCrossEntropyLoss", scores, np.array([1, 2]), reduction="none")
    # A sum of three, a logarithm and a difference: at most 4 roundings of 2^-24.
    np.testing.assert_allclose(loss, [1e4, np.log(3)], rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradient(run: Run, case: Case) -> None:
    scores, labels, weights, attributes = case.sample()
    dtype, shape, reduction = case.dtype, case.shape, case.reduction
    y = (log_softmax(scores.astype(np.float64), 1) if scores.size else scores).astype(dtype)
    rng = np.random.default_rng(7)
    dloss = rng.standard_normal(labels.shape if reduction == "none" else ()).astype(dtype)
    (dx,) = run("SoftmaxCrossEntropyLossGrad", dloss, y, labels, *weights, **attributes)
    counted = labels != case.ignore
    safe = np.where(counted, labels, 0)
    factor = counted * (weights[0].astype(np.float64)[safe] if weights else 1.0)
    if reduction == "mean":
        factor = factor / max(factor.sum(), 1e-300)
    factor = factor * dloss.astype(np.float64)
    hot = np.zeros(shape)
    np.put_along_axis(hot, np.expand_dims(safe, 1), 1, 1)
    want = (np.exp(y.astype(np.float64)) - hot) * np.expand_dims(factor, 1)
    # exp errs by 2 units of at most 1, and the factor, the difference and the product by 4 more.
    np.testing.assert_allclose(
        dx, want, rtol=0, atol=UNIT[dtype] * 8 * max(1, np.abs(factor).max(initial=0))
    )


def test_loss_where_nothing_counts(run: Run) -> None:
    y = np.full((2, 3), np.log(1 / 3), np.float32)
    labels = np.full(2, -1)
    (dx,) = run(
        "SoftmaxCrossEntropyLossGrad", np.float32(1).reshape(()), y, labels, ignore_index=-1
    )
    np.testing.assert_array_equal(dx, np.zeros((2, 3)))


def test_loss_of_impossible_classes(run: Run) -> None:
    y = np.array([[0.0, -np.inf, -200.0]], np.float32)
    (dx,) = run("SoftmaxCrossEntropyLossGrad", np.ones((), np.float32), y, np.array([0]))
    np.testing.assert_array_equal(dx, [[0, 0, 0]])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "places", "axis"), GATHERS, ids=str)
def test_gather(
    run: Run,
    shape: tuple[int, ...],
    places: tuple[int, ...],
    axis: int,
    dtype: type[np.floating],
) -> None:
    rng = np.random.default_rng(10)
    rows = shape[axis]
    # Few different ones, so that many meet, and of both signs.
    few = rng.integers(-rows, max(rows, 1), 5)
    indices = np.asarray(rng.choice(few, places) if rows else np.zeros(places), np.int64)
    at = axis % len(shape)
    # Multiples of 1/8 below 4 add up exactly.
    dy = (rng.integers(-31, 32, (*shape[:at], *places, *shape[at + 1 :])) / 8).astype(dtype)
    (dx,) = run("GatherGrad", dy, indices, np.full(shape, np.nan, dtype), axis=axis)
    want = np.zeros(shape, dtype)
    rest = tuple(range(at, at + len(places)))
    np.add.at(np.moveaxis(want, at, 0), indices, np.moveaxis(dy, rest, tuple(range(len(places)))))
    assert dx.dtype == dtype
    np.testing.assert_array_equal(dx, want)
