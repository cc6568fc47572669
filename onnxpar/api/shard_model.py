"""From a model to an artifact directory: reads, plans, partitions, writes, in this order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx_ir as ir

from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.errors import StrategyError
from onnxpar.core.symbols import Symbol
from onnxpar.emit import check_target, write
from onnxpar.emit.rank_graph import emit_rank
from onnxpar.emit.training_entry import training_entry
from onnxpar.facts.program import Program
from onnxpar.frontend.load import in_memory, load, normalise, read, symbol_table
from onnxpar.graph.dump import Dumper
from onnxpar.graph.pipeline_places import ONE_PLACE, Places
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.graph.validity import blamed_on_model
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.recognise import Recognised, read_parameters
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel, PipelinePrograms
from onnxpar.propagation.propagate import propagate
from onnxpar.report.inspect_data import directory_data
from onnxpar.search.decide import settled
from onnxpar.search.workload import Workload
from onnxpar.stages.partition_training import PartitionedTraining, partition_training
from onnxpar.stages.stage_programs import Staging
from onnxpar.strategy import Strategy, resolve, resolved, strategy_for
from onnxpar.strategy.recompute_entry import RecomputeOptions
from onnxpar.strategy.save import plan_data, write_strategy
from onnxpar.strategy.schema import SEARCH

NOTE = """The resolved strategy: `onnxpar shard MODEL --strategy` with this file gives this plan.
`given` names the nodes of the user's strategy; the others were propagated."""


def analyse(
    model: ir.Model, symbols: Mapping[str, Symbol], registry: Registry = REGISTRY
) -> Program:
    """Normalises a model and finds shapes and rules. The model given is used up.

    Args:
        model: As read by `onnxpar.frontend.load.load`.
        symbols: Constraints on the symbols of its inputs.
        registry: The table of operators.

    Raises:
        ModelError: The model is not valid, or a constraint is on an unknown symbol.
    """
    model = normalise(model, registry)
    return Program.of(model, shapes(model, symbol_table(model, symbols, registry)), registry)


