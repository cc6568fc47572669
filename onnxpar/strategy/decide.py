"""From a strategy to the seeds of propagation: what the user fixed, and what a search adds."""

from collections.abc import Callable, Collection
from dataclasses import replace

import onnx_ir as ir

from onnxpar.analysis.propagate import Rules
from onnxpar.analysis.search.find import Found, SearchSpec, Told, find
from onnxpar.analysis.seeds import Seeds
from onnxpar.analysis.shapes import ShapeEnv
from onnxpar.errors import ShardingError
from onnxpar.program import Program
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.resolve import resolve
from onnxpar.strategy.schema import SEARCH, Strategy

_TRIES = 4
"""Searches with a limit, after the first without one."""
_UNLIMITED = 1 << 62


def decide(strategy: Strategy, program: Program) -> Seeds:
    """Returns what propagation starts from: of a strategy that searches, the plans found.

    A limit on memory holds as in `onnxpar plan`, but in a pipeline, whose program has copies of
    nodes for its stages: there it holds for the search's own count.

    Args:
        strategy: The strategy.
        program: What is divided.

    Raises:
        StrategyError: An entry does not fit the model.
        ShardingError: Nothing fits into the memory of a device.
        MachineError: There is no such machine, or its file is malformed.
    """
    p, entry = program, strategy.search
    seeds = resolve(strategy, p.model, p.rules, p.env)
    if strategy.rest != SEARCH:
        return seeds
    whole = strategy.pipeline is None
    peak = p.peak(load_machine(entry.machine), entry.sizes) if whole else None
    return search(strategy, p.model, p.rules, p.env, seeds, list(p.gradients), peak=peak).seeds


def search(
    strategy: Strategy,
    model: ir.Model,
    rules: Rules,
    env: ShapeEnv,
    seeds: Seeds,
    trained: Collection[str] = (),
    told: Told | None = None,
    micro_batches: int | None = None,
    peak: Callable[[Seeds], int] | None = None,
) -> Found:
    """Searches for what a strategy leaves open; as `decide` otherwise.

    `told` is as in `find`. Of a plan that was written down, what the user spoke of is kept and what
    followed is open. A step has as many micro-batches as the strategy says, if no number is given.
    The limit on memory holds for `peak`, the bytes of a device at the peak of the plan that follows
    from seeds; by default for the search's own count, a sum over nodes that knows no lifetimes.
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

    def run(spec: SearchSpec) -> Found:
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

    return run(spec) if peak is None else _within(spec, run, peak)


def _within(
    spec: SearchSpec, run: Callable[[SearchSpec], Found], peak: Callable[[Seeds], int]
) -> Found:
    """Returns the best plan found whose peak is within the limit.

    The search limits a sum over nodes. How much of it is there at the same time is only known of a
    whole plan; so its limit is moved between one that is too much and one that fits.

    Raises:
        ShardingError: The least that was found is more than the limit.
    """
    found = run(replace(spec, memory=_UNLIMITED))
    most = peak(found.seeds)
    if most <= spec.limit:
        return found
    fits: Found | None = None
    high, low, least = found.chosen.memory, 0.0, most
    limit = high * spec.limit / most
    for _ in range(_TRIES):
        try:
            tried = run(replace(spec, memory=int(limit)))
        except ShardingError:
            low = max(low, limit)
        else:
            held = peak(tried.seeds)
            least = min(least, held)
            if held > spec.limit:
                high = min(limit, tried.chosen.memory)
            elif fits is None or tried.chosen.seconds < fits.chosen.seconds:
                fits, low = tried, max(low, limit)
            else:
                break
        limit = (low + high) / 2
    if fits is None:
        smallest = run(replace(spec, level=1, memory=_UNLIMITED))
        least = min(least, peak(smallest.seeds))
        if least > spec.limit:
            raise ShardingError(
                f"no strategy fits: the least memory of a device that was found is {least} bytes, "
                f"expected at most {spec.limit:.0f}"
            )
        fits = smallest
    return fits
