"""From a strategy to the seeds of propagation: what the user fixed, and what a search adds."""

from collections.abc import Collection
from dataclasses import replace

import onnx_ir as ir

from onnxpar.analysis.propagate import Rules
from onnxpar.analysis.search.find import Found, SearchSpec, Told, find
from onnxpar.analysis.seeds import Seeds
from onnxpar.analysis.shapes import ShapeEnv
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.resolve import resolve
from onnxpar.strategy.schema import SEARCH, Strategy


def decide(
    strategy: Strategy,
    model: ir.Model,
    rules: Rules,
    env: ShapeEnv,
    trained: Collection[str] = (),
) -> Seeds:
    """Returns what propagation starts from: of a strategy that searches, the plans found.

    Args:
        strategy: The strategy.
        model: The normalised model, its backward program appended where it is trained.
        rules: The sharding rule of each of its nodes.
        env: Its shapes.
        trained: Names of the parameters that are trained; none for a forward program.

    Raises:
        StrategyError: An entry does not fit the model.
        ShardingError: Nothing fits into the memory of a device.
        MachineError: There is no such machine, or its file is malformed.
    """
    seeds = resolve(strategy, model, rules, env)
    if strategy.rest != SEARCH:
        return seeds
    return search(strategy, model, rules, env, seeds, trained).seeds


def search(
    strategy: Strategy,
    model: ir.Model,
    rules: Rules,
    env: ShapeEnv,
    seeds: Seeds,
    trained: Collection[str] = (),
    told: Told | None = None,
    micro_batches: int | None = None,
) -> Found:
    """Searches for what a strategy leaves open; as `decide` otherwise.

    `told` is as in `find`. Of a plan that was written down, what the user spoke of is kept and what
    followed is open. A step has as many micro-batches as the strategy says, if no number is given.
    """
    if micro_batches is None:
        pipeline = strategy.pipeline
        micro_batches = 1 if pipeline is None else pipeline.micro_batches or pipeline.stages
    seeds = replace(seeds, nodes={n: seed for n, seed in seeds.nodes.items() if seed.pinned})
    entry = strategy.search
    spec = SearchSpec(
        load_machine(entry.machine),
        entry.algorithm,
        entry.level,
        entry.memory,
        entry.sizes,
        parallel=strategy.optimizer_parallel,
        micro_batches=micro_batches,
    )
    return find(
        model,
        env,
        rules,
        seeds,
        spec,
        named=bool(strategy.axes),
        free_inputs=strategy.dataset == SEARCH,
        trained=trained,
        told=told,
    )
