"""Searches for a model's strategy, and compares it with the presets."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnxpar.api.shard_model import analyse
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.symbols import Symbol
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.frontend.load import load
from onnxpar.graph.validity import blamed_on_model
from onnxpar.parameters.recognise import read_parameters
from onnxpar.report.found_strategy import FoundStrategy
from onnxpar.search.decide import decide
from onnxpar.search.find_plan import OnProgress, silent
from onnxpar.search.plan_choices import Open
from onnxpar.search.rival_plans import Pricing
from onnxpar.search.workload import Workload
from onnxpar.stages.stage_price import PipelineSplit
from onnxpar.strategy import Strategy
from onnxpar.strategy.machine_file import target_machine
from onnxpar.strategy.schema import SEARCH


def plan_strategy(
    model: str | Path,
    strategy: Strategy,
    *,
    symbols: Mapping[str, Symbol] | None = None,
    training: TrainingSpec | None = None,
    stages: Sequence[int] | None = None,
    micro_batches: int | None = None,
    level: int | None = None,
    progress: OnProgress = silent,
) -> FoundStrategy:
    """Searches for a strategy and compares it with the presets.

    `onnxpar shard` with the same strategy carries out the same plan (`search.decide`). If something
    is fixed, presets that do not keep it are priced, too, and shown.

    Args:
        model: Path of the ONNX file.
        strategy: How to search, and what is fixed; its `rest` is "search".
        symbols: Constraints on symbols; they replace the strategy's of the same name.
        training: Plan the program that trains the model, instead of the model.
        stages: Numbers of pipeline stages to try, as in `decide`. By default those of the strategy;
            if a plan of one stage does not fit, all that divide the devices.
        micro_batches: Micro-batches of a step of training, as in `decide`.
        level: The level of optimizer parallel; by default that of the strategy.
        progress: As in `decide`.

    Raises:
        OnnxparError: The model or the strategy is wrong, or no plan fits into a device's memory.
    """
    strategy = replace(strategy, symbols={**strategy.symbols, **(symbols or {})})
    if level is not None:
        strategy = strategy.at_level(level)
    elif strategy.optimizer_parallel != NOT_PARALLEL:
        level = strategy.optimizer_parallel.level
    progress("reading the model", 0, 0)
    with blamed_on_model(Path(model)):
        workload = read_workload(model, strategy.symbols, training, strategy.optimizer_parallel)
    decision = decide(
        strategy,
        workload,
        stages=stages,
        micro_batches=micro_batches,
        configure=_open(strategy, stages, micro_batches, level),
        progress=progress,
    )
    machine, ways = target_machine(strategy), decision.ways
    if not decision.free:
        split = PipelineSplit(1, ways[0].micro_batches)
        pricing = Pricing(workload, machine, strategy.search.sizes, split)
        ways += tuple(pricing.presets(strategy, progress))
    return FoundStrategy(
        decision.found,
        decision.plan,
        ways,
        decision.data,
        machine,
        decision.objective,
        workload.program,
        decision.without,
        decision.choices,
        in_turns=decision.in_turns,
    )


def _open(
    strategy: Strategy, stages: Sequence[int] | None, micro_batches: int | None, level: int | None
) -> Open:
    """What is left to decide for training."""
    free = strategy.pipeline is None and not strategy.axes and not strategy.pair_micro_batches
    if stages is None and free:
        stages = [n for n in range(1, strategy.devices + 1) if strategy.devices % n == 0]
    if micro_batches is None:
        micro_batches = strategy.step_micro_batches
    given = strategy.recompute if strategy.recompute.nodes or strategy.recompute.layers else None
    return Open(stages or [strategy.stages], micro_batches, level, given)


def read_workload(
    path: str | Path,
    symbols: Mapping[str, Symbol],
    training: TrainingSpec | None = None,
    parallel: OptimizerParallel = NOT_PARALLEL,
) -> Workload:
    """Returns the program to plan: the forward program of a model, or the one that trains it.

    Args:
        path: Path of the ONNX file.
        symbols: Constraints on symbols.
        training: How it is trained.
        parallel: What replicas of a parameter share in training.

    Raises:
        OnnxparError: The model cannot be read, or cannot be trained in this way.
    """
    loaded = load(path)
    if training is None:
        return Workload.inference(analyse(loaded, symbols))
    prepared = prepare_training(read_parameters(loaded, training.ties), symbols, training)
    return Workload.training(prepared, training, parallel)


def searching(strategy: Strategy) -> Strategy:
    """Returns a strategy that searches for everything that it leaves open.

    The layouts of inputs are open if they are only the default, but not those of an annotation.
    """
    if strategy.rest == "search":
        return strategy
    free = strategy.dataset == "data_parallel" and strategy.annotation is None
    dataset = SEARCH if free else strategy.dataset
    return replace(strategy, rest="search", dataset=dataset, parameter_axes=())
