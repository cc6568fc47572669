"""Repeated layers as one: choices of the smaller problem cost the same in the complete one."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache

import numpy as np
import pytest
import transformer
from _exporter import save

from onnxpar.api.shard_model import analyse
from onnxpar.core.machine import PRESETS
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Symbol
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.frontend.load import load
from onnxpar.graph.seeds import Seeds
from onnxpar.search import find_plan as find_module
from onnxpar.search.find_plan import SearchSpec, find
from onnxpar.search.node_options import options
from onnxpar.search.problem import Problem, build
from onnxpar.search.repeated_layers import Folded, fold
from onnxpar.search.value_flow import Flow, flow

SIZES = {"batch": 8, "seq": 64}


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Program]:
    """A transformer with so many layers; every mesh here divides its batch."""
    folder = tmp_path_factory.mktemp("gpt")

    @cache
    def made(layers: int) -> Program:
        path = folder / f"gpt-{layers}.onnx"
        sizes = transformer.Config(layers=layers, d_model=128, heads=4, vocab=256, max_positions=64)
        save(transformer.build(sizes), path)
        return analyse(load(path), {"batch": Symbol(divisor=8)})

    return made


def problems(
    program: Program, *, trained: bool = False, one: bool = False
) -> tuple[Folded, Problem, Problem]:
    """The problems of two mesh axes of two devices: with folded layers, and with every layer."""
    mesh = Mesh.of({"x": 2, "y": 2})
    cost = CostModel(PRESETS["h100"], mesh, program.env.table, SIZES)
    weights = list(program.model.graph.initializers) if trained else []
    seen = flow(program, weights)
    folded = fold(seen, {}, one=one)
    assert folded is not None
    axes = [mesh.axis_atoms(name) for name, _ in mesh.axes]
    known = {item.kind: options(item, axes, cost) for item in seen.items}
    small, full = (
        build(f, [known[item.kind] for item in f.items], cost) for f in (folded.flow, seen)
    )
    return folded, small, full


def completed(problem: Problem, nodes: Sequence[int]) -> list[int]:
    """A choice of nodes, completed with the cheapest options of parameters and versions."""
    choice = [*nodes, *(0 for _ in problem.variables[len(nodes) :])]
    totals = {
        v: problem.variables[v].cost.copy() for v in range(len(nodes), len(problem.variables))
    }
    for term in problem.terms:
        for axis, v in enumerate(term.scope):
            if v in totals:
                row = tuple(
                    slice(None) if a == axis else choice[n] for a, n in enumerate(term.scope)
                )
                totals[v] += term.table[row]
    for v, total in totals.items():
        choice[v] = int(total.argmin())
    return choice


@pytest.mark.parametrize(
    ("trained", "one"),
    [*(pytest.param(t, False, marks=pytest.mark.full) for t in (False, True)), (True, True)],
)
def test_a_choice_of_the_smaller_problem_costs_the_same_in_the_complete_one(
    gpt: Callable[[int], Program], trained: bool, one: bool
) -> None:
    folded, small, full = problems(gpt(6), trained=trained, one=one)
    rng = np.random.default_rng(0)
    possible = 0
    for _ in range(50):
        # Whatever is impossible is impossible in both.
        spread = rng.integers(1, 3)
        nodes = [int(rng.integers(min(len(found), spread))) for found in small.options]
        few = completed(small, nodes)
        many = completed(full, [nodes[c] for c in folded.classes])
        assert folded.unfold(small.chosen(few)) == full.chosen(many)
        seconds = small.seconds(few)
        possible += seconds < np.inf
        # Layers are added one by one or multiplied by their number: some 100 roundings of 2^-53.
        assert full.seconds(many) == pytest.approx(seconds, rel=1e-12)
        if seconds < np.inf:
            assert full.memory(many) == pytest.approx(small.memory(few), rel=1e-12)
            assert full.layouts(many) == small.layouts(few)
    assert possible > 0


def test_depth_adds_nothing_to_decide(gpt: Callable[[int], Program]) -> None:
    sizes = []
    for layers in (6, 9):
        _, small, full = problems(gpt(layers))
        sizes.append(len(small.variables))
        assert len(small.variables) < len(full.variables)
    assert sizes[0] == sizes[1]


def test_all_layers_may_be_one(gpt: Callable[[int], Program]) -> None:
    folded, _, _ = problems(gpt(6), trained=True, one=True)
    often = Counter(item.count for item in folded.flow.items if item.trained)
    # The embedding and the head are no layers; the last norm is like those of the layers.
    assert often[6] > often[1] and set(often) == {1, 6, 7}


def test_few_layers_are_decided_one_by_one(gpt: Callable[[int], Program]) -> None:
    program = gpt(4)
    assert fold(flow(program), {}) is None


@pytest.mark.parametrize("machine", ["cpu", "h100"])
def test_layers_that_choose_alike_cost_no_more(
    gpt: Callable[[int], Program], monkeypatch: pytest.MonkeyPatch, machine: str
) -> None:
    program = gpt(6)

    def cost(algorithm: str) -> float:
        spec = SearchSpec(PRESETS[machine], algorithm, sizes=SIZES)
        start = Seeds(Mesh.of({"x": 8}))
        return find(
            program, start, spec, named=False, free_inputs=True
        ).chosen.seconds  # fmt: skip

    folded = cost("recursive")

    def none(flow: Flow, pins: Mapping[str, Sharding]) -> None:
        return None

    monkeypatch.setattr(find_module, "fold", none)
    # The same plan, whose costs are added in another order.
    assert folded == pytest.approx(cost("recursive"), rel=1e-9)


def test_a_limit_that_binds_shards_only_some_layers(gpt: Callable[[int], Program]) -> None:
    program = gpt(6)
    start = Seeds(Mesh.of({"x": 2}))

    def search(memory: int | None) -> tuple[float, float]:
        spec = SearchSpec(PRESETS["h100"], "recursive", memory=memory, sizes=SIZES, gap=0.2)
        chosen = find(program, start, spec, named=False, free_inputs=True).chosen
        return chosen.seconds, chosen.memory

    seconds, memory = search(None)
    # All layers sharded, or none, would be half or all of it.
    slower, held = search(int(0.75 * memory))
    assert 0.6 * memory < held <= 0.75 * memory
    assert slower >= seconds
