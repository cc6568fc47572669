"""The sizes of a micro-batch, from the sizes of a step that a strategy says."""

from typing import Any

import mlp
import pytest

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.parameters.recognise import read_parameters
from onnxpar.stages.assign_stages import of_micro_batch
from onnxpar.strategy.schema import Strategy


@pytest.mark.parametrize(
    ("entries", "batch"),
    [
        ({}, 9),
        ({"micro_batches": 4}, 3),
        ({"pipeline": {"stages": 2}}, 5),
        ({"pipeline": {"stages": 2, "micro_batches": 3}}, 3),
        # Two micro-batches take turns, also in a step that is not divided otherwise.
        ({"pair_micro_batches": True}, 5),
        ({"pair_micro_batches": True, "micro_batches": 3}, 3),
    ],
)
def test_the_batch_of_a_step_is_divided(entries: dict[str, Any], batch: int) -> None:
    data = {"mesh": {"dp": 1}, "target": {"sizes": {"batch": 9}}, **entries}
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))
    prepared = prepare_training(read_parameters(mlp.build(image=4, hidden=(4,))), {}, spec)
    found = of_micro_batch(Strategy.from_dict(data), prepared.program)
    assert found.search.sizes == {"batch": batch}
