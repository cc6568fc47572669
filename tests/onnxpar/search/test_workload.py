"""What decides changes no model."""

from typing import Any

import onnx
import onnx_ir as ir
import pytest
import transformer
import two_layer

from onnxpar.api.shard_model import analyse
from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.machine import PRESETS
from onnxpar.core.symbols import Symbol
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL
from onnxpar.facts.equalities import assumed_equalities
from onnxpar.facts.index_ranges import demanded_ranges
from onnxpar.facts.program import Program
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.parameters.recognise import read_parameters
from onnxpar.partition.partition import partition
from onnxpar.propagation.conflicts import conflicts
from onnxpar.propagation.propagate import propagate
from onnxpar.search.decide import settled
from onnxpar.search.workload import Workload
from onnxpar.strategy import load_strategy, resolve

GPT = transformer.Config(layers=2, d_model=32, heads=4, vocab=64, max_positions=16)
MODELS = {
    "mlp": (two_layer.build, "mse"),
    "gpt": (lambda: transformer.build(GPT), "softmax_cross_entropy"),
}
SYMBOLS = {"batch": Symbol(divisor=4)}


def workload(name: str, trains: bool) -> Workload:
    build, loss = MODELS[name]
    if not trains:
        return Workload.inference(analyse(build(), SYMBOLS))
    spec = TrainingSpec(parse_loss(loss), parse_optimizer("adamw"))
    prepared = prepare_training(read_parameters(build()), SYMBOLS, spec)
    return Workload.training(prepared, spec, NOT_PARALLEL)


def written(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


@pytest.mark.parametrize("strategy", ["dp=2,tp=2", "auto"])
@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_no_decision_changes_the_model(name: str, trains: bool, strategy: str) -> None:
    made = workload(name, trains)
    program = made.program
    before = written(program.model), written(made.forward)
    assert onnx.ModelProto.FromString(before[0]).graph.node
    chosen = settled(load_strategy(strategy, 4), made, SYMBOLS)
    plan = made.plan(resolve(chosen, program))
    made.price(plan, PRESETS["cpu"], {})
    conflicts(program, plan)
    assumed_equalities(program)
    demanded_ranges(program)
    partition(program, plan)
    assert (written(program.model), written(made.forward)) == before


def test_a_preset_whose_parameter_axes_stay_is_planned_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[Seeds] = []

    def counted(program: Program, seeds: Seeds, *more: Any) -> Plan:
        planned.append(seeds)
        return propagate(program, seeds, *more)

    monkeypatch.setattr("onnxpar.search.workload.propagate", counted)
    made = workload("gpt", trains=False)
    chosen = settled(load_strategy("tp=2", 2), made, SYMBOLS)
    plan = made.plan(resolve(chosen, made.program))
    assert len(planned) == 1
    assert plan == propagate(made.program, planned[0])
