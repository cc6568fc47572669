"""The search: MindSpore's published cases, limits on memory, pinned nodes, real programs."""

import os
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path

import onnx
import pytest
import transformer
import yaml
from _exporter import save
from onnx import helper

from onnxpar.api.shard_model import analyse
from onnxpar.core.errors import ShardingError
from onnxpar.core.machine import PRESETS
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import Component
from onnxpar.facts.program import Program
from onnxpar.frontend.load import load
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.propagation.propagate import propagate
from onnxpar.search.find_plan import Found, SearchSpec, find
from onnxpar.strategy import Strategy
from onnxpar.strategy.save import strategy_data, write_strategy
from tests.tiers import FULL

ALGORITHMS = ("recursive", "ilp")
Shape = list[int]


def products(tmp_path: Path, x: Shape, *weights: Shape) -> Program:
    """A chain of products with weights, which are inputs."""
    names = ["x", *(f"h{i}" for i in range(1, len(weights))), "y"]
    shape = list(x)
    nodes, inputs = [], [helper.make_tensor_value_info("x", 1, x)]
    for i, weight in enumerate(weights):
        shape = [shape[0], weight[1]]
        nodes.append(helper.make_node("MatMul", [names[i], f"w{i}"], [names[i + 1]], f"m{i}"))
        inputs.append(helper.make_tensor_value_info(f"w{i}", 1, weight))
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("y", 1, shape)])
    path = tmp_path / "m.onnx"
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path
    )
    return analyse(load(path), {})


def search(program: Program, spec: SearchSpec, seeds: Seeds | None = None) -> tuple[Found, Plan]:
    """What is found on 8 devices, and the plan that follows."""
    start = seeds or Seeds(Mesh.of({"x": 8}))
    found = find(program, start, spec, named=False, free_inputs=True)
    return found, propagate(program, found.seeds)


def shards(plan: Plan, node: str) -> tuple[tuple[int, ...], ...]:
    """The numbers of shards in which a node wants its operands."""
    return tuple(s.strategy(plan.mesh) for s in plan.nodes[node].inputs if s is not None)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_rows_stay_split_through_two_products(tmp_path: Path, algorithm: str) -> None:
    program = products(tmp_path, [32768, 1024], [1024, 1024], [1024, 1024])
    _, plan = search(program, SearchSpec(PRESETS["a100"], algorithm))
    assert shards(plan, "m0") == ((8, 1), (1, 1))
    assert shards(plan, "m1") == ((8, 1), (1, 1))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_around_a_first_product_that_is_pinned_to_columns(tmp_path: Path, algorithm: str) -> None:
    program = products(tmp_path, [32768, 1024], [1024, 1024], [1024, 1024])
    factor = program.rules.by_node["m0"].inputs[1].dims[1][0]
    pin = NodeSeed("m0", {factor: (Component(1024, (0, 1, 2)),)})
    spec = SearchSpec(PRESETS["a100"], algorithm)
    _, plan = search(program, spec, Seeds(Mesh.of({"x": 8}), {"m0": pin}))
    assert shards(plan, "m0") == ((1, 1), (1, 8))
    assert shards(plan, "m1") in (((1, 8), (8, 1)), ((8, 1), (1, 1)))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_dim_that_dominates_is_split(tmp_path: Path, algorithm: str) -> None:
    program = products(tmp_path, [160, 320], [320, 3_200_000])
    _, plan = search(program, SearchSpec(PRESETS["a100"], algorithm))
    assert shards(plan, "m0") == ((1, 1), (1, 8))


def gpt(tmp_path: Path, layers: int = 2) -> Program:
    """A transformer large enough for its weights to count."""
    path = tmp_path / "gpt.onnx"
    config = transformer.Config(layers=layers, d_model=512, heads=8, vocab=4096, max_positions=64)
    save(transformer.build(config), path)
    return analyse(load(path), {})


SIZES = {"batch": 8, "seq": 64}


def test_halving_is_within_a_tenth_of_the_exact_optimum(tmp_path: Path) -> None:
    program = gpt(tmp_path, layers=2 if FULL else 1)
    for machine in ("cpu", "h100"):
        seconds = {}
        for algorithm in ALGORITHMS:
            spec = SearchSpec(PRESETS[machine], algorithm, sizes=SIZES)
            seconds[algorithm] = search(program, spec)[0].chosen.seconds
        assert seconds["recursive"] <= 1.1 * seconds["ilp"]


