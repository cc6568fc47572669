"""Plans training, and chooses the type of the products: the model's own type, or 16 bits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from onnxpar.api.plan_strategy import read_workload
from onnxpar.autodiff.training_program import TrainingSpec
from onnxpar.core.errors import ShardingError
from onnxpar.core.symbols import Symbol
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.report.found_strategy import FoundStrategy
from onnxpar.search.rival_plans import Pricing, Way
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy import Strategy
from onnxpar.strategy.machine_file import machine_of
from onnxpar.strategy.recompute_entry import NOTHING, read_recompute

HALF = "bfloat16"
"""The 16-bit type that is tried: it has the range of float32."""
OWN = "float32"
"""The type of products of a model that can compute them in 16 bits."""


def plan_any_type(
    search: Callable[[TrainingSpec], FoundStrategy],
    model: str | Path,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    training: TrainingSpec,
) -> FoundStrategy:
    """Searches for a strategy, and decides the type in which products are computed.

    The plan for 16 bits is also priced with the model's own type. If it is no worse there, a
    strategy for the model's own type is searched for, too, and the better plan is taken.

    Args:
        search: Searches for a strategy with `plan_strategy`.
        model: Path of the ONNX file.
        strategy: How to search, and what is fixed.
        symbols: Constraints on symbols; they replace the strategy's of the same name.
        training: How the model is trained, with its own type of products.

    Raises:
        OnnxparError: As `plan_strategy`.
    """
    half = replace(training, compute=HALF)
    if HALF not in machine_of(strategy).flops:
        # The machine may not have the type if it states no rate for it.
        return _named(search(training), OWN)
    try:
        found = search(half)
    except ShardingError:
        # Weights in 16 bits take memory in addition to the parameters.
        return _named(search(training), OWN)
    every = {**strategy.symbols, **symbols}
    way = _in_own_type(model, every, training, strategy.search.sizes, found)
    rank = found.objective.rank
    if rank(way) > rank(found.ways[0]):
        return _named(found, HALF, (OWN, way))
    other = search(training)
    if rank(other.ways[0]) > rank(found.ways[0]):
        return _named(found, HALF, (OWN, other.ways[0]))
    return _named(other, OWN, (HALF, found.ways[0]))


def _named(found: FoundStrategy, dtype: str, *others: tuple[str, Way]) -> FoundStrategy:
    return replace(found, types=((dtype, found.ways[0]), *others))


def _in_own_type(
    model: str | Path,
    symbols: Mapping[str, Symbol],
    training: TrainingSpec,
    sizes: Mapping[str, int],
    found: FoundStrategy,
) -> Way:
    """A plan for 16 bits, priced with the model's own type: without the casts."""
    parallel = OptimizerParallel(**found.data.get("optimizer_parallel", {}))
    workload = read_workload(model, symbols, training, parallel)
    nodes = {node.name or "" for node in workload.program.graph}
    seeds = found.found.seeds
    seeds = replace(seeds, nodes={n: seed for n, seed in seeds.nodes.items() if n in nodes})
    best = found.ways[0]
    split = best.staged.split if best.staged is not None else PipelineSplit(1, best.micro_batches)
    again = NOTHING
    if entry := found.data.get("recompute"):
        again = read_recompute(entry)
        kept = (p for p in again.nodes if any(p == n or fnmatchcase(n, p) for n in nodes))
        again = replace(again, nodes=tuple(kept))
    pricing = Pricing(workload, found.machine, sizes, split, again)
    return pricing.way(best.name, workload.plan(seeds))
