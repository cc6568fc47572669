"""The price of a pipeline, for a GPT of equal layers whose weights are cast to 16 bits."""

from collections.abc import Mapping

import pytest
import transformer

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.machine import PRESETS
from onnxpar.parameters.recognise import read_parameters
from onnxpar.search.rival_plans import Pricing
from onnxpar.search.workload import Workload
from onnxpar.stages.stage_price import PipelineSplit, StagedPrice
from onnxpar.strategy import load_strategy, resolve

LAYERS, WIDTH, STAGES = 8, 32, 4
SIZES = {"batch": 4, "seq": 16}


def staged(stages: int, micro_batches: int, sizes: Mapping[str, int] = SIZES) -> StagedPrice:
    config = transformer.Config(layers=LAYERS, d_model=WIDTH, heads=4, vocab=64, max_positions=16)
    spec = TrainingSpec(
        parse_loss("softmax_cross_entropy"),
        parse_optimizer("adamw"),
        compute=parse_compute("float16"),
    )
    prepared = prepare_training(read_parameters(transformer.build(config)), {}, spec)
    workload = Workload.training(prepared, spec, load_strategy("tp=2", 2).optimizer_parallel)
    plan = workload.plan(resolve(load_strategy("tp=2", 2), workload.program))
    pricing = Pricing(workload, PRESETS["h100"], sizes, PipelineSplit(stages, micro_batches))
    found = pricing.way("tp=2", plan).staged
    assert found is not None
    return found


def test_a_stage_holds_the_weights_that_it_casts() -> None:
    found = staged(STAGES, 8)
    # Two layers of 12·d² + 13·d elements; a parameter, its gradient and two moments; at most all of
    # it is on each of the two devices, at least half.
    complete = 4 * 4 * (LAYERS // STAGES) * (12 * WIDTH**2 + 13 * WIDTH)
    for stage in found.stages[1:-1]:
        assert complete / 2 <= stage.held <= complete


def test_equal_layers_are_partitioned_evenly() -> None:
    inner = [stage.seconds for stage in staged(STAGES, 8).stages[1:-1]]
    # The same costs of the same layers, added in another order.
    assert inner[0] == pytest.approx(inner[1], rel=1e-9)
    counts = [stage.nodes for stage in staged(STAGES, 8).stages]
    assert max(counts) < 2 * min(counts)


def test_casts_of_weights_are_not_kept_for_each_micro_batch() -> None:
    one_token = {"batch": 1, "seq": 1}
    # The first stage keeps as many micro-batches as there are stages, if there are so many.
    several, one = (staged(2, count, one_token).stages[0].peak for count in (2, 1))
    casts = 2 * (LAYERS // 2) * 12 * WIDTH**2 / 2
    assert 0 < several - one < casts
