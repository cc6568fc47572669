"""How one node is sharded, given the layouts of its operands: candidates, their cost, the choice.

Candidates come from the layouts of the operands, from those that later readers of the outputs need,
from the user's parameter axes, and from replicating everything. The first criterion is the number
of parameter axes that could shard a matrix but do not. The next is the cost of communication, by
the cost model on a machine of which only the links count, so that it is the number of bytes sent;
then the number of collectives, the elements that a device computes, and the order of the
candidates. Nothing else counts, so the choice is the same on every machine. A plan whose bytes grow
faster than in proportion to a symbol is left if another sends fewer at large sizes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from onnxpar.core.errors import ShardingError
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import ANY, PARALLEL, REPLICATED, SPECIAL, OpRule
from onnxpar.core.sharding import REDUCTIONS, Component, DimSharding, Sharding, atoms_of
from onnxpar.core.symbols import SymbolTable, symbols_of
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.growth import Sizes, grows_faster
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import (
    Carried,
    Factors,
    NodePlan,
    factor_sizes,
    may_stay_partial,
    project,
    shardings,
    used_atoms,
)
from onnxpar.graph.view_parts import Part, Parts
from onnxpar.propagation.backward_dual import Dual
from onnxpar.resharding.shortest_path import group_bytes

FORBIDDEN = float(1 << 60)
"""Seconds; the price of a collective between ranks that have different sizes of a tensor."""


@dataclass(frozen=True)
class Situation:
    """All that the choice for one node depends on, except the node.

    Attributes:
        operands: Sharding in which each operand was computed; None for an absent operand, and if
            its sharding is still free (a parameter, or a value computed from parameters only).
        versions: For each operand the shardings in which it exists: first that in which it was
            computed, then those into which it was resharded for earlier nodes.
        free: For each operand, whether its sharding is still free.
        parts: For each operand, the parts of its dims (see `graph.view_parts`).
        wishes: For each output, the sharding that later readers need; None if unknown.
        gradients: For each output that is a parameter's gradient, the layout of the parameter. The
            gradient gets this layout and stays partial over other atoms, since it is reduced once
            per step, which costs nothing here.
        joined: For each output, the atoms over which it may be partial at no cost (see `Hints`).
        itemsizes: Bytes per element of each operand, then of each output.
        demands: For each output, the sharding into which it will be brought for certain, since its
            only reader has a strategy; None where it may follow.
    """

    operands: tuple[Sharding | None, ...]
    versions: tuple[tuple[Sharding, ...], ...]
    free: tuple[bool, ...]
    parts: tuple[tuple[Parts, ...] | None, ...]
    wishes: tuple[Sharding | None, ...]
    gradients: tuple[Sharding | None, ...]
    joined: tuple[frozenset[int], ...]
    itemsizes: tuple[int, ...]
    demands: tuple[Sharding | None, ...] = ()


def leaving(made: Sharding, parameter: Sharding) -> Sharding:
    """Returns the layout of a gradient output: that of its parameter, partial over other atoms."""
    taken = parameter.split_atoms
    return parameter.with_partial(atom for atom in made.partial if atom not in taken)


def merged(proposals: Iterable[Factors], rule: OpRule) -> dict[str, DimSharding]:
    """Returns the sharded factors of all proposals; where two conflict, those of the first."""
    result: dict[str, DimSharding] = {}
    used: set[int] = set()
    for proposal in proposals:
        for name, parts in proposal.items():
            atoms = set(atoms_of(parts))
            if name not in result and rule.kinds[name] != REPLICATED and not atoms & used:
                result[name] = parts
                used |= atoms
    return result


@dataclass(frozen=True)
class Chooser:
    """Chooses the plan of nodes on one mesh.

    Attributes:
        cost: The cost model, in which a second is one byte that a device sends.
        parameter_axes: Runs of atoms that shard parameters.
        varying: The atoms along which the value of each per-rank symbol differs.
        large: A large size of each symbol with which prices may grow.
        reduced: Which factors of a matrix a parameter axis may shard, in this order: those that are
            reduced, or those that reach the output.
    """

    cost: CostModel
    parameter_axes: tuple[Atoms, ...] = ()
    varying: Mapping[str, frozenset[int]] = field(default_factory=dict)
    large: Sizes = field(default_factory=dict)
    reduced: tuple[bool, ...] = (True, False)
    _costs: dict[tuple[tuple[str, int], ...], CostModel] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def mesh(self) -> Mesh:
        """The mesh."""
        return self.cost.mesh

    @property
    def table(self) -> SymbolTable:
        """The symbols and their constraints."""
        return self.cost.table

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
            situation: The layouts of its operands, and so on.
            implied: Its layout by another node's plan; it is used if that is possible.
        """
        if implied is not None:
            follows = self._following(rule, view, situation, implied)
            # The exchange of a local form may take longer than to compute the node without it.
            plain = {f: parts for f, parts in follows.items() if rule.kinds[f] != SPECIAL}
            ways = [follows, plain, *([{}] if implied.adds else [])]
            found = self._cheapest(rule, view, situation, ways)
            if found is not None:
                return found
        found = self._cheapest(rule, view, situation, self.candidates(rule, view, situation))
        if found is None:
            return shardings(rule, view, {}, self.mesh)
        return self._outgrown(rule, view, situation, found) or found

    def _outgrown(
        self, rule: OpRule, view: NodeView, situation: Situation, found: NodePlan
    ) -> NodePlan | None:
        """Returns another plan if it is cheaper at large sizes, and the one found grows faster.

        Its price grows in proportion to each symbol at most. A matrix may also be sharded in the
        other factor: a table of position biases not by positions, but by heads.
        """

        def sent(plan: NodePlan, sizes: Sizes) -> float:
            cost = self._cost_at(sizes)
            seconds, _ = self._at_once(rule, plan, view, situation, cost)
            # An operand that stays partial may be reduced where it is smaller.
            later = 0.0 if plan.carried else self._pending(plan, situation, False, cost)[0]
            return seconds + later

        def tame(plan: NodePlan) -> bool:
            return not grows_faster(lambda sizes: sent(plan, sizes), self.table, self.large)

        if tame(found):
            return None
        columns = replace(self, reduced=(False,))
        candidates = chain(
            self.candidates(rule, view, situation), columns.candidates(rule, view, situation)
        )
        other = self._cheapest(rule, view, situation, candidates, tame)
        if other is None or self._idle_axes(rule, other, situation) > self._idle_axes(
            rule, found, situation
        ):
            return None
        return other if sent(other, self.large) < sent(found, self.large) else None

    def _cost_at(self, sizes: Sizes) -> CostModel:
        """The cost model at other sizes of symbols."""
        if not sizes:
            return self.cost
        key = tuple(sizes.items())
        if key not in self._costs:
            self._costs[key] = CostModel(self.cost.machine, self.mesh, self.table, sizes)
        return self._costs[key]

    def _cheapest(
        self,
        rule: OpRule,
        view: NodeView,
        situation: Situation,
        candidates: Iterable[dict[str, DimSharding]],
        admits: Callable[[NodePlan], bool] | None = None,
    ) -> NodePlan | None:
        """Returns the cheapest plan; of those that are admitted, if not all are."""
        best: tuple[tuple[Any, ...], NodePlan] | None = None
        seen: list[tuple[Factors, Carried]] = []
        for factors in candidates:
            for carried in self.carries(rule, factors, situation):
                if (factors, carried) in seen:
                    continue
                seen.append((factors, carried))
                try:
                    plan = shardings(rule, view, factors, self.mesh, carried=carried)
                except ShardingError:
                    continue
                price = self.rank(rule, plan, view, situation, bool(carried))
                if best is not None and price >= best[0]:
                    continue
                if admits is None or admits(plan):
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
        """The factors of the implied layout; operands without one keep their own layout."""
        mesh, table, sizes = self.mesh, self.table, factor_sizes(rule, view)
        layouts = [s or made for s, made in zip(implied.inputs, situation.operands, strict=True)]
        pairs = (
            *zip(rule.inputs, layouts, strict=False),
            *zip(rule.outputs, implied.outputs, strict=False),
        )
        proposals = [
            project(operand, sharding, sizes, mesh, table, rule.scaled)
            for operand, sharding in pairs
            if sharding is not None and not operand.mode
        ]
        return merged(proposals, rule)

    def candidates(
        self, rule: OpRule, view: NodeView, situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        """Yields the ways to shard a node's factors, in the order that decides between equals."""
        mesh, table, sizes = self.mesh, self.table, factor_sizes(rule, view)
        layouts = [
            (operand, version)
            for operand, versions in zip(rule.inputs, situation.versions, strict=False)
            for version in versions
        ]
        layouts += [
            (operand, wish)
            for operand, wish in zip(rule.outputs, situation.wishes, strict=False)
            if wish is not None
        ]
        found = [project(o, s, sizes, mesh, table, rule.scaled) for o, s in layouts]
        proposals = [p for i, p in enumerate(found) if p and p not in found[:i]]
        for order in (proposals, *([p, *proposals] for p in proposals[1:])):
            factors = merged(order, rule)
            yield from self._with_axes(rule, factors, situation)
            yield factors
            yield from self._scattered(rule, factors, situation)
        for single in proposals:
            yield merged([single], rule)
        yield {}

    def _with_axes(
        self, rule: OpRule, factors: dict[str, DimSharding], situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        """Shards parameters over the parameter axes that are not used yet, in at most one way."""
        extended = dict(factors)
        partial = {a for s in situation.operands if s is not None for a in s.partial}
        for axis in self.parameter_axes:
            if (used_atoms(extended) | partial) & set(axis):
                continue
            choice = self._parameter_factor(rule, extended, situation, axis)
            if choice is not None:
                extended[choice[0]] = choice[1]
        if extended != factors:
            yield extended

    def _scattered(
        self, rule: OpRule, factors: Factors, situation: Situation
    ) -> Iterator[dict[str, DimSharding]]:
        """Shards the last dim that divides evenly over atoms over which an operand is partial.

        The reduction is then a reduce-scatter, with half the traffic of an all-reduce, and later
        nodes are not computed several times. Not over parameter axes, which replicate activations.
        """
        taken = used_atoms(factors).union(*self.parameter_axes)
        for index, sharding in enumerate(situation.operands):
            if sharding is None or not sharding.partial or rule.inputs[index].mode:
                continue
            atoms = sharding.partial
            if taken.intersection(atoms):
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

    def _parameter_factor(
        self, rule: OpRule, factors: Factors, situation: Situation, axis: Atoms
    ) -> tuple[str, DimSharding] | None:
        """Picks the factor of a free matrix to shard: vocabulary first, else columns.

        Factors of activations are not sharded, since activations are replicated over the axis. Of
        the other factors of a parameter, the first choice is a reduced one (the rows of an
        embedding), the second one that reaches the output (Megatron's columns).
        """
        shared = {
            name
            for index, operand in enumerate(rule.inputs)
            if not situation.free[index]
            for dim in operand.dims
            for name in dim
        }
        for reduced in self.reduced:
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
                    sharded = self._shard_parts(dim_parts, axis)
                    if sharded is not None:
                        return names[0], sharded
        return None

    def _idle_axes(self, rule: OpRule, plan: NodePlan, situation: Situation) -> int:
        """Number of parameter axes that shard nothing although the node contracts a free matrix."""
        matrix = any(
            situation.free[index]
            and len(operand.dims) > 1
            and any(rule.kinds[name] in REDUCTIONS for names in operand.dims for name in names)
            for index, operand in enumerate(rule.inputs)
        )
        used = used_atoms(plan.factors)
        return sum(matrix and not used & set(axis) for axis in self.parameter_axes)

    def _shard_parts(self, parts: tuple[Part, ...], axis: Atoms) -> DimSharding | None:
        """Shards the first part that may be sharded, by the leading atoms that make shards smaller.

        Heads whose number the axis does not divide are sharded over its leading atoms, or unevenly,
        whichever leaves a device fewer; an even sharding wins a tie.
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

    def carries(self, rule: OpRule, factors: Factors, situation: Situation) -> list[Carried]:
        """Returns the choices of operands that stay partial: none, and those of the rule."""
        options: list[Carried] = [{}]
        partial = {i: s for i, s in enumerate(situation.operands) if s is not None and s.partial}
        if not partial:
            return options
        used = used_atoms(factors)
        # An operand that also has a complete version need not stay partial.
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

    def rank(
        self, rule: OpRule, plan: NodePlan, view: NodeView, situation: Situation, carries: bool
    ) -> tuple[Any, ...]:
        """Returns the criteria in their order; the plan with the least is chosen."""
        price = self.price(rule, plan, view, situation, carries)
        return self._idle_axes(rule, plan, situation), *price

    def price(
        self, rule: OpRule, plan: NodePlan, view: NodeView, situation: Situation, carries: bool
    ) -> tuple[float, int, int]:
        """Returns the seconds of communication, the number of collectives, and the elements."""
        sent, collectives = self._at_once(rule, plan, view, situation, self.cost)
        pending, values = self._pending(plan, situation, carries, self.cost)
        if carries:
            # A split of a partial operand, say, leaves more values to reduce than it had.
            collectives += max(values - len(plan.carried), 0)
        elements = sum(map(self.cost.elements, plan.outputs)) + sum(
            self.cost.elements(want)
            for want, operand in zip(plan.inputs, rule.inputs, strict=True)
            if want is not None and operand.mode != ANY
        )
        return sent + pending, collectives, elements

    def _at_once(
        self, rule: OpRule, plan: NodePlan, view: NodeView, situation: Situation, cost: CostModel
    ) -> tuple[float, int]:
        """The seconds in which operands are resharded and statistics exchanged; the reshards."""
        seconds, moves = cost.special(rule, view, plan), 0
        for index, want in enumerate(plan.inputs):
            have = situation.versions[index] if index < len(situation.versions) else ()
            if want is None or rule.inputs[index].mode == ANY or not have or want in have:
                continue
            moved = self._reshard(have, want, situation.itemsizes[index], cost)
            seconds += moved
            moves += moved > 0
        return seconds, moves

    def _pending(
        self, plan: NodePlan, situation: Situation, carries: bool, cost: CostModel
    ) -> tuple[float, int]:
        """The least seconds in which results will be resharded, and how many will be.

        A gradient is reduced once per step. That counts as a reshard, but takes no time here.
        """
        seconds, values = 0.0, 0
        for index, made in enumerate(plan.outputs):
            itemsize = situation.itemsizes[len(situation.operands) + index]
            parameter = situation.gradients[index]
            if parameter is not None:
                leaves = leaving(made, parameter)
                seconds += self._reshard((made,), leaves, itemsize, cost)
                values += bool(leaves.partial)
            elif situation.demands and (demand := situation.demands[index]) is not None:
                moved = self._reshard((made,), demand, itemsize, cost)
                seconds += moved
                values += moved > 0
            elif made.partial and not situation.joined[index].issuperset(made.partial):
                # A partial result needs at least a reduce-scatter; an operand that stayed partial
                # would have needed an all-reduce here.
                kind = "all_reduce" if carries else "reduce_scatter"
                size = cost.elements(made) * itemsize
                moved = group_bytes(kind, size, self.mesh.count(made.partial))
                seconds += cost.collective(kind, made.partial, moved)
                values += 1
        return seconds, values

    def _reshard(
        self, versions: Sequence[Sharding], target: Sharding, itemsize: int, cost: CostModel
    ) -> float:
        """Returns the seconds to bring a value into a sharding from the nearest that it has."""
        route = cost.route(versions, target, itemsize)
        for step in route.steps if self.varying else ():
            for symbol in symbols_of(step.bytes):
                if self.varying.get(symbol, frozenset()) & set(step.atoms):
                    return FORBIDDEN
        return cost.travel(route, itemsize)
