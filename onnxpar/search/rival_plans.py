"""The plans that are compared: from a search, and from presets."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from onnxpar.autodiff.recomputation.clones import Planned, Recomputation, recompute
from onnxpar.autodiff.recomputation.selection import chosen_nodes
from onnxpar.core.errors import OnnxparError
from onnxpar.core.machine import WIRE, Machine
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.growth import grows_faster, large_sizes
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.cost.price import Price
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.search.find_plan import LEVELS, OnProgress
from onnxpar.search.parameter_axes import decide_parameter_axes
from onnxpar.search.workload import Workload
from onnxpar.stages.assign_stages import between_stages
from onnxpar.stages.program_places import late_nodes
from onnxpar.stages.stage_price import PipelineSplit, Priced, StagedPrice, price_stages
from onnxpar.strategy.presets import load_strategy
from onnxpar.strategy.recompute_entry import KEEP, NOTHING, RecomputeOptions
from onnxpar.strategy.resolve_strategy import resolve
from onnxpar.strategy.schema import PIPELINE_AXIS, Strategy

FOUND = "found"
"""Name of the plan that a search finds."""
SLOWDOWN = 2.0
"""At level 1, a plan that saves memory may take this many times as long as the fastest plan."""
PAYS = 0.98
"""Optimizer parallel is decided for a plan if a step then takes less than this share of the
time."""


@dataclass(frozen=True)
class Way:
    """One way to shard the model, priced.

    Attributes:
        name: A preset, or "found"; with what else was chosen, or differs from the best plan.
        price: What it costs without stages, on the devices of one stage; None if it is impossible.
        reason: Why it is impossible.
        staged: What it costs in stages, if there are several.
        micro_batches: Micro-batches of a step.
        plan: Its plan, on the mesh of one stage; None if it is impossible.
        parallel: Its optimizer parallel.
        growth: The symbols with which the bytes that it sends grow faster than in proportion.
        large: Seconds of a step without stages at large sizes of the symbols; 0 if unknown.
    """

    name: str
    price: Price | None
    reason: str = ""
    staged: StagedPrice | None = None
    micro_batches: int = 1
    plan: Plan | None = None
    parallel: OptimizerParallel = NOT_PARALLEL
    growth: tuple[str, ...] = ()
    large: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinity if the way is impossible."""
        if self.staged is not None:
            return self.staged.seconds
        return inf if self.price is None else self.price.step(self.micro_batches)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return 1 if self.staged is None else self.staged.split.stages

    @property
    def mesh(self) -> str:
        """The axes of the mesh of one stage; empty if the way is impossible."""
        axes = () if self.plan is None else self.plan.mesh.axes
        return " x ".join(f"{name}={size}" for name, size in axes)

    @property
    def peak(self) -> int:
        """Bytes at the peak of a device of the fullest stage; 0 if the way is impossible."""
        if self.staged is not None:
            return self.staged.peak
        return 0 if self.price is None else self.price.highest(self.micro_batches)

    @property
    def held(self) -> int:
        """Bytes held all the time by a device of the stage that holds most."""
        if self.staged is not None:
            return self.staged.held
        return 0 if self.price is None else self.price.held

    def fits(self, limit: int) -> bool:
        """Whether it is possible within `limit` bytes of a device."""
        return self.price is not None and self.peak <= limit


@dataclass(frozen=True)
class Objective:
    """What makes one way better than another.

    Attributes:
        level: The level of the objective (see `SearchSpec`).
        limit: Bytes that a device may hold.
        slowest: Seconds that a way may take in order to save memory.
        steady: The ways that fit and whose bytes grow in proportion to each symbol at most.
        large: The large sizes at which ways are compared, too.
    """

    level: int
    limit: int
    slowest: float = inf
    steady: tuple[Way, ...] = ()
    large: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def among(ways: Iterable[Way], level: int, limit: int, large: Mapping[str, int]) -> "Objective":
        """Returns the objective by which these ways are compared."""
        fitting = [way for way in ways if way.fits(limit)]
        fastest = min((way.seconds for way in fitting), default=inf)
        steady = tuple(way for way in fitting if way.large and not way.growth)
        return Objective(level, limit, SLOWDOWN * fastest, steady, large)

    def rank(self, way: Way) -> tuple[float, ...]:
        """Returns the sort key of a way: those that fit come first, then by the objective."""
        if way.price is None:
            return (1.0, inf)
        weights = LEVELS[self.level]
        first = (float(not way.fits(self.limit)), float(self.outgrown(way)))
        if weights.memory_first:
            return (*first, float(way.seconds > self.slowest), way.peak, way.seconds)
        price = way.price
        spent = price.computing + price.communicating
        share = price.communicating / spent if spent else 0.0
        return (*first, way.seconds * (1 + (weights.communication - 1) * share))

    def best_at_large_sizes(self, ways: Iterable[Way]) -> Way | None:
        """Returns the fastest way at large sizes, of those that fit; None if there are no such."""
        known = (way for way in ways if way.large and way.fits(self.limit))
        return min(known, key=lambda way: way.large, default=None)

    def outgrown(self, way: Way) -> bool:
        """Whether the bytes of a way grow faster than those of another that needs no more memory.

        The other way has as many stages, and is faster at large sizes.
        """
        return bool(way.growth) and any(
            other.large < way.large and other.peak <= way.peak and other.stages == way.stages
            for other in self.steady
        )


