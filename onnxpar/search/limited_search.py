"""A search whose result is within a limit on memory, as the price of its plan has it."""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from onnxpar.core.errors import ShardingError
from onnxpar.graph.seeds import Seeds
from onnxpar.search.find_plan import UNLIMITED, Found, OnProgress, SearchSpec, find, silent
from onnxpar.search.rival_plans import SLOWDOWN
from onnxpar.search.workload import Workload
from onnxpar.strategy.machine_file import target_machine
from onnxpar.strategy.schema import SEARCH, Strategy
from onnxpar_format.texts import bytes_text

TRIES = 4
"""Searches with a limit, after the first without one."""
_SMALLEST, _FASTEST = 1, 2
"""The levels that minimise memory and time."""


def search(
    strategy: Strategy,
    workload: Workload,
    seeds: Seeds,
    progress: OnProgress = silent,
    micro_batches: int = 1,
    peak: Callable[[Seeds], int] | None = None,
    tries: int = TRIES,
) -> Found:
    """Searches for what a strategy leaves open; presets are not considered.

    Args:
        strategy: The strategy.
        workload: The program that is sharded.
        seeds: What is fixed. Entries of nodes that are not pinned are left to the search.
        progress: As in `find`.
        micro_batches: Micro-batches of a step of training.
        peak: Returns the bytes of a device at the peak of the plan that follows from seeds, for
            which the limit on memory holds. None: the limit holds for the search's own estimate, a
            sum over nodes that ignores lifetimes.
        tries: Searches with a limit, if the fastest plan is not within it; without any, that plan
            is refused.
    """
    spec, run = _search_of(strategy, workload, seeds, progress, micro_batches)
    found = run(spec) if peak is None else _within(spec, run, peak, tries)
    if spec.weights.memory_first:
        found = _in_time(spec, run, found, peak)
    return found


def least_memory(
    strategy: Strategy, workload: Workload, seeds: Seeds, micro_batches: int = 1
) -> Found:
    """Searches for the least memory, without a limit and without a proof; arguments as `search`."""
    spec, run = _search_of(strategy, workload, seeds, silent, micro_batches)
    return run(replace(spec, algorithm="recursive", level=_SMALLEST, memory=UNLIMITED))


def _search_of(
    strategy: Strategy,
    workload: Workload,
    seeds: Seeds,
    progress: OnProgress,
    micro_batches: int,
) -> tuple[SearchSpec, Callable[[SearchSpec], Found]]:
    """How a strategy searches, and a function that searches in a given way."""
    seeds = replace(seeds, nodes={n: seed for n, seed in seeds.nodes.items() if seed.pinned})
    entry = strategy.search
    spec = SearchSpec(
        target_machine(strategy),
        entry.algorithm,
        entry.level,
        entry.memory,
        entry.sizes,
        parallel=strategy.optimizer_parallel,
        micro_batches=micro_batches,
    )

    def run(spec: SearchSpec) -> Found:
        return find(
            workload.program,
            seeds,
            spec,
            named=bool(strategy.axes),
            free_inputs=strategy.dataset == SEARCH,
            trained=list(workload.gradients),
            progress=progress,
        )

    return spec, run


def _within(
    spec: SearchSpec,
    run: Callable[[SearchSpec], Found],
    peak: Callable[[Seeds], int],
    tries: int,
) -> Found:
    """Returns the best plan found whose peak is within the limit.

    The search limits a sum over nodes. The peak is known only for a complete plan. So the limit of
    the search is moved between one that is too high and one that fits.

    Raises:
        ShardingError: The smallest peak found is above the limit.
    """
    found = run(replace(spec, memory=UNLIMITED))
    most = peak(found.seeds)
    if most <= spec.limit:
        return found
    if not tries:
        raise ShardingError(
            f"the fastest plan needs {bytes_text(most)}, expected at most {bytes_text(spec.limit)}"
        )
    fits: Found | None = None
    high, low, least = found.chosen.memory, 0.0, most
    limit = high * spec.limit / most
    for _ in range(tries):
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
        smallest = run(replace(spec, level=_SMALLEST, memory=UNLIMITED))
        least = min(least, peak(smallest.seeds))
        if least > spec.limit:
            raise ShardingError(
                "no strategy fits the memory limit: the smallest peak found is "
                f"{bytes_text(least)}, expected at most {bytes_text(spec.limit)}"
            )
        fits = smallest
    return fits


def _in_time(
    spec: SearchSpec,
    run: Callable[[SearchSpec], Found],
    found: Found,
    peak: Callable[[Seeds], int] | None,
) -> Found:
    """Returns the plan of least memory that takes at most `SLOWDOWN` times as long as the fastest.

    The last bytes cost much time. If `found` is slower, the fastest plans under limits between the
    two are tried. The limit on memory comes first: if no plan that fits is fast enough, `found` is
    returned.
    """
    # Proofs of how good these plans are would be useless.
    fast = replace(spec, level=_FASTEST, gap=inf)
    fastest = run(replace(fast, memory=UNLIMITED))
    slowest = SLOWDOWN * fastest.chosen.seconds
    if found.chosen.seconds <= slowest:
        return found

    def fits(tried: Found) -> bool:
        held = tried.chosen.memory if peak is None else peak(tried.seeds)
        return held <= spec.limit

    low, high = found.chosen.memory, fastest.chosen.memory
    best = fastest if fits(fastest) else found
    for _ in range(TRIES):
        limit = (low + high) / 2
        try:
            tried = run(replace(fast, memory=int(limit)))
        except ShardingError:
            low = limit
            continue
        if tried.chosen.seconds > slowest:
            low = limit
        else:
            high = min(limit, tried.chosen.memory)
            best = tried if fits(tried) else best
    return best
