"""Parameter axes such as `tp`, decided for the whole program instead of node by node.

Propagation decides each node by its neighbours. It cannot see that a split patch convolution, say,
leaves the residual stream of all layers after it sharded by features. Here the search takes the
parameter axes as its only freedom: every other axis stays as propagation has it, at most 4 % of the
memory that sharding the parameters saves is given up, and the least time at large sizes of the
symbols wins. The result replaces propagation's only if it sends fewer bytes at large and at typical
sizes and communicates for less time. So no plan is taken whose bytes grow faster with a symbol, or
that saves a few bytes with many collectives.

A program with states, such as a decoder with its cache, mostly runs on few tokens, where latencies
weigh most. So it is searched at typical sizes, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnxpar.core.errors import ShardingError
from onnxpar.core.machine import PRESETS, Machine
from onnxpar.core.mesh import Atoms
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.growth import large_sizes
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.graph.state_names import state_pairs
from onnxpar.search.columns_and_rows import is_columns_and_rows
from onnxpar.search.cost_weights import CostWeights
from onnxpar.search.find_plan import GAP, seeds_of
from onnxpar.search.halving import Halving
from onnxpar.search.memory_bounded import Effort, best
from onnxpar.search.node_options import Option, Place, factor_parts
from onnxpar.search.problem import MOMENTS, Problem
from onnxpar.search.repeated_layers import fold
from onnxpar.search.solution import Solution
from onnxpar.search.value_flow import Item, flow
from onnxpar.search.workload import Workload

_NODE = PRESETS["h100"]
_MACHINE = replace(_NODE, overhead=0.0, links=(replace(_NODE.links[0], devices=0),))
"""Devices that are all linked as those of one node are: a parameter axis is meant for these."""
_BYTES = replace(_MACHINE, links=(replace(_MACHINE.links[0], latency=0.0),))
"""The same without latency: seconds are proportional to bytes."""
_EFFORT = Effort(largest=1 << 16, total=1 << 28)
"""A few seconds. What is still entangled in tables of this size is nearly always negligible. With
larger ones, few prices of memory can be tried if all steps of a scan read the same values."""
_GIVEN = 0.04
"""Of the memory that sharding parameters saves in propagation's plan, the share that the search's
plan may give up. To shard the last biases, routers and patches is not worth a collective."""
_LESS = 0.95
"""The share of propagation's bytes below which the search's plan replaces its plan. For smaller
gains, the columns and rows that propagation writes (Shoeybi et al., "Megatron-LM", 2019) stay."""

_TRIES = 2
"""Number of searches, the later ones with less memory, until a plan is within the limit."""
_SLOWER = 1.1
"""The share of propagation's time of communication that the search's plan may take at typical
sizes. For a small network, most of it is latencies."""


def decide_parameter_axes(seeds: Seeds, workload: Workload) -> Seeds:
    """Returns seeds that decide the parameter axes, or the same seeds if propagation does as well.

    Args:
        seeds: What the user fixed; it is kept.
        workload: The program that is sharded.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    if not seeds.parameter_axes or seeds.rest != "propagate":
        return seeds
    return _ParameterAxes(seeds, workload).decide()


