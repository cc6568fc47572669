"""Decides stages, micro-batches, optimizer parallel and recomputation, together with the strategy.

A *configuration* is everything that a plan of training decides besides shardings. There are
thousands of them, and a plan of each cannot be made. So each is estimated first: for each number of
stages, the search finds a strategy of one stage's mesh. Its sum, with the weights of a
configuration, gives the seconds and the bytes of a step. Then the plans of the configurations that
fit and are estimated to be fastest are made and priced, until no other is estimated to be better.
The ratio of the bytes of a priced plan and its estimate corrects the later estimates.

The time of a pipeline is that of `stages.stage_price`. Recomputation of every k-th layer is Chen et
al., 2016; optimizer parallel is ZeRO (Rajbhandari et al., 2020).
"""

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, product
from math import gcd, inf, log
from operator import mul

from onnxpar.autodiff.recomputation.clones import Planned
from onnxpar.core.errors import OnnxparError, StrategyError
from onnxpar.core.machine import Machine
from onnxpar.core.mesh import Mesh
from onnxpar.core.name_patterns import check_symbol_sizes
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.search.eliminate import solve
from onnxpar.search.find_plan import (
    LEVELS,
    UNLIMITED,
    Candidate,
    Found,
    MeshSearch,
    OnProgress,
    SearchSpec,
    seeds_of,
    silent,
)
from onnxpar.search.late_work import late_work
from onnxpar.search.node_options import Option
from onnxpar.search.plan_choices import (
    NO_BUBBLE,
    SCHEDULES,
    Configuration,
    Open,
    pipeline_split,
)
from onnxpar.search.problem import MOMENTS, build, saved
from onnxpar.search.rearranged_states import saved_behind
from onnxpar.search.recomputed_parts import Again, RecomputedParts
from onnxpar.search.repeated_layers import Folded, fold
from onnxpar.search.rival_plans import SLOWDOWN, Pricing, Way
from onnxpar.search.slowest_stage import seconds_of, slowest_stage
from onnxpar.search.value_flow import Flow, flow, recomputing
from onnxpar.search.workload import Workload
from onnxpar.stages.assign_stages import between_stages
from onnxpar.stages.stage_price import ZERO_BUBBLE, PipelineSplit, Priced
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions
from onnxpar.strategy.resolve_strategy import resolve
from onnxpar.strategy.schema import SEARCH, Strategy
from onnxpar_format.texts import bytes_text

AGAIN = 4
"""If the best micro-batches are this many times as large as those of the search, it is repeated."""
MORE = (2, 4, 8, 16, 64)
"""If nothing fits, as many times the devices are estimated."""
PRICED = 6
"""The most plans that are made and priced."""
MICRO_BATCHES = 8
"""Micro-batches of a step if there are stages and the batch is not known."""
NEAR = 1.5
"""A configuration whose estimate is this many times slower than the best plan is not priced."""
RIVALS = 3
"""If plans with as many numbers of stages fit, others are priced only if they may be faster."""
ERROR = 1.05
"""Corrected estimates of seconds are at most this many times too high."""


@dataclass(frozen=True)
class Configured:
    """A configuration whose plan has been made and priced.

    Attributes:
        configuration: The configuration.
        found: The strategy.
        plan: The plan that follows from it, without recomputation.
        way: The plan, priced.
    """

    configuration: Configuration
    found: Found
    plan: Plan
    way: Way


@dataclass(frozen=True)
class _Strategy:
    """The result of a search on the mesh of one stage."""

    stages: int
    inner: int
    options: tuple[Option, ...]
    seeds: Seeds
    pins: Mapping[str, Sharding]
    again: Sequence[Again]


@dataclass(frozen=True)
class _Estimate:
    split: PipelineSplit
    parallel: OptimizerParallel
    again: Again
    strategy: _Strategy
    seconds: float
    bytes: float


_Recomputing = tuple[int, RecomputeOptions]
"""A plan (its identity), and what is recomputed."""


