"""The programs of training, divided: one micro-batch, evaluation, the optimizer, accumulation.

The loss is appended and differentiated on the undivided graph; forward and backward are then
planned and partitioned together, as one graph. Parameters, gradients and moments are buffers of the
runtime; the plan of the first program says how they lie, and the other programs follow it. A
gradient leaves the first program still partial over the axes that split the batch, is added up over
micro-batches so, and is reduced once a step at the beginning of the optimizer's program. Optimizer
parallel changes how buffers lie, and nothing else (`onnxpar.analysis.optimizer_parallel`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import onnx_ir as ir

from onnxpar.analysis.optimizer_parallel import Shards, shard_states
from onnxpar.analysis.plan import Plan, factor_sizes, project
from onnxpar.analysis.propagate import propagate
from onnxpar.analysis.seeds import NodeSeed, Seeds
from onnxpar.analysis.shapes import shapes
from onnxpar.artifacts.manifest import state_entry
from onnxpar.errors import RuleError
from onnxpar.ops.find import find_rules
from onnxpar.ops.random import stop_dropping
from onnxpar.ops.running import infer_with_statistics
from onnxpar.passes.load import symbol_table
from onnxpar.passes.partition import partition
from onnxpar.passes.partitioned import GraphInput, PartitionedModel, States
from onnxpar.sharding import Sharding
from onnxpar.strategy import Strategy, resolve
from onnxpar.strategy.decide import decide
from onnxpar.strategy.schema import SEARCH
from onnxpar.symbols import Symbol, SymbolTable, dim_str
from onnxpar.training.loss import LossInfo, append_loss, append_metrics
from onnxpar.training.optimizer import (
    ParameterInfo,
    StateKind,
    StateProgram,
    accumulation_model,
    optimizer_model,
    state_name,
)
from onnxpar.training.prepare import Prepared, TrainingSpec, prepare_training
from onnxpar.training.trainable import Selection

Json = dict[str, Any]


@dataclass(frozen=True)
class DividedTraining:
    """All programs of a training directory.

    Attributes:
        programs: training_model first, then eval_model, optimizer_model, accumulation_model.
        manifest: The manifest's entry "training".
        selection: What is trained, and what is not.
        unreached: Parameters chosen that the loss does not depend on, with the reason.
        shards: The plan of the training program, and how its buffers lie.
        kept: Bytes of the buffers of each kind on a device, padding included.
    """

    programs: tuple[PartitionedModel, ...]
    manifest: Json
    selection: Selection
    unreached: Mapping[str, str]
    shards: Shards
    kept: Mapping[StateKind, int]


def divide_training(
    model: ir.Model,
    originals: frozenset[str],
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
) -> DividedTraining:
    """Plans and partitions the programs that train a model. The model given is used up.

    Args:
        model: The normalised model.
        originals: Names of the initializers that the file had; others were constants.
        strategy: How to divide it.
        symbols: Constraints on the symbols of its inputs.
        spec: What to train and how.

    Raises:
        OnnxparError: The loss, the parameters or the strategy do not fit the model, or an operator
            between them has no gradient.
    """
    prepared = prepare_training(model, originals, symbols, spec)
    trained = tuple(p for p in prepared.selection.trained if p.name in prepared.gradients)
    shards = _planned(prepared, strategy, trained)
    program = _micro_batch(prepared, shards)
    held = prepared.model.graph.initializers
    statistics = {n: held[n].dtype or ir.DataType.FLOAT for n in prepared.updated.values()}
    states = _States(shards, trained, statistics)
    kind, opset = spec.optimizer, prepared.opset
    infos = [states.info(p) for p in trained]
    updates = optimizer_model(kind, infos, opset=opset, scaled=prepared.compute is not None)
    programs = (
        program,
        _evaluation(prepared.evaluation, strategy, symbols, spec, states),
        states.divided(updates, "optimizer_model"),
        states.divided(accumulation_model(infos, opset=opset), "accumulation_model"),
    )
    buffers = states.buffers(updates)
    entry = {
        "loss": _loss_entry(prepared.loss),
        "optimizer": {"kind": str(kind)},
        "states": [state_entry(b.item, str(b.kind), b.parameter) for b in buffers],
        "compute": prepared.compute,
        "tensors": prepared.selection.entries(prepared.unreached),
        "notices": list(prepared.notices),
        "spec": asdict(spec),
    }
    kept = {k: sum(states.bytes(b) for b in buffers if b.kind == k) for k in StateKind}
    return DividedTraining(programs, entry, prepared.selection, prepared.unreached, shards, kept)


# -- one micro-batch -----------------------------------------------------------------------------


def _planned(prepared: Prepared, strategy: Strategy, trained: Sequence[ParameterInfo]) -> Shards:
    """The plan of forward, loss and backward of one micro-batch, and of what is kept between."""
    p = prepared
    seeds = decide(strategy, p.model, p.rules, p.env, list(p.gradients))
    plan = propagate(p.model, p.env, p.rules, seeds, p.links)
    _check_statistics(plan, p.updated)
    itemsizes = {info.name: int(info.dtype.itemsize) for info in trained}
    return shard_states(plan, p.gradients, itemsizes, strategy.optimizer_parallel)


def _micro_batch(prepared: Prepared, shards: Shards) -> PartitionedModel:
    """Forward, loss and backward of one micro-batch, divided."""
    p = prepared
    gradients = {g: state_name(StateKind.GRADIENT, n) for n, g in p.gradients.items()}
    laid = shards.training(p.model.graph, p.rules)
    return partition(
        p.model,
        p.env,
        p.rules,
        p.ops,
        laid.plan,
        program="training_model",
        states=States(frozenset((*p.gradients, *p.updated.values())), {**gradients, **p.updated}),
        gathered=laid.gathered,
    )


def _check_statistics(plan: Plan, updated: Mapping[str, str]) -> None:
    """Raises RuleError unless new statistics lie as the buffers that they go to."""
    for new, name in updated.items():
        if plan.outputs[new] != plan.parameters[name]:
            raise RuleError(
                f"running statistic {name!r}: expected {plan.parameters[name]}, its update leaves "
                f"as {plan.outputs[new]}"
            )


def _loss_entry(info: LossInfo) -> Json:
    count = info.count
    return {
        "kind": str(info.spec.kind),
        "labels": info.labels,
        "ignore_index": info.spec.ignore_index,
        "count": count if count is None or isinstance(count, int) else dim_str(count),
    }


# -- the other programs --------------------------------------------------------------------------


def _evaluation(
    model: ir.Model,
    strategy: Strategy,
    symbols: Mapping[str, Symbol],
    spec: TrainingSpec,
    states: "_States",
) -> PartitionedModel:
    """Forward and loss, with what is told of a batch; parameters lie as in training."""
    shards, training = states.shards, states.shards.plan
    # Constants of the loss may have names that training gave to others.
    planned = {n: s for n, s in training.parameters.items() if n in model.graph.initializers}
    stop_dropping(model.graph)
    infer_with_statistics(model.graph)
    info = append_loss(model, spec.loss)
    append_metrics(info)
    model = info.model
    env = shapes(model, symbol_table(model, symbols))
    rules, ops = find_rules(model, env)
    if strategy.rest == SEARCH:
        # What was found for training holds here, its inputs and its mesh included.
        names = {v.name for v in model.graph.inputs}
        held = {n: s for n, s in training.inputs.items() if n in names}
        seeds = Seeds(training.mesh, inputs=held)
    else:
        seeds = resolve(strategy, model, rules, env)
    # What is right for forward and backward together is kept, parameters lying as they do.
    seeds = replace(seeds, parameters={**seeds.parameters, **planned}, plans=dict(training.nodes))
    if seeds.mesh != training.mesh:
        raise RuleError("evaluation and training were given two meshes")
    laid = shards.laid(propagate(model, env, rules, seeds), model.graph, rules)
    fed = States(frozenset((*states.parameters, *states.statistics)))
    return partition(
        model,
        env,
        rules,
        ops,
        laid.plan,
        program="eval_model",
        states=fed,
        gathered=laid.gathered,
    )


class _States:
    """The buffers that live between runs."""

    def __init__(
        self,
        shards: Shards,
        trained: Sequence[ParameterInfo],
        statistics: Mapping[str, ir.DataType],
    ) -> None:
        self.shards = shards
        self.parameters = {p.name: p for p in trained}
        self.statistics = statistics

    def info(self, p: ParameterInfo) -> ParameterInfo:
        """The parameter, grouped for the norm with those that are split over the same devices."""
        atoms = self.shards.moment(p.name).split_atoms
        group = ",".join(map(str, sorted(atoms)))
        return ParameterInfo(p.name, p.dtype, p.shape, p.decay, group)

    def sharding(self, kind: StateKind, name: str) -> Sharding:
        """How a buffer of a parameter, or of a running statistic, is divided."""
        match kind:
            case StateKind.GRADIENT | StateKind.MICRO_GRADIENT:
                return self.shards.gradient(name)
            case StateKind.PARAMETER:
                return self.shards.parameter(name)
            case StateKind.STATISTIC:
                return self.shards.plan.parameters[name]
        return self.shards.moment(name)

    def divided(self, program: StateProgram, name: str) -> PartitionedModel:
        """Partitions a program whose operands are buffers."""
        model = program.model
        mesh = self.shards.plan.mesh
        env = shapes(model, SymbolTable({}))
        rules, ops = find_rules(model, env)
        held = {s.name: self.sharding(s.kind, s.parameter) for s in program.states}
        parameters = {s.name: s.parameter for s in program.states}
        nodes = {}
        for node in model.graph:
            first = node.inputs[0] if node.inputs else None
            source = first.name or "" if first is not None else ""
            if source in program.reduced and node.outputs[0].name == program.reduced[source]:
                title = node.name or ""
                rule, view = rules.rules[title], rules.views[title]
                shard = self.shards.moment(parameters[source])
                sizes = factor_sizes(rule, view)
                factors = project(rule.inputs[0], shard, sizes, mesh, env.table)
                nodes[title] = NodeSeed(title, factors)
        outputs = {output: held[state] for output, state in program.updated.items()}
        plan = propagate(model, env, rules, Seeds(mesh, nodes, held, outputs=outputs))
        states = States(frozenset(held), dict(program.updated))
        return partition(model, env, rules, ops, plan, program=name, states=states)

    def buffers(self, updates: StateProgram) -> list["_Buffer"]:
        """All buffers, in the order of the manifest."""
        known = [(s.name, s.kind, s.parameter, s.dtype) for s in updates.states]
        known += [
            (
                state_name(StateKind.MICRO_GRADIENT, p.name),
                StateKind.MICRO_GRADIENT,
                p.name,
                p.dtype,
            )
            for p in self.parameters.values()
        ]
        known += [(n, StateKind.STATISTIC, n, dtype) for n, dtype in self.statistics.items()]
        return [
            _Buffer(
                kind,
                parameter,
                GraphInput(name, _local(name, dtype), self.sharding(kind, parameter)),
            )
            for name, kind, parameter, dtype in known
        ]

    def bytes(self, buffer: "_Buffer") -> int:
        """The bytes of a buffer on a device."""
        shape = buffer.item.sharding.local_shape(self.shards.plan.mesh)
        dtype = buffer.item.local.dtype or ir.DataType.FLOAT
        return prod(int(size) for size in shape) * int(dtype.itemsize)


@dataclass(frozen=True)
class _Buffer:
    """A buffer that lives between runs, and the parameter that it belongs to."""

    kind: StateKind
    parameter: str
    item: GraphInput


def _local(name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype))
