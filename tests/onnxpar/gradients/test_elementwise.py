"""Gradients of elementwise operators."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from harness import Data, GradCase, between

Torch = Callable[..., Any]


def f(name: str, *more: object) -> Torch:
    """A function of torch.nn.functional."""
    return lambda torch, x: getattr(torch.nn.functional, name)(x, *more)


def t(name: str) -> Torch:
    """A function of torch itself."""
    return lambda torch, x: getattr(torch, name)(x)


UNARY: Mapping[str, tuple[Torch | None, Data | None]] = {
    "Abs(x)": (t("abs"), None),
    "Acos(x)": (t("acos"), between(-0.9, 0.9)),
    "Acosh(x)": (t("acosh"), between(1.1, 3)),
    "Asin(x)": (t("asin"), between(-0.9, 0.9)),
    "Asinh(x)": (t("asinh"), None),
    "Atan(x)": (t("atan"), None),
    "Atanh(x)": (t("atanh"), between(-0.9, 0.9)),
    "Celu(x)": (f("celu"), None),
    "Celu<alpha=0.75>(x)": (f("celu", 0.75), None),
    "Cos(x)": (t("cos"), None),
    "Cosh(x)": (t("cosh"), None),
    "Elu(x)": (f("elu"), None),
    "Elu<alpha=0.75>(x)": (f("elu", 0.75), None),
    "Elu<alpha=-0.75>(x)": (None, None),
    "Erf(x)": (t("erf"), None),
    "Exp(x)": (t("exp"), None),
    "Gelu(x)": (f("gelu"), None),
    'Gelu<approximate="tanh">(x)': (
        lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh"),
        None,
    ),
    "HardSigmoid<alpha=0.16666666666666666>(x)": (f("hardsigmoid"), between(-5, 5)),
    "HardSwish(x)": (f("hardswish"), between(-5, 5)),
    "LeakyRelu<alpha=0.125>(x)": (f("leaky_relu", 0.125), None),
    "LeakyRelu<alpha=-0.25>(x)": (f("leaky_relu", -0.25), None),
    "Log(x)": (t("log"), between(0.2, 3)),
    "Mish(x)": (f("mish"), None),
    "Neg(x)": (t("neg"), None),
    "Reciprocal(x)": (t("reciprocal"), None),
    "Relu(x)": (f("relu"), None),
    "Selu(x)": (f("selu"), None),
    "Selu<alpha=-0.5, gamma=1.5>(x)": (None, None),
    "Sigmoid(x)": (t("sigmoid"), None),
    "Sin(x)": (t("sin"), None),
    "Sinh(x)": (t("sinh"), None),
    "Softplus(x)": (f("softplus"), None),
    "Softsign(x)": (f("softsign"), None),
    "Sqrt(x)": (t("sqrt"), between(0.2, 3)),
    "Tan(x)": (t("tan"), between(-1, 1)),
    "Tanh(x)": (t("tanh"), None),
    "ThresholdedRelu<alpha=0.8>(x)": (f("threshold", 0.8, 0), None),
}


@pytest.mark.parametrize("text", UNARY)
def test_unary(text: str) -> None:
    function, data = UNARY[text]
    given = {} if data is None else {"x": data}
    # Their attributes and constants are of type float32: right to 6e-8 of themselves.
    single = text.startswith(("Hard", "Selu"))
    rtol = {"rtol": 1e-6, "torch_rtol": 1e-6} if single else {}
    GradCase(f"y = {text}", {"x": "double[N,6]"}, function, data=given, **rtol).check()
