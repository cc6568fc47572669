"""How long the slowest stage takes, before boundaries of stages are known."""

import numpy as np
import pytest
import transformer

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.parameters.recognise import read_parameters
from onnxpar.search.recomputed_parts import RecomputedParts
from onnxpar.search.slowest_stage import slowest_stage


def best(seconds: float, ends: tuple[float, float], layers: int, stages: int) -> float:
    """Gives each half of a layer to the stage that then takes least."""
    half = (seconds - sum(ends)) / (2 * layers)
    times = [ends[0], *[0.0] * (stages - 2), ends[1]]
    for _ in range(2 * layers):
        times[int(np.argmin(times))] += half
    return max(times)


@pytest.mark.parametrize("seed", range(50))
def test_the_slowest_stage_is_that_of_the_best_boundaries(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = int(rng.integers(1, 20))
    stages = int(rng.integers(2, 2 * layers + 1))
    longest = float(rng.choice([0.0, 1.0, 5.0]))
    ends = float(rng.uniform(0, longest)), float(rng.uniform(0, longest))
    seconds = sum(ends) + float(rng.uniform(0.1, 1)) * layers
    want = best(seconds, ends, layers, stages)
    assert slowest_stage(seconds, ends, layers, stages) == pytest.approx(want)


def test_a_head_as_long_as_a_layer_takes_the_place_of_a_layer() -> None:
    assert slowest_stage(32.0, (0.0, 0.0), 32, 4) == 8
    assert slowest_stage(33.0, (0.0, 1.0), 32, 4) == 8.5
    assert slowest_stage(40.0, (0.0, 8.0), 32, 5) == 8
    assert slowest_stage(52.0, (0.0, 20.0), 32, 4) == 20


def test_one_stage_and_a_model_without_layers_have_no_slowest_stage() -> None:
    assert slowest_stage(33.0, (1.0, 2.0), 32, 1) == 33
    assert slowest_stage(12.0, (0.0, 0.0), 0, 4) == 3


def test_embeddings_are_before_the_layers_and_the_head_with_the_loss_is_after_them() -> None:
    config = transformer.Config(layers=6, d_model=64, heads=4, vocab=128, max_positions=64)
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"))
    program = prepare_training(read_parameters(transformer.build(config)), {}, spec).program
    parts = RecomputedParts(program, None)
    before, after = parts.ends
    operators = {node.name: node.op_type for node in parts.forward.nodes}
    assert "Gather" in {operators[name] for name in before}
    found = [operators[name] for name in after]
    assert found.count("MatMul") + found.count("Gemm") == 1
    inside = frozenset().union(*parts.inside)
    assert len(parts.layers) == 6 and not inside & (before | after)
