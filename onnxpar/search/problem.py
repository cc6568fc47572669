"""The choice of one option for every node, as a sum of tables over few variables each.

A variable is a node (its options), a parameter or input that several nodes read (the layouts that
they want), or the *kept version* of a value that several nodes read. Forward, a value is resharded
for each reader; backward, the reader's share of the cotangent is resharded for the sum. One
version is kept, so that readers that want the same version pay once. If readers want more than two
layouts, the others are priced as separate reshards.
"""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from onnxpar.core.sharding import Sharding
from onnxpar.cost.cost_model import CostModel
from onnxpar.cost.optimizer_parallel import GRADIENTS, PARAMETERS
from onnxpar.search.cost_weights import PLAIN, CostWeights
from onnxpar.search.node_options import Option, bytes_of, saved
from onnxpar.search.node_passes import least_computing, passes_of
from onnxpar.search.rearranged_states import partial_atoms
from onnxpar.search.value_flow import Flow, Item, Use, Value

Table = NDArray[np.float64]
MOMENTS = 2
"""Moments that an optimizer keeps of each trained parameter, at most."""
_UPDATE_PASSES = 7
"""How often an update reads or writes a tensor of the parameter's size."""
_GRADIENT = 4
"""Bytes of an element of the gradient of a parameter that is cast to 16 bits."""
_NEVER = 1e6
"""Seconds; more than any plan takes."""


@dataclass(frozen=True)
class Variable:
    """Something to choose.

    Attributes:
        name: Name of the node or value.
        cost: Seconds of each option.
        memory: Bytes of one device for each option.
    """

    name: str
    cost: Table
    memory: Table


@dataclass(frozen=True)
class Term:
    """Seconds that depend on several variables together; one dim of the table for each."""

    scope: tuple[int, ...]
    table: Table


@dataclass(frozen=True)
class Problem:
    """Variables, and what they cost together.

    Attributes:
        variables: The variables; first the nodes, in the order of the flow.
        terms: Costs of several variables together.
        options: The options of each node.
        sources: For each parameter or input, by name: the variable that decides its sharding, and
            the sharding for each option of that variable.
    """

    variables: tuple[Variable, ...]
    terms: tuple[Term, ...]
    options: tuple[tuple[Option, ...], ...] = ()
    sources: Mapping[str, tuple[int, tuple[Sharding, ...]]] = field(default_factory=dict)

    def chosen(self, choice: Sequence[int]) -> tuple[Option, ...]:
        """Returns the option of each node under a choice."""
        return tuple([found[c] for found, c in zip(self.options, choice, strict=False)])

    def layouts(self, choice: Sequence[int]) -> dict[str, Sharding]:
        """Returns the shardings of parameters and inputs under a choice."""
        return {name: layouts[choice[v]] for name, (v, layouts) in self.sources.items()}

    def seconds(self, choice: Sequence[int]) -> float:
        """Returns what a choice of an option for every variable costs."""
        total = sum(float(v.cost[c]) for v, c in zip(self.variables, choice, strict=True))
        return total + sum(float(t.table[tuple(choice[v] for v in t.scope)]) for t in self.terms)

    def memory(self, choice: Sequence[int]) -> float:
        """Returns the bytes of one device that a choice needs."""
        return sum(float(v.memory[c]) for v, c in zip(self.variables, choice, strict=True))


@dataclass(frozen=True)
class _Usage:
    """The sharding that a reader wants, and the atoms over which its cotangent is partial."""

    target: Sharding
    partials: tuple[int, ...]


Wanted = tuple[tuple[_Usage, ...], NDArray[np.intp]]
T = TypeVar("T", bound=Hashable)


def build(
    flow: Flow,
    options: Sequence[tuple[Option, ...]],
    cost: CostModel,
    pins: Mapping[str, Sharding] | None = None,
    weights: CostWeights = PLAIN,
    outputs: Mapping[str, Sharding] | None = None,
) -> Problem:
    """Builds the problem of a model.

    Args:
        flow: The model.
        options: The options of each node; nodes that are alike share one tuple.
        cost: The cost model.
        pins: The shardings of parameters and inputs that the user fixed, by name.
        weights: The weights of the sum.
        outputs: The shardings to which outputs of the graph are brought; by default they leave as
            they are made, reduced.
    """
    builder = _Builder(flow, tuple(options), cost, pins or {}, weights, outputs or {})
    builder.add_nodes()
    builder.add_values(flow.values)
    return builder.problem()


