"""A model as a search sees it: its nodes, and the values between them."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import onnx_ir as ir

from onnxpar.core.rule import ANY, OpRule
from onnxpar.core.symbols import Dim
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.view_parts import Parts, merged, structure
from onnxpar.ops.node_cost import CostFn

WEIGHT = 1024
"""A floating-point parameter or input counts as a weight if it has at least this many elements. A
value that depends on no weight (masks, positions, tokens) is replicated, and its readers slice it
without communication."""


@dataclass(frozen=True)
class Saved:
    """An operand or a result of a node that is kept until its backward.

    Attributes:
        made: Whether it is a result.
        index: Its index among the operands or results.
        share: The share of the value that counts here. All nodes whose backward reads it share it
            equally, since they may all read it in one layout.
        stored: Whether it is computed from parameters alone, so that all micro-batches share it.
    """

    made: bool
    index: int
    share: float
    stored: bool = False


@dataclass(frozen=True)
class Item:
    """A node.

    Attributes:
        name: Its name.
        rule: Its sharding rule.
        view: The view from which its rule was made.
        fixed: Whether there is nothing to choose, because it is replicated.
        trained: Whether its results depend on a trained parameter, so that it has a backward.
        parts: For each operand, the parts of its dims.
        saved: The operands and results that its backward reads.
        kind: A number; nodes with the same number have the same options and costs.
        pin: Its name if the user fixed it, else "".
        cost: Its cost function, if its operator has one.
        count: Number of nodes that it stands for.
        recomputed: The share of these nodes that is recomputed in the backward.
    """

    name: str
    rule: OpRule
    view: NodeView
    fixed: bool
    trained: bool
    parts: tuple[tuple[Parts, ...] | None, ...]
    saved: tuple[Saved, ...]
    kind: int
    pin: str = ""
    cost: CostFn | None = None
    count: int = 1
    recomputed: float = 0.0


@dataclass(frozen=True)
class Use:
    """A reader of a value: operand `operand` of item `item`, which stands for `count` readers."""

    item: int
    operand: int
    count: int = 1


@dataclass(frozen=True)
class Value:
    """A value and its readers.

    Attributes:
        name: Its name.
        producer: Item and output that make it; None for an input or a parameter.
        uses: The operands that read its elements.
        itemsize: Bytes of one element.
        parameter: Whether it is a parameter.
        trained: Whether it has a cotangent.
        leaves: Whether it is an output of the graph.
        stored: Whether it has a fixed shape and nodes compute it from parameters alone, so that it
            may be stored instead.
        alike: Names of other values that it stands for.
    """

    name: str
    producer: tuple[int, int] | None
    uses: tuple[Use, ...]
    itemsize: int
    parameter: bool
    trained: bool
    leaves: bool
    stored: bool = False
    alike: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of values that it stands for."""
        return 1 + len(self.alike)

    @property
    def readers(self) -> int:
        """Number of operands that read one of these values."""
        return sum(use.count for use in self.uses)


@dataclass(frozen=True)
class Flow:
    """A model as a search sees it; one item may stand for several nodes (see `fold`)."""

    items: tuple[Item, ...]
    values: tuple[Value, ...]

    @cached_property
    def trained(self) -> tuple[tuple[int, ...], ...]:
        """The operands of each item that have cotangents."""
        varying = {name for v in self.values if v.trained for name in (v.name, *v.alike)}
        return tuple(
            tuple(
                operand
                for operand, value in enumerate(item.view.node.inputs)
                if value is not None and value.name in varying
            )
            for item in self.items
        )


def recomputing(seen: Flow, layers: Sequence[Collection[str]], share: float) -> Flow:
    """Returns a flow in which nodes are recomputed, layer by layer.

    The backward recomputes one layer at a time. So of the values that recomputed nodes make, one
    layer's are in memory in addition to those of layers that are not recomputed.

    Args:
        seen: The flow.
        layers: Names of the nodes of each layer that can be recomputed.
        share: The share of the layers that is recomputed.
    """
    again = {name for layer in layers for name in layer}
    producers = {
        (use.item, use.operand): value.producer[0]
        for value in seen.values
        if value.producer is not None
        for use in value.uses
    }
    left = 1 - share + share / max(len(layers), 1)
    kinds: dict[Hashable, int] = {}
    items = []
    for number, item in enumerate(seen.items):
        saved = tuple(
            replace(one, share=one.share * left)
            if (maker := number if one.made else producers.get((number, one.index))) is not None
            and seen.items[maker].name in again
            else one
            for one in item.saved
        )
        recomputed = share if item.name in again else 0.0
        kind = kinds.setdefault((item.kind, saved, recomputed), len(kinds))
        items.append(replace(item, saved=saved, recomputed=recomputed, kind=kind))
    return Flow(tuple(items), seen.values)


