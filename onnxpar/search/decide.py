"""From a strategy that searches to one that does not: the search adds what the user left open.

All commands that carry out a strategy call `settled`. `onnxpar plan` shows the same `Decision` and
writes it to a file, so a strategy that searches gives the same shardings with such a file or
without. Only `onnxpar plan` decides more than shardings (`configure`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from onnxpar.core.errors import OnnxparError, ShardingError, StrategyError
from onnxpar.core.name_patterns import check_symbol_sizes
from onnxpar.core.symbols import Symbol
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.cost.price import InTurns
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.search.configurations import Configurations, Configured, Without
from onnxpar.search.estimates import MICRO_BATCHES
from onnxpar.search.find_plan import Candidate, Found, OnProgress, silent
from onnxpar.search.limited_search import TRIES, search
from onnxpar.search.nothing_fits import nothing_fits
from onnxpar.search.parameter_axes import decide_parameter_axes
from onnxpar.search.plan_choices import Open, pipeline_data, pipeline_split
from onnxpar.search.rival_plans import FOUND, Objective, Pricing, Way, named_apart
from onnxpar.search.taking_turns import in_turns
from onnxpar.search.workload import Workload
from onnxpar.strategy.machine_file import target_machine
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions
from onnxpar.strategy.resolve_strategy import resolve
from onnxpar.strategy.save import PAIR, divided, pairing, strategy_data, targeted
from onnxpar.strategy.schema import SEARCH, Strategy


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
        choices: In the same case, the choices in words.
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
    choices: str = ""
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
    again = strategy.recompute if trains else NOTHING
    splits = {n: pipeline_split(strategy, workload.forward, n, runs) for n in counts}
    pricings = {
        n: Pricing(workload, machine, entry.sizes, split, again, rival)
        for n, split in splits.items()
    }
    every = _Candidates(strategy, workload, limit, runs, pricings, progress)
    every.search(0 if configure is not None else TRIES)
    if configure is not None and every.refused:
        return _configured(strategy, workload, configure, progress)
    every.compare()
    if not every.found:
        raise ShardingError(nothing_fits(strategy, pricings, every.refused, every.presets))
    best, found = every.found[0]
    assert best.plan is not None
    staged: dict[str, Any] | None = None
    if best.staged is not None:
        step = runs if trains else micro_batches
        given = None if strategy.pipeline is None else strategy.pipeline.schedule
        staged = pipeline_data(best.staged, step, workload.forward, given)
    pricing = pricings[best.stages].at(best.parallel)
    plan = workload.plan(found.seeds) if pricing.recompute else best.plan
    try:
        turns = in_turns(strategy, pricing, plan, best, limit)
    except ShardingError:
        if configure is None:
            raise
        return _configured(strategy, workload, configure, progress)
    choices = best.parallel, strategy.recompute, runs, staged, turns
    data = _data(strategy, workload, found.seeds, *choices)
    ways = every.shown()
    assert ways[0].plan is not None
    free = _is_free(strategy)
    return Decision(found, ways[0].plan, ways, every.objective, data, free, in_turns=turns)


def _data(
    strategy: Strategy,
    workload: Workload,
    seeds: Seeds,
    parallel: OptimizerParallel,
    recompute: RecomputeOptions,
    micro_batches: int,
    staged: Mapping[str, Any] | None,
    turns: InTurns | None,
) -> dict[str, Any]:
    """The content of a strategy file with a plan."""
    data = strategy_data(seeds, workload.program.rules, strategy.symbols, parallel, staged)
    if recompute:
        data["recompute"] = recompute.entry
    data |= divided(micro_batches if staged is None else None)
    data |= pairing(strategy) if turns is None else {PAIR: True}
    return data | targeted(strategy)


@dataclass
class _Candidates:
    """The plans among which `decide` chooses: what a search finds, and presets.

    Attributes:
        strategy: The strategy.
        workload: The program that is sharded.
        limit: Bytes that a device may hold.
        micro_batches: Micro-batches of a step.
        pricings: The prices of plans, for each number of stages.
        progress: Called as each step of the search begins.
        found: The plans that may be chosen, the best one first.
        refused: The numbers of stages for which no plan was found.
        presets: The presets that were not chosen.
        objective: By which they are compared.
    """

    strategy: Strategy
    workload: Workload
    limit: int
    micro_batches: int
    pricings: Mapping[int, Pricing]
    progress: OnProgress
    found: list[tuple[Way, Found]] = field(default_factory=list)
    refused: list[Way] = field(default_factory=list)
    presets: list[Way] = field(default_factory=list)
    objective: Objective = field(init=False)

    def search(self, tries: int) -> None:
        """Searches with each number of stages.

        Args:
            tries: As in `limited_search.search`.

        Raises:
            OnnxparError: There is only one number, and an entry does not fit the model.
        """
        strategy, workload = self.strategy, self.workload
        for count, pricing in self.pricings.items():
            alone = len(self.pricings) == 1
            self.progress("searching" if alone else f"searching, stages: {count}", 0, 0)
            one = _unpiped(strategy, workload, count, self.micro_batches)
            runs, peak = self.micro_batches, pricing.peak
            try:
                seeds = resolve(one, workload.program)
                found = search(one, workload, seeds, self.progress, runs, peak, tries)
                self.found.append((pricing.found(found.seeds), found))
            except OnnxparError as error:
                if alone and not isinstance(error, ShardingError):
                    raise
                self.refused.append(Way(pricing.title(FOUND), None, str(error)))

    def compare(self) -> None:
        """Prices the presets, sorts the plans, and takes a preset if it is better than all found.

        If the bytes that the best plan sends grow too fast, large sizes are searched for, too.
        """
        for pricing in self.pricings.values() if _is_free(self.strategy) else ():
            # A stage of one device has nothing to shard: there is only one plan.
            if pricing.split.stages == 1 or pricing.split.stages < self.strategy.world:
                self.presets += pricing.presets(self.strategy, self.progress)
        self.objective = self._compared()
        first = min(self._ways, key=self.objective.rank, default=None)
        if first is None:
            return
        known = self._grown(first)
        self._replace(lambda way: known if way is first else way)
        if known.fits(self.limit) and known.growth:
            self._search_at_large_sizes(self.pricings[known.stages])
            self._replace(self._grown)
            self.objective = self._compared()
        self.found.sort(key=lambda item: self.objective.rank(item[0]))
        self._take_preset()

    @property
    def _ways(self) -> list[Way]:
        return [*(way for way, _ in self.found), *self.presets]

    def _compared(self) -> Objective:
        large = next(iter(self.pricings.values())).large
        return Objective.among(self._ways, self.strategy.search.level, self.limit, large)

    def _replace(self, change: Callable[[Way], Way]) -> None:
        self.found = [(change(way), found) for way, found in self.found]
        self.presets = [change(way) for way in self.presets]

    def _take_preset(self) -> None:
        """Takes the best preset if it fits and is better than what was found."""

        def is_better(way: Way) -> bool:
            rank = self.objective.rank
            fits = way.plan is not None and way.fits(self.limit)
            return fits and not (self.found and rank(self.found[0][0]) <= rank(way))

        for preset in sorted(self.presets, key=self.objective.rank):
            if preset.plan is None or not is_better(preset):
                return
            # A strategy file has the sharding of each node; another plan may follow from that.
            seeds = self.workload.pinned(preset.plan)
            plan = self.workload.plan(seeds)
            way = self.pricings[preset.stages].at(preset.parallel).way(preset.name, plan)
            way = self._grown(way) if preset.large else way
            if is_better(way):
                chosen = Candidate(plan.mesh.axes, way.seconds, way.peak, 0.0, 0.0)
                meshes = self.found[0][1].candidates if self.found else ()
                self.found.insert(0, (way, Found(seeds, chosen, meshes)))
                self.presets.remove(preset)
                return

    def _search_at_large_sizes(self, pricing: Pricing) -> None:
        """Searches for large sizes of the symbols: the bytes of what was found grow too fast."""
        strategy, workload = self.strategy, pricing.workload
        sizes = {**strategy.search.sizes, **pricing.large}
        entry = strategy.search.model_copy(update={"sizes": sizes})
        devices = strategy.world // pricing.split.stages
        one = replace(strategy, devices=devices, pipeline=None, search=entry)
        runs, peak = self.micro_batches, pricing.peak
        try:
            seeds = resolve(one, workload.program)
            found = search(one, workload, seeds, self.progress, runs, peak)
            way = pricing.found(found.seeds)
        except OnnxparError:
            return
        self.found.append((replace(way, name=f"{way.name} at large sizes"), found))

    def _grown(self, way: Way) -> Way:
        return way if way.plan is None else self.pricings[way.stages].grown(way)

    def shown(self) -> tuple[Way, ...]:
        """Returns all plans, the best one first; the first two with seconds at large sizes."""
        best, *others = (way for way, _ in self.found)
        others += [*self.refused, *self.presets]
        if others:
            second = min(range(len(others)), key=lambda i: self.objective.rank(others[i]))
            others[second] = self._at_large_sizes(others[second])
        return self._grown(best), *others

    def _at_large_sizes(self, way: Way) -> Way:
        return way if way.plan is None else self.pricings[way.stages].at_large_sizes(way)


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
    recompute = chosen.recompute or strategy.recompute
    choices = chosen.parallel, recompute, best.way.micro_batches, staged, turns
    data = _data(strategy, workload, best.found.seeds, *choices)

    def cost(way: Way) -> tuple[float, int]:
        return way.seconds, way.peak

    ways = [replace(best.way, name=FOUND)]
    for each in tried:
        # Without a choice that changes nothing, a plan costs the same.
        if cost(each.way) != cost(best.way):
            other = each.configuration.beside(chosen)
            ways.append(replace(each.way, name=f"{FOUND}, {other}" if other else FOUND))
    return Decision(
        best.found,
        best.way.plan,
        named_apart(ways),
        objective,
        data,
        True,
        tuple(without),
        chosen.describe(),
        turns,
    )


def _unpiped(strategy: Strategy, workload: Workload, stages: int, micro_batches: int) -> Strategy:
    """A strategy for the mesh of one stage, and for one micro-batch."""
    sizes = workload.micro_batch(strategy.search.sizes, micro_batches)
    entry = strategy.search.model_copy(update={"sizes": sizes})
    return replace(strategy, devices=strategy.world // stages, pipeline=None, search=entry)


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