def divide(program: Program, seeds: Seeds, places: Places = ONE_PLACE) -> PartitionedModel:
    """Plans and partitions a program.

    Args:
        program: The program.
        seeds: What is fixed.
        places: Where its nodes run in a pipeline.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    return partition(program, propagate(program, seeds), places=places)


def cut_model(program: Program, staging: Staging) -> tuple[Program, Places]:
    """Puts the nodes of a program into virtual stages, and says where they are.

    Args:
        program: The program, whose model is changed.
        staging: The pipeline.

    Raises:
        StrategyError: As `onnxpar.stages.assign_stages.decide_virtual_stages`.
    """
    places = staging.put_forward(program)
    # Copies of nodes are new.
    env = shapes(program.model, program.env.table)
    return Program.of(program.model, env, program.registry), places


def plan_in_stages(program: Program, strategy: Strategy) -> tuple[Program, Places, Plan]:
    """Returns a program, cut into virtual stages if there is a pipeline, and its plan.

    Args:
        program: The program; the model of one that is cut is changed.
        strategy: The strategy, settled.

    Raises:
        OnnxparError: The strategy does not fit the model.
    """
    places, stages = ONE_PLACE, {}
    if strategy.pipeline is not None:
        program, places = cut_model(program, Staging(strategy, strategy.pipeline))
        stages = {
            name: places.virtual_stage[place] % strategy.stages
            for name, place in places.nodes.items()
        }
    chosen = propagate(program, resolve(strategy, program))
    return program, places, replace(chosen, stages=stages)


@dataclass(frozen=True)
class Divided:
    """A model, divided.

    Attributes:
        whole: The program; without nodes where a pipeline's programs have them.
        programs: What is written: the program, or those of a pipeline.
        strategy: The strategy, without what was left to a search.
        pipeline: How they make up a pipeline, where the strategy has one.
    """

    whole: PartitionedModel
    programs: tuple[PartitionedModel, ...]
    strategy: Strategy
    pipeline: PipelinePrograms | None = None


def divide_model(
    model: ir.Model,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    *,
    dumper: Dumper | None = None,
    lap: Callable[[str], None] = lambda stage: None,
) -> Divided:
    """Divides a forward program: everything that `shard_model` does but write files.

    Args:
        model: As read by `onnxpar.frontend.load.load`; it is used up.
        strategy: The strategy.
        symbols: Constraints on symbols, the strategy's included.
        dumper: Where the normalised model is written, if anywhere.
        lap: Called with the name of each stage at its end.

    Raises:
        OnnxparError: The model or the strategy is wrong.
    """
    program = analyse(model, symbols)
    if dumper:
        dumper.model("normalised", program.model)
    lap("analyse")
    strategy = settled(strategy, Workload.inference(program), symbols)
    if strategy.pipeline is None:
        whole = divide(program, resolve(strategy, program))
        lap("divide")
        return Divided(whole, (whole,), strategy)
    staging = Staging(strategy, strategy.pipeline)
    program, places = cut_model(program, staging)
    whole = divide(program, resolve(strategy, program), places)
    stages = staging.split(whole, places, "model")
    lap("divide")
    return Divided(stages.unsplit, stages.programs, strategy, staging.pipeline([stages]))


def partition_for_training(
    recognised: Recognised,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
) -> PartitionedTraining:
    """Partitions the programs that train a model: all that `shard_model` does but write files.

    Args:
        recognised: The normalised model, and what its initializers were; it is used up.
        strategy: The strategy.
        symbols: Constraints on the symbols of its inputs.
        spec: What to train and how.

    Raises:
        OnnxparError: The loss, the parameters or the strategy do not fit the model, or an operator
            between them has no gradient.
    """
    parallel = strategy.optimizer_parallel
    if strategy.pipeline is None:
        prepared = prepare_training(recognised, symbols, spec)
        strategy = settled(strategy, Workload.training(prepared, spec, parallel), symbols)
        return partition_training(prepared, strategy, symbols, spec)
    if strategy.rest == SEARCH:
        # What is searched is the program before it is split; the plan says where.
        whole = prepare_training(recognised.clone(), symbols, spec)
        strategy = settled(strategy, Workload.training(whole, spec, parallel), symbols)
    assert strategy.pipeline is not None
    staging = Staging(strategy, strategy.pipeline)
    prepared = prepare_training(recognised, symbols, spec, staging.put)
    return partition_training(prepared, strategy, symbols, spec, staging)


def plan(
    model: ir.Model | str | Path,
    strategy: str | Path | Strategy | None = None,
    *,
    devices: int | None = None,
    symbols: Mapping[str, Symbol] | None = None,
) -> Plan:
    """Returns the sharding of every operand of every node, without writing anything.

    Of a pipeline it says the stage of each node, too, and its mesh is that of one stage.

    Args:
        model: The model, or its path. A model given is used up.
        strategy: A strategy, the path of a strategy file, or a preset such as `dp=2,tp=4`;
            by default what the model is annotated with.
        devices: Number of devices, if the strategy does not give it.
        symbols: Constraints on symbols; they replace the strategy's of the same name.

    Raises:
        OnnxparError: The model or the strategy is wrong.
    """
    source = repr(model.graph.name) if isinstance(model, ir.Model) else repr(str(model))
    if not isinstance(model, ir.Model):
        model = load(model)
    strategy = strategy_for(strategy, devices, model, f"model {source}")
    constraints = {**strategy.symbols, **(symbols or {})}
    program = analyse(model, constraints)
    strategy = settled(strategy, Workload.inference(program), constraints)
    _, _, found = plan_in_stages(program, strategy)
    return found


@dataclass(frozen=True)
class Summary:
    """What `shard_model` did.

    Attributes:
        out: The directory written.
        partitioned: The program of all ranks.
        report: What `onnxpar inspect --json` prints.
        seconds: Wall time of each stage, in order.
        training: The programs that train the model, where they were asked for.
    """

    out: Path
    partitioned: PartitionedModel
    report: dict[str, Any]
    seconds: dict[str, float]
    training: PartitionedTraining | None = None


def shard_model(
    model: str | Path,
    strategy: str | Path | Strategy | None,
    out: str | Path,
    *,
    devices: int | None = None,
    symbols: Mapping[str, Symbol] | None = None,
    ranks: Sequence[int] | None = None,
    dump: str | Path | None = None,
    force: bool = False,
    training: TrainingSpec | None = None,
    optimizer_parallel: int | None = None,
    recompute: RecomputeOptions | None = None,
) -> Summary:
    """Cuts a model into rank graphs and writes the output directory.

    Args:
        model: Path of the ONNX file.
        strategy: A strategy, the path of a strategy file, or a preset such as `dp=2,tp=4`; None
            for what the model is annotated with.
        out: The directory to write; it is written completely or not at all.
        devices: Number of devices, if the strategy does not give it.
        symbols: Constraints on symbols; they replace the strategy's of the same name.
        ranks: Write these ranks only.
        dump: Directory for the model after each stage.
        force: Replace an existing output directory.
        training: Write the programs that train the model, instead of the model.
        optimizer_parallel: Level of optimizer parallel; it replaces the strategy's.
        recompute: What of training is recomputed; it replaces the strategy's.

    Raises:
        OnnxparError: Anything wrong with model, strategy or target; nothing is written then.
    """
    check_target(Path(out), force=force)
    with blamed_on_model(Path(model)):
        return _shard(
            model,
            strategy,
            out,
            devices,
            symbols or {},
            ranks,
            dump,
            force,
            training,
            optimizer_parallel,
            recompute,
        )


def _shard(
    model: str | Path,
    strategy: str | Path | Strategy | None,
    out: str | Path,
    devices: int | None,
    symbols: Mapping[str, Symbol],
    ranks: Sequence[int] | None,
    dump: str | Path | None,
    force: bool,
    training: TrainingSpec | None,
    optimizer_parallel: int | None,
    recompute: RecomputeOptions | None,
) -> Summary:
    clock = _Clock()
    dumper = Dumper(Path(dump)) if dump is not None else None
    proto = read(model)
    strategy = strategy_for(strategy, devices, proto, f"model {str(model)!r}")
    if optimizer_parallel is not None:
        strategy = strategy.at_level(optimizer_parallel)
    if recompute is not None:
        strategy = replace(strategy, recompute=recompute)
    loaded = in_memory(proto, model)
    _check_ranks(ranks, strategy.world)
    clock.lap("load")
    constraints = {**strategy.symbols, **symbols}
    if dumper:
        dumper.model("loaded", loaded)
    divided: PartitionedTraining | None = None
    if training is None:
        forward = divide_model(loaded, strategy, constraints, dumper=dumper, lap=clock.lap)
        programs, pipeline, first = forward.programs, forward.pipeline, forward.whole
        strategy = forward.strategy
    else:
        parameters = read_parameters(loaded, training.ties)
        if dumper:
            dumper.model("normalised", parameters.model)
        divided = partition_for_training(parameters, strategy, constraints, training)
        programs, pipeline, strategy = divided.programs, divided.pipeline, divided.strategy
        first = pipeline.unsplit[0] if pipeline is not None else programs[0]
        clock.lap("divide")
    if dumper:
        dumper.plan("planned", first.source, first.plan)
        for program in programs:
            rank = program.ranks.start
            name = f"partitioned.{program.program}.rank{rank}"
            dumper.model(name, emit_rank(program, rank))
    report = directory_data(programs if pipeline is None else pipeline.shown(programs), programs)
    if pipeline is not None and strategy.pipeline is not None:
        # As it was cut, whatever costs say elsewhere.
        cut = strategy.pipeline.model_copy(update={"assign": dict(pipeline.assign)})
        strategy = replace(strategy, pipeline=cut)
    write(
        programs,
        Path(out),
        ranks=ranks,
        force=force,
        report=report,
        strategy=_resolved(first, divided, strategy),
        strategy_file=_strategy_file(first, divided, strategy, constraints),
        model_name=Path(model).stem,
        training=training_entry(divided) if divided else None,
        pipeline=pipeline,
    )
    clock.lap("write")
    return Summary(Path(out), first, report, clock.laps, divided)


def _resolved(
    first: PartitionedModel, divided: PartitionedTraining | None, strategy: Strategy
) -> dict[str, Any]:
    """The strategy as resolved; parameters lie as nodes want them, however they are kept."""
    if divided is None:
        return resolved(first.plan, first.source)
    told = resolved(divided.shards.plan, divided.prepared.program.model)
    told["optimizer_parallel"] = asdict(strategy.optimizer_parallel)
    if strategy.recompute:
        told["recompute"] = strategy.recompute.entry
    return told


def _strategy_file(
    first: PartitionedModel,
    divided: PartitionedTraining | None,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
) -> str:
    """The same as a strategy file, from which the same programs follow."""
    plan, source = first.plan, first.source
    if divided is not None:
        plan, source = divided.shards.plan, divided.prepared.program.model
    return write_strategy(plan_data(plan, source, strategy, symbols), NOTE)


def _check_ranks(ranks: Sequence[int] | None, devices: int) -> None:
    for rank in ranks or ():
        if not 0 <= rank < devices:
            raise StrategyError(f"--rank {rank}: expected a rank from 0 to {devices - 1}")


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = perf_counter()

    def lap(self, name: str) -> None:
        now = perf_counter()
        self.laps[name] = now - self._last
        self._last = now
