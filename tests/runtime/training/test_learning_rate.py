"""The learning rate against the multipliers that Hugging Face gives to LambdaLR, by hand."""

import math

import pytest

from onnxpar_runtime.errors import LaunchError
from onnxpar_runtime.training.learning_rate import LearningRateSchedule


def test_constant() -> None:
    schedule = LearningRateSchedule(0.5)
    assert [schedule.at(t) for t in (1, 2, 1000)] == [0.5] * 3


def test_warmup_begins_at_zero() -> None:
    schedule = LearningRateSchedule(0.5, warmup=4)
    assert [schedule.at(t) for t in range(1, 7)] == [0.0, 0.125, 0.25, 0.375, 0.5, 0.5]


def test_linear_reaches_zero_after_the_last_step() -> None:
    schedule = LearningRateSchedule(2.0, "linear", warmup=2, total=6)
    assert [schedule.at(t) for t in range(1, 9)] == [0, 1.0, 2.0, 1.5, 1.0, 0.5, 0.0, 0.0]


def test_cosine_is_half_a_period() -> None:
    schedule = LearningRateSchedule(1.0, "cosine", warmup=1, total=5)
    quarter = [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0]
    # Doubles, a cosine and a product: an ulp or two.
    assert [schedule.at(t) for t in range(2, 7)] == pytest.approx(quarter, rel=1e-14, abs=1e-16)
    assert schedule.at(1) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": -1.0}, "--lr: expected a number >= 0, got -1"),
        ({"rate": math.inf}, "--lr: expected a number >= 0, got inf"),
        ({"rate": math.nan}, "--lr: expected a number >= 0, got nan"),
        ({"rate": 1.0, "kind": "step"}, "expected one of constant, linear, cosine, got 'step'"),
        ({"rate": 1.0, "warmup": -1}, "--warmup: expected a number of steps >= 0, got -1"),
        ({"rate": 1.0, "kind": "linear"}, "needs the number of steps"),
        ({"rate": 1.0, "warmup": 5, "total": 5}, r"expected fewer steps than the run has \(5\)"),
    ],
)
def test_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        LearningRateSchedule(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_equals_pytorchs_with_the_multipliers_of_transformers(kind: str) -> None:
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.3)
    steps = {} if kind == "constant" else {"num_training_steps": 20}
    name = f"get_{kind}_schedule_with_warmup"
    theirs = getattr(optimization, name)(optimizer, num_warmup_steps=5, **steps)
    mine = LearningRateSchedule(0.3, kind, warmup=5, total=20)
    for step in range(1, 21):
        # Some ten operations in float64; cosine ends at 0, off by one unit of 0.3.
        assert mine.at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-14, abs=1e-17)
        optimizer.step()
        theirs.step()
