"""The schedule that a pipeline gets if its strategy names none."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import transformer

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.parameters.recognise import read_parameters
from onnxpar.stages.stage_programs import Staging
from onnxpar.strategy.schema import Strategy

CONFIG = transformer.Config(layers=2, d_model=32, heads=4, vocab=64, max_positions=16)
MUCH = {"batch": 1024, "seq": 16}


def chosen(
    pipeline: dict[str, Any],
    sizes: Mapping[str, int] = MUCH,
    target: Mapping[str, str] = MappingProxyType({}),
    **entries: Any,
) -> str:
    data = {"mesh": {"x": 1}, "pipeline": {"stages": 2, **pipeline}, **entries}
    strategy = Strategy.from_dict(data | {"target": {"sizes": sizes, **target}})
    assert strategy.pipeline is not None
    staging = Staging(strategy, strategy.pipeline)
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("sgd"))
    read = read_parameters(transformer.build(CONFIG))
    staging.training_places(prepare_training(read, {}, spec, staging.put))
    return staging.entry.order


def test_zero_bubble_pays_if_gradients_of_weights_take_longer_than_another_run() -> None:
    assert chosen({}) == "zb-h1"
    assert chosen({}, {"batch": 1, "seq": 1}) == "1f1b"
    # The more micro-batches, the smaller they are, and the more runs there are.
    assert chosen({"micro_batches": 512}) == "1f1b"


@pytest.mark.parametrize("saves", [{"recompute": ["/layer0/*"]}, {"target": {"memory": "1GiB"}}])
def test_what_saves_memory_keeps_less(saves: dict[str, Any]) -> None:
    assert chosen({}, **saves) == "1f1b"


@pytest.mark.parametrize(
    ("pipeline", "expected"), [({"schedule": "gpipe"}, "gpipe"), ({"chunks": 2}, "interleaved")]
)
def test_what_is_given_is_kept(pipeline: dict[str, Any], expected: str) -> None:
    assert chosen(pipeline) == expected
