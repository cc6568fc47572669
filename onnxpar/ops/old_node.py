"""The view of a node of an old opset that an upgrade changes: `OldNode`.

An upgrade changes the node in place. The node keeps its name, its metadata and the names of its
results. Nodes that the upgrade adds are named `<node>/…`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.core.errors import ModelError

OPSET = 21
"""Version of the default domain to which older models are upgraded; newer models keep theirs.

onnxruntime's CUDA provider has no kernel for an older opset that it lacks for this one."""


@dataclass(frozen=True)
class OldNode:
    """A node that is upgraded to a newer version of its operator.

    Attributes:
        node: The node; it is changed.
        shapes: Shapes of values as far as they are known. Only upgrades with `by_shapes` get more
            than the shapes that the model declares.
        fresh: Returns a name that is new in the model and begins with its argument.
    """

    node: ir.Node
    shapes: Mapping[ir.Value, ir.Shape]
    fresh: Callable[[str], str]

    def input(self, index: int) -> ir.Value | None:
        """Operand `index`; None if it is absent."""
        return self.node.inputs[index] if index < len(self.node.inputs) else None

    def shape(self, index: int) -> ir.Shape | None:
        """Shape of operand `index`; None if it is unknown."""
        value = self.input(index)
        return None if value is None else self.shapes.get(value, value.shape)

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or `default` if it is absent.

        Raises:
            ModelError: It is a parameter of a function, which has no value here.
        """
        found = self.node.attributes.get(name)
        if found is None:
            return default
        if found.is_ref():
            raise ModelError(
                f"node {self.node.name!r} ({self.node.op_type}): the attribute {name!r} is a "
                "parameter of a function whose opset is not the model's; convert the function"
            )
        return found.as_string() if found.type == ir.AttributeType.STRING else found.value

    def put(self, index: int, value: ir.Value | None) -> None:
        """Makes `value` operand `index`."""
        if index >= len(self.node.inputs):
            self.node.resize_inputs(index + 1)
        self.node.replace_input_with(index, value)

    def become(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Mapping[str, Any]
    ) -> None:
        """Turns the node into one of another operator; it keeps its results."""
        self.node.op_type = op_type
        self.node.attributes.clear()
        for attribute in ir.convenience.convert_attributes(dict(attributes)):
            self.node.attributes.add(attribute)
        self.node.resize_inputs(len(inputs))
        for index, value in enumerate(inputs):
            self.node.replace_input_with(index, value)

    def emit(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Inserts a node before this one and returns its result."""
        made = self._made(op_type, inputs, ir.convenience.convert_attributes(attributes))
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, made)
        return made.outputs[0]

    def follow(self, index: int, op_type: str, *others: ir.Value | None, **attributes: Any) -> None:
        """Inserts an operator after result `index`, whose readers read the new result instead.

        The operator's operands are the old result and `others`. The new result takes its name.
        """
        old = self.node.outputs[index]
        made = self._made(op_type, [None, *others], ir.convenience.convert_attributes(attributes))
        new = made.outputs[0]
        new.type, new.shape, new.name, old.name = old.type, old.shape, old.name, new.name
        old.type, old.shape = None, None
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        made.replace_input_with(0, old)
        assert self.node.graph is not None
        self.node.graph.insert_after(self.node, made)

    def constant(self, array: object, dtype: type[np.generic]) -> ir.Value:
        """Inserts a constant before this node."""
        data = ir.Tensor(np.asarray(array, dtype))
        made = self.emit("Constant", value=data)
        made.type, made.shape = ir.TensorType(data.dtype), data.shape
        return made

    def operand(self, name: str, index: int) -> None:
        """Turns an attribute of integers or floats into operand `index`, if the node has it."""
        attribute = self.node.attributes.pop(name, None)
        if attribute is None:
            return
        kind, dtype = _CONSTANTS[attribute.type]
        constant = (
            ir.RefAttr(kind, str(attribute.ref_attr_name), attribute.type)
            if attribute.is_ref()
            else ir.Attr(kind, attribute.type, attribute.value)
        )
        made = self._made("Constant", (), [constant], name)
        made.outputs[0].type = ir.TensorType(dtype)
        assert self.node.graph is not None
        self.node.graph.insert_before(self.node, made)
        self.put(index, made.outputs[0])

    def like(self, index: int) -> None:
        """Casts operand `index`, if there is one, to the type of the first operand."""
        value, first = self.input(index), self.input(0)
        if value is not None and (first is None or first.dtype != value.dtype):
            self.put(index, self.emit("CastLike", value, first))

    def _made(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        attributes: Sequence[ir.Attr],
        name: str = "",
    ) -> ir.Node:
        title = self.fresh(f"{self.node.name or self.node.op_type}/{name or op_type}")
        made = ir.Node("", op_type, inputs, attributes, num_outputs=1, name=title)
        made.outputs[0].name = self.fresh(f"{title}:0")
        made.metadata_props.update(self.node.metadata_props)
        return made


_CONSTANTS = {
    ir.AttributeType.INT: ("value_int", ir.DataType.INT64),
    ir.AttributeType.INTS: ("value_ints", ir.DataType.INT64),
    ir.AttributeType.FLOAT: ("value_float", ir.DataType.FLOAT),
    ir.AttributeType.FLOATS: ("value_floats", ir.DataType.FLOAT),
}

WriteFn = Callable[[OldNode], None]


@dataclass(frozen=True)
class Upgrade:
    """The upgrade of a node to a version of its operator that changed its meaning or form.

    Attributes:
        write: Changes the node.
        by_shapes: Whether it needs fewer nodes if it knows the shapes of operands.
    """

    write: WriteFn
    by_shapes: bool = False


def operands(**indices: int) -> Upgrade:
    """Returns the upgrade to a version in which attributes became the operands of these indices."""

    def write(old: OldNode) -> None:
        for name, index in indices.items():
            old.operand(name, index)

    return Upgrade(write)


def renamed(op_type: str) -> Upgrade:
    """Returns the upgrade to a version that renamed the operator."""

    def write(old: OldNode) -> None:
        old.node.op_type = op_type

    return Upgrade(write)
