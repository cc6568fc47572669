"""A strategy for a model: searched for, compared with the plain ones, explained."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from onnxpar.analysis.cost import CostModel
from onnxpar.analysis.plan import Plan
from onnxpar.analysis.price import Price, price
from onnxpar.analysis.propagate import Alike, Rules, alike, propagate
from onnxpar.analysis.search.find import Found, Told
from onnxpar.analysis.seeds import Seeds
from onnxpar.analysis.shapes import ShapeEnv
from onnxpar.errors import OnnxparError
from onnxpar.machine import Machine
from onnxpar.passes.load import load, normalise
from onnxpar.passes.validity import blamed_on_model
from onnxpar.pipeline import analyse
from onnxpar.strategy import Strategy, load_strategy, resolve
from onnxpar.strategy.decide import search
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.schema import SEARCH
from onnxpar.strategy.write import strategy_data
from onnxpar.symbols import Symbol
from onnxpar.training.prepare import TrainingSpec, prepare_training

STATES = {"sgd": 1, "momentum": 2, "adam": 3, "adamw": 3, "lamb": 3}
"""Tensors like a trained parameter that are held besides it: its gradient and its moments."""


@dataclass(frozen=True)
class Way:
    """One way to divide the model, priced.

    Attributes:
        name: A preset, or "found".
        price: What it costs; None where it cannot be.
        reason: Why it cannot be, or does not fit.
    """

    name: str
    price: Price | None
    reason: str = ""


@dataclass(frozen=True)
class Planned:
    """What `plan_strategy` found.

    Attributes:
        found: The search's result.
        plan: The plan of the whole program that follows from it.
        ways: The plan found, then those of the presets.
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


@dataclass(frozen=True)
class Program:
    """What is to be planned: a forward program, or one with its backward.

    Attributes:
        model: The normalised model.
        env: Its shapes.
        rules: The rule of each of its nodes.
        links: Of each cotangent its primal.
        gradients: The output that is the gradient of each trained parameter, by name.
        states: Tensors like a trained parameter that are held besides it.
    """

    model: ir.Model
    env: ShapeEnv
    rules: Rules
    links: Mapping[str, str]
    gradients: Mapping[str, str]
    states: int

    def plan(self, seeds: Seeds) -> Plan:
        """Returns the plan that follows from seeds."""
        return propagate(self.model, self.env, self.rules, seeds, self.links, self._alike)

    @cached_property
    def _alike(self) -> Alike:
        return alike(list(self.model.graph), self.env, self.rules)

    def price(self, plan: Plan, machine: Machine, sizes: Mapping[str, int]) -> Price:
        """Returns what a plan costs a device at given sizes of symbols."""
        cost = CostModel(machine, plan.mesh, self.env.table, sizes)
        states = dict.fromkeys(self.gradients, self.states)
        return price(self.model, self.rules, plan, cost, states, self.gradients.values())


def plan_strategy(
    model: str | Path,
    strategy: Strategy,
    *,
    symbols: Mapping[str, Symbol] | None = None,
    training: TrainingSpec | None = None,
    told: Told = lambda stage, number, count: None,
) -> Planned:
    """Searches for a strategy and compares it with the plain ones.

    Args:
        model: Path of the ONNX file.
        strategy: How to search, and what is fixed; its `rest` is "search".
        symbols: Constraints on symbols; they replace the strategy's of the same name.
        training: Plan the program that trains the model, instead of the model.
        told: Called with the name of each stage as it begins, and that it is number n of m
            candidates; 0 of 0 where there are none to count.

    Raises:
        OnnxparError: The model or the strategy is wrong, or nothing fits into a device's memory.
    """
    entry = strategy.search
    machine = load_machine(entry.machine)
    constraints = {**strategy.symbols, **(symbols or {})}
    told("reading the model", 0, 0)
    with blamed_on_model(Path(model)):
        program = read_program(model, constraints, training)
    told("searching", 0, 0)
    seeds = resolve(strategy, program.model, program.rules, program.env)
    trained = list(program.gradients)
    found = search(strategy, program.model, program.rules, program.env, seeds, trained, told)
    names = presets(strategy.devices)
    told("pricing what was found", 1, len(names) + 1)
    plan = program.plan(found.seeds)
    ways = [Way("found", program.price(plan, machine, entry.sizes))]
    for number, name in enumerate(names, 2):
        told(f"pricing {name}", number, len(names) + 1)
        ways.append(_priced(name, program, machine, strategy))
    limit = machine.memory if entry.memory is None else entry.memory
    return Planned(
        found,
        plan,
        tuple(ways),
        strategy_data(found.seeds, program.rules, constraints, strategy.optimizer_parallel),
        machine,
        limit,
        program.model,
        program.rules,
    )


def presets(devices: int) -> list[str]:
    """Returns the presets that a found strategy is compared with, on so many devices."""
    mixed = [f"dp={n},tp={devices // n}" for n in range(2, devices) if devices % n == 0]
    return [f"dp={devices}", *mixed, f"tp={devices}"] if devices > 1 else ["replicate"]


def read_program(
    path: str | Path, symbols: Mapping[str, Symbol], training: TrainingSpec | None = None
) -> Program:
    """Returns the program of a model, or the one that trains it.

    Args:
        path: Path of the ONNX file.
        symbols: Constraints on symbols.
        training: How it is trained.

    Raises:
        OnnxparError: The model cannot be read, or cannot be trained so.
    """
    loaded = load(path)
    if training is None:
        analysed = analyse(loaded, symbols)
        return Program(analysed.model, analysed.env, analysed.rules, {}, {}, 0)
    originals = frozenset(loaded.graph.initializers)
    prepared = prepare_training(normalise(loaded), originals, symbols, training)
    return Program(
        prepared.model,
        prepared.env,
        prepared.rules,
        prepared.links,
        prepared.gradients,
        STATES[str(training.optimizer)],
    )


def _priced(name: str, program: Program, machine: Machine, strategy: Strategy) -> Way:
    try:
        preset = replace(load_strategy(name, strategy.devices), symbols=strategy.symbols)
        seeds = resolve(preset, program.model, program.rules, program.env)
        return Way(name, program.price(program.plan(seeds), machine, strategy.search.sizes))
    except OnnxparError as error:
        return Way(name, None, str(error))


def searching(strategy: Strategy) -> Strategy:
    """Returns a strategy with what it leaves open searched for.

    Inputs are open where only a default lays them out; those of an annotation are not.
    """
    if strategy.rest == "search":
        return strategy
    free = strategy.dataset == "data_parallel" and strategy.annotation is None
    dataset = SEARCH if free else strategy.dataset
    return replace(strategy, rest="search", dataset=dataset, parameter_axes=())
