"""From a model to a directory: reads, plans, partitions, writes, in this order."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import onnx_ir as ir

from onnxpar.api.encoder_decoder import partition_encoder_decoder
from onnxpar.autodiff.training_program import TrainingSpec, prepare_training
from onnxpar.core.errors import DialectError, ModelError, StrategyError
from onnxpar.core.html import table
from onnxpar.core.symbols import Symbol
from onnxpar.emit import check_target, write
from onnxpar.emit.rank_graph import emit_rank
from onnxpar.emit.training_entry import training_entry
from onnxpar.facts.carried_states import carried_states
from onnxpar.facts.program import Program
from onnxpar.frontend.fused_weights import divide_fused_weights
from onnxpar.frontend.given_model import GivenModel
from onnxpar.frontend.load import in_memory, load, normalise, symbol_table
from onnxpar.frontend.model_folder import given_model
from onnxpar.graph.dump import Dumper
from onnxpar.graph.pipeline_places import ONE_PLACE, Places
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.graph.validity import blamed_on_model
from onnxpar.ops.collective.dialects import Dialect
from onnxpar.ops.registry import Registry
from onnxpar.ops.table import REGISTRY
from onnxpar.parameters.recognise import Recognised, read_parameters
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel, PipelinePrograms
from onnxpar.propagation.propagate import propagate
from onnxpar.propagation.state_layouts import propagate_with_states
from onnxpar.report.inspect_data import directory_data
from onnxpar.search.decide import settled
from onnxpar.search.workload import Workload
from onnxpar.stages.partition_training import PartitionedTraining, partition_training
from onnxpar.stages.stage_programs import Staging
from onnxpar.strategy import Strategy, resolve, resolved, strategy_for
from onnxpar.strategy.recompute_entry import RecomputeOptions
from onnxpar.strategy.save import given_data, pairing, plan_data, write_strategy
from onnxpar.strategy.schema import SEARCH

NOTE = """The resolved strategy: `onnxpar shard MODEL --strategy` with this file gives this plan.
`given` names the nodes of the user's strategy; the others were propagated."""

NOTE_GIVEN = """The strategy as it was given: `onnxpar shard MODEL --strategy` with this file gives
the same directory, of an encoder and a decoder."""


def analyse(
    model: ir.Model,
    symbols: Mapping[str, Symbol],
    registry: Registry = REGISTRY,
    states: Mapping[str, str] | None = None,
) -> Program:
    """Normalises a model and finds shapes and rules. The model given is used up.

    Args:
        model: As read by `onnxpar.frontend.load.load`.
        symbols: Constraints on the symbols of its inputs.
        registry: The table of operators.
        states: States that the user names, output by input.

    Raises:
        ModelError: The model is not valid, a constraint is on an unknown symbol, or a state does
            not exist.
    """
    model = normalise(model, registry)
    env = shapes(model, symbol_table(model, symbols, registry, states))
    return divide_fused_weights(Program.of(model, env, registry))


