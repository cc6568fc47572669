"""The cost of one node and of one reshard: seconds of computing and of communication, bytes.

Costs are those of one size of every symbol: the user's, else `Symbol.typical`. They are seconds of
operators and of collectives; `onnxpar.cost.timeline` tells which of them pass at the same time.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2, prod

import onnx_ir as ir

from onnxpar.core.machine import Link, Machine
from onnxpar.core.mesh import Atoms, Mesh
from onnxpar.core.rule import ANY, IDENTITY, SPECIAL, OpRule
from onnxpar.core.sharding import Component, Sharding, atoms_of, is_even, local_size
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import NodePlan, factor_sizes
from onnxpar.graph.shapes import itemsize as itemsize_of
from onnxpar.ops.node_cost import CostFn, Share, by_rule
from onnxpar.resharding.routes import OPERATORS, Route, cheapest_route, legs, reachable
from onnxpar.resharding.shortest_path import group_bytes

_NUMBERS = SymbolTable({})
_KINDS = {op: kind for kind, op in OPERATORS.items()}
_ROUNDS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "all_to_all": 1.0}
_NESTED = ("all_reduce", "all_gather", "reduce_scatter")
_ORDER = ("slice", "reduce_scatter", "all_to_all", "all_reduce", "all_gather")
_Slot = tuple[int, int]
_REPLICATED: _Slot = (-1, -1)
_LOCAL_FORM = 3
"""How many more times a local form with statistics reads and writes its data than the kernel that
it replaces: softmax and normalisations read it for two statistics, and write it after each."""


@dataclass(frozen=True)
class Work:
    """The work of one device for one node.

    Attributes:
        flops: Arithmetic operations.
        traffic: Bytes read and written.
        seconds: Seconds of both.
        special: Seconds of the collectives in the node's own local form, including waiting.
    """

    flops: float
    traffic: float
    seconds: float
    special: float


@dataclass(frozen=True)
class _Moves:
    """The cost of a reshard.

    Attributes:
        seconds: Seconds in which data moves.
        wait: Seconds before, in which ranks wait for one another.
        room: Bytes that are needed only during the reshard, if a dim is replicated on the way.
        atoms: The atoms over which data moves.
    """

    seconds: float
    wait: float = 0.0
    room: int = 0
    atoms: Atoms = ()


@dataclass(frozen=True)
class CostModel:
    """The cost of nodes and reshards on one machine.

    Attributes:
        machine: The machine.
        mesh: The device mesh.
        table: The symbols and their constraints.
        sizes: The sizes of symbols; `Symbol.typical` for others.
    """

    machine: Machine
    mesh: Mesh
    table: SymbolTable
    sizes: Mapping[str, int] = field(default_factory=dict)
    _values: dict[Dim, int] = field(default_factory=dict, compare=False, repr=False)
    _fixed: dict[Sharding, Sharding] = field(default_factory=dict, compare=False, repr=False)
    _shapes: dict[Sharding, tuple[int, ...]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _padded: dict[Sharding, frozenset[int]] = field(default_factory=dict, compare=False, repr=False)
    _levels: dict[Atoms, Sequence[tuple[Link, Atoms]]] = field(
        default_factory=dict, compare=False, repr=False
    )
    _works: dict[tuple[object, ...], Work] = field(default_factory=dict, compare=False, repr=False)
    _known: dict[tuple[Sharding, Sharding, int], _Moves] = field(
        default_factory=dict, compare=False, repr=False
    )

    def value(self, size: Dim) -> int:
        """Returns a size as a number."""
        if isinstance(size, int):
            return size
        if size not in self._values:
            self._values[size] = self.table.typical(size, self.sizes)
        return self._values[size]

    def fixed(self, sharding: Sharding) -> Sharding:
        """Returns a sharding in which every size is a number."""
        if sharding not in self._fixed:
            dims = tuple(
                tuple(Component(max(self.value(c.size), 1), c.atoms) for c in dim)
                for dim in sharding.dims
            )
            self._fixed[sharding] = Sharding(dims, sharding.partial, sharding.reduction)
        return self._fixed[sharding]

    def is_even(self, parts: Iterable[Component]) -> bool:
        """Whether components are proved to need no padding."""
        return all(is_even(part, self.mesh, self.table) for part in parts)

    def _uneven(self, sharding: Sharding) -> frozenset[int]:
        """The dims that are padded."""
        known = self._padded.get(sharding)
        if known is None:
            found = (d for d, dim in enumerate(sharding.dims) if not self.is_even(dim))
            known = self._padded[sharding] = frozenset(found)
        return known

    def local_shape(self, sharding: Sharding) -> tuple[int, ...]:
        """Returns the shape of one device's shard, padding included."""
        if sharding not in self._shapes:
            shape = self.fixed(sharding).local_shape(self.mesh, _NUMBERS)
            self._shapes[sharding] = tuple(self.value(size) for size in shape)
        return self._shapes[sharding]

    def elements(self, sharding: Sharding) -> int:
        """Returns the number of elements of one device's shard, padding included."""
        return prod(self.local_shape(sharding))

    # -- communication ---------------------------------------------------------------------------

    def collective(self, kind: str, atoms: Atoms, moved: float) -> float:
        """Returns the seconds of one collective in which every rank sends `moved` bytes.

        All ranks of its group begin it together; `wait` returns the seconds before that. A
        reduction or a gather over several links is one collective for each of them: the members of
        a block share the work of their block, so each sends a part of it to the other blocks.
        """
        if not atoms:
            return 0.0
        levels = self._levels_of(atoms) if kind in _NESTED else ()
        if len(levels) < 2:
            link = self.machine.link(self.mesh, atoms)
            rounds = _ROUNDS.get(kind, 1.0) * max(log2(self.mesh.count(atoms)), 1.0)
            return rounds * link.latency + moved / link.bandwidth
        seconds, count, inner = 0.0, self.mesh.count(atoms), 1
        for link, among in levels:
            members = self.mesh.count(among)
            inner *= members
            # Of the bytes of a ring over all, the share that a ring over these members sends.
            share = (members - 1) / inner / ((count - 1) / count)
            seconds += _ROUNDS[kind] * log2(members) * link.latency
            seconds += moved * share / link.bandwidth
        return seconds

    def _levels_of(self, atoms: Atoms) -> Sequence[tuple[Link, Atoms]]:
        """The links of a collective over atoms, with their atoms."""
        known = self._levels.get(atoms)
        if known is None:
            known = self._levels[atoms] = self.machine.levels(self.mesh, atoms)
        return known

    def wait(self, atoms: Iterable[int]) -> float:
        """Returns the seconds that ranks which differ in `atoms` wait after computing."""
        among = tuple(atoms)
        return self.machine.link(self.mesh, among).wait if among else 0.0

    def call(self, op: str, atoms: Atoms, moved: float) -> float:
        """Returns the seconds of a call of a collective operator, including waiting.

        Args:
            op: Its name.
            atoms: The atoms that span its groups.
            moved: The bytes that every rank sends.
        """
        return self.collective(_KINDS.get(op, "permute"), atoms, moved) + self.wait(atoms)

    def handing(self, link: Link) -> float:
        """Returns the seconds that a rank spends to run a collective in the background.

        Its Wait, and the Barrier before it, are two more operators. To hand it to what communicates
        in the background, and to be woken when it is done, takes about as long as one step of a
        collective.
        """
        return 2 * self.machine.overhead + link.latency

    def copying(self, size: float, operators: int = 1) -> float:
        """Returns the seconds of operators that read and write `size` bytes each."""
        one = 2 * size / self.machine.bandwidth + self.machine.overhead
        return operators * one

    def reshard(
        self, source: Sharding, target: Sharding, itemsize: int, *, met: bool = False
    ) -> float:
        """Returns the seconds to bring a value from one sharding into another.

        The result is infinite if the target is partial where the source is not. If sharding is not
        proved even, it includes the copies for padding.

        Args:
            source: The present sharding of the value.
            target: The new sharding.
            itemsize: Bytes of an element.
            met: Whether another collective, not computing, comes before.
        """
        if source == target:
            return 0.0
        known = self._moves(source, target, itemsize)
        return known.seconds if met else known.seconds + known.wait

    def link(self, source: Sharding, target: Sharding, itemsize: int) -> Link | None:
        """Returns the widest link that a reshard crosses, None if no data moves."""
        atoms = () if source == target else self._moves(source, target, itemsize).atoms
        return self.machine.link(self.mesh, atoms) if atoms else None

    def starting(self, source: Sharding, target: Sharding, itemsize: int) -> float:
        """Returns the seconds of a reduction or a gather that do not depend on its bytes."""
        atoms = self._moves(source, target, itemsize).atoms
        kind = "all_gather"
        if source.partial:
            kind = "all_reduce" if source.dims == target.dims else "reduce_scatter"
        return self.collective(kind, atoms, 0)

    def route(self, versions: Sequence[Sharding], target: Sharding, itemsize: int) -> Route:
        """Returns the route to a sharding that partitioning takes from the versions of a value."""
        return cheapest_route(versions, target, self.mesh, self.table, itemsize)

    def travel(self, route: Route, itemsize: int) -> float:
        """Returns the seconds of the collectives and slices of a route, without waiting."""
        return sum(
            self.copying(self.elements(step.after) * itemsize)
            if step.kind == "slice"
            else self.collective(step.kind, step.atoms, self.value(step.bytes))
            for step in route.steps
        )

    def room(self, source: Sharding, target: Sharding, itemsize: int) -> int:
        """Returns the bytes that a device needs only during the reshard of a value."""
        return 0 if source == target else self._moves(source, target, itemsize).room

    def _moves(self, source: Sharding, target: Sharding, itemsize: int) -> _Moves:
        key = (source, target, itemsize)
        known = self._known.get(key)
        if known is None:
            here, there = self.fixed(source), self.fixed(target)
            if here == there:
                found = _Moves(0.0)
            elif not reachable(here, there):
                found = _Moves(float("inf"))
            else:
                uneven = self._uneven(source) | self._uneven(target)
                # By the symbolic sizes, since the graph lines components up by what is proved.
                moves = legs(source, target, self.mesh, self.table)
                costs = [
                    self._independent(self.fixed(a), self.fixed(b), itemsize, uneven)
                    for a, b in moves
                ]
                between = sum(self.elements(b) for a, b in moves[:-1] if a != b)
                found = _Moves(
                    sum(m.seconds for m in costs),
                    max(m.wait for m in costs),
                    # An uneven dim is padded, into a copy, before it is split.
                    between * itemsize * (2 if uneven else 1),
                    tuple(sorted({a for m in costs for a in m.atoms})),
                )
            known = self._known[key] = found
        return known

    def _independent(
        self, source: Sharding, target: Sharding, itemsize: int, uneven: Collection[int]
    ) -> _Moves:
        """A move between equal components in which every atom changes by itself.

        Changes that make the value smaller come first, those that make it larger last; the search
        over sequences of collectives finds the same order. Atoms come and go at the minor end of a
        component. If they do so in front of others, or others change their order, all data is
        exchanged once, where it is least. A padded dim is copied when it is split or gathered.
        """
        # The slot of each atom; None if it is partial.
        before: dict[int, _Slot | None] = dict.fromkeys(source.partial)
        after: dict[int, _Slot | None] = dict.fromkeys(target.partial)
        reordered: list[int] = []
        for d, (old, new) in enumerate(zip(source.dims, target.dims, strict=True)):
            for c, (a, b) in enumerate(zip(old, new, strict=True)):
                if a.atoms == b.atoms:
                    continue
                before.update((atom, (d, c)) for atom in a.atoms)
                after.update((atom, (d, c)) for atom in b.atoms)
                kept = tuple(x for x in a.atoms if x in b.atoms)
                if kept != a.atoms[: len(kept)] or kept != b.atoms[: len(kept)]:
                    reordered += kept
        moves: dict[tuple[str, _Slot | None, _Slot | None], list[int]] = {}
        for atom in sorted({*before, *after}):
            was = before.get(atom, _REPLICATED)
            now = after.get(atom, _REPLICATED)
            if was == now:
                continue
            if was == _REPLICATED:
                kind = "slice"
            elif was is None:
                kind = "all_reduce" if now == _REPLICATED else "reduce_scatter"
            else:
                kind = "all_gather" if now == _REPLICATED else "all_to_all"
            moves.setdefault((kind, was, now), []).append(atom)
        size = least = float(self.elements(source) * itemsize)
        seconds, meeting = 0.0, set(reordered)
        for (kind, was, now), atoms in sorted(moves.items(), key=lambda m: _ORDER.index(m[0][0])):
            count = self.mesh.count(atoms)
            for slot in (was, now):
                if slot is not None and slot[0] in uneven:
                    seconds += self.copying(size * (count if kind == "all_gather" else 1))
            if kind == "slice":
                size /= count
                least = min(least, size)
                seconds += self.copying(size)
                continue
            meeting.update(atoms)
            seconds += self.collective(kind, tuple(atoms), group_bytes(kind, size, count))
            if kind == "reduce_scatter":
                size /= count
            elif kind == "all_gather":
                size *= count
            least = min(least, size)
        seconds += self.collective("permute", tuple(reordered), least)
        return _Moves(seconds, self.wait(sorted(meeting)), atoms=tuple(sorted(meeting)))

    # -- nodes -----------------------------------------------------------------------------------

    def node(
        self, rule: OpRule, view: NodeView, plan: NodePlan, count: CostFn | None = None
    ) -> Work:
        """Returns the work of one device for a node under a plan.

        Args:
            rule: The rule of the node.
            view: The node.
            plan: Its plan.
            count: Counts the arithmetic and traffic of the operator; None: by the rule's factors.
        """
        key = work_key(rule, view, plan, count)
        if key not in self._works:
            self._works[key] = self._work(rule, view, plan, count)
        return self._works[key]

    def masks(self, rule: OpRule, plan: NodePlan, operand: int) -> bool:
        """Whether the padding of an operand is set before the node, since a reduction reads it."""
        held = {name for names in rule.inputs[operand].dims for name in names}
        return any(
            factor in held and rule.kinds[factor] in IDENTITY and not self.is_even(parts)
            for factor, parts in plan.factors.items()
        )

    def masking(self, rule: OpRule, view: NodeView, plan: NodePlan) -> float:
        """Returns the seconds to set padding before a node; inputs and parameters have none set.

        Args:
            rule: The rule of the node.
            view: The node.
            plan: Its plan.
        """
        return sum(
            self.copying(self._size(sharding, value))
            for i, (sharding, value) in enumerate(zip(plan.inputs, view.node.inputs, strict=False))
            if sharding is not None
            and value is not None
            and value.producer() is not None
            and self.masks(rule, plan, i)
        )

    def filling(
        self, rule: OpRule, view: NodeView, plan: NodePlan, trained: Iterable[int]
    ) -> float:
        """Returns the seconds in which the backward of a node sets padding.

        The cotangent of an operand is a sum over the factors that the operand does not have. If one
        of them is sharded unevenly, padding is set to zero in the terms: in the cotangent of the
        output, and in the other operand unless the node only adds.

        Args:
            rule: The rule of the node.
            view: The node.
            plan: Its plan.
            trained: The operands whose cotangents are computed.
        """
        uneven = {f for f, parts in plan.factors.items() if not self.is_even(parts)}
        if not uneven:
            return 0.0
        held = [{f for names in o.dims for f in names} for o in rule.inputs]
        results = zip(plan.outputs, view.node.outputs, strict=True)
        largest = max(self._size(s, v) for s, v in results)
        seconds = 0.0
        for operand in trained:
            summed = uneven - held[operand]
            if not summed:
                continue
            seconds += self.copying(largest)
            # Operands of a sum may be partial together, those of a product only alone.
            adds = any(len(group) > 1 and operand in group for _, group in rule.linear)
            others = [
                self._size(s, v)
                for i, (s, v) in enumerate(zip(plan.inputs, view.node.inputs, strict=True))
                if i != operand and s is not None and v is not None and summed & held[i]
            ]
            if others and not adds:
                seconds += self.copying(max(others))
        return seconds

    def _size(self, sharding: Sharding, value: ir.Value) -> float:
        return self.elements(sharding) * (value.dtype.itemsize if value.dtype is not None else 4)

    def _work(self, rule: OpRule, view: NodeView, plan: NodePlan, count: CostFn | None) -> Work:
        local = {
            name: self._local(size, plan, name) for name, size in factor_sizes(rule, view).items()
        }
        share = self._share(rule, view, plan, local)
        counted = (count or by_rule)(share)
        dtype = view.node.outputs[0].dtype if view.node.outputs else None
        rate = self.machine.rate(dtype.name.lower() if dtype is not None else "float32")
        seconds = max(counted.flops / rate, counted.traffic / self.machine.bandwidth)
        if seconds:
            seconds += self.machine.overhead
        special = self.special(rule, view, plan)
        if special:
            seconds += self.copying(self._largest(view, plan), _LOCAL_FORM)
        return Work(counted.flops, counted.traffic, seconds, special)

    def _share(
        self, rule: OpRule, view: NodeView, plan: NodePlan, local: Mapping[str, int]
    ) -> Share:
        """The local sizes of a node."""

        def shape(sharding: Sharding | None, mode: str) -> tuple[int, ...] | None:
            return None if sharding is None or mode == ANY else self.local_shape(sharding)

        def width(value: ir.Value | None) -> float:
            return value.dtype.itemsize if value is not None and value.dtype is not None else 0

        inputs = tuple(
            shape(s, operand.mode) for s, operand in zip(plan.inputs, rule.inputs, strict=True)
        )
        outputs = tuple(shape(s, "") or () for s in plan.outputs)
        node = view.node
        return Share(
            rule,
            view,
            local,
            inputs,
            outputs,
            tuple(
                prod(s) * width(v) if s is not None else 0
                for s, v in zip(inputs, node.inputs, strict=True)
            ),
            tuple(prod(s) * width(v) for s, v in zip(outputs, node.outputs, strict=True)),
        )

    def _local(self, size: Dim, plan: NodePlan, name: str) -> int:
        parts = plan.factors.get(name)
        if parts is None:
            return max(self.value(size), 1)
        return prod(
            self.value(
                local_size(Component(max(self.value(c.size), 1), c.atoms), self.mesh, _NUMBERS)
            )
            for c in parts
        )

    def special(self, rule: OpRule, view: NodeView, plan: NodePlan) -> float:
        """Returns the seconds of the collectives in the local form of a node, with waiting.

        Over the sharded dims of the largest output, two statistics are all-reduced, or what the
        rule says (`OpRule.inner`).
        """
        counts = {name: self.mesh.count(atoms_of(parts)) for name, parts in plan.factors.items()}
        sizes: Mapping[str, Dim] | None = None
        seconds = 0.0
        for name, parts in plan.factors.items():
            atoms = atoms_of(parts)
            if not atoms or not (rule.kinds[name] == SPECIAL or name in rule.inner):
                continue
            if name in rule.inner:
                others = prod(counts.values()) // counts[name]
                width = itemsize_of(next(iter(view.node.outputs), None))
                size = self.value(rule.inner[name]) * width / others / 2
            else:
                sizes = sizes or factor_sizes(rule, view)
                held = any(name in names for o in rule.outputs for names in o.dims)
                local = self._local(sizes[name], plan, name) if held else 1
                size = self._largest(view, plan) / max(local, 1)
            moved = group_bytes("all_reduce", size, counts[name])
            # The second all-reduce follows soon after the first, so ranks wait once.
            seconds += 2 * self.collective("all_reduce", tuple(sorted(atoms)), moved)
            seconds += self.wait(atoms)
        return seconds

    def _largest(self, view: NodeView, plan: NodePlan) -> int:
        """The bytes of the shard of the largest output, of which all have the type of the first."""
        width = itemsize_of(next(iter(view.node.outputs), None))
        return max(map(self.elements, plan.outputs), default=0) * width


def work_key(
    rule: OpRule, view: NodeView, plan: NodePlan, count: CostFn | None
) -> tuple[object, ...]:
    """Returns a key that is equal only for nodes of equal work on the same machine and mesh.

    Args:
        rule: As the arguments of `CostModel.node`.
        view: Likewise.
        plan: Likewise.
        count: Likewise.
    """
    operands = tuple(
        None if v is None else (v.dtype, view.env.shapes.get(v.name or ""))
        for v in (*view.node.inputs, *view.node.outputs)
    )
    # The operator's own count may depend on attributes.
    counting = None if count is None else (count, str(view.node.attributes))
    return rule, operands, counting, plan.inputs, plan.outputs, tuple(plan.factors.items())
