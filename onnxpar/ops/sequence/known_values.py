"""Folds sequences and optional values whose lengths and positions are constant: `KnownValues`.

The methods after "sequences" are slots `sequence` of operators' records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx_ir as ir

from onnxpar.core.errors import NodeError
from onnxpar.graph.builder import INT64
from onnxpar.graph.metadata_keys import EXPANDED_FROM
from onnxpar.graph.names import Names, names_of
from onnxpar.graph.new_nodes import constant
from onnxpar.ops.body_node import origin

Items = list[ir.Value]
ABSENT = object()
"""Stands for the element of an optional value that has none."""


@dataclass
class KnownValues:
    """The sequences and optional values of a model that are known, while it is folded.

    Attributes:
        root: The model's graph.
        lists: The elements of each known sequence.
        optional: The element of each known optional value, or `ABSENT`.
        changed: Whether readers of a value now read another one.
    """

    root: ir.Graph
    lists: dict[ir.Value, Items] = field(default_factory=dict)
    optional: dict[ir.Value, object] = field(default_factory=dict)
    changed: bool = False

    @cached_property
    def names(self) -> Names:
        """The names in use."""
        return names_of(self.root)

    # -- new nodes -------------------------------------------------------------------------------

    def emit(
        self,
        before: ir.Node,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        count: int = 1,
        **attributes: Any,
    ) -> Items:
        """Inserts a node before another one and returns its results."""
        node = ir.Node(
            "",
            op_type,
            inputs,
            ir.convenience.convert_attributes(attributes),
            num_outputs=count,
            name=self.names.fresh(f"{before.name}/{op_type}"),
        )
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}:{index}"
        node.metadata_props.update(origin(before))
        assert before.graph is not None
        before.graph.insert_before(before, node)
        return list(node.outputs)

    def constant(self, before: ir.Node, array: Any, dtype: ir.DataType = INT64) -> ir.Value:
        """Adds a constant to the graph of a node."""
        value = constant(self.names.fresh(f"{before.name}/constant"), array, dtype)
        assert isinstance(before.graph, ir.Graph)
        before.graph.register_initializer(value)
        return value

    def with_axes(self, before: ir.Node, op_type: str, x: ir.Value, axis: int) -> ir.Value:
        """Squeeze or Unsqueeze of one axis."""
        return self.emit(before, op_type, [x, self.constant(before, [axis])])[0]

    def replace(self, node: ir.Node, value: ir.Value) -> None:
        """Makes the readers of a node's result read another value instead."""
        old = node.outputs[0]
        self.changed = self.changed or bool(old.uses()) or old.is_graph_output()
        maker = value.producer()
        if old.is_graph_output():
            # A body's result must be made in the body.
            here = maker is not None and maker.graph is node.graph
            ours = maker is not None and here and EXPANDED_FROM in maker.metadata_props
            if not ours or value.is_graph_output():
                value = self.emit(node, "Identity", [value])[0]
            value.name, old.name = old.name, f"{old.name}.replaced"
        ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)

    # -- known lists -----------------------------------------------------------------------------

    def items(self, node: ir.Node, index: int = 0) -> Items | None:
        """Returns the elements of an operand that is a sequence; None if they are unknown."""
        value = node.inputs[index]
        return None if value is None else self.lists.get(value)

    def position(self, node: ir.Node, index: int, count: int, *, end: bool = False) -> int | None:
        """A constant position in a list of `count` elements; None if it is not constant."""
        value = node.inputs[index] if len(node.inputs) > index else None
        if value is None:
            return count if end else count - 1
        if value.const_value is None:
            return None
        found = int(value.const_value.numpy().reshape(()))
        place = found + count if found < 0 else found
        if not 0 <= place < count + end:
            raise NodeError(
                f"node {node.name!r} ({node.op_type}): expected a position in a sequence of "
                f"{count}, got {found}"
            )
        return place

    def found(self, node: ir.Node) -> tuple[Items, int] | None:
        """The list and the position that a node reads; None if either is unknown."""
        items = self.items(node)
        place = None if items is None else self.position(node, 1, len(items))
        return None if items is None or place is None else (items, place)

    # -- sequences -------------------------------------------------------------------------------

    def split(self, node: ir.Node) -> None:
        """A Split, if the number of parts is known."""
        x, axis = node.inputs[0], _int(node, "axis", 0)
        parts = node.inputs[1] if len(node.inputs) > 1 else None
        if x is None or x.shape is None:
            return
        rank = len(x.shape)
        size = x.shape[axis] if -rank <= axis < rank else None
        if parts is not None and parts.shape is not None and len(parts.shape) == 1:
            count = parts.shape[0]
            if not isinstance(count, int):
                return
            lengths = parts
        else:
            each = 1
            if parts is not None:
                if parts.const_value is None:
                    return
                each = int(parts.const_value.numpy().reshape(()))
            if not isinstance(size, int) or each < 1:
                return
            full, rest = divmod(size, each)
            every = [each] * full + [rest] * bool(rest)
            count, lengths = len(every), self.constant(node, every)
        made = self.emit(node, "Split", [x, lengths], count, axis=axis)
        if parts is None and not _int(node, "keepdims", 1):
            made = [self.with_axes(node, "Squeeze", item, axis) for item in made]
        self.lists[node.outputs[0]] = made

    def construct(self, node: ir.Node) -> None:
        """The operands are the elements."""
        if all(v is not None for v in node.inputs):
            self.lists[node.outputs[0]] = [v for v in node.inputs if v is not None]

    def empty(self, node: ir.Node) -> None:
        """The sequence has no elements."""
        self.lists[node.outputs[0]] = []

    def insert(self, node: ir.Node) -> None:
        """The sequence with one element more, at a constant position."""
        items, item = self.items(node), node.inputs[1]
        if items is None or item is None:
            return
        place = self.position(node, 2, len(items), end=True)
        if place is not None:
            self.lists[node.outputs[0]] = [*items[:place], item, *items[place:]]

    def erase(self, node: ir.Node) -> None:
        """The sequence without the element at a constant position."""
        if (found := self.found(node)) is not None:
            items, place = found
            self.lists[node.outputs[0]] = [*items[:place], *items[place + 1 :]]

    def at(self, node: ir.Node) -> None:
        """The element at a constant position."""
        if (found := self.found(node)) is not None:
            items, place = found
            self.replace(node, items[place])

    def length(self, node: ir.Node) -> None:
        """A constant."""
        items = self.items(node)
        if items is not None:
            self.replace(node, self.constant(node, len(items)))

    def concat(self, node: ir.Node) -> None:
        """A Concat of the elements."""
        items, axis = self.items(node), _int(node, "axis", 0)
        if not items:
            return
        if _int(node, "new_axis", 0):
            items = [self.with_axes(node, "Unsqueeze", item, axis) for item in items]
        self.replace(node, self.emit(node, "Concat", items, axis=axis)[0])

    def map(self, node: ir.Node) -> None:
        """A copy of the body for each element."""
        first = self.items(node)
        if first is None:
            return
        operands: list[Items] = []
        for value in node.inputs:
            if value is None:
                return
            items = self.lists.get(value)
            if items is None and isinstance(value.type, ir.SequenceType):
                return
            operands.append([value] * len(first) if items is None else items)
        if any(len(items) != len(first) for items in operands):
            raise NodeError(f"node {node.name!r} (SequenceMap): its sequences differ in length")
        results: list[Items] = [[] for _ in node.outputs]
        for place in range(len(first)):
            body = node.attributes["body"].as_graph().clone(allow_outer_scope_values=True)
            for value, items in zip(body.inputs, operands, strict=True):
                ir.convenience.replace_all_uses_with(
                    value, items[place], replace_graph_outputs=True
                )
            made, outputs = list(body), list(body.outputs)
            body.outputs.clear()
            body.remove(made)
            assert isinstance(node.graph, ir.Graph)
            for initializer in list(body.initializers.values()):
                body.initializers.pop(initializer.name or "")
                initializer.name = self.names.fresh(f"{node.name}/{place}/{initializer.name}")
                node.graph.register_initializer(initializer)
            for inner in made:
                inner.name = self.names.fresh(f"{node.name}/{place}/{inner.name or inner.op_type}")
                inner.metadata_props.update(origin(node))
                for value in inner.outputs:
                    if value.name:
                        value.name = self.names.fresh(f"{node.name}/{place}/{value.name}")
            node.graph.insert_before(node, made)
            for items, value in zip(results, outputs, strict=True):
                items.append(value)
        for output, items in zip(node.outputs, results, strict=True):
            self.lists[output] = items

    def same(self, node: ir.Node) -> None:
        """What is known of the operand is known of the result."""
        value, result = node.inputs[0], node.outputs[0]
        if value in self.lists:
            self.lists[result] = self.lists[value]
        if value in self.optional:
            self.optional[result] = self.optional[value]

    # -- optional values -------------------------------------------------------------------------

    def wrap(self, node: ir.Node) -> None:
        """The optional value has the operand as its element, or none."""
        value = node.inputs[0] if node.inputs else None
        result = node.outputs[0]
        self.optional[result] = ABSENT if value is None else value
        if value in self.lists:
            self.lists[result] = self.lists[value]

    def element(self, node: ir.Node) -> None:
        """The element, if it is known to be present."""
        value = node.inputs[0]
        found = self.optional.get(value) if value is not None else None
        if found is None and value is not None and not isinstance(value.type, ir.OptionalType):
            found = value if value.type is not None else None
        if isinstance(found, ir.Value):
            if found in self.lists:
                self.lists[node.outputs[0]] = self.lists[found]
            self.replace(node, found)

    def presence(self, node: ir.Node) -> None:
        """A constant, if it is known whether there is an element."""
        value = node.inputs[0] if node.inputs else None
        if value is None:
            present = False
        elif value in self.optional:
            present = self.optional[value] is not ABSENT
        elif value.type is not None and not isinstance(value.type, ir.OptionalType):
            present = True
        else:
            return
        self.replace(node, self.constant(node, present, ir.DataType.BOOL))


SequenceFn = Callable[[KnownValues, ir.Node], None]


def _int(node: ir.Node, name: str, default: int) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()
