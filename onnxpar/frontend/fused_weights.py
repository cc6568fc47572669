"""Divides fused weights: the weights of several products that a model stores side by side.

Exporters write one product with the weights of queries, keys and values side by side, and then
nodes that take the columns of each from the result. If the parts differ in size, a shard of the
result is no shard of the parts. Here the graph gets a product for each part: every node between the
weights and the nodes that take the parts is copied for each part, and every weight becomes one
initializer for each part, whose metadata says which part of which tensor it is.

Which nodes may be copied follows from their rules: the dim that has the parts must be a parallel
factor (`onnxpar.ops.parts` has what else changes). Equal parts that one Split takes stay together,
since the rule of Split shards them as they are.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxpar.core.rule import PARALLEL
from onnxpar.core.symbols import Dim
from onnxpar.facts.program import Program
from onnxpar.graph.builder import ir_shape
from onnxpar.graph.metadata_keys import PART_OF, PART_RESULT
from onnxpar.graph.names import Names, names_of
from onnxpar.graph.new_nodes import constant, twin
from onnxpar.graph.plan import factor_sizes
from onnxpar.graph.shapes import shapes
from onnxpar.graph.tensor_parts import make_part
from onnxpar.ops.parts import PartForm, Taken, taking


class _Cut(NamedTuple):
    """Where a value is divided: a dim, and its bounds from 0 to its size."""

    axis: int
    bounds: tuple[int, ...]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    def range(self, part: int) -> tuple[int, int]:
        return self.bounds[part], self.bounds[part + 1]


@dataclass
class _Region:
    """The values and nodes that are divided together.

    Attributes:
        cuts: Where each value is divided.
        roles: For each node that is copied, the operands that are divided.
        taken: For each value that is a range of another one, that value and the range.
    """

    cuts: dict[ir.Value, _Cut] = field(default_factory=dict)
    roles: dict[ir.Node, tuple[int, ...]] = field(default_factory=dict)
    taken: dict[ir.Value, tuple[ir.Value, Taken]] = field(default_factory=dict)


class _Refused(Exception):
    """The values cannot be divided."""


def divide_fused_weights(program: Program) -> Program:
    """Returns the program with a product for each part of its fused weights.

    Args:
        program: The program; its model is changed.
    """
    return FusedWeights(program).divide()


class FusedWeights:
    """The fused weights of a program.

    Args:
        program: The program.
        kept: Names of tensors that are not divided.
    """

    def __init__(self, program: Program, kept: Collection[str] = ()) -> None:
        """Finds them; changes nothing."""
        self._finder = _Finder(program)
        whole = {program.graph.initializers[name] for name in kept}
        self._regions = [r for r in self._finder.regions() if whole.isdisjoint(r.cuts)]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._regions)

    def divide(self) -> Program:
        """Returns the program with a product for each part; the model of the program is changed."""
        program = self._finder.program
        if not self._regions:
            return program
        names = names_of(program.graph)
        for region in self._regions:
            _Divider(self._finder, region, names).divide()
        model = common.RemoveUnusedNodesPass()(program.model).model
        return Program.of(model, shapes(model, program.env.table), program.registry)


class _Finder:
    """Finds the values that have parts, and follows them to the weights."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.outputs = set(program.graph.outputs)

    def regions(self) -> Iterator[_Region]:
        """Yields what can be divided; regions have no value in common."""
        done: set[ir.Value] = set()
        # The nodes that take parts of parts come last.
        for node in reversed(list(self.program.graph)):
            value = node.inputs[0] if node.inputs else None
            if value is None or value in done or value.producer() is None:
                continue
            takers = self.takers(value)
            axes = {taken.axis for taken in takers.values()}
            if len(axes) != 1:
                continue
            region = _Region()
            try:
                if self.stays(value, takers):
                    continue
                self.follow(region, value, self.cut(value, axes.pop(), ()))
                self.check(region)
            except _Refused:
                continue
            if done.isdisjoint(region.cuts):
                done.update(region.cuts)
                yield region

    def takers(self, value: ir.Value) -> dict[ir.Value, Taken]:
        """The results that are ranges of a value, and these ranges."""
        found = {}
        for node, index in value.uses():
            if index == 0 and node.graph is self.program.graph:
                for result, taken in zip(node.outputs, self.takes(node), strict=False):
                    if result.uses() or result in self.outputs:
                        found[result] = taken
        return found

    def takes(self, node: ir.Node) -> Sequence[Taken]:
        name = node.name or ""
        definition = self.program.rules.ops.get(name)
        if definition is None or definition.takes is None:
            return ()
        return definition.takes(self.program.rules.views[name]) or ()

    def stays(self, value: ir.Value, takers: dict[ir.Value, Taken]) -> bool:
        """Whether rules shard the parts as they are: equal ones, of one Split or of one index."""
        ranges = {(taken.start, taken.stop) for taken in takers.values()}
        sizes = {stop - start for start, stop in ranges}
        axes = {taken.axis for taken in takers.values()}
        whole = [self.shape(value)[axis] for axis in axes]
        makers = {result.producer() for result in takers}
        equal = len(sizes) == 1 and whole == [sum(stop - start for start, stop in ranges)]
        return equal and (sizes == {1} or len(makers) == 1)

    def cut(self, value: ir.Value, axis: int, more: Sequence[int]) -> _Cut:
        """Where a value is divided so that all ranges that are taken from it are parts."""
        size = self.shape(value)[axis]
        if not isinstance(size, int):
            raise _Refused
        bounds = {0, size, *more}
        for taken in self.takers(value).values():
            if taken.axis == axis:
                bounds.update((taken.start, taken.stop))
        if len(bounds) < 3:
            raise _Refused
        return _Cut(axis, tuple(sorted(bounds)))

    def shape(self, value: ir.Value) -> tuple[Dim, ...]:
        found = self.program.env.shapes.get(value.name or "")
        if found is None:
            raise _Refused
        return found

    def follow(self, region: _Region, value: ir.Value, cut: _Cut) -> None:
        """Divides a value, and all from which it is computed, down to the weights.

        Raises:
            _Refused: It depends on something that cannot be divided.
        """
        waiting = [(value, cut)]
        while waiting:
            value, cut = waiting.pop()
            if value in region.cuts:
                if region.cuts[value] != cut:
                    raise _Refused
                continue
            region.cuts[value] = cut
            if value in self.outputs or value.is_graph_input():
                raise _Refused
            node = value.producer()
            if node is None:
                if value.const_value is None:
                    raise _Refused
                continue
            ranges = dict(zip(node.outputs, self.takes(node), strict=False))
            taken = ranges.get(value)
            source = node.inputs[0] if node.inputs else None
            if taken is not None and source is not None and taken.axis == cut.axis:
                if taken.squeezed:
                    raise _Refused
                inside = [taken.start + bound for bound in cut.bounds]
                region.taken[value] = (source, taken)
                waiting.append((source, self.cut(source, taken.axis, inside)))
                continue
            operands = self.operands(node, value, cut)
            region.roles[node] = tuple(index for index, _ in operands)
            waiting += [(_operand(node, index), at) for index, at in operands]

    def operands(self, node: ir.Node, value: ir.Value, cut: _Cut) -> list[tuple[int, _Cut]]:
        """The operands of a node that have the parts of its result, and where."""
        name = node.name or ""
        definition, rule = self.program.rules.ops.get(name), self.program.rules.by_node[name]
        used = [v for v in node.outputs if v.uses() or v in self.outputs]
        if definition is None or definition.on_part is None or used != [value]:
            raise _Refused
        result = rule.outputs[node.outputs.index(value)]
        factors = result.dims[cut.axis] if not result.mode else ()
        if not factors or rule.kinds[factors[0]] != PARALLEL:
            raise _Refused
        sizes = factor_sizes(rule, self.program.rules.views[name])
        inner = _count([sizes[f] for f in factors[1:]])
        if any(bound % inner for bound in cut.bounds):
            raise _Refused
        bounds = [bound // inner for bound in cut.bounds]
        found = []
        for index, operand in enumerate(rule.inputs):
            for axis, names in enumerate(operand.dims):
                if factors[0] in names:
                    if names[0] != factors[0]:
                        raise _Refused
                    size = _count([sizes[f] for f in names[1:]])
                    found.append((index, _Cut(axis, tuple(bound * size for bound in bounds))))
        if len({index for index, _ in found}) != len(found) or not found:
            raise _Refused
        for part in range(cut.parts):
            if self.form(node, value, cut, found, part) is None:
                raise _Refused
        return found

    def form(
        self,
        node: ir.Node,
        value: ir.Value,
        cut: _Cut,
        operands: Sequence[tuple[int, _Cut]],
        part: int,
    ) -> PartForm | None:
        """How a node computes a part."""
        name = node.name or ""
        definition = self.program.rules.ops[name]
        assert definition.on_part is not None
        given: list[Sequence[Dim]] = [
            self.program.env.shapes.get(v.name or "", ()) if v is not None else ()
            for v in node.inputs
        ]
        for index, at in operands:
            given[index] = part_shape(given[index], at, part)
        view = self.program.rules.views[name]
        return definition.on_part(view, given, part_shape(self.shape(value), cut, part))

    def check(self, region: _Region) -> None:
        """Raises _Refused unless all readers of the values have the parts too, and read all."""
        known: dict[ir.Value, set[int]] = {}
        wide = False
        for value, cut in region.cuts.items():
            read = self.read(region, value, known)
            if value.producer() is None:
                wide = wide or _is_wide(self.shape(value), cut.axis)
                if read != set(range(cut.parts)) or not _is_storable(value):
                    raise _Refused
        if not wide:
            raise _Refused

    def read(self, region: _Region, value: ir.Value, known: dict[ir.Value, set[int]]) -> set[int]:
        """The parts of a value that are read."""
        if value in known:
            return known[value]
        cut = region.cuts[value]
        found = known[value] = set()
        takers = self.takers(value)
        for node, index in value.uses():
            if index in region.roles.get(node, ()):
                for result in node.outputs:
                    if result in region.cuts:
                        found |= self.read(region, result, known)
                continue
            results = [v for v in node.outputs if v in takers]
            if index or not results:
                raise _Refused
            for result in results:
                taken = takers[result]
                inside = [b for b in cut.bounds if taken.start <= b <= taken.stop]
                first = cut.bounds.index(inside[0])
                if taken.axis != cut.axis or (len(inside) > 2) != (result in region.taken):
                    raise _Refused
                if result in region.taken:
                    found |= {first + part for part in self.read(region, result, known)}
                else:
                    found.add(first)
        return found


@dataclass
class _Divider:
    """Divides one region."""

    finder: _Finder
    region: _Region
    names: Names
    parts: dict[ir.Value, list[ir.Value]] = field(default_factory=dict)

    def divide(self) -> None:
        """Makes the parts, weights first, and lets the readers take them."""
        graph = self.finder.program.graph
        for value, cut in self.region.cuts.items():
            if value.producer() is None:
                made = [
                    make_part(value, cut.axis, *cut.range(i), self.named(value, i))
                    for i in range(cut.parts)
                ]
                for part in made:
                    graph.register_initializer(part)
                self.parts[value] = made
        for node in list(graph):
            if node in self.region.roles:
                self.copy(node)
            else:
                self.take(node)

    def named(self, value: ir.Value, part: int) -> str:
        return self.names.fresh(f"{value.name}.{part}")

    def copy(self, node: ir.Node) -> None:
        """Copies a node for each part of its result."""
        (value,) = (v for v in node.outputs if v in self.region.cuts)
        cut, made = self.region.cuts[value], []
        graph, roles = self.finder.program.graph, self.region.roles[node]
        operands = [(i, self.region.cuts[_operand(node, i)]) for i in roles]
        for part in range(cut.parts):
            form = self.finder.form(node, value, cut, operands, part)
            assert form is not None
            inputs = list(node.inputs)
            for index, _ in operands:
                inputs[index] = self.parts[_operand(node, index)][part]
            name = self.names.fresh(f"{node.name}.{part}")
            for index, array in form.operands.items():
                fixed = inputs[index] = constant(self.names.fresh(f"{name}.operand"), array)
                graph.register_initializer(fixed)
            copy = twin(node, inputs)
            copy.name = name
            copy.metadata_props[PART_OF] = node.name or ""
            for key, content in form.attributes.items():
                copy.attributes.add(ir.AttrInt64(key, content))
            for index, result in enumerate(copy.outputs):
                result.name = self.named(node.outputs[index], part) if result.name else ""
            result = copy.outputs[node.outputs.index(value)]
            result.shape = ir_shape(part_shape(self.finder.shape(value), cut, part))
            made.append(result)
            graph.insert_before(node, copy)
        self.parts[value] = made

    def take(self, node: ir.Node) -> None:
        """Lets a node that takes ranges of a divided value take them from the parts."""
        source = node.inputs[0] if node.inputs else None
        if source is None or source not in self.region.cuts:
            return
        bounds = self.region.cuts[source].bounds
        graph = self.finder.program.graph
        ranges = self.finder.takes(node)
        for index, (result, taken) in enumerate(zip(node.outputs, ranges, strict=False)):
            first, last = bounds.index(taken.start), bounds.index(taken.stop)
            if result in self.region.taken:
                self.parts[result] = self.parts[source][first:last]
            elif result.uses() or result in self.finder.outputs:
                own = len(node.outputs) == 1
                name = (node.name or "") if own else self.names.fresh(f"{node.name}.{first}")
                made, axes = taking(self.parts[source][first], taken, result, name)
                made.metadata_props.update(node.metadata_props)
                made.metadata_props[PART_OF] = node.name or ""
                made.metadata_props[PART_RESULT] = str(index)
                if axes in made.inputs:
                    axes.name = self.names.fresh(axes.name or "")
                    graph.register_initializer(axes)
                graph.insert_before(node, made)
                result.replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
                result.name = f"{result.name}.replaced"


def _operand(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def part_shape(shape: Sequence[Dim], cut: _Cut, part: int) -> tuple[Dim, ...]:
    """Returns the shape of one part."""
    start, stop = cut.range(part)
    return (*shape[: cut.axis], stop - start, *shape[cut.axis + 1 :])


def _count(sizes: Sequence[Dim]) -> int:
    """The product of sizes, which must be numbers."""
    if not all(isinstance(size, int) for size in sizes):
        raise _Refused
    return prod(int(size) for size in sizes)


def _is_wide(shape: Sequence[Dim], axis: int) -> bool:
    """Whether a weight has no fewer elements in a dim than in any other.

    If a product has fewer results than operands, the operand is the one to shard. The results are
    then partial sums, which are smaller, and one reduction for all parts is better than many.
    """
    sizes = [int(size) for size in shape]
    return len(sizes) > 1 and sizes[axis] == max(sizes)


def _is_storable(value: ir.Value) -> bool:
    """Whether parts of a tensor can be stored one by one: packed elements cannot."""
    return value.dtype is not None and value.dtype.bitwidth >= 8
