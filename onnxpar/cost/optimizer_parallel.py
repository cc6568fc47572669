"""Optimizer parallel: replicas of a parameter shard its moments, gradient and elements.

This is ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"), expressed by shardings alone. The *shard* of a parameter is its sharding in the
plan, and in addition over the axes that shard the batch. Level 1 keeps moments as shards, level 2
also gradients, level 3 also the parameters, which are then gathered for each node that reads them.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import prod

import onnx_ir as ir

from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.sharding import Component, Sharding, local_size
from onnxpar.core.symbols import NO_CONSTRAINTS
from onnxpar.facts.program import Program
from onnxpar.graph.plan import NodePlan, Plan, factor_sizes, project, shardings
from onnxpar.ops.node_rules import Rules

THRESHOLD = 64 << 10
LEVELS = (0, 1, 2, 3)
MOMENTS, GRADIENTS, PARAMETERS = 1, 2, 3
"""The level from which each of them is sharded."""


@dataclass(frozen=True)
class OptimizerParallel:
    """What is sharded over the replicas of a parameter, and of which parameters.

    Attributes:
        level: 0 nothing, 1 moments, 2 gradients too, 3 parameters too.
        threshold: Least bytes of a device's shard of a parameter, in the plan; the states of
            smaller ones are replicated.
        group: The most replicas over which states are sharded; the other replicas have copies of
            these shards. None: all replicas.
    """

    level: int = 0
    threshold: int = THRESHOLD
    group: int | None = None

    @property
    def words(self) -> str:
        """The level in words; empty for level 0."""
        return f"optimizer parallel {self.level}" if self.level else ""

    def shared(self, bytes_: int, atoms: Collection[int], mesh: Mesh) -> Atoms:
        """Returns the atoms over which the states of a parameter are sharded.

        Args:
            bytes_: Bytes of a device's shard of the parameter, in the plan.
            atoms: The atoms over which the parameter is replicated and the batch is sharded.
            mesh: The mesh.
        """
        if not self.level or bytes_ < self.threshold:
            return ()
        return within(atoms, mesh, self.group)

    def kept(self, bytes_: int, replicas: int, moments: int) -> float:
        """Returns the bytes of a parameter, its gradient and its moments that a device keeps.

        Args:
            bytes_: Bytes of a device's shard of the parameter, in the plan.
            replicas: Over how many replicas its states are sharded.
            moments: How many tensors of the parameter's shape the optimizer keeps.
        """
        counts = {PARAMETERS: 1, GRADIENTS: 1, MOMENTS: moments}
        return sum(
            bytes_ * count / (replicas if self.level >= level else 1)
            for level, count in counts.items()
        )


NOT_PARALLEL = OptimizerParallel()


@dataclass(frozen=True)
class Shards:
    """The layouts of the buffers of a training program.

    Attributes:
        plan: The plan of the program, without optimizer parallel.
        gradients: Name of the output that is the gradient of each trained parameter.
        options: The options of optimizer parallel.
        shards: The shard of each trained parameter that has one; others are as in the plan.
    """

    plan: Plan
    gradients: Mapping[str, str]
    options: OptimizerParallel = NOT_PARALLEL
    shards: Mapping[str, Sharding] = field(default_factory=dict)

    def _at(self, level: int, parameter: str) -> Sharding:
        planned = self.plan.parameters[parameter]
        return self.shards.get(parameter, planned) if self.options.level >= level else planned

    def parameter(self, name: str) -> Sharding:
        """Returns the layout of a parameter between runs."""
        return self._at(PARAMETERS, name)

    def moment(self, parameter: str) -> Sharding:
        """Returns the layout of the moments of a parameter, in which its update is computed."""
        return self._at(MOMENTS, parameter)

    def gradient(self, parameter: str) -> Sharding:
        """Returns the layout of a gradient between runs, possibly partial."""
        leaves = self.plan.outputs[self.gradients[parameter]]
        shard = self._at(GRADIENTS, parameter)
        if shard == self.plan.parameters[parameter]:
            return leaves
        taken = shard.split_atoms
        return shard.with_partial((a for a in leaves.partial if a not in taken), leaves.reduction)

    def training(self, program: Program) -> "ShardedPlan":
        """Returns the training plan, with gradients and parameters in the layouts between runs.

        A gradient is reduce-scattered as soon as it is computed.
        """
        laid = self.laid(self.plan, program)
        gradients = {
            output: self.gradient(name)
            for name, output in self.gradients.items()
            if self.gradient(name) != self.plan.outputs[output]
        }
        plan = replace(
            laid.plan,
            outputs={**self.plan.outputs, **gradients},
            resharded={**self.plan.resharded, **gradients},
        )
        return ShardedPlan(plan, laid.gathered)

    def laid(self, plan: Plan, program: Program) -> "ShardedPlan":
        """Returns the plan of a program with parameters in the layout between runs.

        Nodes that only rearrange a parameter (a transpose, a cast) compute a shard from the shard,
        and the result is gathered. If the parameter were gathered first, the rearranged parameter
        would be kept for all its readers.
        """
        sharded = self.options.level >= PARAMETERS
        held = {n: s for n, s in self.shards.items() if sharded and n in plan.parameters}
        parameters = {**plan.parameters, **held}
        nodes = dict(plan.nodes)
        for node in program.graph if held else ():
            made = _of_shards(node, plan, program.rules, held, program.graph.initializers)
            if made is not None:
                nodes[node.name or ""] = made
                held |= {v.name or "": s for v, s in zip(node.outputs, made.outputs, strict=True)}
        return ShardedPlan(replace(plan, nodes=nodes, parameters=parameters), frozenset(held))


@dataclass(frozen=True)
class ShardedPlan:
    """A plan in which parameters are shards.

    Attributes:
        plan: The plan.
        gathered: Values that are gathered again for each node that reads them, and dropped after.
    """

    plan: Plan
    gathered: frozenset[str]


def _of_shards(
    node: ir.Node,
    plan: Plan,
    rules: Rules,
    held: Mapping[str, Sharding],
    constants: Collection[str],
) -> NodePlan | None:
    """Returns the plan of a node that computes shards from one shard; None if it cannot.

    Args:
        node: The node.
        plan: The plan without optimizer parallel.
        rules: The rules of the nodes.
        held: The shards so far.
        constants: Names of the initializers, which may be the other operands.
    """
    name = node.name or ""
    names = [v.name if v is not None else None for v in node.inputs]
    mine = [i for i, n in enumerate(names) if n in held]
    if len(mine) != 1 or any(n not in constants for n in names if n is not None and n not in held):
        return None
    if plan.nodes[name].pinned or any(v.name in plan.resharded for v in node.outputs):
        return None
    (index,), rule, view = mine, rules.by_node[name], rules.views[name]
    shard, sizes = held[names[index] or ""], factor_sizes(rule, view)
    factors = project(rule.inputs[index], shard, sizes, plan.mesh, view.table, rule.scaled)
    if not set(factors) <= set(rule.splittable):
        return None
    made = shardings(rule, view, factors, plan.mesh)
    unfit = any(s.partial or not s.split_atoms for s in made.outputs)
    return None if unfit or made.inputs[index] != shard else made


def shard_states(
    plan: Plan,
    gradients: Mapping[str, str],
    itemsizes: Mapping[str, int],
    options: OptimizerParallel,
) -> Shards:
    """Decides the shard of each trained parameter.

    Args:
        plan: The plan of the training program.
        gradients: Name of the output that is the gradient of each trained parameter.
        itemsizes: Bytes of an element of each of these parameters.
        options: What to shard.
    """
    shards: dict[str, Sharding] = {}
    batch = {a for s in plan.inputs.values() for a in s.split_atoms}
    for name, output in gradients.items():
        planned = plan.parameters[name]
        if not all(isinstance(n, int) for n in planned.shape):
            continue  # A node assumes another size for it, which partitioning refuses.
        size = prod(int(n) for n in planned.local_shape(plan.mesh)) * itemsizes[name]
        atoms = (batch | set(plan.outputs[output].partial)) - set(planned.split_atoms)
        shard = shard_further(planned, options.shared(size, atoms, plan.mesh), plan.mesh)
        if shard is not None:
            shards[name] = shard
    return Shards(plan, gradients, options, shards)


def within(atoms: Collection[int], mesh: Mesh, limit: int | None) -> Atoms:
    """Returns the atoms, ascending, that span the most devices within a limit.

    Of several choices the minor atoms are taken, since neighbouring devices have a fast link.
    """
    row = sorted(atoms)
    if limit is None or mesh.count(row) <= limit:
        return tuple(row)
    choices = (c for n in range(len(row) + 1) for c in combinations(row, n))
    return max((c for c in choices if mesh.count(c) <= limit), key=lambda c: (mesh.count(c), c))


def shard_further(planned: Sharding, atoms: Atoms, mesh: Mesh) -> Sharding | None:
    """Returns a sharding in which `atoms` shard one more dim, None if no shard would be smaller.

    The new atoms are the minor ones, so that each device splits the shard that it has. The dim is
    the one with the smallest shards, padding included; of several the first, whose shards are
    contiguous.
    """
    best: tuple[int, Sharding] | None = None
    elements = prod(int(size) for size in planned.local_shape(mesh))
    for d, dim in enumerate(planned.dims):
        for c, component in enumerate(dim):
            finer = Component(component.size, (*component.atoms, *atoms))
            local = int(local_size(component, mesh))
            size = elements // local * int(local_size(finer, mesh)) if local else elements
            if size < (elements if best is None else best[0]):
                changed = (*dim[:c], finer, *dim[c + 1 :])
                dims = (*planned.dims[:d], changed, *planned.dims[d + 1 :])
                best = size, Sharding(dims).canonical(mesh, NO_CONSTRAINTS)
    return None if best is None else best[1]