def propagate_and_partition(program: Program, seeds: Seeds) -> PartitionedModel:
    """Fills in what seeds leave open, and partitions the program.

    Args:
        program: The program.
        seeds: The part of the plan that the user fixed.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    return partition(program, propagate(program, seeds))


def assign_virtual_stages(program: Program, staging: Staging) -> tuple[Program, Places]:
    """Assigns the nodes of a program to virtual stages, and returns the program and its places.

    Args:
        program: The program, whose model is changed.
        staging: The pipeline.

    Raises:
        StrategyError: As `onnxpar.stages.assign_stages.decide_virtual_stages`.
    """
    places = staging.put_forward(program)
    # Some nodes were copied: their shapes and rules are not known yet.
    env = shapes(program.model, program.env.table)
    return Program.of(program.model, env, program.registry), places


def plan_in_stages(program: Program, strategy: Strategy) -> tuple[Program, Places, Plan]:
    """Returns the program, with virtual stages if there is a pipeline, its places and its plan.

    Args:
        program: The program; in a pipeline, its model is changed.
        strategy: The strategy, with nothing left to a search.

    Raises:
        OnnxparError: The strategy does not fit the model.
    """
    places, stages = ONE_PLACE, {}
    if strategy.pipeline is not None:
        program, places = assign_virtual_stages(program, Staging(strategy, strategy.pipeline))
        stages = {
            name: places.virtual_stage[place] % strategy.stages
            for name, place in places.nodes.items()
        }
    chosen = propagate(program, resolve(strategy, program))
    return program, places, replace(chosen, stages=stages)


@dataclass(frozen=True)
class PartitionedForward:
    """The programs that run a model.

    Attributes:
        programs: The program, or in a pipeline those of its stages.
        strategy: The strategy, with nothing left to a search.
        pipeline: How the programs make up a pipeline, if the strategy has one.
    """

    programs: tuple[PartitionedModel, ...]
    strategy: Strategy
    pipeline: PipelinePrograms | None = None


def partition_forward(
    program: Program,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    states: Mapping[str, str] | None = None,
) -> PartitionedForward:
    """Plans and partitions a forward program, which is used up.

    Args:
        program: The program.
        strategy: The strategy.
        symbols: Constraints on symbols, the strategy's included.
        states: States that the user names, output by input.

    Raises:
        OnnxparError: The strategy does not fit the model.
    """
    fixed = () if isinstance(strategy.dataset, str) else tuple(strategy.dataset)
    workload = Workload.inference(program)
    strategy = settled(strategy, workload, symbols)
    carried = carried_states(program, states)
    if strategy.pipeline is None:
        seeds = resolve(strategy, program)
        plan = propagate_with_states(workload.plan, seeds, carried, fixed)
        parted = replace(partition(program, plan), carried=carried)
        return PartitionedForward((parted,), strategy)
    staging = Staging(strategy, strategy.pipeline)
    program, places = assign_virtual_stages(program, staging)
    seeds = resolve(strategy, program)
    plan = propagate_with_states(partial(propagate, program), seeds, carried, fixed)
    places = staging.transfers(places, program, plan)
    parted = replace(partition(program, plan, places=places), carried=carried)
    split = staging.split(parted, places, "model")
    return PartitionedForward(split.programs, strategy, staging.pipeline([split]))


def partition_for_training(
    recognised: Recognised,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
    *,
    fuses: bool = True,
) -> PartitionedTraining:
    """Plans and partitions the programs that train a model.

    Args:
        recognised: The normalised model with what is known of its initializers; it is used up.
        strategy: The strategy.
        symbols: Constraints on the symbols of its inputs.
        spec: What to train and how.
        fuses: Whether nodes may become fused operators (`onnxpar.partition.fuse_nodes`).

    Raises:
        OnnxparError: The loss, the parameters or the strategy do not fit the model, or an operator
            between them has no gradient.
    """
    parallel = strategy.optimizer_parallel
    if strategy.pipeline is None:
        prepared = replace(prepare_training(recognised, symbols, spec), fuses=fuses)
        strategy = settled(strategy, Workload.training(prepared, spec, parallel), symbols)
        return partition_training(prepared, strategy, symbols, spec)
    if strategy.rest == SEARCH or strategy.parameter_axes:
        # A search needs the program without stages. It may decide where they begin.
        unstaged = prepare_training(recognised.clone(), symbols, spec)
        strategy = settled(strategy, Workload.training(unstaged, spec, parallel), symbols)
    assert strategy.pipeline is not None
    staging = Staging(strategy, strategy.pipeline)
    prepared = replace(prepare_training(recognised, symbols, spec, staging.put), fuses=fuses)
    return partition_training(prepared, strategy, symbols, spec, staging)


def plan(
    model: ir.Model | str | Path,
    strategy: str | Path | Strategy | None = None,
    *,
    devices: int | None = None,
    symbols: Mapping[str, Symbol] | None = None,
) -> Plan:
    """Returns the sharding of every operand of every node, without writing anything.

    For a pipeline, the plan also gives the stage of each node; its mesh is that of one stage.

    Args:
        model: The path of the model, or a model, which is changed and must not be used again.
        strategy: A strategy, the path of a strategy file, or a preset such as `dp=2,tp=4`;
            by default the model's annotations.
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
    partitioned: PartitionedModel = field(repr=False)
    report: dict[str, Any] = field(repr=False)
    seconds: dict[str, float]
    training: PartitionedTraining | None = field(default=None, repr=False)

    def _repr_html_(self) -> str:
        """Shows the collectives of the program, in a notebook."""
        totals = self.report["totals"]
        title = (
            f"{self.out}: {self.report['devices']} ranks, {totals['nodes']} nodes, of which "
            f"{totals['sharded']} are sharded; {totals['calls']} collectives"
        )
        keys = ("op", "value", "over", "bytes", "before", "after", "reason")
        rows = [[entry[key] for key in keys] for entry in self.report["collectives"]]
        return table(title, keys, rows)


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
    states: Mapping[str, str] | None = None,
    encoder: str | Path | None = None,
    dialect: Dialect | None = None,
    fuses: bool = True,
) -> Summary:
    """Shards a model and writes the output directory.

    Args:
        model: Path of the ONNX file, or of a model folder of onnxruntime-genai or Optimum.
        strategy: A strategy, the path of a strategy file, or a preset such as `dp=2,tp=4`; None
            for the model's annotations.
        out: The directory to write; it is written completely or not at all.
        devices: Number of devices, if the strategy does not give it.
        symbols: Constraints on symbols; they replace the strategy's of the same name.
        ranks: Write only these ranks.
        dump: Directory for the model after each phase of processing.
        force: Replace an existing output directory.
        training: Write the programs that train the model instead of the forward program.
        optimizer_parallel: Level of optimizer parallel; it replaces the strategy's.
        recompute: What training recomputes; it replaces the strategy's.
        states: Outputs that are inputs of the next run, by input; those with the usual names of
            caches are found without it.
        encoder: Path of the ONNX file of the encoder, if the model is the decoder of one. Then the
            directory has two programs, `model` and `encoder`.
        dialect: The runtime whose collectives a forward program has, if not onnxpar's.
        fuses: Whether nodes of training programs may become fused operators; a program with which
            others are compared keeps the nodes of the model.

    Raises:
        DialectError: The dialect cannot say the program; names the node and the reason.
        OnnxparError: The model, the strategy or the target is wrong; nothing is written.
    """
    if dialect is not None and training is not None:
        raise DialectError(f"the dialect {dialect}: expected a forward program, got one to train")
    check_target(Path(out), force=force)
    given = given_model(model, encoder)
    model = given.path
    if given.encoder is not None and training is not None:
        raise ModelError(f"{given.encoder}: an encoder-decoder of two files cannot be trained")
    with blamed_on_model(model):
        clock = _Clock()
        dumper = Dumper(Path(dump)) if dump is not None else None
        proto = given.read()
        if training is None:
            states = given.states(proto) | dict(states or {})
        supplied = given.supplied(proto)
        strategy = strategy_for(strategy, devices, proto, f"model {str(model)!r}")
        if optimizer_parallel is not None:
            strategy = strategy.at_level(optimizer_parallel)
        if recompute is not None:
            strategy = replace(strategy, recompute=recompute)
        loaded = in_memory(proto, model)
        _check_ranks(ranks, strategy.world)
        clock.lap("load")
        if dumper:
            dumper.model("loaded", loaded)
        constraints = {**strategy.symbols, **(symbols or {})}
        parted = (
            _partition(loaded, strategy, constraints, states, training, dumper, clock, fuses)
            if given.encoder is None
            else _partition_both(loaded, given, supplied, strategy, constraints, states, clock)
        )
        trained = parted if isinstance(parted, PartitionedTraining) else None
        programs, pipeline, strategy = parted.programs, parted.pipeline, parted.strategy
        if dialect is not None and pipeline is not None:
            raise DialectError(f"the dialect {dialect}: expected one stage, got a pipeline")
        first = programs[0] if pipeline is None else pipeline.unsplit[0]
        if dumper:
            dumper.plan("planned", first.source, first.plan)
            for program in programs:
                rank = program.ranks.start
                name = f"partitioned.{program.program}.rank{rank}"
                dumper.model(name, emit_rank(program, rank))
        shown = programs if pipeline is None else pipeline.shown(programs)
        report = directory_data(shown, programs)
        if pipeline is not None and strategy.pipeline is not None:
            # The stages chosen here, even if costs differ where the file is read.
            decided: dict[str, object] = {"assign": dict(pipeline.assign)}
            if trained is not None:
                decided["schedule"] = pipeline.entry.schedule
            entry = strategy.pipeline.model_copy(update=decided)
            strategy = replace(strategy, pipeline=entry)
        plan, source = first.plan, first.source
        if trained is not None:
            plan, source = trained.shards.plan, trained.prepared.program.model
        file = (
            write_strategy(plan_data(plan, source, strategy, constraints), NOTE)
            if given.encoder is None
            else write_strategy(given_data(plan.mesh, strategy, constraints), NOTE_GIVEN)
        )
        write(
            programs,
            Path(out),
            ranks=ranks,
            force=force,
            report=report,
            strategy=resolved(plan, source) | ({} if trained is None else _training_keys(strategy)),
            strategy_file=file,
            model_name=Path(model).stem,
            training=None if trained is None else training_entry(trained),
            pipeline=pipeline,
            dialect=dialect,
        )
        clock.lap("write")
    return Summary(Path(out), first, {**report, "dialect": dialect}, clock.laps, trained)


