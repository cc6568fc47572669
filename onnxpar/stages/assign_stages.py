"""The virtual stage of each node: from `pipeline: assign`, and by cost for the other nodes."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import StrategyError
from onnxpar.core.machine import Link, Machine
from onnxpar.core.mesh import Mesh
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.batch import batch_symbols, micro_batch_sizes
from onnxpar.facts.program import Program
from onnxpar.graph.plan import shardings
from onnxpar.stages.partition_chain import Costs, chain_of, partition_chain
from onnxpar.strategy.annotation_seeds import annotated_virtual_stages
from onnxpar.strategy.divided_weights import match_nodes
from onnxpar.strategy.machine_file import machine_of
from onnxpar.strategy.pipeline_entry import PipelineEntry
from onnxpar.strategy.schema import Strategy


def decide_virtual_stages(
    strategy: Strategy,
    entry: PipelineEntry,
    program: Program,
    weights: Collection[str],
) -> dict[ir.Node, int]:
    """Returns the virtual stage of each node of the chain (`partition_chain.chain_of`).

    Args:
        strategy: The strategy, which has a pipeline.
        entry: Its pipeline.
        program: The undivided forward program.
        weights: Names of the initializers that count as weights.

    Raises:
        StrategyError: A pattern matches no node, entries contradict one another, or there are more
            virtual stages than nodes.
    """
    model = program.model
    chain = chain_of(model.graph, weights, program.registry)
    fixed = assigned(strategy, model)
    free = any((node.name or "") not in fixed for node in chain.nodes)
    costs = _costs(strategy, program, chain.nodes) if free else Costs()
    try:
        return partition_chain(
            chain,
            entry.virtual_stages,
            fixed,
            costs,
            _lines(strategy, model),
            stages=entry.stages,
        )
    except StrategyError as error:
        where = strategy.source
        if strategy.pipeline is not None and strategy.document.lines:
            where = strategy.where("pipeline", "assign")
        raise StrategyError(f"{where}: {error}") from None


def assigned(strategy: Strategy, model: ir.Model) -> dict[str, int]:
    """Returns the virtual stages that the strategy file or the annotation assigns, by node name.

    Raises:
        StrategyError: A pattern matches no node.
    """
    if strategy.annotation is not None:
        return annotated_virtual_stages(strategy.annotation, model.graph)
    return {name: virtual for name, (_, virtual) in _matched(strategy, model).items()}


def _matched(strategy: Strategy, model: ir.Model) -> dict[str, tuple[str, int]]:
    """For each node that the strategy file assigns, by name: the pattern, and the virtual stage."""
    if strategy.pipeline is None:
        return {}
    assign = strategy.pipeline.assign
    where = {key: strategy.where("pipeline", "assign", key) for key in assign}
    return match_nodes(assign, list(model.graph), where)


def _lines(strategy: Strategy, model: ir.Model) -> dict[str, str]:
    """Where the strategy file assigns nodes, by node name, such as `line 3`."""
    lines = strategy.document.lines
    places = {
        name: lines.get(("pipeline", "assign", pattern))
        for name, (pattern, _) in _matched(strategy, model).items()
    }
    return {name: f"line {line}" for name, line in places.items() if line is not None}


def _costs(strategy: Strategy, program: Program, nodes: Sequence[ir.Node]) -> Costs:
    """Estimated times of nodes and of sending their results, on the strategy's machine."""
    env, cost = program.env, _undivided_cost(strategy, program)
    link = between_stages(cost.machine, strategy.stages, strategy.devices)
    crossing: dict[str, float] = {}
    for value in (v for node in nodes for v in node.outputs):
        if value.dtype is not None:
            size = prod(cost.value(d) for d in env.shapes.get(value.name or "", ()))
            moved = size * value.dtype.itemsize / strategy.devices
            crossing[value.name or ""] = link.latency + moved / link.bandwidth
    return Costs(estimated_seconds(strategy, program, nodes), crossing)


def estimated_seconds(
    strategy: Strategy, program: Program, nodes: Iterable[ir.Node]
) -> dict[str, float]:
    """Returns estimated seconds of nodes, by name, if the devices of a stage divide all work.

    Args:
        strategy: The strategy.
        program: The undivided program.
        nodes: Nodes of it.
    """
    rules, cost = program.rules, _undivided_cost(strategy, program)
    seconds = {}
    for name in (node.name or "" for node in nodes):
        rule, view = rules.by_node[name], rules.views[name]
        plan = shardings(rule, view, {}, cost.mesh)
        found = cost.node(rule, view, plan, rules.costs.get(name)).seconds
        seconds[name] = found / strategy.devices
    return seconds


def _undivided_cost(strategy: Strategy, program: Program) -> CostModel:
    table, sizes = program.env.table, strategy.search.sizes
    return CostModel(machine_of(strategy), Mesh.of(), table, sizes)


def of_micro_batch(strategy: Strategy, program: Program) -> Strategy:
    """Returns a strategy of training, its sizes of symbols those of a micro-batch.

    Args:
        strategy: The strategy. Its sizes are those of a step.
        program: The program that is trained.
    """
    count = strategy.step_micro_batches or strategy.stages
    if strategy.pair_micro_batches:
        count = max(count, 2)  # a step that is not divided otherwise
    sizes = micro_batch_sizes(strategy.search.sizes, batch_symbols(program), count)
    if sizes == strategy.search.sizes:
        return strategy
    return replace(strategy, search=strategy.search.model_copy(update={"sizes": sizes}))


def between_stages(machine: Machine, stages: int, devices: int) -> Link:
    """Returns the link between a device and its counterpart in the next stage.

    The ranks of the two differ by the number of devices of a stage.

    Args:
        machine: The machine.
        stages: Number of stages.
        devices: Number of devices of each stage.
    """
    world = Mesh.refine(stages * devices, [(stages, devices)])
    return machine.link(world, world.matrix((stages, devices))[0])
