"""Estimates what configurations of a plan of training cost, without making their plans.

For each number of stages, and each split of a stage's devices into two axes, one search finds a
strategy. Its sum, with the weights of a configuration, gives the seconds and the bytes of a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from math import gcd, inf, log
from operator import mul

from onnxpar.core.errors import StrategyError
from onnxpar.core.machine import Machine
from onnxpar.core.mesh import Mesh
from onnxpar.core.name_patterns import check_symbol_sizes
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.graph.seeds import Seeds
from onnxpar.search.eliminate import solve
from onnxpar.search.find_plan import (
    LEVELS,
    UNLIMITED,
    MeshSearch,
    OnProgress,
    SearchSpec,
    seeds_of,
    silent,
    two_axes,
)
from onnxpar.search.late_work import late_work
from onnxpar.search.node_options import Option, saved
from onnxpar.search.plan_choices import SCHEDULES, Configuration, Open, pipeline_split
from onnxpar.search.problem import MOMENTS, build_levels
from onnxpar.search.rearranged_states import saved_behind
from onnxpar.search.recomputed_parts import Again, RecomputedParts
from onnxpar.search.repeated_layers import Folded, fold
from onnxpar.search.slowest_stage import seconds_of, slowest_stage
from onnxpar.search.value_flow import Flow, flow, recomputing
from onnxpar.search.workload import Workload
from onnxpar.stages.assign_stages import between_stages
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy.resolve_strategy import resolve
from onnxpar.strategy.schema import SEARCH, Strategy

AGAIN = 4
"""For micro-batches that are this many times as large, the search is repeated."""
PRICES = (0.125, 0.5, 2.0, 8.0, 32.0)
"""What a byte costs in searches that save memory, as a multiple of the seconds that the fastest
strategy takes for each of its bytes."""
FEW_NODES = 5_000
"""For larger programs, fewer searches are made: of prices, of inner axes and of stages; and virtual
stages have complete layers if they can."""
CLOSE = 1.03
"""For larger programs, searches save memory only with the numbers of stages with which the fastest
strategies do not fit, or take at most this many times as long as the best that fits."""
SLOWER = 1.1
"""For larger programs, more stages are not tried if the fastest strategies with some number of
stages take more than this many times as long as the best estimate that fits."""
SLACK = 1.25
"""An estimate of bytes that is this many times the limit may still fit."""
MICRO_BATCHES = 8
"""Micro-batches of a step if there are stages and the batch is not known."""


@dataclass(frozen=True)
class StageStrategy:
    """The result of a search on the mesh of one stage.

    Attributes:
        stages: The number of stages.
        inner: Devices of the inner axis.
        options: The option of each node, with layers folded.
        seeds: The same for all nodes, for propagation to carry out.
        pins: The shardings of parameters and inputs that the user fixed, by name.
        again: What may be recomputed.
    """

    stages: int
    inner: int
    options: tuple[Option, ...]
    seeds: Seeds
    pins: Mapping[str, Sharding]
    again: Sequence[Again]


@dataclass(frozen=True)
class Estimate:
    """A configuration whose plan has not been made.

    Attributes:
        split: Stages, micro-batches and schedule.
        parallel: Optimizer parallel.
        again: What is recomputed.
        strategy: The strategy of one stage.
        seconds: Seconds of a step.
        bytes: Bytes of a device of the fullest stage.
    """

    split: PipelineSplit
    parallel: OptimizerParallel
    again: Again
    strategy: StageStrategy
    seconds: float
    bytes: float

    @cached_property
    def kind(self) -> tuple[int, tuple[int, int, str, int]]:
        """The strategy (its identity), and how the program is split."""
        split = self.split
        parts = split.stages, split.micro_batches, split.schedule, split.chunks
        return id(self.strategy), parts


@dataclass
class Estimates:
    """Estimates configurations of a training program.

    Attributes:
        strategy: The strategy; what it fixes is kept.
        workload: The training program of one micro-batch.
        machine: The machine.
        limit: Bytes that a device may hold.
        open: What there is to decide.
    """

    strategy: Strategy
    workload: Workload
    machine: Machine
    limit: int
    open: Open
    _costs: dict[tuple[Mesh, int], CostModel] = field(default_factory=dict)
    _found: dict[object, StageStrategy] = field(default_factory=dict)
    _made: dict[tuple[int, int], list[Estimate]] = field(default_factory=dict)
    _fixed: dict[int, Seeds] = field(default_factory=dict)

    def stages(self) -> Sequence[int]:
        """The numbers of stages to try: each stage has a layer, if layers repeat."""
        return [n for n in self.open.stages if n <= self.most] or self.open.stages[:1]

    @property
    def most(self) -> int:
        """The most stages that are tried, unless more are given."""
        return len(self.parts.layers) or len(self.parts.forward.nodes)

    # -- estimates -------------------------------------------------------------------------------

    def every(self, progress: OnProgress = silent) -> list[Estimate]:
        """Estimates of all configurations that may be the best.

        Which strategies are found does not depend on the limit on memory; only how many are. So a
        larger limit adds configurations.

        Args:
            progress: Called as each search begins.
        """
        every = self.stages()
        found: list[list[Estimate]] = []
        best, inner = inf, 0
        for number, stages in enumerate(every, 1):
            progress(f"searching, stages: {stages}", number, len(every))
            found.append(self._fastest(stages, inner))
            best = min(best, self._quickest(found[-1]))
            if not self._is_small and _seconds(found[-1]) > SLOWER * best:
                break
            inner = min(found[-1], key=self._merit).strategy.inner
        for one in sorted(found, key=_seconds):
            # With the same micro-batches, strategies that save memory take more time than the
            # fastest. But they may have larger ones, for which the fastest need too much memory.
            least = inf if self._is_small else best
            if _seconds(one) < least and self._may_save(one, best):
                progress(f"saving memory, stages: {one[0].split.stages}", 0, 0)
                one += self._saving(one, least)
                best = min(best, self._quickest(one))
        # Searches may find one strategy several times.
        return list({id(e): e for one in found for e in one}.values())

    def _may_save(self, fastest: Sequence[Estimate], best: float) -> bool:
        """Whether strategies that save memory may be better than the best estimate that fits.

        For large programs they save less time than recomputation takes, if the fastest strategies
        with as many stages fit with it.
        """
        fitting = self._quickest(fastest)
        return self._is_small or fitting == inf or fitting <= CLOSE * best

    @property
    def _is_small(self) -> bool:
        return len(self.workload.program.graph) <= FEW_NODES

    def of(self, stages: int) -> list[Estimate]:
        """Estimates of all configurations with a number of stages."""
        found = self._fastest(stages)
        return found + self._saving(found)

    def _fastest(self, stages: int, near: int = 0) -> list[Estimate]:
        """Estimates with the fastest strategies.

        Args:
            stages: The number of stages.
            near: For larger programs, the devices of the inner axis that are tried first; then
                follow those next to the best ones. 0: all numbers of devices are tried.
        """
        counts = self._micro_batches(stages)
        every = list(dict.fromkeys(self._inner(stages)))
        left = every
        if near and not self._is_small:
            left = [min(every, key=lambda n: abs(log(n / near)))]
        tried: dict[int, list[Estimate]] = {}
        while left:
            tried |= {n: self._with_inner(stages, n, counts) for n in left}
            best = min(tried, key=lambda n: min(map(self._merit, tried[n])))
            at = every.index(best)
            left = [n for n in every[max(at - 1, 0) : at + 2] if n not in tried]
        return [e for n in sorted(tried) for e in tried[n]]

    def _merit(self, estimate: Estimate) -> tuple[bool, float]:
        """The sort key of an estimate: those that fit, by seconds; then the others, by bytes."""
        fits = estimate.bytes <= self.limit
        return not fits, estimate.seconds if fits else estimate.bytes

    def _saving(self, fastest: Sequence[Estimate], best: float = inf) -> list[Estimate]:
        """Estimates with strategies that save memory, if the fastest do not fit.

        Args:
            fastest: Estimates with the fastest strategies.
            best: Seconds of the best estimate that fits so far.
        """
        least = min(fastest, key=lambda e: e.bytes).strategy
        counts = self._micro_batches(least.stages)
        found, last = list[Estimate](), fastest
        prices = PRICES if self._is_small else PRICES[1::2]
        for price in prices:
            # The higher the price, the longer takes what is found.
            quickest = min(last, key=lambda e: e.seconds)
            if quickest.bytes <= self.limit or quickest.seconds >= best:
                break
            last = self._with_inner(least.stages, least.inner, counts, price)
            found += last
            best = min(best, self._quickest(last))
        return found

    def _quickest(self, estimates: Iterable[Estimate]) -> float:
        """The seconds of the fastest estimate that fits; infinity if none fits."""
        return min((e.seconds for e in estimates if e.bytes <= self.limit), default=inf)

    def _with_inner(
        self, stages: int, inner: int, counts: Sequence[int], price: float = 0.0
    ) -> list[Estimate]:
        """Estimates with a number of devices of the inner axis.

        The smallest micro-batch has one sample for each group of devices of the outer axis. Twice
        as large ones are tried as long as the fastest estimate becomes faster.
        """
        samples = self.strategy.world / stages / inner
        searched = self._nearest(counts, samples)
        strategy = self._search(stages, inner, searched, price)
        found, fastest = list[Estimate](), inf
        for count in self._fewer_micro_batches(counts, samples):
            more = self._with(strategy, count)
            found += more
            least = min(e.bytes for e in more)
            if (seconds := _seconds(more)) >= fastest or least > SLACK * self.limit:
                break
            fastest = seconds
            if count * AGAIN <= searched:
                strategy, searched = self._search(stages, inner, count, price), count
                found += self._with(strategy, count)
        return found

    def _fewer_micro_batches(self, counts: Sequence[int], samples: float) -> Iterator[int]:
        """Yields numbers of micro-batches of about so many samples, twice as many, and so on."""
        last = 0
        while last != counts[0]:
            count = self._nearest(counts, samples)
            if count != last:
                yield count
            last, samples = count, 2 * samples

    def _inner(self, stages: int) -> list[int]:
        """Devices of the inner axis of one stage's mesh; the outer axis has the others.

        The inner axis is within the devices with the fastest links, or twice as many. If the mesh
        is given, the inner devices are those of its last axes; they only say how many samples a
        micro-batch has, since the outer axes alone may shard the batch.
        """
        devices = self.strategy.world // stages
        if self.strategy.axes:
            return list(accumulate([*self.strategy.axes.values()][::-1], mul, initial=1))
        if self.strategy.nodes:
            return [1]
        most = 2 * (self.machine.links[0].devices or devices)
        return [n for n in range(1, min(most, devices) + 1) if devices % n == 0]

    def _with(self, strategy: StageStrategy, count: int) -> list[Estimate]:
        """Estimates of the configurations with a strategy and a number of micro-batches."""
        key = id(strategy), count
        if key not in self._made:
            self._made[key] = list(self._making(strategy, count))
        return self._made[key]

    def _making(self, strategy: StageStrategy, count: int) -> Iterator[Estimate]:
        stages, levels = strategy.stages, self.open.levels
        if strategy.seeds.mesh.size == 1:
            # There are no replicas that could share states.
            levels = levels[:1]
        layers = len(self.parts.layers)
        schedules = [each for each in SCHEDULES if 1 < stages <= layers // each[1]]
        if not self._is_small and layers and layers % stages == 0:
            # Halves of layers take unequal times, so virtual stages with them mostly do not pay.
            schedules = [each for each in schedules if layers // stages % each[1] == 0]
        if (entry := self.strategy.pipeline) is not None:
            schedules = [(entry.order, entry.chunks)]
        memory_first = LEVELS[self.strategy.search.level].memory_first
        sums = self._sums(strategy, count)
        seconds, bytes_ = next(sums)
        moved, cost = self._crossing(strategy, count), self.cost(strategy.seeds.mesh, count)
        kept = _kept(self._small, strategy.options, cost)
        freed = kept - _kept(self._recomputing, strategy.options, cost)
        more = self._again(strategy, cost)
        late, waiting = late_work(self._small, strategy.options, cost)
        before, after = (
            seconds_of(names, self._small, strategy.options, cost) for names in self.parts.ends
        )
        # Micro-batches that take turns are halves of it if there is only one.
        at_once = min(count, 2) if self.strategy.pair_micro_batches else 1
        fits = False
        for level in levels:
            if fits and not memory_first:
                # Higher levels need less memory and more time, as recomputation does.
                return
            slower, smaller = 0.0, 0.0
            if level != levels[0]:
                other = next(sums)
                slower, smaller = other[0] - seconds, other[1] - bytes_
            for schedule, chunk in schedules or SCHEDULES[:1]:
                split = self._split(stages, count, chunk, schedule)
                parallel = replace(self.strategy.optimizer_parallel, level=level)
                fitting = (a for a in strategy.again if self.parts.fits(a, stages * chunk))
                for choice in fitting:
                    step = seconds + slower + choice.seconds * more
                    complete = at_once * (kept - choice.freed * freed)
                    stash = (split.stash(n, complete, waiting) for n in (0, stages - 1))
                    # One layer at a time has what it has computed again.
                    one = at_once * freed / layers if choice.freed else 0.0
                    slowest = slowest_stage(step, (before, after), layers, stages)
                    estimate = Estimate(
                        split,
                        parallel,
                        choice,
                        strategy,
                        split.step(slowest + chunk * moved, late / stages),
                        (bytes_ + smaller + max(stash)) / stages + one,
                    )
                    fits |= estimate.bytes <= self.limit and not choice.freed
                    yield estimate

    def _sums(self, strategy: StageStrategy, count: int) -> Iterator[tuple[float, float]]:
        """For each level: seconds of a micro-batch without stages, bytes of states and work."""
        cost, seen = self.cost(strategy.seeds.mesh, count), self._small
        weights = [replace(self._spec(count, n), kept=0.0).weights for n in self.open.levels]
        # Nodes that are alike share one tuple.
        alike = {id(option): (option,) for option in strategy.options}
        options = [alike[id(option)] for option in strategy.options]
        problems = build_levels(seen, options, cost, strategy.pins, weights)
        for each, problem in zip(weights, problems, strict=True):
            choice = solve(problem, 0.0).choice
            behind = saved_behind(seen, strategy.options, cost, each, MOMENTS)
            yield problem.seconds(choice), problem.memory(choice) - behind

    def _again(self, strategy: StageStrategy, cost: CostModel) -> float:
        """Seconds in which all layers are computed once more."""
        weight = LEVELS[self.strategy.search.level].communication
        seconds = 0.0
        for item, option in zip(self._recomputing.items, strategy.options, strict=True):
            if item.recomputed:
                work = cost.node(item.rule, item.view, option.plan, item.cost)
                seconds += item.count * item.recomputed * (work.seconds + weight * work.special)
        return seconds

    def _crossing(self, strategy: StageStrategy, count: int) -> float:
        """Seconds per micro-batch in which a virtual stage receives and sends."""
        if strategy.stages == 1 or self._border is None:
            return 0.0
        devices = self.strategy.world // strategy.stages
        link = between_stages(self.machine, strategy.stages, devices)
        option = strategy.options[self._border]
        value = self._small.items[self._border].view.node.outputs[0]
        width = int(value.dtype.itemsize) if value.dtype is not None else 0
        size = self.cost(strategy.seeds.mesh, count).elements(option.plan.outputs[0]) * width
        return 4 * (link.latency + size / link.bandwidth)

    # -- searches --------------------------------------------------------------------------------

    def _search(self, stages: int, inner: int, count: int, price: float = 0.0) -> StageStrategy:
        """The fastest strategy of one stage's mesh if a byte has a price: one of `PRICES`, or 0."""
        seeds, levels = self._seeds(stages), self.open.levels
        spec, seen = self._spec(count, levels[0]), self._small
        if price:
            kept = self._split(stages, count).kept(0) / stages
            spec = replace(self._spec(count, levels[-1]), stage=1 / stages, kept=kept)
            if self.parts.everything:
                seen = self._recomputing
        spec = replace(spec, memory=UNLIMITED, price=price)
        if not self.strategy.axes and not self.strategy.nodes:
            devices = seeds.mesh.size
            seeds = replace(seeds, mesh=Mesh.of(two_axes(devices // inner, inner)))
        cost = self.cost(seeds.mesh, count)
        problem, solution, _ = MeshSearch(seen, cost, seeds, spec, silent).solve()
        options = problem.chosen(solution.choice)
        every = options if self._folded is None else self._folded.unfold(options)
        layouts = problem.layouts(solution.choice)
        pins = {**seeds.inputs, **seeds.parameters}
        places = tuple(option.places for option in options)
        key = seeds.mesh, stages, inner, places, tuple(layouts.items())
        if key not in self._found:
            again = self.parts.choices(self._flow, every, cost, stages)
            seeds = seeds_of(self._flow, every, layouts, seeds)
            self._found[key] = StageStrategy(stages, inner, options, seeds, pins, again)
        return self._found[key]

    def _seeds(self, stages: int) -> Seeds:
        """What the strategy fixes, on the mesh of one stage."""
        devices = self.strategy.world // stages
        if devices not in self._fixed:
            one = replace(self.strategy, devices=devices, pipeline=None)
            seeds = resolve(one, self.workload.program)
            seeds = replace(seeds, nodes={n: s for n, s in seeds.nodes.items() if s.pinned})
            free = self.strategy.dataset == SEARCH
            self._fixed[devices] = replace(seeds, inputs={}) if free else seeds
        return self._fixed[devices]

    def _spec(self, count: int, level: int) -> SearchSpec:
        entry = self.strategy.search
        return SearchSpec(
            self.machine,
            level=entry.level,
            sizes=self.workload.micro_batch(entry.sizes, count),
            parallel=replace(self.strategy.optimizer_parallel, level=level),
            micro_batches=count,
            working=1 / max(len(self.parts.layers), 4),
        )

    def cost(self, mesh: Mesh, count: int) -> CostModel:
        """The cost model of a micro-batch; one for each mesh, since it keeps what it has priced."""
        if (mesh, count) not in self._costs:
            sizes = self.workload.micro_batch(self.strategy.search.sizes, count)
            table = self.workload.program.env.table
            self._costs[mesh, count] = CostModel(self.machine, mesh, table, sizes)
        return self._costs[mesh, count]

    # -- the model -------------------------------------------------------------------------------

    @cached_property
    def _flow(self) -> Flow:
        pinned = self._seeds(self.open.stages[0]).nodes
        return flow(self.workload.program, list(self.workload.gradients), pinned)

    @cached_property
    def _folded(self) -> Folded | None:
        return fold(self._flow, {}, one=True)

    @property
    def _small(self) -> Flow:
        return self._flow if self._folded is None else self._folded.flow

    @cached_property
    def _recomputing(self) -> Flow:
        """The model in which all layers are recomputed."""
        return recomputing(self._small, self.parts.inside, 1.0)

    @cached_property
    def parts(self) -> RecomputedParts:
        """The layers, and what of them may be recomputed."""
        return RecomputedParts(self.workload.program, self.open.recompute)

    @cached_property
    def _border(self) -> int | None:
        """The item whose result one layer gives to the next."""
        parts = self.parts
        ends = {parts.forward.row[layer.stop - 1].name for layer in parts.layers}
        return next((i for i, item in enumerate(self._small.items) if item.name in ends), None)

    # -- configurations --------------------------------------------------------------------------

    def _micro_batches(self, stages: int) -> list[int]:
        """The numbers of micro-batches to try, in ascending order."""
        if self.open.micro_batches is not None:
            return [self.open.micro_batches]
        sizes, table = self.strategy.search.sizes, self.workload.program.env.table
        given = [sizes[name] for name in self.workload.batch if name in sizes]
        if not given:
            return [1 if stages == 1 else MICRO_BATCHES]
        batch = gcd(*given)

        def allowed(count: int) -> bool:
            try:
                check_symbol_sizes(self.workload.micro_batch(sizes, count), table, "")
            except StrategyError:
                return False
            return True

        counts = [n for n in range(1, batch + 1) if batch % n == 0 and allowed(n)]
        return counts or [1]

    def _nearest(self, counts: Sequence[int], samples: float) -> int:
        """The number of micro-batches that have about so many samples."""
        sizes = self.strategy.search.sizes
        batch = gcd(*(sizes[name] for name in self.workload.batch if name in sizes)) or samples
        return min(counts, key=lambda count: abs(log(batch / count / samples)))

    def _split(
        self, stages: int, count: int, chunks: int = 1, schedule: str = "1f1b"
    ) -> PipelineSplit:
        model = self.workload.forward
        return pipeline_split(self.strategy, model, stages, count, chunks, schedule)

    def configuration(self, estimate: Estimate) -> Configuration:
        """Returns the configuration of an estimate."""
        parts, again = self.parts, estimate.again
        return Configuration(
            estimate.split, estimate.parallel, parts.options(again), parts.words(again)
        )

    def on(self, devices: int, stages: Sequence[int]) -> "Estimates":
        """Returns estimates for another number of devices, and other numbers of stages."""
        # The copy keeps what is known of the model, and strategies, which are known by their mesh.
        other = copy(self)
        other.strategy = replace(self.strategy, devices=devices)
        other.open = replace(self.open, stages=stages)
        return other


def _kept(seen: Flow, options: Sequence[Option], cost: CostModel) -> float:
    """The bytes that a micro-batch leaves for its backward."""
    return sum(
        item.count * bytes_
        for item, option in zip(seen.items, options, strict=True)
        for one, bytes_ in saved(item, option, cost)
        if item.trained and not one.stored
    )


def _seconds(estimates: Sequence[Estimate]) -> float:
    """The seconds of the fastest of some estimates."""
    return min(e.seconds for e in estimates)
