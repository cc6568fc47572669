"""A strategy for a model: searched for, compared with the plain ones, explained."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxpar.analysis.cost import CostModel
from onnxpar.analysis.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.analysis.plan import Plan
from onnxpar.analysis.price import Price
from onnxpar.analysis.propagate import Rules
from onnxpar.analysis.search.find import LEVELS, Candidate, Found, Told
from onnxpar.analysis.seeds import Seeds
from onnxpar.analysis.staged import Priced, Split, StagedPrice, price_stages
from onnxpar.analysis.stages import chain_of, floating
from onnxpar.errors import OnnxparError, ShardingError, StrategyError
from onnxpar.machine import Machine
from onnxpar.passes.load import load, normalise
from onnxpar.passes.validity import blamed_on_model
from onnxpar.pipeline import analyse
from onnxpar.program import Program
from onnxpar.strategy import Strategy, load_strategy, resolve
from onnxpar.strategy.decide import search
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.schema import SEARCH
from onnxpar.strategy.virtual_stages import assigned, between_stages
from onnxpar.strategy.write import pipeline_data, strategy_data
from onnxpar.symbols import Symbol
from onnxpar.training.prepare import TrainingSpec, prepare_training


@dataclass(frozen=True)
class Way:
    """One way to divide the model, priced.

    Attributes:
        name: A preset, or "found", with the number of pipeline stages where there are several.
        price: What it costs without stages, on the devices of one; None where it cannot be.
        reason: Why it cannot be, or does not fit.
        staged: What it costs in stages, where there are several.
        micro_batches: Micro-batches of a step.
    """

    name: str
    price: Price | None
    reason: str = ""
    staged: StagedPrice | None = None
    micro_batches: int = 1

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinity where there is none."""
        if self.staged is not None:
            return self.staged.seconds
        return inf if self.price is None else self.price.step(self.micro_batches)

    @property
    def peak(self) -> int:
        """Bytes at the peak of a device, of the fullest stage."""
        if self.staged is not None:
            return self.staged.peak
        return 0 if self.price is None else self.price.peak

    @property
    def held(self) -> int:
        """Bytes held all the time by a device, of the stage that holds most."""
        if self.staged is not None:
            return self.staged.held
        return 0 if self.price is None else self.price.held

    def rank(self, level: int, limit: int) -> tuple[float, ...]:
        """Returns what ways are ordered by, the best first: those that fit, by the objective.

        Args:
            level: The objective, as of a search.
            limit: Bytes that a device may hold.
        """
        if self.price is None:
            return (1.0, inf)
        weights, over = LEVELS[level], float(self.peak > limit)
        if weights.memory_first:
            return (over, self.peak, self.seconds)
        share = self.price.communicating / self.price.seconds if self.price.seconds else 0.0
        return (over, self.seconds * (1 + (weights.communication - 1) * share))


@dataclass(frozen=True)
class Planned:
    """What `plan_strategy` found.

    Attributes:
        found: The search's result, or the preset that it did not better.
        plan: The plan of the whole program that follows from it.
        ways: That plan, then those found for other numbers of stages, then the presets.
        data: The content of a strategy file that says the plan.
        machine: The machine that it is for.
        limit: Bytes that a device may hold.
        model: The program that is planned.
        rules: Its rules.
    """

    found: Found
    plan: Plan
    ways: tuple[Way, ...]
    data: dict[str, Any]
    machine: Machine
    limit: int
    model: ir.Model
    rules: Rules

    @property
    def devices(self) -> int:
        """Number of devices, of all stages."""
        staged = self.ways[0].staged
        return self.plan.mesh.size * (staged.split.stages if staged is not None else 1)


MICRO_BATCHES = 8
"""Micro-batches of a step where stages are compared and nobody says how many."""


