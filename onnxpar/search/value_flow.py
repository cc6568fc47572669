"""What a search sees of a model: its nodes, and which value goes from where to where."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from math import prod

from onnxpar.core.rule import ANY, OpRule
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.facts.program import Program
from onnxpar.graph.metadata_keys import GRADIENT_OF
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.view_parts import Parts, merged, structure
from onnxpar.ops.node_cost import CostFn

WEIGHT = 1024
"""Elements from which a parameter, or an input of real numbers, counts as a weight. What depends on
no weight (masks, positions, tokens) is replicated, and sliced without communication where
it is read."""


@dataclass(frozen=True)
class Saved:
    """An operand or a result of a node that is kept until its backward.

    Attributes:
        made: Whether it is a result.
        index: Which one.
        share: The part of the value that counts here, among all nodes whose backward reads it: they
            may have it in one layout.
    """

    made: bool
    index: int
    share: float


@dataclass(frozen=True)
class Item:
    """A node.

    Attributes:
        name: Its name.
        rule: Its sharding rule.
        view: What its rule saw.
        fixed: Whether there is nothing to choose: it is replicated.
        trained: Whether its results vary with a trained parameter, so that it has a backward.
        parts: For each operand, the parts of its dims.
        saved: What its backward reads of its operands and results.
        kind: A number; nodes of the same have the same options and costs.
        pin: Its name where the user fixed it, else "".
        cost: What a device computes and moves for it, where its operator says that.
        count: Nodes that it stands for.
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


@dataclass(frozen=True)
class Use:
    """Operands that read a value: operand `operand` of item `item`, `count` of them."""

    item: int
    operand: int
    count: int = 1


@dataclass(frozen=True)
class Value:
    """A value and who reads it.

    Attributes:
        name: Its name.
        producer: Item and output that make it; None for an input or a parameter.
        uses: Who reads its elements.
        shape: Its global shape.
        itemsize: Bytes of one element.
        parameter: Whether it is a parameter.
        trained: Whether a cotangent comes back along it.
        leaves: Whether it is an output of the graph.
        alike: Names of other values that it stands for.
    """

    name: str
    producer: tuple[int, int] | None
    uses: tuple[Use, ...]
    shape: tuple[Dim, ...]
    itemsize: int
    parameter: bool
    trained: bool
    leaves: bool
    alike: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Values that it stands for."""
        return 1 + len(self.alike)

    @property
    def readers(self) -> int:
        """Operands that read one of them."""
        return sum(use.count for use in self.uses)


@dataclass(frozen=True)
class Flow:
    """A model as a search sees it; where nodes choose alike, one for all of them (`fold`)."""

    items: tuple[Item, ...]
    values: tuple[Value, ...]
    table: SymbolTable


def flow(
    program: Program,
    trained: Collection[str] = (),
    pinned: Collection[str] = (),
) -> Flow:
    """Reads the flow of a normalised model.

    Args:
        program: The program; it is not changed.
        trained: Names of the parameters that are trained; none for a forward program.
        pinned: Names of the nodes that the user fixed.
    """
    model, env, rules = program.model, program.env, program.rules
    nodes = [n for n in model.graph if not rules.views[n.name or ""].is_backward]
    parts = structure(nodes, rules.by_node, rules.views, env.table)
    parts = merged(nodes, rules.by_node, rules.views, env.table, parts)
    saved = _saved(program)
    varying: set[str] = set(trained)
    weighty = set(trained)
    for value in (*model.graph.inputs, *model.graph.initializers.values()):
        shape = env.shapes.get(value.name or "", ())
        real = value.dtype is None or value.dtype.is_floating_point()
        if real and prod(map(env.table.typical, shape)) >= WEIGHT:
            weighty.add(value.name or "")
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
    leaving = {v.name for v in model.graph.outputs}
    graph = model.graph
    values = []
    for value in (
        *graph.inputs,
        *graph.initializers.values(),
        *(out for node in nodes for out in node.outputs),
    ):
        name = value.name or ""
        if name not in env.shapes or not (name in uses or name in leaving):
            continue
        values.append(
            Value(
                name,
                made.get(name),
                tuple(uses.get(name, ())),
                env.shapes[name],
                int(value.dtype.itemsize) if value.dtype is not None else 4,
                name in graph.initializers,
                name in varying,
                name in leaving,
            )
        )
    return Flow(tuple(items), tuple(values), env.table)


def _saved(program: Program) -> dict[str, tuple[Saved, ...]]:
    """Returns of each node what its backward reads of its operands and results."""
    read: dict[str, set[str]] = {}
    for node in program.graph:
        forward = node.metadata_props.get(GRADIENT_OF)
        if forward is not None:
            read.setdefault(forward, set()).update(v.name or "" for v in node.inputs if v)
    places: dict[str, list[tuple[str, bool, int]]] = {}
    for name in read.keys() & program.rules.views.keys():
        node = program.rules.views[name].node
        for made, values in ((False, node.inputs), (True, node.outputs)):
            found = {v.name or "": i for i, v in enumerate(values) if v is not None}
            for value in read[name] & found.keys() - program.graph.initializers.keys():
                places.setdefault(value, []).append((name, made, found[value]))
    saved: dict[str, list[Saved]] = {}
    for readers in places.values():
        for name, made, index in readers:
            saved.setdefault(name, []).append(Saved(made, index, 1 / len(readers)))
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
