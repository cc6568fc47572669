"""A training program with fewer of its equal layers, whose plans say how all layers are sharded.

Propagation decides node by node, and equal layers in equal surroundings are sharded equally. So a
plan of a program with six layers is one of a program with a hundred, if the strategies of all
layers are equal, and if the layers in the middle of the six have equal plans: what propagation
knows when it enters the next layer is then what it knew when it entered the one before.

The nodes of a training program are a row in which the layers repeat twice:

    before | layer 0 … layer n-1 | between | layer n-1 … layer 0 backward | after

Of both repetitions the first and the last layers are kept. A node that read a value of a layer that
is left out reads that of the layer that is now in the same place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from onnxpar.facts.layers import find_repetitions, repetitions, spans
from onnxpar.facts.program import Program
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.new_nodes import twin
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import Plan
from onnxpar.graph.seeds import SPREAD, Seeds
from onnxpar.ops.node_rules import Rules, completed
from onnxpar.propagation.propagate import Alike, alike, propagate

_KEPT = 3
"""Layers that are kept at each end of a repetition."""
_SHARED = 3
"""A value with readers in more layers than this belongs to none of them: it is a constant, a mask
or a position. A value of one layer is read there, in the next one, and in the backward of one."""


@dataclass(frozen=True)
class ShortProgram:
    """A program with fewer layers, and what stands for what.

    Attributes:
        program: The program; its nodes and values have the names that they have in the long one.
        links: For each of its cotangents its primals, by name.
        nodes: For each node of the long program, the node that has its plan.
        values: For each value of the long program, the value that has its sharding.
        inside: Pairs of nodes in the middle that must have equal plans.
        known: The result of `alike`.
    """

    program: Program
    links: Mapping[str, tuple[str, ...]]
    nodes: Mapping[str, str]
    values: Mapping[str, str]
    inside: Sequence[tuple[str, str]]
    known: Alike

    def plan(self, seeds: Seeds) -> Plan | None:
        """Returns the plan of the long program that follows from seeds.

        Returns:
            None if layers are not sharded equally: then only the long program has the plan.
        """
        if seeds.rest == SPREAD or seeds.plans or seeds.outputs or not self._alike(seeds):
            return None
        mine = replace(
            seeds,
            nodes={name: seed for name, seed in seeds.nodes.items() if self.nodes[name] == name},
            parameters={n: s for n, s in seeds.parameters.items() if self.values[n] == n},
        )
        short = propagate(self.program, mine, self.links, self.known)
        plans, values = short.nodes, self.values
        if any(plans[a] != plans[b] for a, b in self.inside):
            return None
        return replace(
            short,
            nodes={name: plans[other] for name, other in self.nodes.items()},
            parameters={n: short.parameters[v] for n, v in values.items() if v in short.parameters},
            outputs={n: short.outputs[v] for n, v in values.items() if v in short.outputs},
            resharded={n: short.resharded[v] for n, v in values.items() if v in short.resharded},
        )

    def _alike(self, seeds: Seeds) -> bool:
        """Whether the strategies of all layers are equal."""
        nodes, parameters = seeds.nodes, seeds.parameters
        for name, other in self.nodes.items():
            one, two = nodes.get(name), nodes.get(other)
            if one is None or two is None:
                if one is not two:
                    return False
            elif one is not two and replace(one, node=other, where=two.where) != two:
                return False
        return all(parameters.get(n) == parameters.get(v) for n, v in self.values.items())


def shorten(
    program: Program, links: Mapping[str, tuple[str, ...]], known: Alike
) -> ShortProgram | None:
    """Returns a program with fewer layers.

    Args:
        program: A training program; it is not changed.
        links: For each cotangent its primals, by name; none for a forward program.
        known: The result of `alike`.

    Returns:
        None if there are fewer than eight equal layers, or they do not repeat once forward and once
        backward; if a node has a body; or if layers are connected in another way than one after the
        other, or share weights with some of the others.
    """
    if not links:
        return None
    try:
        return _Shortening(program, links, known).run()
    except _DifferentLayersError:
        return None


class _DifferentLayersError(Exception):
    """A layer is not connected as the one before it."""


@dataclass(frozen=True)
class _Place:
    """Node `node` of layer `layer` of run `run`."""

    run: int
    layer: int
    node: int


@dataclass(frozen=True)
class _Home:
    """What a value belongs to: a node, whose result `index` it is, or operand."""

    place: _Place
    index: int
    made: bool


class _Shortening:
    def __init__(
        self, program: Program, links: Mapping[str, tuple[str, ...]], known: Alike
    ) -> None:
        self.program, self.links = program, links
        self.row = list(program.graph)
        kinds = [known.kinds[node.name or ""] for node in self.row]
        self.runs = _runs(kinds, spans(self.row))
        self.left_out = min(map(len, self.runs), default=0) - 2 * _KEPT
        self.number = {node.name or "": i for i, node in enumerate(self.row)}
        self.places = dict(self._every_place())
        self.homes: dict[str, _Home | None] = {}

    def run(self) -> ShortProgram | None:
        if len(self.runs) != 2 or any(map(bodies_of, self.row)):
            return None
        short, links = self._program()
        nodes = {
            node.name or "": self.row[self._stands_for(i)].name or ""
            for i, node in enumerate(self.row)
        }
        return ShortProgram(short, links, nodes, self._values(), list(self._inside()), alike(short))

    # -- places ----------------------------------------------------------------------------------

    def _every_place(self) -> Iterator[tuple[int, _Place]]:
        for number, run in enumerate(self.runs):
            for layer, first in enumerate(run):
                for node in range(run.step):
                    yield first + node, _Place(number, layer, node)

    def _node(self, place: _Place) -> int:
        """The number of a node in the row."""
        return self.runs[place.run][place.layer] + place.node

    def _is_left_out(self, place: _Place) -> bool:
        return _KEPT <= place.layer < _KEPT + self.left_out

    def _stands_for(self, number: int) -> int:
        """The node that has the plan of a node."""
        place = self.places.get(number)
        if place is None or not self._is_left_out(place):
            return number
        return self._node(replace(place, layer=_KEPT - 1))

    def _short(self, layer: int) -> int:
        """The number of a layer in the short program."""
        return layer if layer < _KEPT else layer - self.left_out

    def _moved(self, place: _Place, reader: _Place | None) -> _Place:
        """The place that takes the role that another place has for its reader.

        Raises:
            _DifferentLayersError: There is none.
        """
        if reader is None:
            if self._is_left_out(place):
                raise _DifferentLayersError
            return place
        # Forward layers have ascending numbers, backward layers have descending ones.
        if place.run == reader.run:
            layer = self._short(reader.layer) - (reader.layer - place.layer)
        else:
            layer = reader.layer + place.layer - self.left_out - self._short(reader.layer)
        if not 0 <= layer < len(self.runs[place.run]) - self.left_out:
            raise _DifferentLayersError
        return replace(place, layer=layer if layer < _KEPT else layer + self.left_out)

    # -- values ----------------------------------------------------------------------------------

    def _home(self, value: ir.Value) -> _Home | None:
        """What a value belongs to; None if it belongs to no layer."""
        name = value.name or ""
        if name not in self.homes:
            self.homes[name] = self._find_home(value)
        return self.homes[name]

    def _find_home(self, value: ir.Value) -> _Home | None:
        readers = sorted((self.number[use.node.name or ""], use.idx) for use in value.uses())
        layers = {(p.run, p.layer) for n, _ in readers if (p := self.places.get(n)) is not None}
        maker, index = value.producer(), value.index()
        if len(layers) > _SHARED or value.is_graph_input():
            place = None
        elif maker is not None and index is not None:
            place = self.places.get(self.number[maker.name or ""])
            return None if place is None else _Home(place, index, True)
        else:
            place = self.places.get(readers[0][0]) if readers else None
        return None if place is None else _Home(place, readers[0][1], False)

    def _at(self, home: _Home) -> ir.Value:
        node = self.row[self._node(home.place)]
        value = node.outputs[home.index] if home.made else node.inputs[home.index]
        if value is None:
            raise _DifferentLayersError
        return value

    def _instead(self, value: ir.Value, reader: _Place | None) -> ir.Value:
        """The value that a node reads in the short program instead of another."""
        home = self._home(value)
        if home is None:
            maker = value.producer()
            place = None if maker is None else self.places.get(self.number[maker.name or ""])
            if place is not None and self._is_left_out(place):
                raise _DifferentLayersError
            return value
        return self._at(replace(home, place=self._moved(home.place, reader)))

    def _values(self) -> dict[str, str]:
        """For each value of the long program, the value that has its sharding."""
        graph = self.program.graph
        made = (value for node in self.row for value in node.outputs)
        found = {}
        for value in (*graph.inputs, *graph.initializers.values(), *made):
            home = self._home(value)
            if home is not None and self._is_left_out(home.place):
                place = replace(home.place, layer=_KEPT - 1)
                found[value.name or ""] = self._at(replace(home, place=place)).name or ""
            else:
                found[value.name or ""] = value.name or ""
        return found

    def _inside(self) -> Iterator[tuple[str, str]]:
        for number, run in enumerate(self.runs):
            for node in range(run.step):
                one = _Place(number, _KEPT - 1, node)
                two = replace(one, layer=_KEPT + self.left_out)
                yield self.row[self._node(one)].name or "", self.row[self._node(two)].name or ""

    # -- the program -----------------------------------------------------------------------------

    def _program(self) -> tuple[Program, dict[str, tuple[str, ...]]]:
        """The short program and its links."""
        old = self.program
        copies: dict[str, ir.Value] = {}
        nodes: list[ir.Node] = []
        links: dict[str, tuple[str, ...]] = {}
        known = {v.name or "": v for node in self.row for v in node.outputs}
        known |= {v.name or "": v for v in (*old.graph.inputs, *old.graph.initializers.values())}
        for number, node in enumerate(self.row):
            place = self.places.get(number)
            if place is not None and self._is_left_out(place):
                continue
            operands = [None if v is None else self._instead(v, place) for v in node.inputs]
            read = [None if v is None else self._copied(v, copies) for v in operands]
            made = twin(node, read)
            copies.update({v.name or "": v for v in made.outputs})
            nodes.append(made)
            if GRADIENT_OF in node.metadata_props:
                made.metadata_props[GRADIENT_OF] = self._origin(node, place)
            for name in (v.name or "" for v in node.outputs):
                if name in self.links:
                    primals = (self._instead(known[p], place) for p in self.links[name])
                    links[name] = tuple(v.name or "" for v in primals)
        graph = ir.Graph(
            [self._copied(v, copies) for v in old.graph.inputs],
            [copies[v.name or ""] for v in old.graph.outputs if v.name in copies],
            nodes=nodes,
            initializers=[v for name, v in copies.items() if name in old.graph.initializers],
            opset_imports=old.graph.opset_imports,
        )
        model = ir.Model(graph, ir_version=old.model.ir_version)
        return Program(model, old.env, self._rules(nodes), old.registry), links

    def _copied(self, value: ir.Value, copies: dict[str, ir.Value]) -> ir.Value:
        """The value of the short program with the name of a value of the long one."""
        name = value.name or ""
        if name not in copies:
            if value.producer() is not None:
                raise _DifferentLayersError
            copies[name] = ir.Value(
                name=name, type=value.type, shape=value.shape, const_value=value.const_value
            )
        return copies[name]

    def _origin(self, node: ir.Node, place: _Place | None) -> str:
        """The forward node whose gradient a node of the short program computes."""
        name = node.metadata_props[GRADIENT_OF]
        home = self.places.get(self.number[name]) if name in self.number else None
        if home is None:
            return name
        return self.row[self._node(self._moved(home, place))].name or ""

    def _rules(self, nodes: Sequence[ir.Node]) -> Rules:
        rules, env, registry = self.program.rules, self.program.env, self.program.registry
        views = {}
        for node in nodes:
            name = node.name or ""
            view = NodeView(node, env, rules.views[name].opset)
            views[name] = completed(view, rules.ops.get(name), registry)
        return Rules(rules.by_node, views, rules.reasons, rules.ops)


def _runs(kinds: Sequence[int], read: Iterator[tuple[int, int]]) -> list[range]:
    """The repetitions of a row of which at least two layers are left out."""
    found = repetitions(find_repetitions(kinds, read))
    return [run for run in found if len(run) >= 2 * _KEPT + 2]