def plan_strategy(
    model: str | Path,
    strategy: Strategy,
    *,
    symbols: Mapping[str, Symbol] | None = None,
    training: TrainingSpec | None = None,
    stages: Sequence[int] | None = None,
    micro_batches: int | None = None,
    told: Told = lambda stage, number, count: None,
) -> Planned:
    """Searches for a strategy and compares it with the plain ones.

    Args:
        model: Path of the ONNX file.
        strategy: How to search, and what is fixed; its `rest` is "search".
        symbols: Constraints on symbols; they replace the strategy's of the same name.
        training: Plan the program that trains the model, instead of the model.
        stages: Numbers of pipeline stages to try, all of which divide the devices; by default the
            strategy's.
        micro_batches: Micro-batches of a step of training; by default what the strategy says, or 1
            without stages, else `MICRO_BATCHES`. A forward program runs once, whatever is said.
        told: Called with the name of each stage as it begins, and that it is number n of m
            candidates; 0 of 0 where there are none to count.

    Raises:
        OnnxparError: The model or the strategy is wrong, or nothing fits into a device's memory.
    """
    entry = strategy.search
    machine = load_machine(entry.machine)
    constraints = {**strategy.symbols, **(symbols or {})}
    counts = _counts(strategy, stages)
    runs = 1 if training is None else _micro_batches(strategy, counts, micro_batches)
    told("reading the model", 0, 0)
    with blamed_on_model(Path(model)):
        program = read_program(model, constraints, training, strategy.optimizer_parallel)
    limit = machine.memory if entry.memory is None else entry.memory
    tried: list[tuple[Way, Found, Plan]] = []
    refused: list[Way] = []
    for count in counts:
        told("searching" if counts == [1] else f"searching, stages: {count}", 0, 0)
        one = replace(strategy, devices=strategy.world // count, pipeline=None)
        priced = _Priced(
            program, machine, entry.sizes, _split(strategy, program.forward, count, runs)
        )
        try:
            seeds = resolve(one, program.model, program.rules, program.env)
            found = search(
                one,
                program.model,
                program.rules,
                program.env,
                seeds,
                list(program.gradients),
                told,
                runs,
                priced.peak,
            )
            plan, way = priced(found.seeds)
        except OnnxparError as error:
            if len(counts) == 1:
                raise
            refused.append(Way(f"found, pp={count}" if count > 1 else "found", None, str(error)))
            continue
        tried.append((way, found, plan))
    if not tried:
        raise ShardingError("; ".join(f"{way.name}: {way.reason}" for way in refused))
    tried.sort(key=lambda item: item[0].rank(entry.level, limit))
    best, found, plan = tried[0]
    ways = [*(way for way, _, _ in tried), *refused]
    names = presets(strategy.world)
    plain: list[tuple[Way, Plan]] = []
    for number, name in enumerate(names, 1):
        told(f"pricing {name}", number, len(names))
        way, seen = _preset(name, program, machine, strategy, runs)
        if seen is not None and way.rank(entry.level, limit) < best.rank(entry.level, limit):
            plain.append((way, seen))
        ways.append(way)
    if plain and 1 in counts and _is_free(strategy):
        rival, seen = min(plain, key=lambda item: item[0].rank(entry.level, limit))
        seeds = program.pinned(seen)
        again = program.plan(seeds)
        way = _way(program, rival.name, again, machine, entry.sizes, Split(1, runs))
        if way.rank(entry.level, limit) < best.rank(entry.level, limit):
            ways = [way, *(other for other in ways if other is not rival)]
            chosen = Candidate(again.mesh.axes, way.seconds, way.peak, 0.0, 0.0)
            best, plan, found = way, again, replace(found, seeds=seeds, chosen=chosen)
    data = strategy_data(found.seeds, program.rules, constraints, strategy.optimizer_parallel)
    if best.staged is not None:
        wanted = strategy.pipeline.micro_batches if strategy.pipeline is not None else None
        said = best.micro_batches if training is not None else micro_batches or wanted
        data["pipeline"] = pipeline_data(best.staged, said)
    return Planned(found, plan, tuple(ways), data, machine, limit, program.model, program.rules)


def _is_free(strategy: Strategy) -> bool:
    """Whether nothing is fixed that a preset would not keep."""
    fixed = strategy.annotation or strategy.axes or strategy.nodes or strategy.parameters
    return not fixed and strategy.dataset == SEARCH and strategy.stages == 1


@dataclass
class _Priced:
    """Plans that follow from seeds, each made and priced once."""

    program: Program
    machine: Machine
    sizes: Mapping[str, int]
    split: Split
    _known: list[tuple[Seeds, Plan, Way]] = field(default_factory=list)

    def peak(self, seeds: Seeds) -> int:
        return self(seeds)[1].peak

    def __call__(self, seeds: Seeds) -> tuple[Plan, Way]:
        for known, plan, way in self._known:
            if known is seeds:
                return plan, way
        plan = self.program.plan(seeds)
        way = _way(self.program, "found", plan, self.machine, self.sizes, self.split)
        self._known.append((seeds, plan, way))
        return plan, way


def _way(
    program: Program,
    name: str,
    plan: Plan,
    machine: Machine,
    sizes: Mapping[str, int],
    split: Split,
) -> Way:
    """Returns a plan of one stage's mesh as a way, priced in stages where there are several.

    Raises:
        StrategyError: There are more parts than nodes.
    """
    found, steps = program.priced(plan, machine, sizes)
    if split.stages == 1:
        return Way(name, found, micro_batches=split.micro_batches)
    chain = chain_of(program.forward.graph, floating(program.forward.graph))
    names = frozenset(node.name or "" for node in program.forward.graph)
    priced = Priced(program.model, plan, found, steps, names)
    cost = CostModel(machine, plan.mesh, program.env.table, sizes)
    link = between_stages(machine, split.stages, plan.mesh.size)
    staged = price_stages(priced, chain, cost, link, split)
    return Way(f"{name}, pp={split.stages}", found, "", staged, split.micro_batches)


def _counts(strategy: Strategy, stages: Sequence[int] | None) -> list[int]:
    counts = list(dict.fromkeys(stages or [strategy.stages]))
    for count in counts:
        if count < 1 or strategy.world % count:
            raise StrategyError(
                f"stages: expected numbers that divide the {strategy.world} devices, got {count}"
            )
        if count != strategy.stages and (strategy.axes or strategy.pipeline is not None):
            raise StrategyError(
                f"stages: {strategy.source} is for {strategy.stages} stages, got {count}"
            )
    return counts


def _micro_batches(strategy: Strategy, counts: Sequence[int], given: int | None) -> int:
    if given is not None:
        return given
    if strategy.pipeline is not None and strategy.pipeline.micro_batches is not None:
        return strategy.pipeline.micro_batches
    return 1 if list(counts) == [1] else MICRO_BATCHES


def _split(strategy: Strategy, model: ir.Model, stages: int, micro_batches: int) -> Split:
    entry = strategy.pipeline
    if entry is None:
        return Split(stages, micro_batches)
    return Split(stages, micro_batches, entry.schedule, entry.chunks, assigned(strategy, model))


def presets(devices: int) -> list[str]:
    """Returns the presets that a found strategy is compared with, on so many devices."""
    mixed = [f"dp={n},tp={devices // n}" for n in range(2, devices) if devices % n == 0]
    return [f"dp={devices}", *mixed, f"tp={devices}"] if devices > 1 else ["replicate"]


def read_program(
    path: str | Path,
    symbols: Mapping[str, Symbol],
    training: TrainingSpec | None = None,
    parallel: OptimizerParallel = NOT_PARALLEL,
) -> Program:
    """Returns the program of a model, or the one that trains it.

    Args:
        path: Path of the ONNX file.
        symbols: Constraints on symbols.
        training: How it is trained.
        parallel: What replicas of a parameter share in training.

    Raises:
        OnnxparError: The model cannot be read, or cannot be trained so.
    """
    loaded = load(path)
    if training is None:
        return analyse(loaded, symbols).program
    originals = frozenset(loaded.graph.initializers)
    prepared = prepare_training(normalise(loaded), originals, symbols, training)
    return prepared.program(training, parallel)


def _preset(
    name: str, program: Program, machine: Machine, strategy: Strategy, micro_batches: int
) -> tuple[Way, Plan | None]:
    try:
        preset = replace(load_strategy(name, strategy.world), symbols=strategy.symbols)
        seeds = resolve(preset, program.model, program.rules, program.env)
        split = Split(1, micro_batches)
        plan = program.plan(seeds)
        return _way(program, name, plan, machine, strategy.search.sizes, split), plan
    except OnnxparError as error:
        return Way(name, None, str(error)), None


def searching(strategy: Strategy) -> Strategy:
    """Returns a strategy with what it leaves open searched for.

    Inputs are open where only a default lays them out; those of an annotation are not.
    """
    if strategy.rest == "search":
        return strategy
    free = strategy.dataset == "data_parallel" and strategy.annotation is None
    dataset = SEARCH if free else strategy.dataset
    return replace(strategy, rest="search", dataset=dataset, parameter_axes=())
