"""What is planned: a program, and all that the prices of its plans follow from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxpar.autodiff.optimizer import moments_of
from onnxpar.autodiff.training_program import TrainingProgram, TrainingSpec
from onnxpar.core.machine import Machine
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.live_memory import MemoryStep
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel, shard_states
from onnxpar.cost.price import Price, price
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import NodeSeed, Seeds
from onnxpar.propagation.propagate import Alike, alike, propagate


@dataclass(frozen=True)
class Workload:
    """What is to be planned: a forward program, or one with its backward.

    Attributes:
        program: The program of one device, undivided.
        links: Of each cotangent its primals.
        gradients: The output that is the gradient of each trained parameter, by name.
        moments: Tensors like a trained parameter that its optimizer keeps.
        forward: The model, before a loss is appended to it.
        parallel: What replicas of a parameter share in training.
    """

    program: Program
    links: Mapping[str, tuple[str, ...]]
    gradients: Mapping[str, str]
    moments: int
    forward: ir.Model
    parallel: OptimizerParallel = NOT_PARALLEL

    @staticmethod
    def inference(program: Program) -> "Workload":
        """Returns a forward program as what is planned."""
        return Workload(program, {}, {}, 0, program.model)

    @staticmethod
    def training(
        prepared: TrainingProgram, spec: TrainingSpec, parallel: OptimizerParallel
    ) -> "Workload":
        """Returns a training program as what is planned.

        Args:
            prepared: The program of one micro-batch.
            spec: How it is trained.
            parallel: What replicas of a parameter share.
        """
        moments = len(moments_of(spec.optimizer))
        return Workload(
            prepared.program,
            prepared.links,
            prepared.gradients,
            moments,
            prepared.evaluation,
            parallel,
        )

    def plan(self, seeds: Seeds) -> Plan:
        """Returns the plan that follows from seeds."""
        return propagate(self.program, seeds, self.links, self._alike)

    @cached_property
    def _alike(self) -> Alike:
        return alike(self.program)

    def pinned(self, plan: Plan) -> Seeds:
        """Returns seeds from which a plan follows: what it has of each forward node."""
        nodes = {
            node.name or "": NodeSeed(
                node.name or "",
                plan.nodes[node.name or ""].factors,
                carried=plan.nodes[node.name or ""].carried,
                pinned=False,
            )
            for node in self.program.graph
            if GRADIENT_OF not in node.metadata_props and not plan.nodes[node.name or ""].reason
        }
        return Seeds(plan.mesh, nodes, dict(plan.inputs), dict(plan.parameters))

    def price(self, plan: Plan, machine: Machine, sizes: Mapping[str, int]) -> Price:
        """Returns what a plan costs a device at given sizes of symbols."""
        return self.priced(plan, machine, sizes)[0]

    def priced(
        self, plan: Plan, machine: Machine, sizes: Mapping[str, int]
    ) -> tuple[Price, tuple[MemoryStep, ...]]:
        """As `price`, with its steps as memory is counted by them."""
        cost = CostModel(machine, plan.mesh, self.program.env.table, sizes)
        held = self.program.graph.initializers
        itemsizes = {n: int((held[n].dtype or ir.DataType.FLOAT).itemsize) for n in self.gradients}
        shards = shard_states(plan, self.gradients, itemsizes, self.parallel)
        return price(self.program, plan, cost, shards, self.moments)

    def peak(self, machine: Machine, sizes: Mapping[str, int]) -> Callable[[Seeds], int]:
        """Returns what tells the bytes of a device at the peak of the plan that follows."""
        return lambda seeds: self.price(self.plan(seeds), machine, sizes).peak
