"""From a strategy that searches to one that does not: the search adds what the user left open.

All commands that carry out a strategy call `settled`. `onnxpar plan` shows the same `Decision` and
writes it to a file, so a strategy that searches gives the same shardings with such a file or
without. Only `onnxpar plan` decides more than shardings (`configure`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, lcm
from typing import Any

from onnxpar.core.errors import OnnxparError, ShardingError, StrategyError
from onnxpar.core.name_patterns import check_symbol_sizes
from onnxpar.core.symbols import Symbol, SymbolTable
from onnxpar.cost.price import InTurns
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.search.configurations import Configurations, Configured, Without
from onnxpar.search.estimates import MICRO_BATCHES
from onnxpar.search.find_plan import (
    UNLIMITED,
    Candidate,
    Found,
    OnProgress,
    SearchSpec,
    find,
    silent,
)
from onnxpar.search.parameter_axes import decide_parameter_axes
from onnxpar.search.plan_choices import Open, pipeline_data, pipeline_split
from onnxpar.search.rival_plans import (
    FOUND,
    SLOWDOWN,
    Objective,
    Pricing,
    Way,
    named_apart,
)
from onnxpar.search.taking_turns import in_turns
from onnxpar.search.workload import Workload
from onnxpar.strategy.machine_file import target_machine
from onnxpar.strategy.recompute_entry import NOTHING
from onnxpar.strategy.resolve_strategy import resolve
from onnxpar.strategy.save import PAIR, divided, pairing, strategy_data, targeted
from onnxpar.strategy.schema import SEARCH, Strategy
from onnxpar_format.texts import bytes_text

_TRIES = 4
"""Searches with a limit, after the first without one."""
_FASTEST = 2
"""The level that minimises time."""


@dataclass(frozen=True)
class Decision:
    """The result of a strategy that searches.

    Attributes:
        found: The result of the search, or the preset that was better.
        plan: The plan of the complete program that follows from it.
        ways: That plan, then the plans found for other numbers of stages, then the presets, if the
            plan was compared with them.
        objective: The objective by which it is the best.
        data: The content of a strategy file for the plan.
        free: Whether the plan was compared with presets: they would keep everything that is fixed.
        without: If more than the strategy was decided: what a step costs without each choice.
        in_turns: What a step costs whose micro-batches take turns, if they do; None also if it has
            stages.
    """

    found: Found
    plan: Plan
    ways: tuple[Way, ...]
    objective: Objective
    data: dict[str, Any]
    free: bool
    without: tuple[Without, ...] | None = None
    in_turns: InTurns | None = None


def settled(strategy: Strategy, workload: Workload, symbols: Mapping[str, Symbol]) -> Strategy:
    """Returns a strategy that leaves nothing to a search; runs the search if necessary.

    Args:
        strategy: The strategy.
        workload: The program that is sharded, before it is split into stages.
        symbols: Constraints on symbols, including those of the strategy.

    Raises:
        StrategyError: An entry does not fit the model.
        ShardingError: No plan fits into the memory of a device.
        MachineError: There is no such machine, or its file is malformed.
    """
    if strategy.rest != SEARCH:
        # The sizes are also used to choose stage boundaries.
        _check_sizes(strategy, workload)
        if not strategy.parameter_axes:
            return strategy
        seeds = resolve(strategy, workload.program)
        decided = decide_parameter_axes(seeds, workload)
        if decided is seeds:
            return strategy
        data = strategy_data(decided, workload.program.rules, symbols, strategy.optimizer_parallel)
    else:
        data = decide(replace(strategy, symbols=symbols), workload).data
    found = Strategy.from_dict(data, source=strategy.source)
    return replace(
        found,
        search=strategy.search,
        recompute=strategy.recompute,
        pipeline=found.pipeline or strategy.pipeline,
        micro_batches=strategy.micro_batches,
        pair_micro_batches=found.pair_micro_batches or strategy.pair_micro_batches,
    )


def _check_sizes(strategy: Strategy, workload: Workload) -> None:
    check_symbol_sizes(
        strategy.search.sizes, workload.program.env.table, f"{strategy.source}: sizes for planning"
    )


def decide(
    strategy: Strategy,
    workload: Workload,
    *,
    stages: Sequence[int] | None = None,
    micro_batches: int | None = None,
    configure: Open | None = None,
    progress: OnProgress = silent,
) -> Decision:
    """Searches for what a strategy leaves open, and compares the result with the presets.

    Presets are considered if they would keep everything that is fixed. One is taken if it is better
    by the objective, or if no plan that the search finds fits into the memory.

    Args:
        strategy: The strategy, whose `rest` is "search".
        workload: The program that is sharded, before it is split into stages.
        stages: Numbers of pipeline stages to try, all of which divide the devices; by default the
            strategy's.
        micro_batches: Micro-batches of a step of training; by default the strategy's, or 1 without
            stages, else `MICRO_BATCHES`. It does not matter for a forward program.
        configure: What else may be decided for training, if the fastest plan needs too much memory,
            or more devices than the fastest links connect; then presets are not considered.
            Otherwise only its level of optimizer parallel is decided.
        progress: Called as each step of the search begins.

    Raises:
        OnnxparError: As `settled`.
    """
    _check_sizes(strategy, workload)
    entry = strategy.search
    machine = target_machine(strategy)
    limit = machine.memory
    trains = bool(workload.gradients)
    if configure is not None and not (trains and configure.anything):
        configure = None
    if entry.algorithm != "recursive":
        # Configurations are estimated with recursive searches, which prove nothing.
        configure = None
    counts = _counts(strategy, stages)
    micro_batches = strategy.step_micro_batches if micro_batches is None else micro_batches
    if trains:
        _check_micro_batches(strategy, workload, micro_batches)
    near = machine.links[0].devices
    if configure is not None and 0 < near < strategy.world:
        return _configured(strategy, workload, configure, progress)
    runs = _micro_batches(strategy, counts, micro_batches) if trains else 1
    rival = None
    if configure is not None and configure.level is None:
        rival = replace(strategy.optimizer_parallel, level=configure.levels[0])
    tried: list[tuple[Way, Found]] = []
    refused: list[Way] = []
    pricings = [
        Pricing(
            workload,
            machine,
            entry.sizes,
            pipeline_split(strategy, workload.forward, count, runs),
            strategy.recompute if trains else NOTHING,
            rival,
        )
        for count in counts
    ]
    for count, pricing in zip(counts, pricings, strict=True):
        progress("searching" if counts == [1] else f"searching, stages: {count}", 0, 0)
        one = _unpiped(strategy, workload, count, runs)
        try:
            seeds = resolve(one, workload.program)
            tries = 0 if configure is not None else _TRIES
            found = search(one, workload, seeds, progress, runs, pricing.peak, tries)
            tried.append((pricing.found(found.seeds), found))
        except OnnxparError as error:
            if len(counts) == 1 and not isinstance(error, ShardingError):
                raise
            refused.append(Way(pricing.title(FOUND), None, str(error)))
    if configure is not None and refused:
        return _configured(strategy, workload, configure, progress)
    free = _is_free(strategy)
    rivals: list[tuple[Way, Pricing]] = []
    for pricing in pricings if free else ():
        # A stage of one device has nothing to shard: there is only one plan.
        if pricing.split.stages == 1 or pricing.split.stages < strategy.world:
            rivals += [(way, pricing) for way in pricing.presets(strategy, progress)]
    shown = [way for way, _ in rivals]
    by_stages = {pricing.split.stages: pricing for pricing in pricings}
    large = pricings[0].large

    def compared() -> Objective:
        return Objective.among((*(way for way, _ in tried), *shown), entry.level, limit, large)

    objective = compared()
    first = min((*(way for way, _ in tried), *shown), key=objective.rank, default=None)
    known = by_stages[first.stages].grown(first) if first is not None else None
    if known is not None and known.fits(limit) and known.growth:
        tried += _at_large_sizes(strategy, by_stages[known.stages], progress, runs)
        tried = [(by_stages[way.stages].grown(way), found) for way, found in tried]
        rivals = [(pricing.grown(way), pricing) for way, pricing in rivals]
        shown = [way for way, _ in rivals]
        objective = compared()
    rank = objective.rank
    tried.sort(key=lambda item: rank(item[0]))
    for preset, pricing in sorted(rivals, key=lambda item: rank(item[0])):
        if preset.plan is None or not preset.fits(limit):
            break
        if tried and rank(tried[0][0]) <= rank(preset):
            break
        # A strategy file has the sharding of each node; another plan may follow from that.
        seeds = workload.pinned(preset.plan)
        plan = workload.plan(seeds)
        way = pricing.at(preset.parallel).way(preset.name, plan)
        way = pricing.grown(way) if preset.large else way
        if way.fits(limit) and not (tried and rank(tried[0][0]) <= rank(way)):
            chosen = Candidate(plan.mesh.axes, way.seconds, way.peak, 0.0, 0.0)
            meshes = tried[0][1].candidates if tried else ()
            tried.insert(0, (way, Found(seeds, chosen, meshes)))
            shown.remove(preset)
            break
    if not tried:
        raise ShardingError(_nothing_fits(refused, shown, workload.program.env.table))
    best, found = tried[0]
    assert best.plan is not None
    staged: dict[str, Any] | None = None
    if best.staged is not None:
        step = runs if trains else micro_batches
        given = None if strategy.pipeline is None else strategy.pipeline.schedule
        staged = pipeline_data(best.staged, step, workload.forward, given)
    data = strategy_data(
        found.seeds, workload.program.rules, strategy.symbols, best.parallel, staged
    )
    if strategy.recompute:
        data["recompute"] = strategy.recompute.entry
    pricing = by_stages[best.stages].at(best.parallel)
    plan = workload.plan(found.seeds) if pricing.recompute else best.plan
    try:
        turns = in_turns(strategy, pricing, plan, best, limit)
    except ShardingError:
        if configure is None:
            raise
        return _configured(strategy, workload, configure, progress)
    data |= divided(runs if staged is None else None)
    data |= pairing(strategy) if turns is None else {PAIR: True}
    data |= targeted(strategy)
    others = [*(way for way, _ in tried[1:]), *refused, *shown]
    best = known if known is not None and best is first else by_stages[best.stages].grown(best)
    if large and others:
        second = min(range(len(others)), key=lambda i: rank(others[i]))
        others[second] = by_stages[others[second].stages].at_large_sizes(others[second])
    assert best.plan is not None
    return Decision(found, best.plan, (best, *others), objective, data, free, in_turns=turns)


def _at_large_sizes(
    strategy: Strategy, pricing: Pricing, progress: OnProgress, micro_batches: int
) -> list[tuple[Way, Found]]:
    """Searches for large sizes of the symbols: the bytes of what was found grow too fast."""
    sizes = {**strategy.search.sizes, **pricing.large}
    entry = strategy.search.model_copy(update={"sizes": sizes})
    devices = strategy.world // pricing.split.stages
    one = replace(strategy, devices=devices, pipeline=None, search=entry)
    workload = pricing.workload
    try:
        seeds = resolve(one, workload.program)
        found = search(one, workload, seeds, progress, micro_batches, pricing.peak)
        way = pricing.found(found.seeds)
    except OnnxparError:
        return []
    return [(replace(way, name=f"{way.name} at large sizes"), found)]


def _configured(
    strategy: Strategy, workload: Workload, configure: Open, progress: OnProgress
) -> Decision:
    """The decision if more than the strategy is to be decided.

    Raises:
        ShardingError: Nothing fits.
    """
    entry, pipeline = strategy.search, strategy.pipeline
    if pipeline is not None and pipeline.model_fields_set <= {"stages", "micro_batches"}:
        # `configure` has both numbers; schedule and chunks are open.
        strategy = replace(strategy, devices=strategy.world, pipeline=None)
    machine = target_machine(strategy)
    limit = machine.memory
    configurations = Configurations(strategy, workload, machine, limit, configure, progress)
    tried = configurations.run()
    objective = Objective.among((each.way for each in tried), entry.level, limit, {})

    def rank(each: Configured) -> tuple[float, ...]:
        pairs = 0.0 if each.turns is None else each.turns.seconds
        return (float(each.peak > limit), pairs, *objective.rank(each.way))

    tried.sort(key=rank)
    if not tried or tried[0].peak > limit:
        raise ShardingError(configurations.nothing_fits(tried))
    best, without = configurations.improved(tried[0])
    chosen = best.configuration
    pricing = Pricing(
        replace(workload, parallel=chosen.parallel),
        machine,
        entry.sizes,
        chosen.split,
        chosen.recompute,
    )
    turns = best.turns or in_turns(strategy, pricing, best.plan, best.way, limit)
    assert best.way.plan is not None
    staged = None
    if best.way.staged is not None:
        count, schedule = best.way.micro_batches, chosen.split.schedule
        staged = pipeline_data(best.way.staged, count, workload.forward, schedule)
    rules = workload.program.rules
    data = strategy_data(best.found.seeds, rules, strategy.symbols, chosen.parallel, staged)
    if recompute := chosen.recompute or strategy.recompute:
        data["recompute"] = recompute.entry
    data |= divided(best.way.micro_batches if staged is None else None)
    data |= pairing(strategy) if turns is None else {PAIR: True}
    data |= targeted(strategy)

    def cost(way: Way) -> tuple[float, int]:
        return way.seconds, way.peak

    # Without a choice that changes nothing, a plan costs the same.
    ways = [best.way, *(each.way for each in tried if cost(each.way) != cost(best.way))]
    return Decision(
        best.found,
        best.way.plan,
        named_apart(ways),
        objective,
        data,
        True,
        tuple(without),
        in_turns=turns,
    )


def _unpiped(strategy: Strategy, workload: Workload, stages: int, micro_batches: int) -> Strategy:
    """A strategy for the mesh of one stage, and for one micro-batch."""
    sizes = workload.micro_batch(strategy.search.sizes, micro_batches)
    entry = strategy.search.model_copy(update={"sizes": sizes})
    return replace(strategy, devices=strategy.world // stages, pipeline=None, search=entry)


def _nothing_fits(refused: Sequence[Way], presets: Sequence[Way], table: SymbolTable) -> str:
    """The message if there is no plan: why not, what the presets would need, what may help."""
    texts = [f"{way.name}: {way.reason}" if refused[1:] else way.reason for way in refused]
    plans = {way.name: way.plan for way in presets if way.plan is not None}
    if plans:
        least = min((way for way in presets if way.name in plans), key=lambda way: way.peak)
        texts.append(
            f"the preset that needs least memory is {least.name}, with {bytes_text(least.peak)}"
        )
        divisors = _unproved(plans.values(), table)
        if divisors:
            options = " ".join(f"--symbol {name}:divisor={n}" for name, n in divisors.items())
            texts.append(
                "sizes that may not divide evenly are padded or gathered, which takes memory; if "
                f"they always divide evenly, {options} may help"
            )
    return "; ".join(texts)


def _unproved(plans: Iterable[Plan], table: SymbolTable) -> dict[str, int]:
    """The divisors of symbols, not known so far, with which all dims would divide evenly."""
    found: dict[str, int] = {}
    for plan in plans:
        shardings = (s for node in plan.nodes.values() for s in (*node.inputs, *node.outputs))
        for part in (c for s in shardings if s is not None for dim in s.dims for c in dim):
            pieces = plan.mesh.count(part.atoms)
            is_symbol = not isinstance(part.size, int) and part.size.is_Symbol
            if is_symbol and not table.divisible(part.size, pieces):
                found[str(part.size)] = lcm(found.get(str(part.size), 1), pieces)
    return found


def _is_free(strategy: Strategy) -> bool:
    """Whether presets would keep everything that is fixed."""
    fixed = strategy.annotation or strategy.axes or strategy.nodes or strategy.parameters
    return not fixed and strategy.dataset == SEARCH


def _counts(strategy: Strategy, stages: Sequence[int] | None) -> list[int]:
    counts = list(dict.fromkeys(stages or [strategy.stages]))
    for count in counts:
        if count < 1 or strategy.world % count:
            raise StrategyError(
                f"stages: expected numbers that divide the {strategy.world} devices, got {count}"
            )
        if count != strategy.stages and (strategy.axes or strategy.pipeline is not None):
            raise StrategyError(
                f"stages: {strategy.source} has {strategy.stages} stages, got {count}"
            )
        if count > 1 and strategy.pair_micro_batches:
            raise StrategyError(
                f"{strategy.where(PAIR)}: expected one stage, since stages work on several "
                f"micro-batches already, got pair_micro_batches: true and {count} stages"
            )
    return counts


def _check_micro_batches(strategy: Strategy, workload: Workload, given: int | None) -> None:
    """Checks that the batch of a step has a sample for each micro-batch."""
    for name in sorted(workload.batch):
        batch = strategy.search.sizes.get(name)
        if batch is not None and given is not None and batch < given:
            raise StrategyError(
                f"micro-batches: expected at most {batch}, since {name}={batch} is the batch of a "
                f"step, got {given}"
            )


def _micro_batches(strategy: Strategy, counts: Sequence[int], given: int | None) -> int:
    if given is not None:
        return given
    if strategy.pipeline is not None:
        return strategy.pipeline.stages
    return 1 if list(counts) == [1] else MICRO_BATCHES


def search(
    strategy: Strategy,
    workload: Workload,
    seeds: Seeds,
    progress: OnProgress = silent,
    micro_batches: int = 1,
    peak: Callable[[Seeds], int] | None = None,
    tries: int = _TRIES,
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

    found = run(spec) if peak is None else _within(spec, run, peak, tries)
    if spec.weights.memory_first:
        found = _in_time(spec, run, found, peak)
    return found


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
        smallest = run(replace(spec, level=1, memory=UNLIMITED))
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
    for _ in range(_TRIES):
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
