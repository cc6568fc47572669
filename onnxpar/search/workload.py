"""What is planned: a program, and everything that the prices of its plans depend on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import onnx_ir as ir

from onnxpar.autodiff.optimizer import moments_of
from onnxpar.autodiff.training_program import TrainingProgram, TrainingSpec
from onnxpar.core.machine import Machine
from onnxpar.core.symbols.expressions import dim_symbol
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.live_memory import MemoryStep
from onnxpar.cost.optimizer_parallel import (
    NOT_PARALLEL,
    OptimizerParallel,
    Shards,
    shard_states,
)
from onnxpar.cost.price import InTurns, Price, price, price_in_turns
from onnxpar.facts.batch import batch_symbols, micro_batch_sizes
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.propagation.propagate import Alike, alike, propagate
from onnxpar.search.short_program import ShortProgram, shorten
from onnxpar.stages.partition_chain import Chain, chain_of, floating, weightless_nodes


@dataclass(frozen=True)
class Workload:
    """A program to be planned: a forward program, or one with its backward.

    Attributes:
        program: The program of one device, undivided.
        links: For each cotangent its primals.
        gradients: The output that is the gradient of each trained parameter, by name.
        moments: Number of tensors per trained parameter, of its shape, that the optimizer keeps.
        forward: The model without loss and backward.
        parallel: Optimizer parallel.
    """

    program: Program
    links: Mapping[str, tuple[str, ...]]
    gradients: Mapping[str, str]
    moments: int
    forward: ir.Model
    parallel: OptimizerParallel = NOT_PARALLEL
    _first: list[tuple[Seeds, Plan]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @staticmethod
    def inference(program: Program) -> "Workload":
        """Returns the workload of a forward program."""
        return Workload(program, {}, {}, 0, program.model)

    @staticmethod
    def training(
        prepared: TrainingProgram, spec: TrainingSpec, parallel: OptimizerParallel
    ) -> "Workload":
        """Returns the workload of a training program.

        Args:
            prepared: The program of one micro-batch.
            spec: How it is trained.
            parallel: Optimizer parallel.
        """
        return Workload(
            prepared.program,
            prepared.links,
            prepared.gradients,
            len(moments_of(spec.optimizer)),
            prepared.evaluation,
            parallel,
        )

    def plan(self, seeds: Seeds) -> Plan:
        """Returns the plan that follows from seeds. The first one is kept, for who asks again."""
        if self._first and self._first[0][0] == seeds:
            return self._first[0][1]
        short = None if self._short is None else self._short.plan(seeds)
        found = short or propagate(self.program, seeds, self.links, self._alike)
        if not self._first:
            self._first.append((seeds, found))
        return found

    @cached_property
    def batch(self) -> frozenset[str]:
        """The symbols that are the batch."""
        return batch_symbols(self.program)

    def micro_batch(self, sizes: Mapping[str, int], micro_batches: int) -> dict[str, int]:
        """As `onnxpar.facts.batch.micro_batch_sizes`."""
        return micro_batch_sizes(sizes, self.batch, micro_batches)

    def equal_parts(self, sizes: Mapping[str, int], count: int) -> dict[str, int] | None:
        """Returns the sizes of symbols in equal micro-batches; None if they cannot be equal.

        Args:
            sizes: Sizes of symbols in the batch; others have their typical size.
            count: Micro-batches of a step.
        """
        table = self.program.env.table
        whole = {name: table.typical(dim_symbol(name), sizes) for name in self.batch}
        admitted = all(
            size % count == 0 and (name not in table or table[name].facts.admits(size // count))
            for name, size in whole.items()
        ) and not any(symbol.per_rank for symbol in table.values())
        return {**sizes, **self.micro_batch(whole, count)} if whole and admitted else None

    @cached_property
    def chain(self) -> Chain:
        """The nodes of the forward that are partitioned into stages."""
        graph = self.forward.graph
        return chain_of(graph, floating(graph), self.program.registry)

    @cached_property
    def weightless(self) -> frozenset[str]:
        """The nodes that each stage computes again in its backward (see `weightless_nodes`)."""
        return weightless_nodes(self.program)

    @cached_property
    def _alike(self) -> Alike:
        return alike(self.program)

    @cached_property
    def _short(self) -> ShortProgram | None:
        return shorten(self.program, self.links, self._alike)

    def pinned(self, plan: Plan) -> Seeds:
        """Returns seeds with the shardings that a plan has for forward nodes."""
        forward = [n.name or "" for n in self.program.graph if GRADIENT_OF not in n.metadata_props]
        nodes = {
            name: NodeSeed(name, found.factors, carried=found.carried, pinned=False)
            for name in forward
            if not (found := plan.nodes[name]).reason
        }
        return Seeds(plan.mesh, nodes, dict(plan.inputs), dict(plan.parameters))

    def price(self, plan: Plan, machine: Machine, sizes: Mapping[str, int]) -> Price:
        """Returns what a plan costs a device at given sizes of symbols."""
        return self.priced(plan, CostModel(machine, plan.mesh, self.program.env.table, sizes))[0]

    def priced(self, plan: Plan, cost: CostModel) -> tuple[Price, tuple[MemoryStep, ...]]:
        """Returns what a plan costs a device, with the steps by which memory is counted."""
        return price(self.program, plan, cost, self._shards(plan), self.moments)

    def in_turns(self, plan: Plan, cost: CostModel, micro_batches: int) -> InTurns:
        """Returns what a step costs a device if each two micro-batches take turns."""
        shards = self._shards(plan)
        return price_in_turns(self.program, plan, cost, shards, self.moments, micro_batches)

    def _shards(self, plan: Plan) -> Shards:
        held = self.program.graph.initializers
        itemsizes = {n: int((held[n].dtype or ir.DataType.FLOAT).itemsize) for n in self.gradients}
        return shard_states(plan, self.gradients, itemsizes, self.parallel)
