"""Parameter axes such as `tp`, decided for the whole program instead of node by node.

Propagation decides each node by its neighbours. It cannot see that a split patch convolution, say,
leaves the residual stream of all layers after it sharded by features. Here the search takes the
parameter axes as its only freedom: every other axis stays as propagation has it, the memory of the
parameters may not grow, and the least time at large sizes of the symbols wins. The result replaces
propagation's only if it sends fewer bytes and communicates for less time, at large and at typical
sizes. So no plan is taken whose bytes grow faster with a symbol, or that saves a few bytes with
many collectives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from onnxpar.core.errors import ShardingError
from onnxpar.core.machine import PRESETS, Machine
from onnxpar.core.mesh import Atoms
from onnxpar.core.rule import SPECIAL
from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.growth import large_sizes
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import Seeds
from onnxpar.search.find_plan import GAP, seeds_of
from onnxpar.search.memory_bounded import best, least
from onnxpar.search.node_options import Option, Place, factor_parts, given_option, options
from onnxpar.search.problem import MOMENTS, CostWeights, build
from onnxpar.search.repeated_layers import fold
from onnxpar.search.value_flow import Item, flow
from onnxpar.search.workload import Workload

_NODE = PRESETS["h100"]
_MACHINE = replace(_NODE, overhead=0.0, links=(replace(_NODE.links[0], devices=0),))
"""Devices that are all linked as those of one node are: a parameter axis is meant for these."""
_BYTES = replace(_MACHINE, links=(replace(_MACHINE.links[0], latency=0.0),))
"""The same without latency: seconds are proportional to bytes."""
_LESS = 0.95
"""The share of propagation's bytes below which the search's plan replaces its plan. For smaller
gains, the columns and rows that propagation writes (Shoeybi et al., "Megatron-LM", 2019) stay."""


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
        if self._is_known_form():
            return self.seeds
        large = large_sizes(self.workload.program)
        before = self._costs(self.propagated, large)
        try:
            seeds = self._search(large)
            plan = self.workload.plan(seeds)
        except ShardingError:
            # The search found nothing, or nothing that can be carried out.
            return self.seeds
        if self._memory(plan.parameters) > self._memory(self.propagated.parameters):
            return self.seeds
        after = self._costs(plan, large)
        enough = (1.0, 1.0, _LESS, _LESS)
        less = (b < e * a for a, b, e in zip(before, after, enough, strict=True))
        return seeds if all(less) else self.seeds

    @cached_property
    def propagated(self) -> Plan:
        """The plan in which propagation decides the parameter axes."""
        return self.workload.plan(self.seeds)

    def _is_known_form(self) -> bool:
        """Whether propagation's plan is columns and rows in turn: there is nothing to gain.

        Then nothing is resharded but partial sums of products with parameters, at most one for
        every two matrices, and no local form communicates but that of the loss. In a deep model
        this is far cheaper to see than to search.
        """
        plan, program = self.propagated, self.workload.program
        cost = CostModel(_BYTES, plan.mesh, program.env.table)
        made = {**plan.inputs, **plan.parameters}
        stored, reduced, matrices, special = set(program.graph.initializers), set[str](), 0, 0
        products = set[str]()  # of two activations
        for node in program.graph:
            name = node.name or ""
            if program.rules.views[name].is_backward:
                continue
            rule, found = program.rules.by_node[name], plan.nodes[name]
            operands = list(zip(node.inputs, rule.inputs, found.inputs, strict=False))
            read = [
                v.name or "" for v, operand, _ in operands if v is not None and not operand.mode
            ]
            if read and stored.issuperset(read):
                stored.update(v.name or "" for v in node.outputs)
            elif stored.isdisjoint(read) and "sum" in map(rule.kinds.get, found.factors):
                products.update(v.name or "" for v in node.outputs)
            special += any(rule.kinds[factor] == SPECIAL for factor in found.factors)
            for value, operand, want in operands:
                have = made.get(value.name or "") if value is not None else None
                if value is None or have is None or want is None:
                    continue
                if cost.reshard(have.with_partial(()), want.with_partial(()), 1):
                    return False
                if set(have.partial) - set(want.partial):
                    reduced.add(value.name or "")
                kinds = {rule.kinds[f] for names in operand.dims for f in names}
                matrices += len(operand.dims) > 1 and value.name in stored and "sum" in kinds
            for value, sharding in zip(node.outputs, found.outputs, strict=True):
                made[value.name or ""] = plan.resharded.get(value.name or "", sharding)
        return special <= 1 and reduced.isdisjoint(products) and 2 * len(reduced) <= matrices

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
        total = self.workload.price(plan, machine, sizes).communicating
        cost = CostModel(machine, self.seeds.mesh, program.env.table, sizes)
        for value in program.graph.outputs:
            made, wanted = (p.outputs[value.name or ""] for p in (plan, self.propagated))
            if not made.partial:
                itemsize = int(value.dtype.itemsize) if value.dtype is not None else 4
                total += cost.reshard(made, wanted, itemsize)
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

    def _search(self, sizes: Mapping[str, int]) -> Seeds:
        """The plan of least time that needs no more memory for parameters than propagation's."""
        mesh = self.seeds.mesh
        seen = flow(self.workload.program, list(self.workload.gradients), self.seeds.nodes)
        env = self.workload.program.env
        complete = {name: Sharding.replicated(env.shapes[name]) for name in self.seeds.held}
        pins = {**complete, **self.seeds.inputs, **self.seeds.parameters}
        cost = CostModel(_MACHINE, mesh, env.table, sizes)
        folded = fold(seen, pins)
        items = seen if folded is None else folded.flow
        ours = {atom for axis in self.seeds.parameter_axes for atom in axis}
        first: list[Atoms] = [(a,) for a in range(len(mesh.atoms)) if a not in ours]
        axes = [*first, *self.seeds.parameter_axes]
        chosen = [self._before(item, first) for item in items.items]
        limit = self._memory(self.propagated.parameters)
        weights, batch = CostWeights(parameters_only=True), self._batch(seen.items)
        for number in range(len(first) + 1, len(axes) + 1):
            known: dict[object, tuple[Option, ...]] = {}
            found = []
            for item, before in zip(items.items, chosen, strict=True):
                kept = batch[item.name]
                key = (item.kind, item.pin, before.places, kept)
                if key not in known:
                    known[key] = self._options(item, axes[:number], cost, before, kept)
                found.append(known[key])
            problem = build(items, found, cost, pins, weights, self.propagated.outputs)
            later = mesh.count(atom for axis in axes[number:] for atom in axis)
            try:
                solution = best(problem, later * limit, gap=GAP, integer=False)
            except ShardingError:
                solution = least(problem)
            chosen = list(problem.chosen(solution.choice))
        every = chosen if folded is None else folded.unfold(chosen)
        return seeds_of(seen, every, problem.layouts(solution.choice), self.seeds)

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

    def _options(
        self,
        item: Item,
        axes: Sequence[Atoms],
        cost: CostModel,
        before: Option,
        batch: frozenset[str],
    ) -> tuple[Option, ...]:
        seed = self.seeds.nodes.get(item.name)
        if seed is None:
            return options(item, axes, cost, before, batch=batch)
        return given_option(item, seed, axes, cost)
