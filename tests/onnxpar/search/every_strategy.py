"""Every strategy of a small program, and its cost, to compare with a search.

The costs are added up directly from the cost model, as docs/design/0011 defines them, without the
tables of the search. In a forward program nothing is trained.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, product
from math import inf, prod
from typing import Generic, TypeVar

from onnxpar.core.machine import Link, Machine
from onnxpar.core.mesh import Mesh
from onnxpar.core.sharding import REDUCTIONS, Sharding
from onnxpar.cost.cost_model import CostModel, Work
from onnxpar.cost.optimizer_parallel import NOT_PARALLEL, OptimizerParallel
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.seeds import Seeds
from onnxpar.search.find_plan import Candidate, SearchSpec, find
from onnxpar.search.node_options import Option, options
from onnxpar.search.value_flow import Flow, Item, Value, flow
from onnxpar.search.workload import Workload

SIZES = {"batch": 96, "seq": 32}
STATES = {1: 2, 2: 1, 3: 1}
"""The number of tensors of a trained parameter by the level of optimizer parallel that shards them:
two moments, the gradient, the parameter. Several micro-batches have the sum of gradients, too."""
TOUCHED = 7
"""How often an update reads or writes a tensor of the parameter's size: it reads and writes the
parameter and two moments, and reads the gradient."""

T = TypeVar("T")
Reading = tuple[Sharding, frozenset[int]]
"""The sharding that a reader wants, and the atoms over which its cotangent is partial."""


@dataclass(frozen=True)
class Setting:
    """The circumstances for which a program is planned.

    Attributes:
        machine: The machine.
        mesh: The mesh.
        parallel: Optimizer parallel.
        micro_batches: Micro-batches of a step.
        pins: The shardings of inputs and parameters that the user fixed.
    """

    machine: Machine
    mesh: Mesh
    parallel: OptimizerParallel = NOT_PARALLEL
    micro_batches: int = 1
    pins: Mapping[str, Sharding] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A program, its setting, and every option of every node."""

    workload: Workload
    setting: Setting
    flow: Flow
    cost: CostModel
    found: tuple[tuple[Option, ...], ...]

    @staticmethod
    def of(workload: Workload, setting: Setting) -> "Case":
        """The case of a program."""
        cost = CostModel(setting.machine, setting.mesh, workload.program.env.table, SIZES)
        seen = flow(workload.program, list(workload.gradients))
        axes = [setting.mesh.axis_atoms(name) for name, _ in setting.mesh.axes]
        found = tuple(options(item, axes, cost) for item in seen.items)
        return Case(workload, setting, seen, cost, found)

    @property
    def count(self) -> int:
        """The number of strategies."""
        sources = (v for v in self.flow.values if v.producer is None)
        layouts = prod(len(self._layouts(v)) for v in sources if len(v.uses) > 1)
        return prod(map(len, self.found)) * layouts

    def search(
        self, memory: int | None = None, algorithm: str = "ilp", level: int = 2
    ) -> Candidate:
        """The result of a search."""
        s, p = self.setting, self.workload
        spec = SearchSpec(
            s.machine,
            algorithm,
            level,
            memory,
            SIZES,
            gap=0.0,
            parallel=s.parallel,
            micro_batches=s.micro_batches,
        )
        constants = p.program.graph.initializers
        seeds = Seeds(
            s.mesh,
            inputs={n: pin for n, pin in s.pins.items() if n not in constants},
            parameters={n: pin for n, pin in s.pins.items() if n in constants},
        )
        trained = list(p.gradients)
        free = not seeds.inputs
        return find(p.program, seeds, spec, named=True, free_inputs=free, trained=trained).chosen

    # -- every strategy --------------------------------------------------------------------------

    def everything(self) -> Iterator[tuple[float, float]]:
        """Seconds and bytes of every possible strategy."""
        computed = [
            [(self._seconds(item, option), self._kept(item, option)) for option in found]
            for item, found in zip(self.flow.items, self.found, strict=True)
        ]
        made = [_Known(self._around(v), self._moving(v)) for v in self.flow.values if v.producer]
        sources = [v for v in self.flow.values if v.producer is None]
        laid = [_Known(self._around(v), self._stored(v)) for v in sources]
        for choice in product(*(range(len(f)) for f in self.found)):
            seconds = held = 0.0
            for of_item, c in zip(computed, choice, strict=True):
                seconds, held = seconds + of_item[c][0], held + of_item[c][1]
            held += self._waiting(choice)
            seconds += sum(known(choice) for known in made)
            if seconds == inf:
                continue
            for ways in product(*(known(choice) for known in laid)):
                yield seconds + sum(w[0] for w in ways), held + sum(w[1] for w in ways)

    def _around(self, value: Value) -> tuple[int, ...]:
        """The nodes on whose options the cost of a value depends."""
        readers = dict.fromkeys(use.item for use in value.uses)
        return (*readers, *(value.producer or ())[:1])

    # -- nodes -----------------------------------------------------------------------------------

    def _seconds(self, item: Item, option: Option) -> float:
        """Seconds of a node, forward and backward."""
        work = self.cost.node(item.rule, item.view, option.plan, item.cost)
        masking = self._masking(item, option)
        if not item.trained:
            return work.seconds + work.special + masking
        filling = self.cost.filling(item.rule, item.view, option.plan, self._varying(item))
        passes = 1 + self._backward(item, work)
        return passes * work.seconds + 2 * work.special + filling + masking

    def _backward(self, item: Item, work: Work) -> int:
        """How often the backward does the work of a node."""
        if not item.trained:
            return 0
        varying = self._varying(item)
        # The backward of a product (more arithmetic than bytes) has a product for each operand that
        # varies; the backward of another node takes as long as its forward.
        multiplied = [
            i
            for i, operand in enumerate(item.rule.inputs)
            if any(item.rule.kinds[f] in REDUCTIONS for names in operand.dims for f in names)
        ]
        backward = 1
        if work.flops > 2 * work.traffic and all(i in varying for i in multiplied):
            backward = 2
        return backward

    def _masking(self, item: Item, option: Option) -> float:
        """Seconds to set the padding that a reduction reads, in each operand that a node made."""
        seconds = 0.0
        plan = option.plan
        for i, value in enumerate(item.view.node.inputs):
            sharding = plan.inputs[i] if i < len(plan.inputs) else None
            if value is None or value.producer() is None or sharding is None:
                continue
            reduced = [
                parts
                for name, parts in plan.factors.items()
                if item.rule.kinds[name] in REDUCTIONS
                and any(name in names for names in item.rule.inputs[i].dims)
            ]
            if not all(map(self.cost.is_even, reduced)) and value.dtype is not None:
                seconds += self.cost.copying(self.cost.elements(sharding) * value.dtype.itemsize)
        return seconds

    def _varying(self, item: Item) -> list[int]:
        trained = {v.name for v in self.flow.values if v.trained}
        return [
            i for i, v in enumerate(item.view.node.inputs) if v is not None and v.name in trained
        ]

    def _kept(self, item: Item, option: Option) -> float:
        """A quarter of the bytes of the results."""
        if not item.trained:
            return 0.0
        pairs = zip(option.plan.outputs, item.view.node.outputs, strict=True)
        return sum(self.cost.elements(s) * v.dtype.itemsize for s, v in pairs if v.dtype) / 4

    @cached_property
    def _saved(self) -> list[list[tuple[int, bool, int, int]]]:
        """For each value that backward nodes read: its places at their forward nodes."""
        places = {
            (item.name, v.name): (number, made, index, v.dtype.itemsize)
            for number, item in enumerate(self.flow.items)
            for made, values in enumerate((item.view.node.inputs, item.view.node.outputs))
            for index, v in enumerate(values)
            if v is not None and v.dtype is not None
        }
        graph = self.workload.program.graph
        readers: dict[str, set[str]] = {}
        for node in graph:
            of = node.metadata_props.get(GRADIENT_OF)
            for v in node.inputs if of is not None else ():
                if v is not None and v.name not in graph.initializers and (of, v.name) in places:
                    readers.setdefault(v.name, set()).add(of)
        return [[places[of, name] for of in sorted(found)] for name, found in readers.items()]

    def _waiting(self, choice: Sequence[int]) -> float:
        """Bytes of values that the backward reads; the mean over the nodes that have a value."""
        total = 0.0
        for places in self._saved:
            for number, made, index, itemsize in places:
                plan = self.found[number][choice[number]].plan
                sharding = (plan.outputs if made else plan.inputs)[index]
                if sharding is not None:
                    total += self.cost.elements(sharding) * itemsize / len(places)
        return total

    # -- values ----------------------------------------------------------------------------------

    def _readings(self, value: Value, choice: Sequence[int]) -> list[Reading]:
        return [self._reading(use.item, use.operand, choice[use.item]) for use in value.uses]

    def _reading(self, item: int, operand: int, option: int) -> Reading:
        """A cotangent is partial over atoms that shard the results but not the operand."""
        plan = self.found[item][option].plan
        wanted = plan.inputs[operand]
        assert wanted is not None
        there = {*wanted.split_atoms, *wanted.partial}
        partials = {atom for out in plan.outputs for atom in out.split_atoms} - there
        return wanted, frozenset(partials)

    def _back(self, reading: Reading, to: Sharding, value: Value) -> float:
        """Seconds to reshard a reader's share of the cotangent for the sum."""
        if not value.trained:
            return 0.0
        target, partials = reading
        share = target.with_partial(sorted(partials))
        weight = value.name in self._weights and target.dims == to.dims
        itemsize = max(value.itemsize, 4) if weight else value.itemsize
        seconds = self.cost.reshard(share, to, itemsize, met=weight)
        if not weight:
            return seconds
        # A node that computes a weight from a parameter passes a partial cotangent on.
        s = self.setting
        each_time = s.parallel.level >= 2
        return seconds / (1 if each_time else s.micro_batches)

    @cached_property
    def _weights(self) -> set[str]:
        """Names of values that nodes compute from parameters alone."""
        graph = self.workload.program.graph
        parameters, found = set(graph.initializers), set[str]()
        for item in self.flow.items:
            operands = zip(item.view.node.inputs, item.rule.inputs, strict=False)
            names = {v.name for v, operand in operands if v is not None and not operand.mode}
            if names and names <= parameters | found:
                found.update(v.name or "" for v in item.view.node.outputs)
        return found

    def _moving(self, value: Value) -> Callable[[Sequence[int]], float]:
        """Seconds to reshard a value for its readers, which may share one version, and back.

        The shares of the cotangent of readers that want the same version are added up before.
        """
        assert value.producer is not None
        maker, output = value.producer

        def seconds(choice: Sequence[int]) -> float:
            source = self.found[maker][choice[maker]].plan.outputs[output]
            reduced = source.with_partial(())
            readings = self._readings(value, choice)

            def back(reading: Reading) -> float:
                return self._back(reading, reduced, value)

            def brought(reading: Reading) -> float:
                return self.cost.reshard(source, reading[0], value.itemsize) + back(reading)

            def beside(reading: Reading, kept: Reading) -> float:
                if reading == kept:
                    return 0.0
                return back(reading) if reading[0] == kept[0] else brought(reading)

            leaving = self.cost.reshard(source, reduced, value.itemsize) if value.leaves else 0.0
            each = sum(map(brought, readings))
            shared = (brought(k) + sum(beside(r, k) for r in readings) for k in set(readings))
            return leaving + min((each, *shared))

        return seconds

    def _layouts(self, value: Value) -> tuple[Sharding, ...]:
        """The possible shardings of an input or parameter: the user's, or those of readers."""
        if value.name in self.setting.pins:
            return (self.setting.pins[value.name],)
        wanted = (
            self._reading(use.item, use.operand, c)[0].with_partial(())
            for use in value.uses
            for c in range(len(self.found[use.item]))
        )
        return tuple(dict.fromkeys(wanted))

    def _stored(self, value: Value) -> Callable[[Sequence[int]], list[tuple[float, float]]]:
        """Seconds and bytes of an input or a parameter, for each possible sharding.

        With one reader, it has the sharding that the reader wants. With several, its gradient may
        stay partial until the end of the step over atoms over which all shares are partial.
        """

        def ways(choice: Sequence[int]) -> list[tuple[float, float]]:
            readings = self._readings(value, choice)
            layouts = self._layouts(value)
            if len(readings) == 1 and value.name not in self.setting.pins:
                layouts = (readings[0][0].with_partial(()),)
            return [
                way
                for layout in layouts
                for partials in self._common(layout, readings)
                for way in [self._laid(value, layout, partials, readings)]
            ]

        return ways

    def _common(self, layout: Sharding, readings: Sequence[Reading]) -> list[frozenset[int]]:
        """The atoms over which a gradient may stay partial: the common ones, or some of them."""
        most = frozenset.intersection(*(partials for _, partials in readings))
        most -= {*layout.split_atoms}
        if len(readings) == 1:
            return [most]
        mesh = self.setting.mesh
        axes = [set(mesh.axis_atoms(name)) for name, _ in mesh.axes]
        fewer = (
            most - set().union(*gone)
            for n in range(len(axes) + 1)
            for gone in combinations(axes, n)
        )
        return list(dict.fromkeys(fewer))

    def _laid(
        self,
        value: Value,
        layout: Sharding,
        partials: frozenset[int],
        readings: Sequence[Reading],
    ) -> tuple[float, float]:
        """Seconds and bytes of a value with this layout, including states if it is trained."""
        seconds = sum(self.cost.reshard(layout, r[0], value.itemsize) for r in readings)
        size = float(self.cost.elements(layout) * value.itemsize)
        if not value.parameter:
            return seconds, 0.0
        if not value.trained:
            return seconds, size
        there = layout.with_partial(sorted(partials))
        seconds += sum(self._back(reading, there, value) for reading in readings)
        s, cost = self.setting, self.cost
        shared = tuple(sorted(partials))
        if not s.parallel.level or size < s.parallel.threshold:
            shared = ()
        part = size / cost.mesh.count(shared)
        counts = {**STATES, 2: 2 if s.micro_batches > 1 else STATES[2]}
        held = sum(n * (part if s.parallel.level >= level else size) for level, n in counts.items())
        forward, backward = self._behind(value, shared or tuple(partials))
        once = TOUCHED * part / s.machine.bandwidth
        if s.parallel.level < 2 or not shared:
            reduced = cost.reshard(there, layout, value.itemsize, met=True)
            once += max(reduced - backward, 0.0)
            return seconds + once / s.micro_batches, held
        gathered = cost.collective("all_gather", shared, size - part)
        scattered = cost.collective("reduce_scatter", shared, size - part) + cost.wait(shared)
        if s.parallel.level < 3:
            once += gathered
        else:
            gathered += cost.wait(shared)
            first = sum(use.count for use in value.uses)
            seconds += max(first * gathered - forward, 0.0)
            scattered += (self._gathers(value) - first) * gathered
        seconds += max(scattered - backward, 0.0)
        return seconds + once / s.micro_batches, held

    def _behind(self, value: Value, atoms: tuple[int, ...]) -> tuple[float, float]:
        """What the nodes that read a parameter compute at least, where links overlap."""
        machine, cost = self.setting.machine, self.cost
        if not atoms or not machine.link(cost.mesh, atoms).overlaps:
            return 0.0, 0.0
        forward = backward = 0.0
        for use in value.uses:
            item = self.flow.items[use.item]
            works = [
                cost.node(item.rule, item.view, option.plan, item.cost)
                for option in self.found[use.item]
            ]
            forward += use.count * min(work.seconds for work in works)
            backward += use.count * min(self._backward(item, w) * w.seconds for w in works)
        return forward, backward

    def _gathers(self, value: Value) -> int:
        """How many nodes read a parameter: forward, and backward where it is multiplied."""
        count = 0
        for use in value.uses:
            item = self.flow.items[use.item]
            count += 1
            added = any(use.operand in group and len(group) > 1 for _, group in item.rule.linear)
            if not added and set(self._varying(item)) - {use.operand}:
                count += 1
        return count


@dataclass
class _Known(Generic[T]):
    """A function of the options of a few nodes that remembers its results."""

    nodes: tuple[int, ...]
    ask: Callable[[Sequence[int]], T]
    answers: dict[tuple[int, ...], T] = field(default_factory=dict)

    def __call__(self, choice: Sequence[int]) -> T:
        key = tuple([choice[n] for n in self.nodes])
        if key not in self.answers:
            self.answers[key] = self.ask(choice)
        return self.answers[key]


def random_machine(draw: random.Random) -> Machine:
    """A machine with links between very fast and very slow."""
    link = Link(
        0, 10 ** draw.uniform(7, 10), 10 ** draw.uniform(-9, -6), 10 ** draw.uniform(-9, -6)
    )
    rate = 10 ** draw.uniform(8, 10)
    return Machine("random", {"float32": rate, "float64": rate / 2}, 1e9, 1 << 40, 1e-9, (link,))


def random_mesh(draw: random.Random) -> Mesh:
    """One axis or two."""
    return Mesh.of(draw.choice([{"x": 2}, {"x": 4}, {"x": 3}, {"x": 2, "y": 2}]))
