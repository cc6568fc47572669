"""Gradients of BatchNormalization, in inference and in training form."""

from dataclasses import replace
from typing import Any

import pytest

from tests.onnxpar.ops.gradient_harness import GradCase, between

OPERANDS = {"s": "double[4]", "b": "double[4]", "m": "double[4]", "v": "double[4]"}
SHAPES = ("double[N,4]", "double[N,4,S]", "double[N,4,3,2]")
VARIANCE = {"v": between(0.2, 2.0)}


def inferred(torch: Any, x: Any, s: Any, b: Any, m: Any, v: Any) -> Any:
    # torch's own has no derivatives by the statistics.
    m, v, s, b = (t.reshape(-1, *[1] * (x.ndim - 2)) for t in (m, v, s, b))
    return (x - m) / torch.sqrt(v + 0.125) * s + b


def trained(torch: Any, x: Any, s: Any, b: Any, m: Any, v: Any) -> Any:
    y = torch.nn.functional.batch_norm(x, None, None, s, b, training=True, eps=0.125)
    axes = [0, *range(2, x.ndim)]
    mean, variance = x.mean(axes), x.var(axes, unbiased=False)
    return y, m * 0.75 + mean * 0.25, v * 0.75 + variance * 0.25


def case(attributes: str, shape: str, opset: int = 20, **more: Any) -> GradCase:
    training = "training_mode=1" in attributes
    outputs = "y, p, q" if training else "y"
    text = f"{outputs} = BatchNormalization<epsilon=0.125{attributes}>(x, s, b, m, v)"
    function = trained if training else inferred
    inputs = {"x": shape, **OPERANDS}
    # Before opset 14, onnx.reference mixes statistics of the batch into the inference form.
    return GradCase(
        text, inputs, function, opset=opset, data=VARIANCE, reference=opset >= 14, **more
    )


def alone(momentum: float, by: str) -> GradCase:
    """The training form, its running statistics being of no consequence."""
    form = f", training_mode=1, momentum={momentum}"
    known = case(form, "double[N,4,S]", by=tuple(by))
    text = f"{known.nodes} i = Shape(p) j = Shape(q)"
    return replace(known, nodes=text, torch=lambda *x, **y: trained(*x, **y)[0])


@pytest.mark.parametrize("opset", [13, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_inference_form(shape: str, opset: int) -> None:
    case("", shape, opset).check()


@pytest.mark.parametrize("opset", [14, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_training_form(shape: str, opset: int) -> None:
    case(", training_mode=1, momentum=0.75", shape, opset).check()


@pytest.mark.parametrize("by", ["x", "s", "b", "m", "v", "xs", "bv"])
def test_some_operands_of_the_inference_form(by: str) -> None:
    case("", "double[N,4,S]", by=tuple(by)).check()


@pytest.mark.parametrize("by", ["x", "s", "b", "xb"])
@pytest.mark.parametrize("momentum", [0.0, 0.75])
def test_some_operands_of_the_training_form(by: str, momentum: float) -> None:
    alone(momentum, by).check()
