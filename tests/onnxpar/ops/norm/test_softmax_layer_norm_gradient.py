"""Gradients of Softmax, LogSoftmax and LayerNormalization."""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.onnxpar.ops.gradient_harness import GradCase

NSX = {"x": "double[N,S,4]"}
# Statistics in double; their default is float32, whatever is normalised.
DOUBLE = "stash_type=11"


@pytest.mark.parametrize(("axis", "opset"), [(-1, 20), (1, 20), (0, 20), (-1, 13)])
@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax(name: str, axis: int, opset: int) -> None:
    function = {"Softmax": "softmax", "LogSoftmax": "log_softmax"}[name]
    GradCase(
        f"y = {name}<axis={axis}>(x)",
        NSX,
        lambda torch, x: getattr(torch, function)(x, axis),
        opset=opset,
    ).check()


@pytest.mark.parametrize("name", ["Softmax", "LogSoftmax"])
def test_softmax_of_a_parameter(name: str) -> None:
    GradCase(f"y = {name}(x)", {"x": "double[5,6]"}).check()


def layer_norm(*dims: int) -> Any:
    def function(torch: Any, x: Any, s: Any, b: Any = None) -> Any:
        return torch.nn.functional.layer_norm(x, dims, s, b)

    return function


@pytest.mark.parametrize(
    ("axis", "inputs", "opset"),
    [
        (-1, {"x": "double[N,S,6]", "s": "double[6]", "b": "double[6]"}, 20),
        (-1, {"x": "double[N,S,6]", "s": "double[6]", "b": "double[6]"}, 17),
        (1, {"x": "double[N,3,4]", "s": "double[3,4]", "b": "double[3,4]"}, 20),
        (0, {"x": "double[3,4]", "s": "double[3,4]", "b": "double[3,4]"}, 20),
        (-1, {"x": "double[N,6]", "s": "double[6]"}, 20),
    ],
    ids=str,
)
def test_layer_norm(axis: int, inputs: Mapping[str, str], opset: int) -> None:
    dims = {-1: (6,), 1: (3, 4), 0: (3, 4)}[axis]
    GradCase(
        f"y = LayerNormalization<axis={axis}, {DOUBLE}>({', '.join(inputs)})",
        inputs,
        layer_norm(*dims),
        opset=opset,
    ).check()


@pytest.mark.parametrize("by", [["x"], ["s"], ["b"], ["x", "s"], ["x", "b"], ["s", "b"]], ids=str)
def test_some_operands_of_layer_norm(by: list[str]) -> None:
    GradCase(
        f"y = LayerNormalization<{DOUBLE}>(x, s, b)",
        {"x": "double[N,S,6]", "s": "double[6]", "b": "double[6]"},
        layer_norm(6),
        by=by,
    ).check()


def test_layer_norm_whose_scale_is_broadcast() -> None:
    GradCase(
        f"y = LayerNormalization<axis=1, {DOUBLE}>(x, s, b)",
        {"x": "double[N,3,4]", "s": "double[4]", "b": "double[3,1]"},
        lambda torch, x, s, b: torch.nn.functional.layer_norm(x, (3, 4)) * s + b,
    ).check()