@dataclass
class Pricing:
    """Makes and prices the plans that follow from seeds, each once.

    Attributes:
        workload: The program that is planned.
        machine: The machine that runs it.
        sizes: Sizes of its symbols; the batch is that of all micro-batches of a step.
        split: How it is split into stages; a plan is on the mesh of one stage.
        recompute: What is recomputed in training.
        rival: Optimizer parallel that a plan has instead of the workload's if it pays (`PAYS`).
    """

    workload: Workload
    machine: Machine
    sizes: Mapping[str, int]
    split: PipelineSplit
    recompute: RecomputeOptions = NOTHING
    rival: OptimizerParallel | None = None
    _known: list[tuple[Seeds, Way]] = field(default_factory=list)

    def peak(self, seeds: Seeds) -> int:
        """Returns the bytes of a device at the peak of the plan that follows from seeds."""
        return self.found(seeds).peak

    def found(self, seeds: Seeds) -> Way:
        """Returns the plan that follows from the seeds of a search, priced.

        Raises:
            ShardingError: The seeds do not fit the program.
            StrategyError: There are more virtual stages than nodes.
        """
        for known, way in self._known:
            if known is seeds:
                return way
        way = self.way(self.title(FOUND), self.workload.plan(seeds))
        self._known.append((seeds, way))
        return way

    def way(self, name: str, plan: Plan) -> Way:
        """Returns a plan on one stage's mesh as a way, priced in stages if there are several.

        Raises:
            StrategyError: There are more virtual stages than nodes.
        """
        sizes = self.workload.micro_batch(self.sizes, self.split.micro_batches)
        cost = CostModel(self.machine, plan.mesh, self.workload.program.env.table, sizes)
        planned = self.planned(plan)
        way = self.in_stages(name, self.unstaged(planned, cost), cost)
        if self.rival is None:
            return way
        sharded, name = self.at(self.rival), f"{name}, {self.rival.words}"
        other = sharded.in_stages(name, sharded.unstaged(planned, cost), cost)
        return other if other.seconds < PAYS * way.seconds else way

    def at(self, parallel: OptimizerParallel) -> "Pricing":
        """Returns the same with a given optimizer parallel."""
        workload = replace(self.workload, parallel=parallel)
        return replace(self, workload=workload, rival=None, _known=[])

    def planned(self, plan: Plan) -> Planned:
        """Returns the program with its plan and with what is recomputed."""
        planned = Planned(self.workload.program, plan)
        names = frozenset[str]() if self.split.stages == 1 else self.workload.weightless
        if self.recompute.nodes or self.recompute.layers:
            names |= chosen_nodes(planned, self.recompute)
        keep = self.recompute.communication == KEEP
        return recompute(planned, Recomputation(names, keep))

    def of(self, planned: Planned) -> Workload:
        """Returns the workload with the program that `planned` returns."""
        return replace(self.workload, program=planned.program)

    def unstaged(self, planned: Planned, cost: CostModel) -> Priced:
        """Returns a program with its plan on one stage's mesh, priced without stages.

        Args:
            planned: What `planned` returns.
            cost: The cost model of a micro-batch.
        """
        workload = self.of(planned)
        found, steps = workload.priced(planned.plan, cost)
        late = late_nodes(planned.program.graph, workload.links, workload.gradients)
        return Priced(planned.program.model, planned.plan, found, steps, late)

    def in_stages(self, name: str, priced: Priced, cost: CostModel) -> Way:
        """Returns what `unstaged` returns as a way, priced in stages if there are several.

        Args:
            name: The name of the way.
            priced: What `unstaged` returns.
            cost: The cost model of a micro-batch.

        Raises:
            StrategyError: There are more virtual stages than nodes.
        """
        split, plan, parallel = self.split, priced.plan, self.workload.parallel
        way = Way(name, priced.price, "", None, split.micro_batches, plan, parallel)
        if split.stages == 1:
            return way
        link = between_stages(self.machine, split.stages, plan.mesh.size)
        return replace(way, staged=price_stages(priced, self.workload.chain, cost, link, split))

    @cached_property
    def large(self) -> dict[str, int]:
        """A large size of each symbol for which the user gives none."""
        sizes = large_sizes(self.workload.program)
        return {name: size for name, size in sizes.items() if name not in self.sizes}

    def at_large_sizes(self, way: Way) -> Way:
        """Returns a way with its seconds at large sizes."""
        if way.plan is None or not self.large:
            return way
        sizes = {**self.sizes, **self.large}
        workload = replace(self.workload, parallel=way.parallel)
        found = workload.price(way.plan, self.machine, sizes)
        return replace(way, large=found.step(way.micro_batches))

    def grown(self, way: Way) -> Way:
        """Returns a way with its growth, and its seconds at large sizes."""
        plan, workload = way.plan, replace(self.workload, parallel=way.parallel)
        if plan is None or not self.large or way.large:
            return way

        def sent(sizes: Mapping[str, int]) -> float:
            return workload.price(plan, WIRE, {**self.sizes, **sizes}).communicating

        growth = grows_faster(sent, workload.program.env.table, self.large)
        return replace(self.at_large_sizes(way), growth=growth)

    def title(self, name: str) -> str:
        """A name with the number of stages: a preset `pp=2,dp=2`, or `found, 2 stages`."""
        stages = self.split.stages
        if stages == 1:
            return name
        return f"{name}, {stages} stages" if name == FOUND else f"{PIPELINE_AXIS}={stages},{name}"

    def presets(self, strategy: Strategy, progress: OnProgress) -> Iterator[Way]:
        """Yields each preset on the mesh of one stage, priced.

        Args:
            strategy: The strategy that gives the symbols and the number of devices.
            progress: Called for each preset as it begins.
        """
        devices = strategy.world // self.split.stages
        names = rival_presets(devices)
        for number, name in enumerate(names, 1):
            title = self.title(name)
            progress(f"pricing {title}", number, len(names))
            try:
                preset = replace(load_strategy(name, devices), symbols=strategy.symbols)
                seeds = resolve(preset, self.workload.program)
                plan = self.workload.plan(decide_parameter_axes(seeds, self.workload))
                way = self.way(title, plan)
            except OnnxparError as error:
                way = Way(title, None, str(error))
            yield way


