"""What exporters write in several operators has its gradient in one, and the same derivatives."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.parameters.recognise import read_parameters
from tests.onnxpar.ops.gradient_harness import GradCase, between

MEAN = "square = Pow(x, two)  mean = ReduceMean<keepdims = 1>(square, last)"
NORMAL = f"""{MEAN}  added = Add(mean, epsilon)  root = Sqrt(added)
    inverse = Reciprocal(root)  normal = Mul(x, inverse)"""
QUOTIENT = """square = Mul(x, x)  mean = ReduceMean(square, first)
    added = Add(epsilon, mean)  root = Sqrt(added)  inverse = Div(one, root)
    normal = Mul(inverse, x)"""
HALVES = """a = Slice(x, zero, three, last)  b = Slice(x, three, end, last, one_long)
    opposite = Neg(b)  turned = Concat<axis = -1>(opposite, a)"""
SPLIT = """a, b = Split<axis = 2, num_outputs = 2>(x)
    opposite = Neg(b)  turned = Concat<axis = 2>(opposite, a)"""
SUM = "along = Mul(x, cos)  across = Mul(turned, sin)  y = Add(along, across)"
CONSTS: Mapping[str, Any] = {
    "two": np.array(2.0),
    "three_half": np.array(1.5),
    "one": np.array(1.0),
    "last": np.array([-1]),
    "first": np.array([2]),
    "middle": np.array([1]),
    "epsilon": np.array(1e-5),
    "wide": np.full((1, 1, 1, 1), 1e-5),
    "zero": np.array([0]),
    "one_long": np.array([1]),
    "two_long": np.array([2]),
    "three": np.array([3]),
    "end": np.array([2**62]),
}
X = {"x": "double[N,5,6]"}
SCALED = {**X, "w": "double[6]"}
ROTATED = {**X, "cos": "double[5,6]", "sin": "double[5,6]"}
GATED = {"x": "double[N,6]", "up": "double[N,6]"}


def case(nodes: str, inputs: Mapping[str, str], torch: Any = None, **more: Any) -> GradCase:
    read = nodes.replace(")", ",").replace("(", ",").replace(" ", "").split(",")
    consts = {name: value for name, value in CONSTS.items() if name in read}
    return GradCase(nodes, dict(inputs), torch, consts=consts, **more)


def rms(torch: Any, x: Any, w: Any, **_: Any) -> Any:
    return torch.nn.functional.rms_norm(x, (6,), w, 1e-5)


def rotary(torch: Any, x: Any, cos: Any, sin: Any) -> Any:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


TURNED_BACK = HALVES.replace("Neg(b)", "Neg(a)").replace("(opposite, a)", "(opposite, b)")
EVERY_SECOND = HALVES.replace("zero, three, last", "zero, end, last, two_long")
SILU = "s = Sigmoid(x)  active = Mul(s, x)"
WRITTEN: Sequence[tuple[str, GradCase]] = [
    ("RMSNormalizationGrad", case(f"{NORMAL}  y = Mul(w, normal)", SCALED, rms)),
    ("RMSNormalizationGrad", case(f"{QUOTIENT}  y = Mul(normal, w)", SCALED, rms)),
    # The scale is not trained, and the normal is read by another node too.
    ("RMSNormalizationGrad", case(f"{NORMAL}  y = Mul(w, normal)", SCALED, rms, by=["x"])),
    (
        "RMSNormalizationGrad",
        case(
            f"{NORMAL}  scaled = Mul(w, normal)  y = Add(scaled, normal)",
            SCALED,
            lambda torch, x, w: rms(torch, x, w + 1),
        ),
    ),
    ("RotaryEmbeddingGrad", case(f"{HALVES}  {SUM}", ROTATED, rotary, by=["x"])),
    ("RotaryEmbeddingGrad", case(f"{SPLIT}  {SUM}", ROTATED, rotary, by=["x"])),
    (
        "GatedSiluGrad",
        case(f"{SILU}  y = Mul(active, up)", GATED, lambda t, x, up: t.nn.functional.silu(x) * up),
    ),
    (
        "GatedGeluGrad",
        case("g = Gelu(x)  y = Mul(up, g)", GATED, lambda t, x, up: t.nn.functional.gelu(x) * up),
    ),
    (
        "GatedGeluTanhGrad",
        case(
            'g = Gelu<approximate = "tanh">(x)  y = Mul(up, g)',
            GATED,
            lambda t, x, up: t.nn.functional.gelu(x, approximate="tanh") * up,
        ),
    ),
]


@pytest.mark.parametrize(("op", "of"), WRITTEN, ids=str)
def test_one_node_has_the_gradient(op: str, of: GradCase) -> None:
    kinds = Counter(node.op_type for node in of.program.model.graph)
    assert kinds[op] == 1
    of.check()


POSITIVE = between(0.3, 2)
# What looks like one of them, and is not.
OTHERS = [
    case(
        f"{NORMAL.replace('two', 'three_half')}  y = Mul(w, normal)", SCALED, data={"x": POSITIVE}
    ),
    case(f"{NORMAL.replace('last', 'middle')}  y = Mul(w, normal)", SCALED),
    case(f"{NORMAL}  y = Mul(w, normal)", {**X, "w": "double[5,1]"}),
    # The mean of each row divides a column.
    case(
        f"{NORMAL.replace('keepdims = 1', 'keepdims = 0')}  y = Mul(w, normal)",
        {"x": "double[6,6]", "w": "double[6]"},
    ),
    case(f"{HALVES}  {SUM}", ROTATED),
    case(f"{HALVES}  {SUM}", ROTATED, by=["x", "sin"]),
    case(f"{HALVES}  {SUM}", {**ROTATED, "x": "double[N,1,1,1,5,6]"}, by=["x"]),
    case(f"{NORMAL}  y = Mul(w, normal)", {"x": "double[6]", "w": "double[6]"}),
    case(f"{NORMAL.replace('epsilon', 'wide')}  y = Mul(w, normal)", SCALED),
    case(f"{EVERY_SECOND}  {SUM}", ROTATED, by=["x"]),
    case(f"{TURNED_BACK}  {SUM}", ROTATED, by=["x"]),
    case(f"{HALVES.replace('opposite, a', 'a, opposite')}  {SUM}", ROTATED, by=["x"]),
    case(f"{SILU}  y = Mul(active, up)", {"x": "double[N,6]", "up": "double[6]"}),
    case(f"{SILU}  y = Mul(active, up)", GATED, by=["x"]),
]


@pytest.mark.parametrize("of", OTHERS, ids=str)
def test_others_keep_theirs(of: GradCase) -> None:
    kinds = {node.op_type for node in of.program.model.graph}
    assert not kinds & {op for op, _ in WRITTEN}
    of.check_differences()


def test_a_trained_epsilon_has_its_gradient() -> None:
    text = f"""<ir_version: 10, opset_import: ["": 20]>
    g (float[batch,6] h) => (float[batch,6] y)
    <float two = {{2.0}}, int64[1] last = {{1}}, float[1] epsilon = {{0.5}},
     float[1] gain = {{2.0}}, float[6] w = {{1, 2, 3, 4, 5, 6}}> {{
        x = Mul(h, gain)  {NORMAL}  y = Mul(w, normal)
    }}"""
    recognised = read_parameters(ir.from_proto(onnx.parser.parse_model(text)))
    names = ("w", "epsilon", "gain")
    spec = TrainingSpec(parse_loss("mse"), parse_optimizer("sgd"), trainable=names)
    assert prepare_training(recognised, {}, spec).gradients.keys() == {*names}
