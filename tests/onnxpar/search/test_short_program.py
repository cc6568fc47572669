"""Plans of deep programs follow from programs with fewer of their layers."""

from functools import cache
from random import Random

import pytest
import transformer

from onnxpar.autodiff.append_loss import parse_loss
from onnxpar.autodiff.mixed_precision import parse_compute
from onnxpar.autodiff.optimizer import parse_optimizer
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.machine import PRESETS
from onnxpar.core.mesh import Mesh
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL
from onnxpar.graph.seeds import Seeds
from onnxpar.parameters.recognise import read_parameters
from onnxpar.propagation.propagate import alike, propagate
from onnxpar.search.find_plan import seeds_of
from onnxpar.search.node_options import options
from onnxpar.search.repeated_layers import fold
from onnxpar.search.short_program import ShortProgram, shorten
from onnxpar.search.value_flow import flow
from onnxpar.search.workload import Workload
from onnxpar.strategy import load_strategy, resolve
from tests.tiers import FULL

MESH = Mesh.of({"x": 2, "y": 2})


@cache
def workload(layers: int, compute: str | None = None) -> Workload:
    sizes = transformer.Config(layers=layers, d_model=32, heads=4, vocab=64, max_positions=16)
    half = None if compute is None else parse_compute(compute)
    spec = TrainingSpec(parse_loss("softmax_cross_entropy"), parse_optimizer("adamw"), compute=half)
    prepared = prepare_training(read_parameters(transformer.build(sizes)), {}, spec)
    return Workload.training(prepared, spec, NOT_PARALLEL)


@cache
def short(layers: int, compute: str | None = None) -> ShortProgram:
    made = workload(layers, compute)
    found = shorten(made.program, made.links, alike(made.program))
    assert found is not None and len(found.program.graph) < len(made.program.graph)
    return found


def drawn(made: Workload, seed: int, *, one: bool = True) -> Seeds:
    """A strategy that draws an option for each node, the same in all layers."""
    random = Random(seed)
    seen = flow(made.program, list(made.gradients))
    cost = CostModel(PRESETS["h100"], MESH, made.program.env.table, {"batch": 8, "seq": 16})
    axes = [MESH.axis_atoms(name) for name, _ in MESH.axes]
    folded = fold(seen, {}, one=True)
    assert folded is not None
    chosen = [random.choice(options(item, axes, cost)) for item in folded.flow.items]
    every = list(folded.unfold(chosen))
    if not one:
        name = "/layer4/attn/q_proj/MatMul"
        number = next(i for i, item in enumerate(seen.items) if item.name == name)
        found = options(seen.items[number], axes, cost)
        every[number] = next(o for o in found if o.plan != every[number].plan)
    return seeds_of(seen, every, {}, Seeds(MESH))


@pytest.mark.parametrize("seed", range(8 if FULL else 1))
@pytest.mark.parametrize(("layers", "compute"), [(9, None), (10, "bfloat16")])
def test_equal_layers_are_sharded_as_in_the_whole_program(
    layers: int, compute: str | None, seed: int
) -> None:
    made = workload(layers, compute)
    seeds = drawn(made, seed)
    equal = short(layers, compute).plan(seeds) == propagate(made.program, seeds, made.links)
    assert equal  # Not inlined: pytest would take minutes to show how plans differ.


@pytest.mark.parametrize("name", ["dp=2,tp=2", "tp=4"])
def test_presets_are_carried_out_as_in_the_whole_program(name: str) -> None:
    made = workload(9)
    seeds = resolve(load_strategy(name, 4), made.program)
    equal = short(9).plan(seeds) == propagate(made.program, seeds, made.links)
    assert equal


def test_a_layer_with_a_strategy_of_its_own_needs_the_whole_program() -> None:
    made = workload(9)
    seeds = drawn(made, 0, one=False)
    found = short(9).plan(seeds)
    refused = found is None
    assert refused
    equal = made.plan(seeds) == propagate(made.program, seeds, made.links)
    assert equal


def test_few_layers_are_not_shortened() -> None:
    made = workload(3)
    assert shorten(made.program, made.links, alike(made.program)) is None
