"""The virtual stage of each node: by `pipeline: assign`, and by the prices of other nodes."""

from collections.abc import Collection, Sequence
from math import prod

import onnx_ir as ir

from onnxpar.core.errors import StrategyError
from onnxpar.core.machine import Link, Machine
from onnxpar.core.mesh import Mesh
from onnxpar.core.name_patterns import match
from onnxpar.cost.cost_model import CostModel
from onnxpar.facts.program import Program
from onnxpar.graph.plan import shardings
from onnxpar.stages.cut_chain import Costs, chain_of, cut_chain
from onnxpar.strategy.annotation_seeds import annotated_virtual_stages
from onnxpar.strategy.machine_file import load_machine
from onnxpar.strategy.schema import PipelineEntry, Strategy


def decide_virtual_stages(
    strategy: Strategy,
    entry: PipelineEntry,
    program: Program,
    weights: Collection[str],
) -> dict[ir.Node, int]:
    """Returns the virtual stage of each node that is cut.

    Args:
        strategy: The strategy, which has a pipeline.
        entry: What it says of the pipeline.
        program: The program, neither sharded nor differentiated.
        weights: Names of the initializers that count as weights.

    Raises:
        StrategyError: A pattern fits no node, entries contradict one another, or there are more
            virtual stages than nodes.
    """
    model = program.model
    chain = chain_of(model.graph, weights, program.registry)
    fixed = assigned(strategy, model)
    free = any((node.name or "") not in fixed for node in chain.nodes)
    costs = _costs(strategy, program, chain.nodes) if free else Costs()
    try:
        return cut_chain(chain, entry.virtual_stages, fixed, costs, _lines(strategy, model))
    except StrategyError as error:
        where = strategy.source
        if strategy.pipeline is not None and strategy.document.lines:
            where = strategy.where("pipeline", "assign")
        raise StrategyError(f"{where}: {error}") from None


def assigned(strategy: Strategy, model: ir.Model) -> dict[str, int]:
    """Returns the virtual stages that the user, or the annotation, says, by the nodes' names.

    Raises:
        StrategyError: A pattern fits no node.
    """
    if strategy.annotation is not None:
        return annotated_virtual_stages(strategy.annotation, model.graph)
    return {name: virtual for name, (_, virtual) in _matched(strategy, model).items()}


def _matched(strategy: Strategy, model: ir.Model) -> dict[str, tuple[str, int]]:
    """Of each node that the user assigned, by name: the pattern, and the virtual stage."""
    if strategy.pipeline is None:
        return {}
    said = strategy.pipeline.assign
    where = {key: strategy.where("pipeline", "assign", key) for key in said}
    return match(said, [node.name or "" for node in model.graph], "node", where)


def _lines(strategy: Strategy, model: ir.Model) -> dict[str, str]:
    """Where the user assigned nodes, by name: `line 3` of a strategy file."""
    lines = strategy.document.lines
    places = {
        name: lines.get(("pipeline", "assign", pattern))
        for name, (pattern, _) in _matched(strategy, model).items()
    }
    return {name: f"line {line}" for name, line in places.items() if line is not None}


def _costs(strategy: Strategy, program: Program, nodes: Sequence[ir.Node]) -> Costs:
    """What nodes take undivided, and their results on the way, on the strategy's machine."""
    env, rules = program.env, program.rules
    machine = load_machine(strategy.search.machine)
    mesh = Mesh.of()
    cost = CostModel(machine, mesh, env.table, strategy.search.sizes)
    link = between_stages(machine, strategy.stages, strategy.devices)
    seconds: dict[str, float] = {}
    crossing: dict[str, float] = {}
    for node in nodes:
        name = node.name or ""
        rule, view = rules.by_node[name], rules.views[name]
        plan = shardings(rule, view, {}, mesh)
        seconds[name] = cost.node(rule, view, plan, rules.costs.get(name)).seconds
        for value in node.outputs:
            if value.dtype is not None:
                size = prod(cost.value(d) for d in env.shapes.get(value.name or "", ()))
                moved = size * value.dtype.itemsize / strategy.devices
                crossing[value.name or ""] = link.latency + moved / link.bandwidth
    return Costs({n: s / strategy.devices for n, s in seconds.items()}, crossing)


def between_stages(machine: Machine, stages: int, devices: int) -> Link:
    """Returns what joins counterparts of two stages, which lie as far apart as a stage is large.

    Args:
        machine: The machine.
        stages: Number of stages.
        devices: Number of devices of each.
    """
    world = Mesh.refine(stages * devices, [(stages, devices)])
    return machine.link(world, world.matrix((stages, devices))[0])