@dataclass
class Configurations:
    """Searches for the best configuration, with its strategy.

    Attributes:
        strategy: The strategy; what it fixes is kept.
        workload: The training program of one micro-batch.
        machine: The machine.
        limit: Bytes that a device may hold.
        open: What there is to decide.
        progress: Called as each step begins.
    """

    strategy: Strategy
    workload: Workload
    machine: Machine
    limit: int
    open: Open
    progress: OnProgress = silent
    _plans: dict[int, Plan] = field(default_factory=dict)
    _planned: dict[_Recomputing, Planned] = field(default_factory=dict)
    _unstaged: dict[tuple[_Recomputing, int, OptimizerParallel], Priced] = field(
        default_factory=dict
    )
    _costs: dict[tuple[Mesh, int], CostModel] = field(default_factory=dict)
    _fixed: dict[int, Seeds] = field(default_factory=dict)
    _refused: list[OnnxparError] = field(default_factory=list)

    def run(self) -> list[Configured]:
        """Returns the plans that were priced; none of them fits if nothing fits."""
        estimates: list[_Estimate] = []
        every = self._stages()
        for number, stages in enumerate(every, 1):
            self.progress(f"searching, stages: {stages}", number, len(every))
            estimates += self._estimates(stages)
        return self._priced(estimates)

    def _stages(self) -> Sequence[int]:
        """The numbers of stages to try: each stage has a layer, if layers repeat."""
        return [n for n in self.open.stages if n <= self._most] or self.open.stages[:1]

    @property
    def _most(self) -> int:
        """The most stages that are tried, unless more are given."""
        return len(self._parts.layers) or len(self._parts.forward.nodes)

    # -- estimates -------------------------------------------------------------------------------

    def _estimates(self, stages: int) -> list[_Estimate]:
        """Estimates of all configurations with a number of stages."""
        counts = self._micro_batches(stages)
        found: list[_Estimate] = []
        for inner in self._inner(stages):
            found += self._with_inner(stages, inner, counts)
        if all(e.bytes > self.limit for e in found):
            # The fastest strategies need too much memory, whatever else is chosen.
            inner = min(found, key=lambda e: e.bytes).strategy.inner
            found += self._with_inner(stages, inner, counts, limit=True)
        return found

    def _with_inner(
        self, stages: int, inner: int, counts: Sequence[int], *, limit: bool = False
    ) -> list[_Estimate]:
        """Estimates with a number of devices of the inner axis.

        The smallest micro-batch has one sample for each group of devices of the outer axis. Twice
        as large ones are tried as long as the fastest estimate becomes faster.
        """
        samples = self.strategy.world / stages / inner
        first = self._nearest(counts, samples)
        strategy = self._search(stages, inner, first, limit=limit)
        found, best, fastest = [], first, inf
        for count in self._fewer_micro_batches(counts, samples):
            more = list(self._of(strategy, count))
            found += more
            seconds = min((e.seconds for e in more if e.bytes <= self.limit), default=inf)
            if seconds >= fastest:
                break
            best, fastest = count, seconds
        if best * AGAIN <= first:
            found += self._of(self._search(stages, inner, best, limit=limit), best)
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

    def _of(self, strategy: _Strategy, count: int) -> Iterator[_Estimate]:
        """Estimates of the configurations with a strategy and a number of micro-batches."""
        stages, levels = strategy.stages, self.open.levels
        layers = len(self._parts.layers)
        schedules = [each for each in SCHEDULES if 1 < stages <= layers // each[1]]
        if (entry := self.strategy.pipeline) is not None:
            schedules = [(entry.schedule, entry.chunks)]
        memory_first = LEVELS[self.strategy.search.level].memory_first
        seconds, bytes_, kept = self._sum(strategy, count, levels[0], 0.0)
        again, _, rest = self._sum(strategy, count, levels[0], 1.0)
        more, freed = again - seconds, kept - rest
        moved, cost = self._crossing(strategy, count), self._cost(strategy.seeds.mesh, count)
        late, waiting = late_work(self._small, strategy.options, cost)
        before, after = (
            seconds_of(names, self._small, strategy.options, cost) for names in self._parts.ends
        )
        fits = False
        for level in levels:
            if fits and not memory_first:
                # Higher levels need less memory and more time.
                return
            slower, smaller = 0.0, 0.0
            if level != levels[0]:
                other = self._sum(strategy, count, level, 0.0)
                slower, smaller = other[0] - seconds, other[1] - bytes_
            for schedule, chunk in schedules or SCHEDULES[:1]:
                split = self._split(stages, count, chunk, schedule)
                parallel = replace(self.strategy.optimizer_parallel, level=level)
                fitting = (a for a in strategy.again if self._parts.fits(a, stages * chunk))
                for choice in fitting:
                    step = seconds + slower + choice.seconds * more
                    complete = kept - choice.freed * freed
                    stash = (split.stash(n, complete, waiting) for n in (0, stages - 1))
                    slowest = slowest_stage(step, (before, after), layers, stages)
                    estimate = _Estimate(
                        split,
                        parallel,
                        choice,
                        strategy,
                        split.step(slowest + chunk * moved, late / stages),
                        (bytes_ + smaller + max(stash)) / stages,
                    )
                    fits |= estimate.bytes <= self.limit
                    yield estimate

    def _sum(
        self, strategy: _Strategy, count: int, level: int, share: float
    ) -> tuple[float, float, float]:
        """Seconds of a micro-batch without stages, bytes of states and work, bytes for backward."""
        cost = self._cost(strategy.seeds.mesh, count)
        seen = recomputing(self._small, self._parts.inside, share) if share else self._small
        weights = replace(self._spec(count, level), kept=0.0).weights
        # Nodes that are alike share one tuple.
        alike = {id(option): (option,) for option in strategy.options}
        options = [alike[id(option)] for option in strategy.options]
        problem = build(seen, options, cost, strategy.pins, weights)
        choice = solve(problem, 0.0).choice
        kept = sum(
            item.count * bytes_
            for item, option in zip(seen.items, strategy.options, strict=True)
            for one, bytes_ in saved(item, option, cost)
            if item.trained and not one.stored
        )
        behind = saved_behind(seen, strategy.options, cost, weights.parallel, MOMENTS)
        return problem.seconds(choice), problem.memory(choice) - behind, kept

    def _crossing(self, strategy: _Strategy, count: int) -> float:
        """Seconds per micro-batch in which a virtual stage receives and sends."""
        if strategy.stages == 1 or self._border is None:
            return 0.0
        devices = self.strategy.world // strategy.stages
        link = between_stages(self.machine, strategy.stages, devices)
        option = strategy.options[self._border]
        value = self._small.items[self._border].view.node.outputs[0]
        width = int(value.dtype.itemsize) if value.dtype is not None else 0
        size = self._cost(strategy.seeds.mesh, count).elements(option.plan.outputs[0]) * width
        return 4 * (link.latency + size / link.bandwidth)

    # -- searches --------------------------------------------------------------------------------

    def _search(self, stages: int, inner: int, count: int, *, limit: bool = False) -> _Strategy:
        """The fastest strategy of one stage's mesh, or the fastest that the limit allows."""
        seeds, levels = self._seeds(stages), self.open.levels
        spec, seen = replace(self._spec(count, levels[0]), memory=UNLIMITED), self._small
        if limit:
            kept = self._split(stages, count).kept(0) / stages
            spec = replace(
                self._spec(count, levels[-1]), stage=1 / stages, kept=kept, memory=self.limit
            )
            if self._parts.everything:
                seen = recomputing(seen, self._parts.inside, 1.0)
        if not self.strategy.axes and not self.strategy.nodes:
            devices = seeds.mesh.size
            axes = {"x": devices // inner, "y": inner}
            mesh = Mesh.of({name: size for name, size in axes.items() if size > 1} or {"x": 1})
            seeds = replace(seeds, mesh=mesh)
        problem, solution = MeshSearch(
            seen, self._cost(seeds.mesh, count), seeds, spec, silent
        ).closest()
        options = problem.chosen(solution.choice)
        every = options if self._folded is None else self._folded.unfold(options)
        layouts = problem.layouts(solution.choice)
        pins = {**seeds.inputs, **seeds.parameters}
        cost = self._cost(seeds.mesh, count)
        again = self._parts.choices(self._flow, every, cost, stages)
        seeds = seeds_of(self._flow, every, layouts, seeds)
        return _Strategy(stages, inner, options, seeds, pins, again)

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
            working=1 / max(len(self._parts.layers), 4),
        )

    def _cost(self, mesh: Mesh, count: int) -> CostModel:
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
        return fold(self._flow, {})

    @property
    def _small(self) -> Flow:
        return self._flow if self._folded is None else self._folded.flow

    @cached_property
    def _parts(self) -> RecomputedParts:
        return RecomputedParts(self.workload.program, self.open.recompute)

    @cached_property
    def _border(self) -> int | None:
        """The item whose result one layer gives to the next."""
        parts = self._parts
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

    # -- plans -----------------------------------------------------------------------------------

    def _priced(self, estimates: Sequence[_Estimate]) -> list[Configured]:
        """Plans of the configurations that are estimated to be fastest, or to need least memory.

        At level 1, the plan that is estimated to be fastest says how long the others may take.
        """
        left = sorted(estimates, key=lambda e: e.seconds)
        memory_first = LEVELS[self.strategy.search.level].memory_first
        # What the estimates of bytes are multiplied by, for a number of stages (0 for others),
        # by what is recomputed: nothing, a part of each layer, or complete layers.
        ratios: dict[tuple[int, int], float] = {}
        found: list[Configured] = []
        best, least = inf, inf
        # The fastest estimate of the plans that fit, by the number of stages.
        quickest: dict[int, float] = {}
        # The least ratio of the seconds of a plan that fits and their estimate.
        slower = inf

        def bytes_(estimate: _Estimate) -> float:
            amounts = sorted(range(3), key=lambda amount: abs(amount - estimate.again.amount))
            keys = product((estimate.split.stages, 0), amounts)
            return estimate.bytes * next((ratios[key] for key in keys if key in ratios), 1.0)

        def worth(estimate: _Estimate) -> bool:
            stages, seconds = estimate.split.stages, slower * estimate.seconds
            if memory_first and quickest:
                return bytes_(estimate) < least and seconds <= SLOWDOWN * best
            if stages in quickest:
                return estimate.seconds < quickest[stages] and seconds < ERROR * best
            if len(quickest) >= RIVALS:
                return seconds < ERROR * best
            return estimate.seconds < NEAR * best

        for number in range(1, PRICED + 1):
            fitting = [e for e in left if bytes_(e) <= self.limit and worth(e)]
            if memory_first and quickest:
                fitting.sort(key=bytes_)
            elif not fitting and not found:
                fitting = sorted(left, key=bytes_)
            if not fitting:
                break
            estimate = fitting[0]
            left.remove(estimate)
            configuration = self._configuration(estimate)
            self.progress(f"pricing {configuration.describe()}", number, PRICED)
            try:
                configured = self._configured(estimate, configuration)
            except OnnxparError as error:
                self._refused.append(error)
                continue
            way = configured.way
            found.append(configured)
            for key in (estimate.split.stages, 0):
                ratios[key, estimate.again.amount] = way.peak / estimate.bytes
            if way.fits(self.limit):
                stages, seconds = estimate.split.stages, estimate.seconds
                quickest[stages] = min(quickest.get(stages, inf), seconds)
                slower = min(slower, way.seconds / seconds)
                best, least = min(best, way.seconds), min(least, way.peak)
        return found

    def _configuration(self, estimate: _Estimate) -> Configuration:
        parts, again = self._parts, estimate.again
        return Configuration(
            estimate.split, estimate.parallel, parts.options(again), parts.words(again)
        )

    def _configured(self, estimate: _Estimate, chosen: Configuration) -> Configured:
        seeds = estimate.strategy.seeds
        key = id(estimate.strategy)
        if key not in self._plans:
            self._plans[key] = self.workload.plan(seeds)
        way = self._way(chosen, self._plans[key])
        candidate = Candidate(seeds.mesh.axes, way.seconds, way.peak, 0.0, 0.0)
        return Configured(chosen, Found(seeds, candidate, ()), self._plans[key], way)

    def nothing_fits(self, tried: Sequence[Configured]) -> str:
        """Returns the message if nothing fits: what comes closest, and what would fit."""
        closest = min(tried, key=lambda each: each.way.peak, default=None)
        limit = bytes_text(self.limit)
        if closest is None:
            reasons = dict.fromkeys(str(error) for error in self._refused)
            return f"no plan could be made: {'; '.join(reasons) or 'nothing was estimated'}"
        way = closest.way
        text = (
            f"no plan fits into {limit} on a device; the closest needs {bytes_text(way.peak)}, of "
            f"which {bytes_text(way.held)} are parameters, gradients and moments, with "
            f"{closest.configuration.describe()}"
        )
        more = self._enough()
        return f"{text}; {more}" if more else text

    def _enough(self) -> str:
        """Returns how many devices would be enough, by estimates."""
        strategy, devices = self.strategy, self.strategy.world
        if strategy.nodes or (strategy.pipeline is not None and strategy.pipeline.assign):
            return ""
        most = 1 if strategy.pair_micro_batches else self._most
        # A mesh that is given is that of one stage, so more devices make more stages.
        fixed = bool(strategy.axes) or strategy.pipeline is not None
        for times in MORE:
            # The copy keeps what is known of the model.
            other = copy(self)
            stages = {n * k for n in self.open.stages for k in ((times,) if fixed else (1, times))}
            tried = sorted(n for n in stages if n <= most and devices * times % n == 0)
            if not tried:
                break
            devices = self.strategy.world * times
            other.strategy = replace(strategy, devices=strategy.devices * times)
            other.open = replace(self.open, stages=tried)
            for count in tried[-2:]:
                fits = [e for e in other._estimates(count) if e.bytes <= self.limit]
                if fits:
                    best = min(fits, key=lambda e: e.seconds)
                    what = other._configuration(best).describe()
                    return f"about {devices} devices would be enough, with {what}"
        more = devices > self.strategy.world
        return f"{devices} devices would not be enough either" if more else ""

    def improved(self, best: Configured) -> tuple[Configured, list[tuple[str, Way]]]:
        """Returns a plan without the choices that do not pay, and it without each other choice.

        Estimates leave out much: for example, chunks may make stages unequal.
        """
        while True:
            found = [(name, self._changed(best, other)) for name, other in self._fewer(best)]
            fitting = [each for _, each in found if each.way.fits(self.limit)]
            better = min(fitting, key=self._rank, default=best)
            if better is best or self._rank(better) > self._rank(best):
                return best, [(name, each.way) for name, each in found]
            best = better

    def _rank(self, plan: Configured) -> tuple[float, float]:
        """The sort key of a plan: its seconds, then its bytes; at level 1, the bytes come first."""
        seconds, bytes_ = plan.way.seconds, plan.way.peak
        memory_first = LEVELS[self.strategy.search.level].memory_first
        return (bytes_, seconds) if memory_first else (seconds, bytes_)

    def _fewer(self, best: Configured) -> Iterator[tuple[str, Configuration]]:
        """Yields each choice that was made, and the configuration without it."""
        chosen = best.configuration
        split, parallel = chosen.split, chosen.parallel
        if chosen.recompute and self.open.recompute is None:
            yield chosen.recomputed, replace(chosen, recompute=NOTHING)
        if parallel.level and self.open.level is None:
            yield chosen.sharded, replace(chosen, parallel=replace(parallel, level=0))
        if split.chunks > 1 and self.strategy.pipeline is None:
            plain = replace(split, schedule="1f1b", chunks=1)
            yield f"{split.chunks} chunks", replace(chosen, split=plain)
        if split.schedule == ZERO_BUBBLE and self.strategy.pipeline is None:
            yield NO_BUBBLE, replace(chosen, split=replace(split, schedule="1f1b"))

    def _changed(self, plan: Configured, chosen: Configuration) -> Configured:
        return replace(plan, configuration=chosen, way=self._way(chosen, plan.plan))

    def _way(self, chosen: Configuration, plan: Plan) -> Way:
        """Returns a plan on one stage's mesh with a configuration, priced."""
        workload = replace(self.workload, parallel=chosen.parallel)
        sizes = self.strategy.search.sizes
        pricing = Pricing(workload, self.machine, sizes, chosen.split, chosen.recompute)
        cost = self._cost(plan.mesh, chosen.split.micro_batches)
        program = id(plan), chosen.recompute
        if program not in self._planned:
            self._planned[program] = pricing.planned(plan)
        key = program, chosen.split.micro_batches, chosen.parallel
        if key not in self._unstaged:
            self._unstaged[key] = pricing.unstaged(self._planned[program], cost)
        return pricing.in_stages(chosen.describe(), self._unstaged[key], cost)
