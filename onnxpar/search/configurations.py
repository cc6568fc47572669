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

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from onnxpar.autodiff.recomputation.clones import Planned
from onnxpar.core.errors import OnnxparError
from onnxpar.core.machine import Machine
from onnxpar.cost.optimizer_parallel import OptimizerParallel
from onnxpar.cost.price import InTurns
from onnxpar.graph.plan import Plan
from onnxpar.search.corrections import Corrections
from onnxpar.search.estimates import Estimate, Estimates
from onnxpar.search.find_plan import (
    LEVELS,
    Candidate,
    Found,
    OnProgress,
    silent,
)
from onnxpar.search.nothing_fits import MORE
from onnxpar.search.plan_choices import (
    NO_BUBBLE,
    Configuration,
    Open,
)
from onnxpar.search.rival_plans import SLOWDOWN, Pricing, Way
from onnxpar.search.taking_turns import priced_in_turns
from onnxpar.search.workload import Workload
from onnxpar.stages.stage_price import ZERO_BUBBLE, Priced
from onnxpar.strategy.recompute_entry import NOTHING, RecomputeOptions
from onnxpar.strategy.schema import Strategy
from onnxpar_format.texts import bytes_text

PRICED = 5
"""The most plans that are made and priced,"""
MORE_NODES, AT_MOST = 40_000, 16
"""or more, if they have no more nodes than this together,"""
MOST_NODES, AT_LEAST = 100_000, 3
"""or fewer, if they have more nodes than this together."""
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
        turns: What a step costs whose micro-batches take turns, if the user says that they do.
        ratios: Its seconds and its bytes as it was priced first, divided by those of its estimate.
    """

    configuration: Configuration
    found: Found
    plan: Plan
    way: Way
    turns: InTurns | None = None
    ratios: tuple[float, float] = (1.0, 1.0)

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.way.seconds if self.turns is None else self.turns.seconds

    @property
    def peak(self) -> int:
        """Bytes at the peak of a device."""
        return self.way.peak if self.turns is None else self.turns.peak


@dataclass(frozen=True)
class Without:
    """What a step costs without one of a plan's choices.

    Attributes:
        choice: The choice, in words.
        seconds: Seconds of a step without it.
        peak: Bytes at the peak of a device without it.
        saved_seconds: Seconds that the choice saves; negative if a step takes longer.
        saved_bytes: Bytes at the peak that the choice saves; negative if it needs more.
        estimated: Whether this is a corrected estimate, not the price of a plan.
    """

    choice: str
    seconds: float
    peak: int
    saved_seconds: float
    saved_bytes: int
    estimated: bool


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
    _workloads: dict[OptimizerParallel, Workload] = field(default_factory=dict)
    _plans: dict[int, Plan] = field(default_factory=dict)
    _planned: dict[_Recomputing, Planned] = field(default_factory=dict)
    _unstaged: dict[tuple[_Recomputing, int, OptimizerParallel], Priced] = field(
        default_factory=dict
    )
    _refused: list[OnnxparError] = field(default_factory=list)
    _found: list[Configured] = field(default_factory=list)

    def run(self) -> list[Configured]:
        """Returns the plans that were priced; none of them fits if nothing fits."""
        self._found = self._priced(self._every)
        return self._found

    @cached_property
    def _estimates(self) -> Estimates:
        return Estimates(self.strategy, self.workload, self.machine, self.limit, self.open)

    @cached_property
    def _every(self) -> Sequence[Estimate]:
        return self._estimates.every(self.progress)

    def _priced(self, estimates: Sequence[Estimate]) -> list[Configured]:
        """Plans of the configurations that are estimated to be fastest, or to need least memory.

        At level 1, the plan that is estimated to be fastest says how long the others may take.
        """
        left = sorted(estimates, key=lambda e: e.seconds)
        memory_first = LEVELS[self.strategy.search.level].memory_first
        known = Corrections(self.limit)
        found: list[Configured] = []

        def worth(estimate: Estimate) -> bool:
            stages, best = estimate.split.stages, known.best()
            seconds = known.seconds(estimate)
            if memory_first and known.fitting:
                return known.bytes(estimate) < known.least and seconds <= SLOWDOWN * best
            if stages in known.fitting:
                return seconds < min(known.best(stages), ERROR * best)
            if len(known.fitting) >= RIVALS:
                return seconds < ERROR * best
            return estimate.seconds < NEAR * best

        nodes = len(self.workload.program.graph)
        few = min(max(MOST_NODES // nodes, AT_LEAST), PRICED)
        most = max(few, min(MORE_NODES // nodes, AT_MOST))
        for number in range(1, most + 1):
            left = [e for e in left if memory_first or known.open(e)]
            fitting = [e for e in left if known.bytes(e) <= self.limit]
            promising = [e for e in fitting if worth(e)]
            if memory_first and known.fitting:
                promising.sort(key=known.bytes)
            elif promising:
                promising.sort(key=known.likely)
            elif not known.fitting:
                # Estimates of bytes may be too high.
                near = [e for e in left if not found or known.untried(e)]
                promising = sorted(near, key=known.bytes)
            else:
                # Estimates of seconds are too low, and by how much differs between strategies.
                promising = sorted(filter(known.promises, left), key=known.at_least)
            if not promising:
                break
            estimate = promising[0]
            left.remove(estimate)
            configuration = self._estimates.configuration(estimate)
            self.progress(f"pricing {configuration.describe()}", number, most)
            try:
                configured = self._configured(estimate, configuration)
            except OnnxparError as error:
                self._refused.append(error)
                continue
            ratios = configured.seconds / estimate.seconds, configured.peak / estimate.bytes
            found.append(replace(configured, ratios=ratios))
            known.add(estimate, configured.seconds, configured.peak)
        return found

    def _configured(self, estimate: Estimate, chosen: Configuration) -> Configured:
        seeds = estimate.strategy.seeds
        key = id(estimate.strategy)
        if key not in self._plans:
            self._plans[key] = self.workload.plan(seeds)
        plan = self._plans[key]
        way, turns = self._way(chosen, plan)
        candidate = Candidate(seeds.mesh.axes, way.seconds, way.peak, 0.0, 0.0)
        return Configured(chosen, Found(seeds, candidate, ()), plan, way, turns)

    def nothing_fits(self, tried: Sequence[Configured]) -> str:
        """Returns the message if nothing fits: what comes closest, and what would fit."""
        closest = min(tried, key=lambda each: each.peak, default=None)
        limit = bytes_text(self.limit)
        if closest is None:
            reasons = dict.fromkeys(str(error) for error in self._refused)
            return f"no plan could be made: {'; '.join(reasons) or 'nothing was estimated'}"
        held, words = closest.way.held, closest.configuration.describe()
        turns = ", whose micro-batches take turns" if closest.turns is not None else ""
        text = (
            f"no plan fits into {limit} on a device; the closest needs {bytes_text(closest.peak)}, "
            f"of which {bytes_text(held)} are parameters, gradients and moments, with "
            f"{words}{turns}"
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
            # More stages need less memory, so fewer of them seldom fit if these do not.
            for count in tried[-2:]:
                fits = [e for e in other.of(count) if e.bytes <= self.limit]
                if fits:
                    best = min(fits, key=lambda e: e.seconds)
                    what = other.configuration(best).describe()
                    return f"about {devices} devices would be enough, with {what}"
        more = devices > self.strategy.world
        return f"{devices} devices would not be enough either" if more else ""

    def improved(self, best: Configured) -> tuple[Configured, list[Without]]:
        """Returns a plan without the choices that do not pay, and it without each other choice.

        Estimates leave out much: for example, chunks may make stages unequal.
        """
        while True:
            found = [(name, self._changed(best, other)) for name, other in self._fewer(best)]
            better = min((each for _, each in found), key=self._rank, default=best)
            if better is best or self._rank(better) > self._rank(best):
                lacking = [_without(best, name, each.seconds, each.peak) for name, each in found]
                return best, [*self._smaller(best), *lacking]
            best = better

    def _rank(self, plan: Configured) -> tuple[bool, float, float]:
        return self._order(plan.seconds, plan.peak)

    def _order(self, seconds: float, bytes_: float) -> tuple[bool, float, float]:
        """The sort key of a plan: those that fit, by seconds, or at level 1 by bytes; then others.

        Plans that do not fit are sorted by bytes.
        """
        memory_first = LEVELS[self.strategy.search.level].memory_first
        fits = bytes_ <= self.limit
        costs = (seconds, bytes_) if fits and not memory_first else (bytes_, seconds)
        return not fits, *costs

    def _smaller(self, best: Configured) -> Iterator[Without]:
        """Yields what a step costs with fewer stages, and with half as many micro-batches or less.

        These numbers are the next smaller ones that were estimated.
        """
        split = best.configuration.split
        stages, count = split.stages, split.micro_batches
        splits = {(e.split.stages, e.split.micro_batches) for e in self._every}
        if fewer := max((n for n, _ in splits if n < stages), default=0):
            alike = {(n, m) for n, m in splits if n == fewer}
            yield self._best_of(alike, best, f"{stages} stages, not {fewer}")
        if half := max((m for n, m in splits if n == stages and 2 * m <= count), default=0):
            yield self._best_of({(stages, half)}, best, f"{count} micro-batches, not {half}")

    def _best_of(
        self, splits: Collection[tuple[int, int]], best: Configured, choice: str
    ) -> Without:
        """The best plan that was priced, or else estimated, with some splits.

        Args:
            splits: Numbers of stages and of micro-batches.
            best: The plan that was chosen. The ratios of its price to its estimate correct others.
            choice: Why it has another split, in words.
        """
        priced = [
            each
            for each in self._found
            if each.peak <= self.limit
            and (each.configuration.split.stages, each.configuration.split.micro_batches) in splits
        ]
        if priced:
            other = min(priced, key=self._rank)
            return _without(best, choice, other.seconds, other.peak)
        slower, larger = best.ratios
        costs = (
            (slower * e.seconds, larger * e.bytes)
            for e in self._every
            if (e.split.stages, e.split.micro_batches) in splits
        )
        # If none fits, the fastest says what memory the choice saves.
        seconds, bytes_ = min(costs, key=lambda c: (c[1] > self.limit, *c))
        return _without(best, choice, seconds, int(bytes_), estimated=True)

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
        way, turns = self._way(chosen, plan.plan)
        return replace(plan, configuration=chosen, way=way, turns=turns)

    def _way(self, chosen: Configuration, plan: Plan) -> tuple[Way, InTurns | None]:
        """Returns a plan on one stage's mesh with a configuration, priced; also in turns."""
        parallel = chosen.parallel
        # A workload keeps what does not depend on its plan.
        if parallel not in self._workloads:
            self._workloads[parallel] = replace(self.workload, parallel=parallel)
        workload, sizes = self._workloads[parallel], self.strategy.search.sizes
        pricing = Pricing(workload, self.machine, sizes, chosen.split, chosen.recompute)
        cost = self._estimates.cost(plan.mesh, chosen.split.micro_batches)
        program = id(plan), chosen.recompute
        if program not in self._planned:
            self._planned[program] = pricing.planned(plan)
        key = program, chosen.split.micro_batches, parallel
        if key not in self._unstaged:
            self._unstaged[key] = pricing.unstaged(self._planned[program], cost)
        way = pricing.in_stages(chosen.describe(), self._unstaged[key], cost)
        if not self.strategy.pair_micro_batches:
            return way, None
        return way, priced_in_turns(self.strategy, pricing, self._planned[program], way)


def _without(
    best: Configured, choice: str, seconds: float, peak: int, *, estimated: bool = False
) -> Without:
    """A plan without a choice, beside the plan with it."""
    saved = seconds - best.seconds, peak - best.peak
    return Without(choice, seconds, peak, *saved, estimated)
