"""Gradients of elementwise operators."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.errors import ModelError
from onnxpar.parameters.recognise import read_parameters
from tests.onnxpar.ops.gradient_harness import Data, GradCase, between
from tests.onnxpar.ops.op_harness import chosen

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
    # Their attributes and constants have type float32: a relative error of up to 6e-8.
    single = text.startswith(("Hard", "Selu"))
    rtol = {"rtol": 1e-6, "torch_rtol": 1e-6} if single else {}
    GradCase(f"y = {text}", {"x": "double[N,6]"}, function, data=given, **rtol).check()


NX = {"x": "double[N,6]"}


@pytest.mark.parametrize(("attribute", "alpha"), [("", 1.0), ("<alpha=0.75>", 0.75)])
def test_celu_which_has_float32_alone(attribute: str, alpha: float) -> None:
    case = GradCase(
        f"h = Cast<to=1>(x)\n c = Celu{attribute}(h)\n y = Cast<to=11>(c)",
        NX,
        f("celu", alpha),
        torch_rtol=1e-6,  # float32 rounds to 6e-8, a few times here
    )
    case.check_program()
    case.check_torch()
    case.check_meshes()


TIED = np.array([[1.0, -2, 3, 4], [2, 2, -3, 4]])


def several(nodes: str, torch: Torch | None, *shapes: str, **more: Any) -> GradCase:
    """A case whose operands a, b, … have these shapes."""
    types = (f"double[{shape}]" if shape else "double" for shape in shapes)
    inputs = dict(zip("abcdef", types, strict=False))
    return GradCase(nodes, inputs, torch, **more)


QUICK_GELU = """
    f = Constant<value = double {1.702}>()  f_a = Mul(f, a)
    s = Sigmoid(f_a)  y = Mul(a, s)