def flow(
    program: Program,
    trained: Collection[str] = (),
    pinned: Collection[str] = (),
    small: bool = False,
) -> Flow:
    """Reads the flow of a normalised model.

    Args:
        program: The program; it is not changed.
        trained: Names of the parameters that are trained; none for a forward program.
        pinned: Names of the nodes that the user fixed.
        small: Whether floating-point parameters with few elements count as weights, too.
    """
    graph, env, rules = program.graph, program.env, program.rules
    sources = (*graph.inputs, *graph.initializers.values())
    nodes = [n for n in graph if not rules.views[n.name or ""].is_backward]
    facts = (nodes, rules.by_node, rules.views, env.table)
    parts = merged(*facts, structure(*facts))
    stored = _stored(nodes, program)
    saved = _saved(program, stored)
    varying: set[str] = set(trained)
    weighty = {*trained, *_large(sources, program, 2 if small else WEIGHT)}
    items: list[Item] = []
    kinds: dict[tuple[Hashable, ...], int] = {}
    uses: dict[str, list[Use]] = {}
    made: dict[str, tuple[int, int]] = {}
    for index, node in enumerate(nodes):
        name = node.name or ""
        rule, view = rules.by_node[name], rules.views[name]
        names = [v.name or "" if v is not None else "" for v in node.inputs]
        moves = any(n in varying for n in names)
        for position, out in enumerate(node.outputs):
            made[out.name or ""] = (index, position)
            if moves and (out.dtype is None or out.dtype.is_floating_point()):
                varying.add(out.name or "")
        weighty.update((v.name or "") for v in node.outputs if any(n in weighty for n in names))
        fixed = (
            name in rules.reasons
            or not rule.splittable
            or not any((v.name or "") in weighty for v in node.outputs)
        )
        backward = any((v.name or "") in varying for v in node.outputs)
        seen = tuple(parts.get(n) for n in names)
        keeps = saved.get(name, ())
        key = (*_kind(rule, view, fixed, backward, seen), keeps)
        kind = kinds.setdefault(key, len(kinds))
        pin = name if name in pinned else ""
        count = rules.costs.get(name)
        items.append(Item(name, rule, view, fixed, backward, seen, keeps, kind, pin, count))
        for position, operand in enumerate(rule.inputs):
            if view.has(position) and operand.mode != ANY and names[position] in env.shapes:
                uses.setdefault(names[position], []).append(Use(index, position))
    leaving = {v.name for v in graph.outputs}
    values = []
    for value in (*sources, *(out for node in nodes for out in node.outputs)):
        name = value.name or ""
        if name not in env.shapes or not (name in uses or name in leaving):
            continue
        values.append(
            Value(
                name,
                made.get(name),
                tuple(uses.get(name, ())),
                int(value.dtype.itemsize) if value.dtype is not None else 4,
                name in graph.initializers,
                name in varying,
                name in leaving,
                name in stored,
            )
        )
    return Flow(tuple(items), tuple(values))


def _large(values: Iterable[ir.Value], program: Program, least: int) -> Iterator[str]:
    """Yields the names of floating-point values with at least so many elements."""
    env = program.env
    for value in values:
        shape = env.shapes.get(value.name or "", ())
        real = value.dtype is None or value.dtype.is_floating_point()
        if real and prod(map(env.table.typical, shape)) >= least:
            yield value.name or ""


def _stored(nodes: Sequence[ir.Node], program: Program) -> set[str]:
    """Returns the values of fixed shape that nodes compute from parameters alone."""
    parameters, found = set(program.graph.initializers), set[str]()
    for node in nodes:
        rule = program.rules.by_node[node.name or ""]
        read = [
            v.name or ""
            for v, operand in zip(node.inputs, rule.inputs, strict=False)
            if v is not None and not operand.mode
        ]
        if read and all(name in parameters or name in found for name in read):
            made = (v.name or "" for v in node.outputs)
            found.update(name for name in made if _is_fixed(program.env.shapes.get(name, ())))
    return found


def _is_fixed(shape: Sequence[Dim]) -> bool:
    return all(isinstance(size, int) for size in shape)


def _saved(program: Program, stored: Collection[str]) -> dict[str, tuple[Saved, ...]]:
    """Returns for each node the operands and results that its backward reads."""
    read: dict[str, set[str]] = {}
    for node in program.graph:
        forward = node.metadata_props.get(GRADIENT_OF)
        if forward is not None:
            read.setdefault(forward, set()).update(v.name or "" for v in node.inputs if v)
    places: dict[str, list[tuple[str, bool, int]]] = {}
    parameters = set(program.graph.initializers)
    for name in read.keys() & program.rules.views.keys():
        node = program.rules.views[name].node
        for made, values in ((False, node.inputs), (True, node.outputs)):
            found = {v.name or "": i for i, v in enumerate(values) if v is not None}
            for value in (read[name] & found.keys()) - parameters:
                places.setdefault(value, []).append((name, made, found[value]))
    saved: dict[str, list[Saved]] = {}
    for value, readers in places.items():
        for name, made, index in readers:
            one = Saved(made, index, 1 / len(readers), value in stored)
            saved.setdefault(name, []).append(one)
    return {n: tuple(sorted(s, key=lambda s: (s.made, s.index))) for n, s in saved.items()}


def _kind(
    rule: OpRule,
    view: NodeView,
    fixed: bool,
    backward: bool,
    parts: tuple[tuple[Parts, ...] | None, ...],
) -> tuple[Hashable, ...]:
    operands = tuple(
        None if v is None else (v.dtype, view.env.shapes.get(v.name or ""))
        for v in (*view.node.inputs, *view.node.outputs)
    )
    return (
        (view.node.domain, view.node.op_type, fixed, backward),
        rule,
        operands,
        parts,
    )
