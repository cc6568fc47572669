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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import inf

from onnxpar.autodiff.recomputation.clones import Planned
from onnxpar.core.errors import OnnxparError
from onnxpar.core.machine import Machine
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.graph.plan import Plan
from onnxpar.search.estimates import Estimate, Estimates
from onnxpar.search.find_plan import (
    LEVELS,
    Candidate,
    Found,
    OnProgress,
    silent,
)
from onnxpar.search.plan_choices import (
    NO_BUBBLE,
    Configuration,
    Open,
)
from onnxpar.search.rival_plans import SLOWDOWN, Pricing, Way
from onnxpar.search.workload import Workload
from onnxpar.stages.stage_price import ZERO_BUBBLE, Priced
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions
from onnxpar.strategy.schema import Strategy
from onnxpar_format.texts import bytes_text

MORE = (2, 4, 8, 16, 64)
"""If nothing fits, as many times the devices are estimated."""
PRICED = 6
"""The most plans that are made and priced."""
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
    _refused: list[OnnxparError] = field(default_factory=list)

    def run(self) -> list[Configured]:
        """Returns the plans that were priced; none of them fits if nothing fits."""
        found: list[Estimate] = []
        every = self._estimates.stages()
        for number, stages in enumerate(every, 1):
            self.progress(f"searching, stages: {stages}", number, len(every))
            found += self._estimates.of(stages)
        return self._priced(found)

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self.strategy, self.workload, self.machine, self.limit, self.open)

    def _priced(self, estimates: Sequence[Estimate]) -> list[Configured]:
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

        def bytes_(estimate: Estimate) -> float:
            amounts = sorted(range(3), key=lambda amount: abs(amount - estimate.again.amount))
            keys = product((estimate.split.stages, 0), amounts)
            return estimate.bytes * next((ratios[key] for key in keys if key in ratios), 1.0)

        def worth(estimate: Estimate) -> bool:
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
            configuration = self._estimates.configuration(estimate)
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

    def _configured(self, estimate: Estimate, chosen: Configuration) -> Configured:
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
        most = 1 if strategy.pair_micro_batches else self._estimates.most
        # A mesh that is given is that of one stage, so more devices make more stages.
        fixed = bool(strategy.axes) or strategy.pipeline is not None
        for times in MORE:
            stages = {n * k for n in self.open.stages for k in ((times,) if fixed else (1, times))}
            tried = sorted(n for n in stages if n <= most and devices * times % n == 0)
            if not tried:
                break
            devices = self.strategy.world * times
            other = self._estimates.on(strategy.devices * times, tried)
            for count in tried[-2:]:
                fits = [e for e in other.of(count) if e.bytes <= self.limit]
                if fits:
                    best = min(fits, key=lambda e: e.seconds)
                    what = other.configuration(best).describe()
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
        cost = self._estimates.cost(plan.mesh, chosen.split.micro_batches)
        program = id(plan), chosen.recompute
        if program not in self._planned:
            self._planned[program] = pricing.planned(plan)
        key = program, chosen.split.micro_batches, chosen.parallel
        if key not in self._unstaged:
            self._unstaged[key] = pricing.unstaged(self._planned[program], cost)
        return pricing.in_stages(chosen.describe(), self._unstaged[key], cost)
