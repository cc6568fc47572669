"""Gradients of the cross-entropy losses."""

from typing import Any

import numpy as np
import pytest

from tests.onnxpar.ops.gradient_harness import GradCase

LOSS, NLL = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"
ROWS = {"x": "double[N,4]", "t": "int64[N]"}
PLACES = {"x": "double[N,4,S]", "t": "int64[N,S]"}


def loss(reduction: str, ignored: int = -100, function: str = "cross_entropy") -> Any:
    def run(torch: Any, x: Any, t: Any, w: Any = None) -> Any:
        made = getattr(torch.nn.functional, function)
        return made(x, t, w, reduction=reduction, ignore_index=ignored)

    return run


@pytest.mark.parametrize(
    ("inputs", "ignored", "opset"),
    [(ROWS, None, 20), (PLACES, None, 20), (ROWS, 1, 20), (PLACES, 1, 20), (PLACES, 1, 13)],
    ids=str,
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(
    reduction: str, inputs: dict[str, str], ignored: int | None, opset: int
) -> None:
    more = "" if ignored is None else f", ignore_index={ignored}"
    GradCase(
        f'y = {LOSS}<reduction="{reduction}"{more}>(x, t)',
        inputs,
        loss(reduction, -100 if ignored is None else ignored),
        opset=opset,
    ).check()


@pytest.mark.parametrize("name", [LOSS, NLL])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_classes(reduction: str, name: str) -> None:
    GradCase(
        f'y = {name}<reduction="{reduction}", ignore_index=1>(x, t, w)',
        PLACES,
        lambda torch, x, t: loss(reduction, 1, "cross_entropy" if name == LOSS else "nll_loss")(
            torch, x, t, torch.tensor([0.5, 2, 1, 0.25], dtype=torch.double)
        ),
        consts={"w": np.array([0.5, 2, 1, 0.25])},
    ).check()


def test_labels_of_32_bits() -> None:
    GradCase(f"y = {LOSS}(x, t)", {"x": "double[N,4]", "t": "int32[N]"}).check()


def test_log_probabilities_are_read_too() -> None:
    GradCase(
        f"l, p = {LOSS}<ignore_index=2>(x, t)\n y = Mul(p, p)\n z = Identity(l)",
        PLACES,
        lambda torch, x, t: (
            torch.nn.functional.log_softmax(x, 1) ** 2,
            torch.nn.functional.cross_entropy(x, t, ignore_index=2),
        ),
    ).check()


def test_no_label_that_counts() -> None:
    case = GradCase(
        f'y = {LOSS}<reduction="sum", ignore_index=-5>(x, t)',
        ROWS,
        loss("sum", -5),
        data={"t": np.full(5, -5)},
    )
    case.check()
    assert not case.single["x"].any()
