"""How one node is sharded, given the layouts of its operands: candidates, their cost, the choice.

Candidates come from what the operands and the later users of the outputs already have, from the
user's parameter axes, and from leaving everything whole. The choice is by bytes moved, then by the
number of operands that move, then by the elements a device computes, then by order; but a parameter
axis that could split a matrix and is left idle counts before all of these. It depends on nothing
else, so that it is the same on every machine.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import ANY, PARALLEL, REPLICATED, SPECIAL, OpRule
from onnxpar.core.sharding import REDUCTIONS, Component, DimSharding, Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import Factors, NodePlan, factor_sizes, may_stay_partial, project, shardings
from onnxpar.graph.view_parts import Part, Parts
from onnxpar.propagation.backward_dual import Dual

ReshardCost = Callable[[Sequence[Sharding], Sharding, int], int]


@dataclass(frozen=True)
class Situation:
    """What the choice for one node may look at.

    Attributes:
        operands: Sharding in which each operand was made; None for an operand whose sharding is
            still free (a parameter, or a value made of parameters only) or absent.
        versions: For each operand the shardings in which it is there, having been brought into
            them for earlier nodes; the one in which it was made is the first.
        free: For each operand, whether its sharding is still free.
        parts: For each operand, the parts of its dims (see `graph.view_parts`).
        wishes: For each output, the split that its later users want; None if unknown.
        gradients: For each output that is a parameter's gradient, the layout of the parameter; it
            leaves so, still partial over other atoms: it is reduced once a step, at no cost here.
        joined: For each output, the atoms over which it may be partial at no cost, since its user
            adds it to what is partial over them anyway.
        itemsizes: Bytes per element of each operand, then of each output.
    """

    operands: tuple[Sharding | None, ...]
    versions: tuple[tuple[Sharding, ...], ...]
    free: tuple[bool, ...]
    parts: tuple[tuple[Parts, ...] | None, ...]
    wishes: tuple[Sharding | None, ...]
    gradients: tuple[Sharding | None, ...]
    joined: tuple[frozenset[int], ...]
    itemsizes: tuple[int, ...]


def leaving(made: Sharding, parameter: Sharding) -> Sharding:
    """Returns how a gradient leaves: split as its parameter, partial over what that leaves over."""
    taken = parameter.split_atoms
    return parameter.with_partial(atom for atom in made.partial if atom not in taken)


@dataclass(frozen=True)
class Chooser:
    """Chooses the plan of nodes on one mesh.

    Attributes:
        mesh: The mesh.
        table: What is known of symbols.
        parameter_axes: Runs of atoms that split parameters.
        cost: Bytes that one device sends to bring a value into a sharding: (where it is, to,
            itemsize) -> bytes.
    """

    mesh: Mesh
    table: SymbolTable
    parameter_axes: tuple[Atoms, ...]
    cost: ReshardCost

    def choose(
        self,
        rule: OpRule,
        view: NodeView,
        situation: Situation,
        implied: Dual | None = None,
    ) -> NodePlan:
        """Returns the cheapest plan of a node in a situation.

        Args:
            rule: The node's rule.
            view: The node.
            situation: What the choice may look at.
            implied: Its layout by another node's plan: it is sharded so if it can be.
        """
        if implied is not None:
            follows = self._following(rule, view, situation, implied)
            ways = [follows, {}] if implied.adds else [follows]
            found = self._cheapest(rule, view, situation, ways)
            if found is not None:
                return found
        found = self._cheapest(rule, view, situation, self._candidates(rule, view, situation))
        return found or shardings(rule, view, {}, self.mesh)

    def _cheapest(
        self,
        rule: OpRule,
        view: NodeView,
        situation: Situation,
        candidates: Iterable[dict[str, DimSharding]],
    ) -> NodePlan | None:
        best: tuple[tuple[int, ...], NodePlan] | None = None
        seen: list[tuple[Factors, Mapping[int, tuple[Atoms, str]]]] = []
        for factors in candidates:
            for carried in self._carries(rule, factors, situation):
                if (factors, carried) in seen:
                    continue
                seen.append((factors, carried))
                try:
                    plan = shardings(rule, view, factors, self.mesh, carried=carried)
                except ShardingError:
                    continue
                price = (
                    self._idle_axes(rule, plan, situation),
                    *self.price(rule, plan, view, situation, bool(carried)),
                )
                if best is None or price < best[0]:
                    best = (price, plan)
        return None if best is None else best[1]

    # -- candidates ------------------------------------------------------------------------------

    def _following(
        self,
        rule: OpRule,
        view: NodeView,
        situation: Situation,
        implied: Dual,
    ) -> dict[str, DimSharding]:
        """The factors by which operands and outputs lie as implied, else as operands were made."""
        mesh, table, sizes = self.mesh, self.table, factor_sizes(rule, view)
        lying = [s or made for s, made in zip(implied.inputs, situation.operands, strict=True)]
        pairs = (
            *zip(rule.inputs, lying, strict=False),
            *zip(rule.outputs, implied.outputs, strict=False),
        )
        proposals = [
            project(operand, sharding, sizes, mesh, table, rule.scaled)
            for operand, sharding in pairs
            if sharding is not None and not operand.mode
        ]
        return self._merge(rule, proposals)

    def _candidates(
        self, rule: OpRule, view: NodeView, situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        mesh, table, sizes = self.mesh, self.table, factor_sizes(rule, view)
        proposals: list[dict[str, DimSharding]] = []
        for index, versions in enumerate(situation.versions[: len(rule.inputs)]):
            for sharding in versions:
                proposals.append(
                    project(rule.inputs[index], sharding, sizes, mesh, table, rule.scaled)
                )
        for index, wish in enumerate(situation.wishes):
            if wish is not None and index < len(rule.outputs):
                proposals.append(
                    project(rule.outputs[index], wish, sizes, mesh, table, rule.scaled)
                )
        proposals = [p for i, p in enumerate(proposals) if p and p not in proposals[:i]]
        orders = [proposals] + [[p, *proposals] for p in proposals[1:]]
        for order in orders:
            merged = self._merge(rule, order)
            yield from self._with_axes(rule, merged, situation)
            yield merged
            yield from self._scattered(rule, merged, situation)
        for single in proposals:
            yield self._merge(rule, [single])
        yield {}

    def _merge(
        self, rule: OpRule, proposals: list[dict[str, DimSharding]]
    ) -> dict[str, DimSharding]:
        merged: dict[str, DimSharding] = {}
        used: set[int] = set()
        for proposal in proposals:
            for name, parts in proposal.items():
                atoms = {a for c in parts for a in c.atoms}
                if name in merged or rule.kinds[name] == REPLICATED or atoms & used:
                    continue
                merged[name] = parts
                used |= atoms
        return merged

    def _with_axes(
        self, rule: OpRule, factors: dict[str, DimSharding], situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        """Splits parameters over the parameter axes that are not used yet, one way at most."""
        extended = dict(factors)
        for axis in self.parameter_axes:
            used = {a for parts in extended.values() for c in parts for a in c.atoms}
            if used & set(axis) or self._is_partial_over(axis, situation):
                continue
            choice = self._parameter_split(rule, extended, situation, axis)
            if choice is not None:
                extended[choice[0]] = choice[1]
        if extended != factors:
            yield extended

    def _scattered(
        self, rule: OpRule, factors: Factors, situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        """Splits a dim, the last that divides, over atoms that an operand is partial over.

        The reduction is then a reduce-scatter, half the traffic of an all-reduce, and what
        follows is computed once. Not over parameter axes: there activations stay whole.
        """
        kept = {a for axis in self.parameter_axes for a in axis}
        used = {a for parts in factors.values() for c in parts for a in c.atoms}
        for index, sharding in enumerate(situation.operands):
            if sharding is None or not sharding.partial or rule.inputs[index].mode:
                continue
            atoms = sharding.partial
            if set(atoms) & (kept | used):
                continue
            for dim, names in reversed(
                list(zip(sharding.dims, rule.inputs[index].dims, strict=True))
            ):
                if len(names) != 1 or len(dim) != 1 or rule.kinds[names[0]] != PARALLEL:
                    continue
                if names[0] in factors and factors[names[0]] != dim:
                    continue
                together = (*dim[0].atoms, *atoms)
                if self.table.divisible(dim[0].size, self.mesh.count(together)):
                    yield {**factors, names[0]: (Component(dim[0].size, together),)}

    def _is_partial_over(self, axis: Atoms, situation: Situation) -> bool:
        return any(s is not None and set(axis) & set(s.partial) for s in situation.operands)

    def _parameter_split(
        self, rule: OpRule, factors: Factors, situation: Situation, axis: Atoms
    ) -> tuple[str, DimSharding] | None:
        """Picks the factor of a free matrix to split: vocabulary first, else columns.

        A factor that the activations share is left alone: splitting it would cut what they hold
        whole. What remains of the parameter's own factors is, in this order, one that is reduced
        away (the rows of an embedding), then one that reaches the output (Megatron's columns).
        """
        shared = {
            name
            for index, operand in enumerate(rule.inputs)
            if not situation.free[index]
            for dim in operand.dims
            for name in dim
        }
        for reduced in (True, False):
            for index, operand in enumerate(rule.inputs):
                parts = situation.parts[index]
                if not situation.free[index] or parts is None or len(operand.dims) < 2:
                    continue
                for names, dim_parts in zip(operand.dims, parts, strict=True):
                    if len(names) != 1 or names[0] in shared or names[0] in factors:
                        continue
                    kind = rule.kinds[names[0]]
                    if kind == REPLICATED or (kind in REDUCTIONS) != reduced:
                        continue
                    if not any(
                        rule.kinds[n] in REDUCTIONS for other in operand.dims for n in other
                    ):
                        continue
                    split = self._cut(dim_parts, axis)
                    if split is not None:
                        return names[0], split
        return None

    def _idle_axes(self, rule: OpRule, plan: NodePlan, situation: Situation) -> int:
        """Number of parameter axes that split nothing although a free matrix is contracted."""
        matrix = any(
            situation.free[index]
            and len(operand.dims) > 1
            and any(rule.kinds[name] in REDUCTIONS for names in operand.dims for name in names)
            for index, operand in enumerate(rule.inputs)
        )
        used = {a for parts in plan.factors.values() for c in parts for a in c.atoms}
        return sum(matrix and not used & set(axis) for axis in self.parameter_axes)

    def _cut(self, parts: tuple[Part, ...], axis: Atoms) -> DimSharding | None:
        """Splits the first part that may be split, by as much of the axis as makes pieces smaller.

        Heads that the axis does not divide are split over a prefix of it, or unevenly, whichever
        leaves a device fewer; an even split wins a tie.
        """
        for position, part in enumerate(parts):
            if not part.splittable:
                continue
            best: tuple[int, Atoms] | None = None
            for length in range(1, len(axis) + 1):
                atoms = axis[:length]
                count = self.mesh.count(atoms)
                if isinstance(part.size, int):
                    local = -(-part.size // count)
                elif self.table.divisible(part.size, count):
                    local = self.table.typical(part.size) // count
                else:
                    continue
                if best is None or local < best[0]:
                    best = (local, atoms)
            if best is None or (isinstance(part.size, int) and best[0] == part.size):
                return None
            return tuple(
                Component(p.size, best[1] if i == position else ()) for i, p in enumerate(parts)
            )
        return None

    def _carries(
        self, rule: OpRule, factors: Factors, situation: Situation
    ) -> list[dict[int, tuple[Atoms, str]]]:
        """Returns the ways in which partial operands may pass: none, or all the rule admits."""
        options: list[dict[int, tuple[Atoms, str]]] = [{}]
        partial = {i: s for i, s in enumerate(situation.operands) if s is not None and s.partial}
        if not partial:
            return options
        used = {a for parts in factors.values() for c in parts for a in c.atoms}
        # What is there in a complete version as well need not be carried.
        complete = {i for i in partial if any(not v.partial for v in situation.versions[i])}
        for carried in (partial.keys(), partial.keys() - complete):
            sharing = {(partial[i].partial, partial[i].reduction) for i in carried}
            if len(sharing) != 1:
                continue
            atoms, reduction = next(iter(sharing))
            if not used & set(atoms) and may_stay_partial(rule, frozenset(carried), reduction):
                option = dict.fromkeys(sorted(carried), (atoms, reduction))
                if option not in options:
                    options.append(option)
        return options

    # -- cost ------------------------------------------------------------------------------------

    def price(
        self,
        rule: OpRule,
        plan: NodePlan,
        view: NodeView,
        situation: Situation,
        carries: bool,
    ) -> tuple[int, int, int]:
        """Returns the bytes a plan sends, how many operands move, and the elements it touches."""
        moved, moves, elements = 0, 0, 0
        for index, want in enumerate(plan.inputs):
            have = situation.versions[index] if index < len(situation.versions) else ()
            if want is None or rule.inputs[index].mode == ANY:
                continue
            elements += self._elements(want)
            if not have or want in have:
                continue
            itemsize = situation.itemsizes[index]
            cost = self.cost(have, want, itemsize)
            moved += cost
            moves += cost > 0
        for index, made in enumerate(plan.outputs):
            size = self._elements(made)
            elements += size
            itemsize = situation.itemsizes[len(situation.operands) + index]
            parameter = situation.gradients[index]
            if parameter is not None:
                moved += self.cost((made,), leaving(made, parameter), itemsize)
            elif made.partial and not situation.joined[index].issuperset(made.partial):
                count = self.mesh.count(made.partial)
                # A partial value needs at least a reduce-scatter; one that was passed on would
                # have needed the all-reduce here.
                moved += (2 if carries else 1) * size * itemsize * (count - 1) // count
        for name, parts in plan.factors.items():
            if rule.kinds[name] == SPECIAL:
                count = self.mesh.count(a for c in parts for a in c.atoms)
                size = (
                    self._elements(plan.outputs[0]) * situation.itemsizes[len(situation.operands)]
                )
                whole = self.table.typical(factor_sizes(rule, view)[name])
                moved += 4 * size * (count - 1) // max(whole, 1)
        for name in rule.inner.keys() & plan.factors.keys():
            moved += self._inside(rule, plan, name, situation)
        return moved, moves, elements

    def _inside(self, rule: OpRule, plan: NodePlan, name: str, situation: Situation) -> int:
        """Bytes that a device sends where its local form all-reduces statistics."""
        split = {f: self.mesh.count(a for c in p for a in c.atoms) for f, p in plan.factors.items()}
        count = split.pop(name)
        held = self.table.typical(rule.inner[name]) // max(prod(split.values()), 1)
        itemsize = situation.itemsizes[len(situation.operands)]
        return 2 * held * itemsize * (count - 1) // count

    def _elements(self, sharding: Sharding) -> int:
        total = 1
        for size in sharding.local_shape(self.mesh, self.table):
            total *= self.table.typical(size)
        return total