def _partition(
    model: ir.Model,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    states: Mapping[str, str] | None,
    training: TrainingSpec | None,
    dumper: Dumper | None,
    clock: "_Clock",
    fuses: bool,
) -> PartitionedForward | PartitionedTraining:
    """Partitions a model, which is used up, or the programs that train it."""
    parted: PartitionedForward | PartitionedTraining
    if training is None:
        program = analyse(model, symbols, states=states)
        if dumper:
            dumper.model("normalised", program.model)
        clock.lap("analyse")
        parted = partition_forward(program, strategy, symbols, states)
    else:
        recognised = read_parameters(model, training.ties)
        if dumper:
            dumper.model("normalised", recognised.model)
        parted = partition_for_training(recognised, strategy, symbols, training, fuses=fuses)
    clock.lap("partition")
    return parted


def _partition_both(
    decoder: ir.Model,
    given: GivenModel,
    supplied: Mapping[str, str],
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    states: Mapping[str, str] | None,
    clock: "_Clock",
) -> PartitionedForward:
    """Partitions a decoder, which is used up, and its encoder."""
    assert given.encoder is not None
    with blamed_on_model(given.encoder):
        programs = partition_encoder_decoder(
            given.read_encoder,
            decoder,
            strategy,
            symbols,
            lambda model, own, known: analyse(model, own, states=known),
            states,
            supplied,
        )
    clock.lap("partition")
    return PartitionedForward(programs, strategy)


def _training_keys(strategy: Strategy) -> dict[str, Any]:
    """Returns what a resolved strategy says about training besides layouts."""
    parallel = {"optimizer_parallel": asdict(strategy.optimizer_parallel)}
    again = {"recompute": strategy.recompute.entry} if strategy.recompute else {}
    return parallel | again | pairing(strategy)


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