def rival_presets(devices: int) -> list[str]:
    """Returns the presets with which a found strategy is compared, for a number of devices."""
    mixed = [f"dp={n},tp={devices // n}" for n in range(2, devices) if devices % n == 0]
    return [f"dp={devices}", *mixed, f"tp={devices}"] if devices > 1 else ["replicate"]


def named_apart(ways: Sequence[Way]) -> tuple[Way, ...]:
    """Returns the same ways, but no two with one name.

    The first of a name keeps it. The others say by what they differ from it: by the mesh, or by how
    many nodes are sharded differently than in the first plan of this name and mesh.
    """
    first: dict[str, Way] = {}
    alike: dict[tuple[str, str], Way] = {}
    taken = Counter[str]()
    found = []
    for way in ways:
        name = way.name
        if first.setdefault(name, way).mesh != way.mesh:
            name += f", mesh {way.mesh}"
        if (one := alike.setdefault((way.name, way.mesh), way)) is not way:
            number = _differences(one, way)
            name += f", {number} {'node' if number == 1 else 'nodes'} sharded differently"
        taken[name] += 1
        found.append(replace(way, name=f"{name} ({taken[name]})" if taken[name] > 1 else name))
    return tuple(found)


def _differences(one: Way, other: Way) -> int:
    """The number of nodes that two plans on one mesh shard differently."""
    assert one.plan is not None and other.plan is not None
    nodes = other.plan.nodes
    pairs = ((node, nodes[name]) for name, node in one.plan.nodes.items() if name in nodes)
    return sum((a.inputs, a.outputs) != (b.inputs, b.outputs) for a, b in pairs)