"""


def quick_gelu(torch: Any, a: Any) -> Any:
    return a * (1.702 * a).sigmoid()


LEARNED = "b_a = Mul(b, a) s = Sigmoid(b_a) y = Mul(a, s)"


def learned(torch: Any, a: Any, b: Any) -> Any:
    return a * (b * a).sigmoid()


def silu_and_sigmoid(torch: Any, a: Any) -> Any:
    return torch.nn.functional.silu(a) - a.sigmoid()


@pytest.mark.parametrize(
    "case",
    [
        several("y = Add(a, b)", lambda torch, a, b: a + b, "N,6", "N,6"),
        several("y = Add(a, b)", lambda torch, a, b: a + b, "N,S,6", "6"),
        several("y = Add(a, b)", lambda torch, a, b: a + b, "N,1", "3,1,6"),
        several("y = Add(a, b)", lambda torch, a, b: a + b, "N,6", ""),
        several("y = Add(a, a)", lambda torch, a: a + a, "N,6"),
        several("y = Sub(a, b)", lambda torch, a, b: a - b, "N,6", "6"),
        several("y = Sub(a, b)", lambda torch, a, b: a - b, "1,6", "N,1"),
        several("y = Mul(a, b)", lambda torch, a, b: a * b, "N,6", "N,6"),
        several("y = Mul(a, b)", lambda torch, a, b: a * b, "6", "N,S,1"),
        several("y = Mul(a, b)", lambda torch, a, b: a * b, "6", "N,6", by=["a"]),
        several("y = Mul(a, a)", lambda torch, a: a * a, "N,6"),
        several("s = Sigmoid(a) y = Mul(a, s)", lambda t, a: t.nn.functional.silu(a), "N,6"),
        several("s = Sigmoid(a) m = Mul(s, a) y = Sub(m, s)", silu_and_sigmoid, "N,6"),
        several(QUICK_GELU, quick_gelu, "N,6"),
        several(LEARNED, learned, "N,6", ""),
        several(LEARNED, learned, "N,6", "", by=["a"]),
        several("s = Sigmoid(a) y = Mul(s, b)", lambda torch, a, b: a.sigmoid() * b, "N,6", "N,6"),
        several("y = Div(a, b)", lambda torch, a, b: a / b, "N,6", "N,6"),
        several("y = Div(a, b)", lambda torch, a, b: a / b, "N,1", "6"),
        several("y = Div(a, b)", lambda torch, a, b: a / b, "5,6", "N,6", by=["a"]),
        several("y = Sum(a, b, c)", lambda torch, a, b, c: a + b + c, "N,6", "6", "N,1"),
        several("y = Sum(a)", lambda torch, a: a + 0, "N,6"),
        several("y = Max(a, b)", lambda torch, a, b: torch.maximum(a, b), "N,6", "N,6"),
        several("y = Min(a, b)", lambda torch, a, b: torch.minimum(a, b), "N,6", "6"),
        several(
            "y = Max(a, b, c)",
            lambda torch, a, b, c: torch.maximum(torch.maximum(a, b), c),
            *("N,6", "6", "N,1"),
        ),
        several("y = Min(a)", lambda torch, a: a + 0, "N,6"),
        several("y = Mod<fmod=1>(a, b)", lambda torch, a, b: a.fmod(b), "N,6", "6"),
        several("y = PRelu(a, b)", lambda torch, a, b: a.where(a > 0, a * b), "N,6", "6"),
        several("y = PRelu(a, b)", lambda torch, a, b: a.where(a > 0, a * b), "N,6", "N,1"),
        several("y = PRelu(a, b)", lambda torch, a, b: a.where(a > 0, a * b), "N,S,4", "3,1"),
    ],
    ids=str,
)
def test_several_operands(case: GradCase) -> None:
    case.check()


def test_broadcast_that_may_be_one_is_refused() -> None:
    case = several("y = Div(a, b)", None, "5,6", "N,6", by=["b"])
    with pytest.raises(
        ModelError, match=r"'Div_y' .*: dim 0 of input 1 is N and is combined with 5: a gradient"
    ):
        case.check()


def test_extremum_shares_dy_between_operands_that_are_equal() -> None:
    data = {"a": TIED, "b": TIED[::-1].copy()}
    case = several("y = Max(a, b)", None, "2,4", "2,4", data=data)
    weights = case.arrays["onnxpar.weight.y"]
    other = data["b"]
    taken = np.where(other == TIED, 0.5, other < TIED)
    np.testing.assert_array_equal(case.single["a"], taken * weights)
    torch = lambda torch, a, b: torch.maximum(a, b)  # noqa: E731
    case = several("y = Max(a, b)", torch, "2,4", "2,4", data=data)
    case.check_torch()
    case.check_meshes()


@pytest.mark.parametrize("exponent", [-2.0, -0.5, 0.5, 1.0, 2.0, 3.0, 2.5])
def test_power_to_a_constant(exponent: float) -> None:
    case = GradCase(
        "y = Pow(x, p)",
        NX,
        lambda torch, x, **_: x**exponent,
        consts={"p": np.array(exponent)},
        data={"x": between(0.3, 2)},
    )
    case.check()


POSITIVE = between(0.3, 2)


@pytest.mark.parametrize(
    "case",
    [
        several("y = Pow(a, b)", lambda torch, a, b: a**b, "N,6", "N,6", data={"a": POSITIVE}),
        several("y = Pow(a, b)", lambda torch, a, b: a**b, "6", "N,1", data={"a": POSITIVE}),
        several("y = Pow(a, b)", lambda torch, a, b: a**b, "N,6", "", data={"a": POSITIVE}),
        several(
            "y = Pow(a, p)",
            lambda torch, a: a ** torch.tensor([0, 1, 2, 3, -1, -2]),
            "N,6",
            consts={"p": np.array([0, 1, 2, 3, -1, -2])},
        ),
        GradCase(
            "y = Where(c, a, b)",
            {"c": "bool[N,6]", "a": "double[N,6]", "b": "double[6]"},
            lambda torch, c, a, b: torch.where(c, a, b),
        ),
        GradCase(
            "y = Where(c, a, b)",
            {"c": "bool[N,1]", "a": "double[6]", "b": "double"},
            lambda torch, c, a, b: torch.where(c, a, b),
        ),
        several(
            "y = Clip(a, l, h)",
            lambda torch, a: a.clamp(-0.5, 1),
            "N,6",
            consts={"l": np.array(-0.5), "h": np.array(1.0)},
        ),
        several("y = Clip(a)", lambda torch, a: a + 0, "N,6"),
        several(
            "y = Clip(a, b, c)",
            lambda torch, a, b, c: torch.clamp(a, b, c),
            *("N,6", "", ""),
            data={"b": np.array(-0.5), "c": np.array(1.1)},
        ),
        several(
            "y = Clip(a, b, c)",
            lambda torch, a, b, c: torch.clamp(a, b, c),
            *("N,6", "", ""),
            data={"b": np.array(1.1), "c": np.array(-0.5)},
        ),
        several("y = Clip(a, , b)", lambda torch, a, b: torch.clamp(a, max=b), "N,6", ""),
    ],
    ids=str,
)
def test_powers_choices_and_bounds(case: GradCase) -> None:
    case.check()


@pytest.mark.parametrize(
    ("nodes", "torch", "data"),
    [
        ("y = Clip(a, l, h)", lambda torch, a: a.clamp(-2, 3), TIED),
        ("y = Relu(a)", lambda torch, a: a.relu(), TIED - 2),
        ("y = Abs(a)", lambda torch, a: a.abs(), TIED - 2),
        ("y = LeakyRelu<alpha=0.5>(a)", lambda t, a: t.nn.functional.leaky_relu(a, 0.5), TIED - 2),
        ("y = Elu<alpha=0.5>(a)", lambda torch, a: torch.nn.functional.elu(a, 0.5), TIED - 2),
        ("y = Pow(a, z)", lambda torch, a: a ** torch.tensor([0.0, 2, 1, 0]), TIED - 2),
        ("y = Pow(z, a)", lambda t, a: t.tensor([0.0, 2, 1, 0]) ** a, np.abs(TIED)),
        ("y = ReduceMax(a)", lambda torch, a: a.amax(keepdim=True, dim=(0, 1)), TIED),
    ],
)
def test_kinks_are_as_in_pytorch(nodes: str, torch: Torch, data: Any) -> None:
    consts = {"l": -2.0, "h": 3.0, "z": [0.0, 2, 1, 0]}
    arrays = {n: np.array(v) for n, v in consts.items() if n in nodes.split("(")[1]}
    case = several(nodes, torch, "2,4", data={"a": data}, consts=arrays)
    case.check_torch()
    case.check_meshes()


@pytest.mark.parametrize(
    "text",
    [
        *("Softplus(x)", "Sigmoid(x)", "Gelu(x)", 'Gelu<approximate="tanh">(x)', "Erf(x)"),
        *("Tanh(x)", "Mish(x)", "Softsign(x)", "Atan(x)", "Elu(x)", "HardSwish(x)"),
    ],
)
def test_no_overflow_far_from_zero(text: str) -> None:
    far = np.array([[-1e4, -750, -40, 0, 40, 750, 1e4]])
    case = GradCase(f"y = {text}", {"x": "double[1,7]"}, UNARY[text][0], data={"x": far})
    case.check_torch()
    farther = GradCase(case.nodes, {"x": "double[1,2]"}, data={"x": np.array([[-1e200, 1e200]])})
    slope = farther.single["x"] / farther.arrays["onnxpar.weight.y"]
    # They become constant on the left, and constant or the identity on the right.
    assert slope[0, 0] == 0
    assert slope[0, 1] in (0, 1)


@pytest.mark.parametrize(
    "first",
    chosen(
        [
            *("Relu(x)", "Tanh(x)", "Gelu(x)", "Abs(x)", "Neg(x)", "Softplus(x)", "Elu(x)"),
            *("Add(x, b)", "Sub(b, x)", "Mul(x, b)", "Div(x, b)", "Max(x, b)", "Pow(b, x)"),
            *("PRelu(x, b)", "Where(c, x, b)", "Where(c, b, x)", "Clip(x, l)", "Sum(x, x, b)"),
            *("ReduceSum(x, a)", "ReduceMean(x, a)", "ReduceMax(x, a)", "ReduceLogSumExp(x, a)"),
            *("CumSum(x, i)", "Identity(x)"),
        ],
        10,
    ),
)
def test_partial_cotangent(first: str) -> None:
    # If w is sharded by columns, the cotangent of h is a partial sum, as in Megatron's MLP.
    constants = {
        "c": np.array([True, False, True, True]),
        "l": np.array(0.3),
        "a": np.array([0], np.int64),
        "i": np.array(1, np.int64),
    }
    read = first.split("(")[1]
    inputs = {"x": "double[N,4]", "w": "double[4,6]"}
    given = {"b": POSITIVE}
    if "b" in read:
        inputs["b"] = "double[4]"
    consts = {n: v for n, v in constants.items() if n in read}
    case = GradCase(f"h = {first}\n y = MatMul(h, w)", inputs, data=given, consts=consts, split=1)
    case.check_program()
    case.check_differences()
    case.check_meshes()


@pytest.mark.parametrize(
    "nodes",
    [
        "s = Sigmoid(a) y = Mul(a, s)",
        "s = Sigmoid(a) y = Mul(s, a)",
        QUICK_GELU,
        "y = Swish(a)",
        "y = Swish<alpha = 0.5>(a)",
    ],
)
def test_the_gradient_of_silu_is_one_node(nodes: str) -> None:
    graph = several(nodes, None, "N,6", opset=24).program.model.graph
    kinds = [node.op_type for node in graph]
    assert kinds.count("SiluGrad") == 1
    assert "SigmoidGrad" not in kinds


def test_a_learned_factor_in_the_sigmoid_is_trained() -> None:
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (float[batch,2] x) => (float[batch,2] y) <float[2] w = {1, 2}, float[1] beta = {1.5}> {
        h = Mul(x, w)  steep = Mul(beta, h)  s = Sigmoid(steep)  y = Mul(h, s)
    }"""
    recognised = read_parameters(ir.from_proto(onnx.parser.parse_model(text)))
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"))
    assert prepare_training(recognised, {}, spec).gradients.keys() == {"w", "beta"}