def build_levels(
    flow: Flow,
    options: Sequence[tuple[Option, ...]],
    cost: CostModel,
    pins: Mapping[str, Sharding],
    weights: Iterable[CostWeights],
) -> Iterator[Problem]:
    """Yields the problems of a model that differ only in optimizer parallel.

    What does not depend on optimizer parallel is computed once.

    Args:
        flow: As in `build`, like the next three.
        options: Likewise.
        cost: Likewise.
        pins: Likewise.
        weights: The weights of each problem; they are equal except in `parallel`.
    """
    shared: _Builder | None = None
    # The gradients of all values that are made from data are reduced at once.
    stored = [value for value in flow.values if value.producer is None or value.stored]
    for each in weights:
        if shared is None:
            shared = _Builder(flow, tuple(options), cost, pins, each, {})
            shared.add_nodes()
            shared.add_values([v for v in flow.values if v.producer is not None and not v.stored])
        variables, terms = list(shared.variables), list(shared.terms)
        own = replace(shared, weights=each, sources={}, variables=variables, terms=terms, _once={})
        own.add_values(stored)
        yield own.problem()


@dataclass
class _Builder:
    flow: Flow
    options: tuple[tuple[Option, ...], ...]
    cost: CostModel
    pins: Mapping[str, Sharding]
    weights: CostWeights
    outputs: Mapping[str, Sharding]
    sources: dict[str, tuple[int, tuple[Sharding, ...]]] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)
    _units: dict[tuple[int, bool, tuple[int, ...]], tuple[Table, Table]] = field(
        default_factory=dict
    )
    _wanted: dict[tuple[int, int], Wanted] = field(default_factory=dict)
    _least: dict[tuple[int, bool, tuple[int, ...]], tuple[float, float]] = field(
        default_factory=dict
    )
    _once: dict[
        tuple[int, int, bool, bool, int, int, tuple[float, float]],
        tuple[Table, Table, tuple[Sharding, ...], NDArray[np.intp]],
    ] = field(default_factory=dict)
    _made_as: dict[tuple[int, int], tuple[Sharding, ...]] = field(default_factory=dict)
    _tables: dict[tuple[object, ...], Table] = field(default_factory=dict)
    _counted: dict[tuple[int, tuple[int, ...], int], Table] = field(default_factory=dict)
    # Equal shardings and usages are one object, so that their identity is a key.
    _known: dict[Hashable, Hashable] = field(default_factory=dict)
    _moves: dict[tuple[int, int, int, bool, int], float] = field(default_factory=dict)
    _versions: dict[tuple[tuple[int, int, int], ...], tuple[_Usage | None, ...]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._hides = any(link.overlaps for link in self.cost.machine.links)
        # Of the level, resharding depends only on this.
        self._reduces_later = self.weights.parallel.level < GRADIENTS

    def problem(self) -> Problem:
        """The problem of what was added."""
        return Problem(tuple(self.variables), tuple(self.terms), self.options, self.sources)

    def add_nodes(self) -> None:
        """Adds the variables of the nodes."""
        for number, (item, found) in enumerate(zip(self.flow.items, self.options, strict=True)):
            seconds, memory = self._unit(number, found)
            self.variables.append(Variable(item.name, item.count * seconds, item.count * memory))

    def add_values(self, values: Iterable[Value]) -> None:
        """Adds the variables and terms of some values."""
        for value in values:
            if value.producer is None:
                self._source(value)
                if value.name in self.sources:
                    self.sources.update(dict.fromkeys(value.alike, self.sources[value.name]))
            else:
                self._made(value, *value.producer)

    def _count(self, variable: int, seconds: Table, memory: Table | float = 0.0) -> None:
        """Adds to what the options of a variable cost."""
        old = self.variables[variable]
        self.variables[variable] = replace(old, cost=old.cost + seconds, memory=old.memory + memory)

    def _term(self, scope: tuple[int, ...], table: Table, count: int) -> None:
        """Adds a table that counts `count` times; a node may be in its scope twice."""
        distinct = tuple(dict.fromkeys(scope))
        pattern = tuple([distinct.index(v) for v in scope])
        key = (id(table), pattern, count)
        if key not in self._counted:
            once = table if len(distinct) == len(scope) else _diagonal(table, pattern)
            self._counted[key] = once if count == 1 else once * count
        self.terms.append(Term(distinct, self._counted[key]))

    # -- nodes -----------------------------------------------------------------------------------

    def _unit(self, number: int, found: tuple[Option, ...]) -> tuple[Table, Table]:
        item, trained = self.flow.items[number], self.flow.trained[number]
        key = (id(found), item.trained, trained)
        if key not in self._units:
            seconds, memory = np.zeros(len(found)), np.zeros(len(found))
            for i, option in enumerate(found):
                work = self.cost.node(item.rule, item.view, option.plan, item.cost)
                passes = passes_of(item, trained, work) + item.recomputed
                times = (2 if item.trained else 1) + item.recomputed
                seconds[i] = passes * work.seconds + (
                    self.weights.communication * times * work.special
                )
                seconds[i] += self.cost.masking(item.rule, item.view, option.plan)
                if item.trained:
                    seconds[i] += self.cost.filling(item.rule, item.view, option.plan, trained)
                    memory[i] = 0 if self.weights.parameters_only else self._held(item, option)
            self._units[key] = seconds, memory
        return self._units[key]

    def _held(self, item: Item, option: Option) -> float:
        """Bytes that a device holds for a node when its backward begins."""
        weights = self.weights
        made = zip(item.view.node.outputs, option.plan.outputs, strict=True)
        held = sum(weights.working * weights.stage * bytes_of(*each, self.cost) for each in made)
        for one, bytes_ in saved(item, option, self.cost):
            held += (weights.stage if one.stored else weights.kept) * bytes_
        return held

    # -- how values are wanted -------------------------------------------------------------------

    def _usages(self, use: Use) -> Wanted:
        """The distinct usages of an operand, and which of them each option of the node has."""
        found = self.options[use.item]
        key = (id(found), use.operand)
        if key not in self._wanted:
            item = self.flow.items[use.item]
            distinct: dict[_Usage, int] = {}
            index = [
                distinct.setdefault(self._usage(item, option, use.operand), len(distinct))
                for option in found
            ]
            self._wanted[key] = tuple(distinct), np.array(index, np.intp)
        return self._wanted[key]

    def _usage(self, item: Item, option: Option, operand: int) -> _Usage:
        target = option.plan.inputs[operand]
        assert target is not None
        return self._one(_Usage(self._one(target), partial_atoms(item, option, operand)))

    def _one(self, thing: T) -> T:
        """Returns one object for all that are equal."""
        return cast(T, self._known.setdefault(thing, thing))

    def _kind(self, value: Value) -> int:
        """A number for what resharding a value depends on besides its size."""
        return 1 + self._reduces_later if value.stored else 0

    def _move(self, source: Sharding, usage: _Usage, value: Value) -> float:
        """Seconds to reshard a value for a reader, and its cotangent back."""
        key = (id(source), id(usage), value.itemsize, value.trained, self._kind(value))
        if key not in self._moves:
            seconds = self.cost.reshard(source, usage.target, value.itemsize)
            gathered = bool(source.split_atoms or source.partial)
            if seconds and gathered and value.stored and self.weights.parameters_only:
                seconds = _NEVER
            back = self._back(source.with_partial(()), usage, value)
            self._moves[key] = self.weights.communication * seconds + back
        return self._moves[key]

    def _back(self, to: Sharding, usage: _Usage, value: Value, *, met: bool = False) -> float:
        """Seconds to reshard a reader's share of a cotangent for the sum of all shares."""
        if not value.trained:
            return 0.0
        held = {*usage.target.split_atoms, *usage.target.partial}
        partials = [a for a in usage.partials if a not in held]
        there = usage.target.with_partial(partials)
        # The cotangent of a cast weight is reduced when the gradient of the weight is: later, in
        # 32 bits. But if the reader gathers the weight, its cotangent is scattered at once.
        late = value.stored and to.dims == usage.target.dims
        itemsize = max(value.itemsize, _GRADIENT) if late else value.itemsize
        seconds = self.cost.reshard(there, to, itemsize, met=met or late)
        if late and self._reduces_later:
            seconds /= self.weights.micro_batches
        return self.weights.communication * seconds

    # -- parameters and inputs -------------------------------------------------------------------

    def _source(self, value: Value) -> None:
        pin = self.pins.get(value.name)
        if pin is None and value.readers == 1:
            # It is laid out as its only reader wants it.
            use = value.uses[0]
            seconds, memory, layouts_of, index = self._read_once(value, use)
            self.sources[value.name] = use.item, layouts_of
            self._count(use.item, value.count * seconds[index], value.count * memory[index])
            return
        uses = tuple([(id(self.options[use.item]), use.operand) for use in value.uses])
        layouts = self._layouts(value, uses) if pin is None else [self._one(pin)]
        ways = self._ways(value, layouts)
        if not ways:
            return
        seconds, memory = self._stored(value, ways)
        self.variables.append(Variable(value.name, value.count * seconds, value.count * memory))
        here = len(self.variables) - 1
        self.sources[value.name] = here, tuple(way.target for way in ways)
        same = tuple(map(id, ways))
        for use, (found, operand) in zip(value.uses, uses, strict=True):
            key = ("source", same, found, operand, value.itemsize, value.trained)
            if key not in self._tables:
                usages, index = self._usages(use)
                table = np.array([[self._added(s, u, value) for u in usages] for s in ways])
                self._tables[key] = table[:, index]
            self._term((here, use.item), self._tables[key], use.count * value.count)

    def _ways(self, value: Value, layouts: Collection[Sharding]) -> list[_Usage]:
        """The shardings of a source, and the atoms over which its gradient is partial.

        The gradient may be partial until the end of the step over atoms over which the shares of
        all readers are partial.
        """
        partials = {frozenset[int]()}
        if value.parameter and value.trained:
            for use in value.uses:
                shares = {frozenset(u.partials) for u in self._usages(use)[0]}
                partials |= {a & b for a in shares for b in {*partials, *shares}}
        ordered = sorted(map(sorted, partials))
        found = (
            _Usage(layout, tuple([a for a in atoms if a not in layout.split_atoms]))
            for layout in layouts
            for atoms in ordered
        )
        return [self._one(usage) for usage in dict.fromkeys(found)]

    def _added(self, way: _Usage, usage: _Usage, value: Value) -> float:
        """Seconds to reshard a source for a reader, and its share of the gradient for the sum."""
        seconds = self.cost.reshard(way.target, usage.target, value.itemsize)
        back = self._back(way.target.with_partial(way.partials), usage, value)
        return self.weights.communication * seconds + back

    def _layouts(self, value: Value, uses: Sequence[tuple[int, int]]) -> list[Sharding]:
        """The distinct shardings in which readers want a value."""
        layouts: dict[Sharding, None] = {}
        for use in dict(zip(uses, value.uses, strict=True)).values():
            for option in self.options[use.item]:
                wanted_here = option.plan.inputs[use.operand]
                if wanted_here is not None:
                    layouts[self._one(wanted_here.with_partial(()))] = None
        return list(layouts)

    def _read_once(
        self, value: Value, use: Use
    ) -> tuple[Table, Table, tuple[Sharding, ...], NDArray[np.intp]]:
        found = self.options[use.item]
        reads = self._reads(value)
        hiding = self._computed(value) if self._hides else (0.0, 0.0)
        key = (
            *(id(found), use.operand, value.parameter, value.trained, value.itemsize, reads),
            hiding,
        )
        if key not in self._once:
            usages, index = self._usages(use)
            wanted = (o.plan.inputs[use.operand] for o in found)
            layouts = tuple(s.with_partial(()) for s in wanted if s is not None)
            self._once[key] = (*self._stored(value, usages), layouts, index)
        return self._once[key]

    def _stored(self, value: Value, usages: Sequence[_Usage]) -> tuple[Table, Table]:
        """Seconds and bytes of a parameter or input that is laid out as each usage wants it."""
        seconds, memory = np.zeros(len(usages)), np.zeros(len(usages))
        for i, usage in enumerate(usages if value.parameter else ()):
            size = self.cost.elements(usage.target) * value.itemsize
            memory[i] = size
            if value.trained:
                seconds[i], memory[i] = self._states(value, usage, size)
            memory[i] *= self.weights.stage
        return seconds, memory

    def _states(self, value: Value, usage: _Usage, size: int) -> tuple[float, float]:
        """Seconds and bytes of a trained parameter, its gradient and its moments."""
        cost, machine, parallel = self.cost, self.cost.machine, self.weights.parallel
        atoms = parallel.shared(size, usage.partials, cost.mesh)
        replicas = cost.mesh.count(atoms)
        part = size / replicas
        communication = self.weights.communication
        forward, backward = self._behind(value, atoms or usage.partials)
        each, once = 0.0, _UPDATE_PASSES * part / machine.bandwidth
        if atoms and parallel.level >= GRADIENTS:
            # The gradient is reduce-scattered over the group as soon as it is made.
            rest = tuple(a for a in usage.partials if a not in atoms)
            scattered = cost.collective("reduce_scatter", atoms, size - part) + cost.wait(atoms)
            gathered = cost.collective("all_gather", atoms, size - part)
            reduced = cost.collective("all_reduce", rest, 2 * (part - part / cost.mesh.count(rest)))
            once += communication * reduced
            if parallel.level >= PARAMETERS:
                first = sum(use.count for use in value.uses)
                gathered += cost.wait(atoms)
                each += communication * max(first * gathered - forward, 0.0)
                scattered += (self._reads(value) - first) * gathered
            else:
                once += communication * gathered
            each += communication * max(scattered - backward, 0.0)
        else:
            # All gradients are reduced together, so ranks wait for each other only once.
            reduced = self._back(usage.target.with_partial(()), usage, value, met=True)
            once += max(reduced - communication * backward, 0.0)
        seconds = each + once / self.weights.micro_batches
        return seconds, parallel.kept(size, replicas, MOMENTS)

    def _behind(self, value: Value, atoms: Sequence[int]) -> tuple[float, float]:
        """Seconds of collectives of a parameter that computing hides, forward and backward.

        No more is counted than what its readers compute at least. The schedule may hide it behind
        other nodes as well; but then it does not hide the collectives of theirs.
        """
        if not atoms or not self.cost.machine.link(self.cost.mesh, atoms).overlaps:
            return 0.0, 0.0
        return self._computed(value)

    def _computed(self, value: Value) -> tuple[float, float]:
        """The least seconds in which the readers of a value compute, forward and backward."""
        forward = backward = 0.0
        for use in value.uses:
            item, found = self.flow.items[use.item], self.options[use.item]
            trained = self.flow.trained[use.item]
            key = id(found), item.trained, trained
            if key not in self._least:
                self._least[key] = least_computing(item, trained, found, self.cost)
            first, later = self._least[key]
            forward, backward = forward + use.count * first, backward + use.count * later
        return forward, backward

    def _reads(self, value: Value) -> int:
        """How many nodes read a parameter, forward and backward.

        The backward of a product reads it for the cotangent of the other operand.
        """
        count = 0
        for use in value.uses:
            item = self.flow.items[use.item]
            adds = any(len(group) > 1 and use.operand in group for _, group in item.rule.linear)
            others = any(i != use.operand for i in self.flow.trained[use.item])
            count += use.count * (2 if others and not adds else 1)
        return count

    # -- values made by nodes --------------------------------------------------------------------

    def _made(self, value: Value, producer: int, output: int) -> None:
        if value.leaves:
            made = self._outputs(producer, output)
            reduced = [
                self.cost.reshard(
                    s, self.outputs.get(value.name, s.with_partial(())), value.itemsize
                )
                for s in made
            ]
            weight = value.count * self.weights.communication
            self._count(producer, weight * np.array(reduced))
        if value.readers == 1:
            use = value.uses[0]
            table = self._edge(value, producer, output, use)
            self._term((producer, use.item), table, value.count)
        elif value.uses:
            self._shared(value, producer, output)

    def _outputs(self, producer: int, output: int) -> tuple[Sharding, ...]:
        """The sharding of an output for each option of its node."""
        options = self.options[producer]
        key = (id(options), output)
        if key not in self._made_as:
            made = (o.plan.outputs[output] for o in options)
            self._made_as[key] = tuple(map(self._one, made))
        return self._made_as[key]

    def _edge(self, value: Value, producer: int, output: int, use: Use) -> Table:
        key = (
            id(self.options[producer]),
            output,
            id(self.options[use.item]),
            use.operand,
            value.trained,
            self._kind(value),
        )
        if key not in self._tables:
            usages, index = self._usages(use)
            made = self._outputs(producer, output)
            rows = {s: [self._move(s, u, value) for u in usages] for s in dict.fromkeys(made)}
            self._tables[key] = np.array([rows[s] for s in made])[:, index]
        return self._tables[key]

    def _shared(self, value: Value, producer: int, output: int) -> None:
        """One version of a value is kept for its readers; the others are resharded separately."""
        options, made = self.options[producer], self._outputs(producer, output)
        kept = self._kept(value)
        self.variables.append(Variable(value.name, np.zeros(len(kept)), np.zeros(len(kept))))
        here = len(self.variables) - 1
        costs = value.itemsize, value.trained, self._kind(value)
        of = (id(options), output, tuple(map(id, kept)), *costs)
        for use in value.uses:
            key = ("shared", of, id(self.options[use.item]), use.operand)
            if key not in self._tables:
                usages, index = self._usages(use)
                sources = list({id(s): s for s in made}.values())
                place = {id(s): i for i, s in enumerate(sources)}
                small = np.array(
                    [[[self._fetch(s, k, u, value) for u in usages] for k in kept] for s in sources]
                )
                rows = np.array([place[id(s)] for s in made], np.intp)
                self._tables[key] = small[rows][:, :, index]
            scope = (producer, here, use.item)
            self._term(scope, self._tables[key], use.count * value.count)
        fetched = ("kept", of)
        if fetched not in self._tables:
            self._tables[fetched] = np.array(
                [[0.0 if k is None else self._move(s, k, value) for k in kept] for s in made]
            )
        self._term((producer, here), self._tables[fetched], value.count)

    def _kept(self, value: Value) -> tuple[_Usage | None, ...]:
        """The versions that may be kept: none, or one that several readers want."""
        uses = tuple([(id(self.options[u.item]), u.operand, u.count) for u in value.uses])
        if uses not in self._versions:
            readers: dict[int, tuple[_Usage, int]] = {}
            for use in value.uses:
                for usage in self._usages(use)[0]:
                    before = readers.get(id(usage), (usage, 0))[1]
                    readers[id(usage)] = usage, before + use.count
            self._versions[uses] = (None, *(u for u, n in readers.values() if n > 1))
        return self._versions[uses]

    def _fetch(self, source: Sharding, kept: _Usage | None, usage: _Usage, value: Value) -> float:
        if usage is kept:
            return 0.0
        if kept is not None and usage.target is kept.target:
            return self._back(source.with_partial(()), usage, value)
        return self._move(source, usage, value)


def _diagonal(table: Table, pattern: tuple[int, ...]) -> Table:
    """The entries in which dims with the same number have the same index."""
    letters = "abcdefgh"
    dims = "".join(letters[i] for i in pattern)
    entries: Table = np.einsum(f"{dims}->{letters[: len(set(pattern))]}", table)
    return entries
