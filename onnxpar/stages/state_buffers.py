"""The buffers that live between the runs of training programs, and what updates them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import onnx_ir as ir

from onnxpar.autodiff.optimizer import (
    OptimizerKind,
    StateProgram,
    optimizer_model,
    state_name,
)
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.cost.optimizer_parallel import Shards
from onnxpar.facts.program import Program
from onnxpar.graph.plan import factor_sizes, project
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.graph.shapes import shapes
from onnxpar.ops.local_helpers import DOUBLE
from onnxpar.ops.registry import Registry
from onnxpar.parameters.trainable import ParameterInfo
from onnxpar.partition.partition import partition
from onnxpar.partition.partitioned_model import GraphValue, PartitionedModel, States
from onnxpar.propagation.propagate import propagate
from onnxpar.schedule.accumulate import with_sums
from onnxpar.strategy.pipeline_entry import PipelineEntry
from onnxpar_format.manifest import StateKind

_GRADIENTS = (StateKind.GRADIENT, StateKind.MICRO_GRADIENT)


@dataclass(frozen=True)
class Buffers:
    """The buffers of a training program.

    Attributes:
        shards: Their layouts.
        trained: The parameters that are trained.
        statistics: Element types of the running statistics, by name.
        registry: The operators.
        stages: The pipeline stages that have each parameter and statistic; empty without a
            pipeline.
    """

    shards: Shards
    trained: Sequence[ParameterInfo]
    statistics: Mapping[str, ir.DataType]
    registry: Registry
    stages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def updates(
        self, kind: OptimizerKind, opset: int, *, scaled: bool
    ) -> tuple[list[StateProgram], list[PartitionedModel]]:
        """Returns the optimizer's program, and the same partitioned."""
        infos = [self._info(p) for p in self.trained]
        update = optimizer_model(kind, infos, opset=opset, scaled=scaled)
        return [update], [self._partitioned(update, "optimizer_model")]

    def with_sums(self, program: PartitionedModel) -> PartitionedModel:
        """Returns a program that also reads the sums of its gradients over micro-batches."""
        kinds, names = _GRADIENTS, [p.name for p in self.trained]
        return with_sums(program, {state_name(kinds[0], n): state_name(kinds[1], n) for n in names})

    # -- in stages -------------------------------------------------------------------------------

    def placed(self, training: Sequence[PartitionedModel]) -> "Buffers":
        """Returns the buffers of a pipeline, each on the stages whose programs read it.

        Args:
            training: The programs of forward and backward.
        """
        found: dict[str, set[int]] = {}
        for pm in training:
            for p in pm.parameters:
                found.setdefault(p.name, set()).add(pm.stage)
        return replace(self, stages={name: tuple(sorted(on)) for name, on in found.items()})

    def stage_updates(
        self,
        kind: OptimizerKind,
        opset: int,
        entry: PipelineEntry,
        *,
        scaled: bool,
    ) -> tuple[list[StateProgram], list[PartitionedModel]]:
        """Returns the optimizer's programs of all stages, and the same partitioned.

        The partitioned programs are called `optimizer_model.<stage>`.

        Args:
            kind: The optimizer.
            opset: Version of the default domain.
            entry: The pipeline.
            scaled: Whether gradients carry a loss scale.
        """
        updates, partitioned = [], []
        double = any(p.dtype == DOUBLE for p in self.trained)
        for stage in range(entry.stages):
            infos = []
            for p in self.trained:
                on = self.stages[p.name]
                if stage in on:
                    shared = on if len(on) > 1 else ()
                    infos.append(replace(self._info(p), stages=shared, counted=stage == on[0]))
            update = optimizer_model(
                kind, infos, opset=opset, scaled=scaled, stages=entry.stages, double=double
            )
            updates.append(update)
            parted = self._partitioned(update, f"optimizer_model.{stage}")
            partitioned.append(replace(parted, stage=stage, stages=entry.stages))
        return updates, partitioned

    # -- layouts ---------------------------------------------------------------------------------

    def _info(self, p: ParameterInfo) -> ParameterInfo:
        """The parameter, grouped for the norm with those that are sharded over the same devices."""
        atoms = self.shards.moment(p.name).split_atoms
        return replace(p, norm_group=",".join(map(str, sorted(atoms))))

    def _sharding(self, kind: StateKind, name: str) -> Sharding:
        """The sharding of a buffer of a parameter or of a running statistic."""
        match kind:
            case StateKind.GRADIENT | StateKind.MICRO_GRADIENT:
                return self.shards.gradient(name)
            case StateKind.PARAMETER:
                return self.shards.parameter(name)
            case StateKind.STATISTIC:
                return self.shards.plan.parameters[name]
        return self.shards.moment(name)

    def _partitioned(self, update: StateProgram, name: str) -> PartitionedModel:
        """Partitions a program whose operands are buffers."""
        mesh = self.shards.plan.mesh
        env = shapes(update.model, SymbolTable({}))
        program = Program.of(update.model, env, self.registry)
        held = {s.name: self._sharding(s.kind, s.parameter) for s in update.states}
        parameters = {s.name: s.parameter for s in update.states}
        nodes = {}
        for node in program.graph:
            first = node.inputs[0] if node.inputs else None
            source = first.name or "" if first is not None else ""
            if source in update.reduced and node.outputs[0].name == update.reduced[source]:
                title = node.name or ""
                rule, view = program.rules.by_node[title], program.rules.views[title]
                shard = self.shards.moment(parameters[source])
                sizes = factor_sizes(rule, view)
                factors = project(rule.inputs[0], shard, sizes, mesh, env.table)
                nodes[title] = NodeSeed(title, factors)
        outputs = {output: held[state] for output, state in update.updated.items()}
        plan = propagate(program, Seeds(mesh, nodes, held, outputs=outputs))
        # Each is resharded right after its update, so that not all shards are there at once.
        plan = replace(plan, resharded=outputs)
        states = States(frozenset(held), dict(update.updated))
        return partition(program, plan, name=name, states=states)

    # -- all of them ------------------------------------------------------------------------------

    def kept(self, updates: Sequence[StateProgram]) -> dict[StateKind, int]:
        """Returns the bytes of the buffers of each kind on a device of the stage that has most."""
        found = self.all(updates)
        every = sorted({s for b in found for s in b.stages}) or [0]
        return {
            kind: max(
                sum(self._bytes(b) for b in found if b.kind == kind and stage in (b.stages or (0,)))
                for stage in every
            )
            for kind in StateKind
        }

    def all(self, updates: Sequence[StateProgram]) -> list["Buffer"]:
        """Returns all buffers: states of the programs, gradients of a micro-batch, statistics."""
        known = [(s.name, s.kind, s.parameter, s.dtype) for u in updates for s in u.states]
        known = list(dict.fromkeys(known))
        known += [
            (
                state_name(StateKind.MICRO_GRADIENT, p.name),
                StateKind.MICRO_GRADIENT,
                p.name,
                p.dtype,
            )
            for p in self.trained
        ]
        known += [(n, StateKind.STATISTIC, n, dtype) for n, dtype in self.statistics.items()]
        return [
            Buffer(
                kind,
                parameter,
                GraphValue(name, _local(name, dtype), self._sharding(kind, parameter)),
                self.stages.get(parameter, ()),
            )
            for name, kind, parameter, dtype in known
        ]

    def _bytes(self, buffer: "Buffer") -> int:
        """The bytes of a buffer on a device."""
        shape = buffer.item.sharding.local_shape(self.shards.plan.mesh)
        dtype = buffer.item.local.dtype or ir.DataType.FLOAT
        return prod(int(size) for size in shape) * int(dtype.itemsize)


@dataclass(frozen=True)
class Buffer:
    """A buffer that lives between runs, and the parameter that it belongs to.

    Attributes:
        kind: What it is for.
        parameter: Name of the parameter, or of the running statistic.
        item: The buffer as an input of a program, with its sharding.
        stages: The pipeline stages that hold it; empty without a pipeline.
    """

    kind: StateKind
    parameter: str
    item: GraphValue
    stages: tuple[int, ...] = ()

    @property
    def summed(self) -> bool:
        """Whether its value is the sum of what several stages hold."""
        return self.kind in _GRADIENTS and len(self.stages) > 1


def _local(name: str, dtype: ir.DataType) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype))
