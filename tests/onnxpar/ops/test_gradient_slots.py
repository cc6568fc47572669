"""Which operators stop gradients, and how the command line shows that."""

import json

import pytest

from onnxpar.cli import main
from onnxpar.ops.operator import NotDifferentiable
from onnxpar.ops.table import REGISTRY


def test_integers_and_steps_stop_gradients() -> None:
    flat = {d.op_type for d in REGISTRY.defs if isinstance(d.gradient, NotDifferentiable)}
    assert {"Floor", "Sign", "Shape", "Equal", "Range", "RandomNormal"} <= flat
    assert not {"Relu", "Mul", "ReduceMax", "Cast", "Where"} & flat


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Relu", "yes"),
        ("Floor", "its derivative is 0 except at jumps"),
        ("Shape", "not differentiable"),
    ],
)
def test_the_command_line_shows_it(
    name: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ops", "--json"]) == 0
    (row,) = (r for r in json.loads(capsys.readouterr().out) if r["op_type"] == name)
    assert row["gradient"] == shown