@pytest.mark.parametrize("algorithm", ["recursive", pytest.param("ilp", marks=pytest.mark.full)])
def test_a_limit_on_memory_changes_the_plan(tmp_path: Path, algorithm: str) -> None:
    program = gpt(tmp_path, layers=1)
    spec = SearchSpec(PRESETS["h100"], algorithm, sizes=SIZES)
    free, _ = search(program, spec)
    limit = int(free.chosen.memory / 2)
    bound, plan = search(program, replace(spec, memory=limit))
    assert bound.chosen.memory <= limit < free.chosen.memory
    assert bound.chosen.seconds >= free.chosen.seconds
    local = (prod(map(int, s.local_shape(plan.mesh))) for s in plan.parameters.values())
    assert 4 * sum(local) <= limit
    with pytest.raises(ShardingError, match="no strategy fits the memory limit: the smallest"):
        search(program, replace(spec, memory=1000))


def test_level_1_takes_the_least_memory(tmp_path: Path) -> None:
    program = gpt(tmp_path, layers=2 if FULL else 1)
    spec = SearchSpec(PRESETS["h100"], "ilp", sizes=SIZES)
    fast, _ = search(program, spec)
    small, _ = search(program, replace(spec, level=1))
    quiet, _ = search(program, replace(spec, level=0))
    assert small.chosen.memory < fast.chosen.memory
    assert fast.chosen.seconds <= min(small.chosen.seconds, quiet.chosen.seconds)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_level_0_weighs_the_reduction_of_an_output(tmp_path: Path, algorithm: str) -> None:
    """A sum over eight saves 38 us of reading and costs 12 us: worth it, but not ten times that."""
    program = products(tmp_path, [1, 1 << 16], [1 << 16, 1])
    spec = SearchSpec(PRESETS["cpu"], algorithm)
    assert shards(search(program, spec)[1], "m0") == ((1, 8), (8, 1))
    assert shards(search(program, replace(spec, level=0))[1], "m0") == ((1, 1), (1, 1))


@pytest.mark.full
def test_the_plan_depends_on_nothing_but_its_input(tmp_path: Path) -> None:
    """Hashes of names differ from process to process, and with them the order of sets."""
    path = tmp_path / "gpt.onnx"
    save(transformer.build(transformer.Config(layers=1, d_model=64, heads=4)), path)
    sizes = ["--symbol", "batch=4", "--symbol", "seq=8"]
    exact = ["--algorithm", "ilp", "--memory", "300KiB"]
    for options in (["--loss", "softmax_cross_entropy"], exact):
        plans = set()
        for seed in ("0", "1"):
            out = tmp_path / f"{seed}.yaml"
            command = ["-m", "onnxpar.cli", "plan", str(path), "--devices", "4", *sizes, *options]
            subprocess.run(
                [sys.executable, *command, "-o", str(out)],
                env={**os.environ, "PYTHONHASHSEED": seed},
                check=True,
                capture_output=True,
                timeout=60,
            )
            plans.add(out.read_text())
        assert len(plans) == 1, options


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("matrix", [(2, 3), (3, 2)])
def test_what_is_pinned_keeps_its_devices(
    tmp_path: Path, algorithm: str, matrix: tuple[int, int]
) -> None:
    """Six devices are 2 x 3 or 3 x 2, and a search of its own choice would take one of them."""
    program = products(tmp_path, [36, 36], [36, 36])
    mesh = Mesh.refine(6, [matrix])
    (rows, columns) = mesh.matrix(matrix)
    ((m,), (n,)) = program.rules.by_node["m0"].outputs[0].dims
    factors = {m: (Component(36, rows),), n: (Component(36, columns),)}
    start = Seeds(mesh, {"m0": NodeSeed("m0", factors)})
    _, plan = search(program, SearchSpec(PRESETS["cpu"], algorithm), start)
    assert shards(plan, "m0") == ((matrix[0], 1), (1, matrix[1]))


@pytest.mark.parametrize("devices", [3, 5, 6, 7])
def test_weights_are_sharded_over_any_number_of_devices(tmp_path: Path, devices: int) -> None:
    """The products read their weights, and 8192 and 32768 divide by none of the numbers."""
    program = products(tmp_path, [1, 8192], [8192, 32768], [32768, 8192])
    spec = SearchSpec(PRESETS["h100"])
    _, plan = search(program, spec, Seeds(Mesh.of({"x": devices})))
    for node in ("m0", "m1"):
        assert prod(shards(plan, node)[1]) == devices


def test_found_axes_need_no_quotes(tmp_path: Path) -> None:
    """YAML 1.1 reads `y` as a boolean; files in which it is quoted still work."""
    program = products(tmp_path, [8, 8], [8, 8])
    for algorithm in ALGORITHMS:
        spec = SearchSpec(PRESETS["h100"], algorithm)
        found, _ = search(program, spec)
        text = write_strategy(strategy_data(found.seeds, program.rules, {}), "found")
        assert yaml.safe_load(text)["mesh"] == dict(found.chosen.axes) and '"' not in text
    old = 'mesh: {x: 2, "y": 4}\nnodes:\n  m0: {in: [[x, "y"], ["y", ~]]}\n'
    assert Strategy.from_text(old).axes == {"x": 2, "y": 4}
