"""The programs of training, partitioned: one micro-batch, evaluation, the optimizer.

The loss is appended and differentiated on the undivided graph; forward and backward are then
planned and partitioned together, as one graph. Parameters, gradients and moments are buffers of the
runtime; the plan of the first program decides their layouts, and the other programs follow it. A
gradient leaves the first program still partial over the axes that shard the batch. It is added up
over micro-batches in this form, and reduced once per step at the beginning of the optimizer's
program. Optimizer parallel changes only the layouts of buffers
(`onnxpar.cost.optimizer_parallel`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.autodiff.append_loss import append_loss, append_metrics
from onnxpar.autodiff.optimizer import state_name
from onnxpar.autodiff.recomputation.clones import Planned
from onnxpar.autodiff.recomputation.selection import Measure, recomputed
from onnxpar.autodiff.training_program import TrainingProgram, TrainingSpec
from onnxpar.core.errors import RuleError, StrategyError
from onnxpar.core.name_patterns import check_symbol_sizes
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import Dim, Symbol
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.flops import program_flops
from onnxpar.cost.optimizer_parallel import Shards, shard_states
from onnxpar.facts.program import Program
from onnxpar.frontend.load import symbol_table
from onnxpar.graph.pipeline_places import ONE_PLACE, PlaceKind, Places, with_added
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.norm.running_statistics import infer_with_statistics
from onnxpar.ops.random.draws import stop_dropping
from onnxpar.parameters.trainable import ParameterInfo
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import PartitionedModel, PipelinePrograms, States
from onnxpar.partition.program_memory import program_memory, total_bytes
from onnxpar.propagation.propagate import propagate
from onnxpar.schedule.accumulate import accumulate_rest
from onnxpar.schedule.background import run_in_background
from onnxpar.schedule.finish_later import finish_later
from onnxpar.schedule.group import group_collectives
from onnxpar.schedule.left_running import left_running_bytes
from onnxpar.schedule.pair_micro_batches import pair_micro_batches
from onnxpar.schedule.start_ahead import start_ahead
from onnxpar.stages.assign_stages import of_micro_batch
from onnxpar.stages.partition_chain import weightless_nodes
from onnxpar.stages.stage_memory import fullest_stage
from onnxpar.stages.stage_programs import Staging, plan_copies
from onnxpar.stages.state_buffers import Buffer, Buffers
from onnxpar.strategy import Strategy, resolve
from onnxpar.strategy.machine_file import background_machine, machine_of, memory_limit
from onnxpar.strategy.save import PAIR
from onnxpar_format.manifest import StateKind


@dataclass(frozen=True)
class PartitionedTraining:
    """All programs of a training directory.

    Attributes:
        programs: training_model first, then paired_model if there is one, eval_model,
            optimizer_model.
        prepared: The program that was planned, without recomputation, and what it trains.
        spec: What the user asked for.
        shards: The plan of the training program, and the layouts of its buffers.
        states: The buffers of the runtime.
        kept: Bytes of the buffers of each kind on a device, including padding; in a pipeline, on a
            device of the stage that has most.
        strategy: The strategy, with nothing left to a search.
        flops: Operations of a micro-batch, see `program_flops`.
        pipeline: How the programs make up a pipeline, where the strategy has one.
    """

    programs: tuple[PartitionedModel, ...]
    prepared: TrainingProgram
    spec: TrainingSpec
    shards: Shards
    states: tuple[Buffer, ...]
    kept: Mapping[StateKind, int]
    strategy: Strategy
    flops: Dim | None
    pipeline: PipelinePrograms | None = None


def partition_training(
    prepared: TrainingProgram,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
    staging: Staging | None = None,
) -> PartitionedTraining:
    """Plans and partitions the programs that train a model. The program given is used up.

    Args:
        prepared: Forward, loss and backward; in a pipeline with their virtual stages.
        strategy: The strategy, with nothing left to a search.
        symbols: Constraints on the symbols of its inputs.
        spec: What to train and how.
        staging: The pipeline, where the strategy has one.

    Raises:
        OnnxparError: The strategy does not fit the model.
    """
    _check_pairs(strategy, prepared.program)
    flops = program_flops(prepared.program)  # partitioning changes the program
    trained = tuple(p for p in prepared.selection.trained if p.name in prepared.gradients)
    places = staging.training_places(prepared) if staging is not None else ONE_PLACE
    seeds = resolve(strategy, prepared.program)
    shards = _planned(prepared, seeds, strategy, trained)
    held = prepared.program.graph.initializers
    statistics = {n: held[n].dtype or ir.DataType.FLOAT for n in prepared.updated.values()}
    opset, registry = prepared.program.opset, prepared.program.registry
    buffers = Buffers(shards, trained, statistics, registry)
    scaled = prepared.compute is not None
    rest: Sequence[PartitionedModel] = ()
    if staging is None:
        updates, rest = buffers.updates(spec.optimizer, opset, scaled=scaled)
    by_micro_batch = of_micro_batch(strategy, prepared.program)
    sizes = _sizes(by_micro_batch)
    machine = background_machine(strategy)
    mesh, table = shards.plan.mesh, prepared.program.env.table
    background = CostModel(machine, mesh, table, sizes)

    def device_bytes(made: PartitionedModel, where: Places) -> int:
        """Bytes that a device holds when it trains with a program of one micro-batch, or a pair."""
        if staging is None:
            run = pair_micro_batches(made) if strategy.pair_micro_batches else made
            held = total_bytes([program_memory(other, sizes) for other in (run, *rest[:1])])
            return held + left_running_bytes(rest[0], machine, sizes)
        entry = staging.entry
        split = staging.split(made, where, "forward_model").programs
        placed = buffers.placed(split)
        _, others = placed.stage_updates(spec.optimizer, opset, entry, scaled=scaled)
        parts = [placed.with_sums(part) for part in split]
        left = max(left_running_bytes(other, machine, sizes) for other in others)
        return fullest_stage(parts, others, staging.pipeline_split, sizes) + left

    program = _micro_batch(prepared, shards, places, by_micro_batch, staging, device_bytes)
    if staging is None:
        given = memory_limit(strategy), strategy.recompute.memory
        limits = [limit for limit in given if limit is not None]
        room = min(limits) - device_bytes(program, places) if limits else None
        runs = [(pair_micro_batches(program), 2)] if strategy.pair_micro_batches else []
        parts = []
        for run, micro_batches in (*runs, (program, 1)):
            part = buffers.with_sums(run)
            start_ahead(part, rest[0], machine)
            run_in_background(part, background, room=room, micro_batches=micro_batches)
            accumulate_rest(part)
            parts.append(part)
        rest = [group_collectives(other, machine, sizes) for other in rest]
        finish_later(rest[0], parts)
        *paired, program = parts
    evaluation, where = _evaluation(prepared, seeds, symbols, spec, buffers, staging)
    pipeline: PipelinePrograms | None = None
    if staging is None:
        programs = (program, *paired, evaluation, *rest)
    else:
        training = staging.split(program, places, "forward_model")
        evaluated = staging.split(evaluation, where, "eval_model")
        buffers = buffers.placed(training.programs)
        updates, rest = buffers.stage_updates(spec.optimizer, opset, staging.entry, scaled=scaled)
        parts = [buffers.with_sums(part) for part in training.programs]
        made = Counter(state for part in parts for state in part.states.outputs.values())
        shared = {state for state, count in made.items() if count > 1}
        for part in parts:
            start_ahead(part, rest[part.stage], machine, shared)
            # A stage is filled by its micro-batches, whose values take the memory.
            run_in_background(part, background, room=0)
            accumulate_rest(part)
        rest = [group_collectives(other, machine, sizes) for other in rest]
        for other in rest:
            finish_later(other, [part for part in parts if part.stage == other.stage])
        training = replace(training, programs=tuple(parts))
        programs = (*training.programs, *evaluated.programs, *rest)
        pipeline = staging.pipeline([training, evaluated], rest)
    return PartitionedTraining(
        programs,
        prepared,
        spec,
        shards,
        tuple(buffers.all(updates)),
        buffers.kept(updates),
        strategy,
        flops,
        pipeline,
    )


# -- one micro-batch -----------------------------------------------------------------------------


def _planned(
    prepared: TrainingProgram, seeds: Seeds, strategy: Strategy, trained: Sequence[ParameterInfo]
) -> Shards:
    """The plan of forward, loss and backward of one micro-batch, and the layouts of its buffers."""
    p = prepared
    plan = plan_copies(p, seeds)
    _check_statistics(plan, p.updated)
    itemsizes = {info.name: int(info.dtype.itemsize) for info in trained}
    itemsizes |= {n: itemsizes[c.original] for n, c in p.copies.items() if n in p.gradients}
    return shard_states(plan, p.gradients, itemsizes, strategy.optimizer_parallel)


def _micro_batch(
    prepared: TrainingProgram,
    shards: Shards,
    places: Places,
    strategy: Strategy,
    staging: Staging | None,
    held: Callable[[PartitionedModel, Places], int],
) -> PartitionedModel:
    """Forward, loss and backward of one micro-batch, partitioned.

    Args:
        prepared: The program.
        shards: Its plan, and the layouts of its buffers.
        places: Where nodes run in a pipeline.
        strategy: The strategy with the sizes of a micro-batch, for what is recomputed.
        staging: The pipeline, where the strategy has one.
        held: Returns the bytes that a device holds when it trains with such a program.
    """
    p = prepared
    # The gradient of a copy goes to the buffer of its original, on another stage.
    owner = {n: p.copies[n].original if n in p.copies else n for n in p.gradients}
    gradients = {g: state_name(StateKind.GRADIENT, owner[n]) for n, g in p.gradients.items()}
    laid = shards.training(p.program)
    states = States(frozenset((*p.gradients, *p.updated.values())), {**gradients, **p.updated})
    if staging is not None:
        places = staging.transfers(places, p.program, laid.plan, states.inputs)

    def partitioned(run: Planned) -> PartitionedModel:
        return partition(
            run.program,
            run.plan,
            name="training_model",
            states=states,
            gathered=laid.gathered,
            places=with_added(places, run.added),
            fuses=p.fuses,
        )

    again = strategy.recompute
    check_symbol_sizes(dict(again.sizes), p.program.env.table, f"{again.where}: 'sizes'")
    sizes = _sizes(strategy)
    machine = machine_of(strategy)
    cost = CostModel(machine, shards.plan.mesh, p.program.env.table, sizes)

    def weighed(run: Planned) -> int:
        return held(partitioned(run), with_added(places, run.added))

    planned = Planned(p.program, laid.plan)
    weightless = frozenset[str]() if staging is None else weightless_nodes(p.program)
    # One program of forward and backward keeps nothing for other micro-batches.
    kinds = {name: places.kinds[places.nodes[name]] for name in weightless}
    always = frozenset(name for name, kind in kinds.items() if kind is PlaceKind.FORWARD)
    return partitioned(recomputed(planned, again, Measure(cost, weighed), always))


def _check_pairs(strategy: Strategy, program: Program) -> None:
    """Raises StrategyError if micro-batches may be of one size on one rank and not on another."""
    table = program.env.table
    names = sorted(name for name in table if table[name].per_rank)
    if strategy.pair_micro_batches and names:
        raise StrategyError(
            f"{strategy.where(PAIR)}: expected sizes that are equal on all ranks, got the per-rank "
            f"symbol {names[0]!r} and pair_micro_batches: true"
        )


def _sizes(strategy: Strategy) -> dict[str, int]:
    """Sizes of symbols at which memory is predicted."""
    return {**strategy.search.sizes, **dict(strategy.recompute.sizes)}


def _check_statistics(plan: Plan, updated: Mapping[str, str]) -> None:
    """Raises RuleError unless new statistics have the layouts of their buffers."""
    for new, name in updated.items():
        if plan.outputs[new] != plan.parameters[name]:
            raise RuleError(
                f"running statistic {name!r}: expected {plan.parameters[name]}, its update "
                f"produces {plan.outputs[new]}"
            )


# -- the other programs --------------------------------------------------------------------------


def _evaluation(
    prepared: TrainingProgram,
    training_seeds: Seeds,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
    buffers: Buffers,
    staging: Staging | None,
) -> tuple[PartitionedModel, Places]:
    """Forward, loss and results of a batch; parameters have the layout of training."""
    model, shards, training = prepared.evaluation, buffers.shards, buffers.shards.plan
    # Constants of the loss may have names that training gave to others.
    planned = {n: s for n, s in training.parameters.items() if n in model.graph.initializers}
    stop_dropping(model.graph)
    infer_with_statistics(model.graph)
    info = append_loss(model, spec.loss)
    append_metrics(info)
    model = info.model
    places = (
        staging.put_again(model, prepared.program.registry) if staging is not None else ONE_PLACE
    )
    env = shapes(model, symbol_table(model, symbols, prepared.program.registry))
    program = Program.of(model, env, prepared.program.registry)
    seeds = _as_in_training(training, training_seeds, program, planned)
    laid = shards.laid(propagate(program, seeds), program)
    fed = States(frozenset((*(p.name for p in buffers.trained), *buffers.statistics)))
    if staging is not None:
        places = staging.transfers(places, program, laid.plan, fed.inputs)
    parted = partition(
        program,
        laid.plan,
        name="eval_model",
        states=fed,
        gathered=laid.gathered,
        places=places,
    )
    return parted, places


def _as_in_training(
    plan: Plan,
    seeds: Seeds,
    program: Program,
    parameters: Mapping[str, Sharding],
) -> Seeds:
    """The seeds of evaluation: inputs, parameters and the user's entries are those of training.

    Other nodes keep their plan from training if their operands arrive as that plan expects.
    """
    nodes = {}
    for node in program.graph:
        name = node.name or ""
        found, rule = plan.nodes.get(name), program.rules.by_node[name]
        # The outputs of a loss may differ.
        if found is not None and found.pinned and found.rule.inputs == rule.inputs:
            out = tuple(plan.resharded.get(v.name or "") for v in node.outputs)
            nodes[name] = NodeSeed(name, found.factors, out, carried=found.carried)
    inputs = {v.name or "": plan.inputs[v.name or ""] for v in program.graph.inputs}
    return replace(
        seeds,
        nodes=nodes,
        inputs=inputs,
        parameters=parameters,
        plans=dict(plan.nodes),
        held=frozenset(inputs),
    )