@dataclass
class _ParameterAxes:
    seeds: Seeds
    workload: Workload

    def decide(self) -> Seeds:
        """Returns the seeds that the search finds if their plan is better, else propagation's."""
        program, plan = self.workload.program, self.propagated
        if is_columns_and_rows(program, plan, CostModel(_BYTES, plan.mesh, program.env.table)):
            return self.seeds
        large = large_sizes(program)
        before = zip(self._costs(plan, large), (_SLOWER, 1.0, _LESS, _LESS), strict=True)
        kept, limits = self.seeds, [cost * enough for cost, enough in before]
        for sizes in (large, {}) if state_pairs(program.graph) else (large,):
            try:
                seeds, found = self._found(sizes)
            except ShardingError:
                # The search found nothing, or nothing that can be carried out.
                continue
            after = self._costs(found, large)
            if all(cost < limit for cost, limit in zip(after, limits, strict=True)):
                kept, limits = seeds, after
        return kept

    def _found(self, sizes: Mapping[str, int]) -> tuple[Seeds, Plan]:
        """The search's seeds at sizes of symbols, and their plan, which is within the limit.

        Raises:
            ShardingError: Nothing is within the limit, or nothing that can be carried out.
        """
        shapes = self.workload.program.env.shapes
        held = self._memory(self.propagated.parameters)
        whole = self._memory(
            {n: Sharding.replicated(shapes[n]) for n in self.propagated.parameters}
        )
        limit = allowed = held + _GIVEN * (whole - held)
        for _ in range(_TRIES):
            seeds, counted = self._search(sizes, allowed)
            plan = self.workload.plan(seeds)
            held = self._memory(plan.parameters)
            if held <= limit:
                return seeds, plan
            # Nodes without options read parameters in other layouts than the search counts.
            allowed = limit - (held - counted)
        raise ShardingError("no plan is within the memory limit")

    @cached_property
    def propagated(self) -> Plan:
        """The plan in which propagation decides the parameter axes."""
        return self.workload.plan(self.seeds)

    def _costs(self, plan: Plan, large: Mapping[str, int]) -> list[float]:
        """Seconds of communication with and without latency, at typical and at large sizes."""
        return [
            self._seconds(plan, machine, sizes)
            for machine in (_MACHINE, _BYTES)
            for sizes in ({}, large)
        ]

    def _seconds(self, plan: Plan, machine: Machine, sizes: Mapping[str, int]) -> float:
        """Seconds of communication until outputs have the shardings that propagation gives them."""
        program = self.workload.program
        price = self.workload.price(plan, machine, sizes)
        total = price.communicating - price.gradients
        cost = CostModel(machine, self.seeds.mesh, program.env.table, sizes)
        for value in program.graph.outputs:
            made, wanted = (p.outputs[value.name or ""] for p in (plan, self.propagated))
            if not made.partial:
                itemsize = int(value.dtype.itemsize) if value.dtype is not None else 4
                total += cost.reshard(made, wanted.with_partial(()), itemsize)
        return total

    def _memory(self, layouts: Mapping[str, Sharding]) -> float:
        """Bytes of a device for parameters, their gradients and moments."""
        cost = CostModel(_MACHINE, self.seeds.mesh, self.workload.program.env.table)
        total = 0.0
        for name, value in self.workload.program.graph.initializers.items():
            size = cost.elements(layouts[name]) * int(value.dtype.itemsize if value.dtype else 4)
            trained = name in self.workload.gradients
            total += NOT_PARALLEL.kept(size, 1, MOMENTS) if trained else size
        return total

    def _search(self, sizes: Mapping[str, int], limit: float) -> tuple[Seeds, float]:
        """The plan of least time whose parameters fit into the limit, and the bytes of these."""
        mesh = self.seeds.mesh
        # Propagation shards small parameters, too, and the limit counts what they then need.
        trained = list(self.workload.gradients)
        seen = flow(self.workload.program, trained, self.seeds.nodes, small=True)
        env = self.workload.program.env
        complete = {name: Sharding.replicated(env.shapes[name]) for name in self.seeds.held}
        pins = {**complete, **self.seeds.inputs, **self.seeds.parameters}
        cost = CostModel(_MACHINE, mesh, env.table, sizes)
        folded = fold(seen, pins)
        items = seen if folded is None else folded.flow
        ours = {atom for axis in self.seeds.parameter_axes for atom in axis}
        first: list[Atoms] = [(a,) for a in range(len(mesh.atoms)) if a not in ours]
        axes = [*first, *self.seeds.parameter_axes]

        def solve(problem: Problem, later: int) -> Solution:
            return best(problem, later * limit, gap=GAP, effort=_EFFORT)

        weights, batch = CostWeights(parameters_only=True), self._batch(seen.items)
        halving = Halving(
            items, cost, pins, weights, self.seeds.nodes, batch, self.propagated.outputs
        )
        before = [self._before(item, first) for item in items.items]
        problem, solution = halving.run(axes, solve, before, len(first))
        chosen = problem.chosen(solution.choice)
        every = chosen if folded is None else folded.unfold(chosen)
        layouts = problem.layouts(solution.choice)
        return seeds_of(seen, every, layouts, self.seeds), solution.memory

    def _batch(self, items: Sequence[Item]) -> dict[str, frozenset[str]]:
        """For each node, the factors whose first part is the batch: dim 0 of the inputs."""
        batch = {(v.name or "", 0) for v in self.workload.program.graph.inputs}
        found = {}
        for item in items:
            node, rule = item.view.node, item.rule
            factors = {
                names[0]
                for value, operand in zip(node.inputs, rule.inputs, strict=False)
                for dim, names in enumerate(operand.dims)
                if names and value is not None and (value.name or "", dim) in batch
            }
            found[item.name] = frozenset(factors)
            batch |= {
                (value.name or "", dim)
                for value, result in zip(node.outputs, rule.outputs, strict=False)
                for dim, names in enumerate(result.dims)
                if names and names[0] in factors
            }
        return found

    def _before(self, item: Item, axes: Sequence[Atoms]) -> Option:
        """How propagation shards a node over the axes that are no parameter axes."""
        plan = self.propagated.nodes[item.name]
        parts = {} if item.fixed else factor_parts(item)
        # If propagation does not separate the parts of a dim, it shards the first one.
        places: dict[int, Place] = {
            atom: (name, index if len(components) == len(parts[name]) else 0)
            for name, components in plan.factors.items()
            if name in parts
            for index, component in enumerate(components)
            for atom in component.atoms
        }
        return Option(plan, tuple(places.get(atom) for (atom,) in axes))
