"""Adds nodes to a global graph, shapes known: autodiff and the programs of training use it.

The global graph is the undivided program; what is added to it is divided later by the same rules as
what the user wrote. Every new value gets its shape as expressions and, for small integer values
such as target shapes, its elements, so that inference need not run again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim, SymbolTable, dim_str, symbols_of
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.builder import DOMAIN, INT64, ir_shape
from onnxpar.graph.shapes import ShapeEnv

SIZES = "Sizes"
"""Operator of the global graph, without operands: sizes that are expressions in the symbols."""
SIZES_KEY = "onnxpar.sizes"
"""Metadata key of such a node: its sizes as JSON, so that shape inference may run again."""

# Opset from which an operator takes its axes as an input; before, they are an attribute.
_AXES_INPUT_SINCE = {"ReduceSum": 13, "Unsqueeze": 13, "Squeeze": 13}
_AXES_INPUT_DEFAULT = 18


@dataclass
class GlobalBuilder:
    """Appends nodes to a graph.

    Attributes:
        graph: The graph; it is changed.
        opset: Version of its default domain.
        table: What is known of the symbols.
        shapes: Shape of each value by name; new values are added.
        contents: Elements of small integer values by name; new values are added.
        scope: Prefix of the names of new nodes.
        metadata: Metadata of new nodes.
        before: The node of the graph before which new nodes stand; None: they stand at the end.
        outermost: The graph that holds the constants of a body; None where that is `graph`.
    """

    graph: ir.Graph
    opset: int
    table: SymbolTable
    shapes: dict[str, tuple[Dim, ...]]
    contents: dict[str, tuple[Dim, ...]]
    scope: str = ""
    metadata: dict[str, str] = field(default_factory=dict)
    before: ir.Node | None = None
    outermost: ir.Graph | None = None
    _names: dict[str, int] = field(default_factory=dict)
    _node_names: dict[str, int] = field(default_factory=dict)
    _consts: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    _shape_values: dict[ir.Value, ir.Value] = field(default_factory=dict)

    @staticmethod
    def over(graph: ir.Graph, opset: int, env: ShapeEnv) -> "GlobalBuilder":
        """Returns a builder that appends to a graph whose shapes are known."""
        builder = GlobalBuilder(graph, opset, env.table, dict(env.shapes), dict(env.contents))
        values = [*graph.inputs, *graph.initializers.values()]
        for node in ir.traversal.RecursiveGraphIterator(graph):
            builder._node_names[node.name or ""] = 0
            values += node.outputs
            for body in bodies_of(node).values():
                values.extend(body.inputs)
        for value in values:
            builder._names[value.name or ""] = 0
        return builder

    def nested(self, body: ir.Graph) -> "GlobalBuilder":
        """Returns a builder that appends to a body; names, shapes and constants are shared."""
        outermost = self.graph if self.outermost is None else self.outermost
        return replace(self, graph=body, before=None, outermost=outermost, _shape_values={})

    @property
    def env(self) -> ShapeEnv:
        """What is known of all values, new ones included."""
        return ShapeEnv(self.shapes, self.contents, self.table)

    # -- names -----------------------------------------------------------------------------------

    def fresh(self, hint: str) -> str:
        """Returns a name that no other value of the graph has, beginning with `hint`."""
        return _fresh(self._names, hint)

    def fresh_node(self, hint: str) -> str:
        """Returns a name that no other node of the graph has, beginning with `hint`."""
        return _fresh(self._node_names, hint)

    def rename(self, value: ir.Value, name: str) -> None:
        """Gives a value a name beginning with `name`, and moves what is known of it there."""
        old = value.name or ""
        new = self.fresh(name)
        value.name = new
        for known in (self.shapes, self.contents):
            if old in known:
                known[new] = known.pop(old)

    def forget(self, value: ir.Value) -> None:
        """Takes the name of an output that nobody will read, so that it is not computed."""
        self.shapes.pop(value.name or "", None)
        self.contents.pop(value.name or "", None)
        value.name = ""

    # -- values ----------------------------------------------------------------------------------

    def shape_of(self, value: ir.Value) -> tuple[Dim, ...]:
        """Returns the shape of a value.

        Raises:
            KeyError: It is not known.
        """
        return self.shapes[value.name or ""]

    def declare(self, value: ir.Value, dtype: ir.DataType | None, shape: Sequence[Dim]) -> None:
        """Sets dtype and shape of a value that has a name."""
        value.type = ir.TensorType(dtype) if dtype is not None else None
        value.shape = ir_shape(shape)
        self.shapes[value.name or ""] = tuple(shape)

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType | None, Sequence[Dim]]],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        name: str | None = None,
    ) -> tuple[ir.Value, ...]:
        """Appends a node and returns its outputs, one for each `(dtype, global shape)` given."""
        node_name = _fresh(self._node_names, name or f"{self.scope}/{op_type}")
        values = []
        for index, (dtype, shape) in enumerate(outputs):
            suffix = "" if len(outputs) == 1 else f":{index}"
            value = ir.Value(name=self.fresh(f"{node_name}{suffix}.out"))
            self.declare(value, dtype, shape)
            values.append(value)
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(dict(attributes or {})),
            outputs=values,
            name=node_name,
        )
        node.metadata_props.update(self.metadata)
        self.place(node)
        return tuple(values)

    def place(self, node: ir.Node) -> None:
        """Puts a node where new nodes stand."""
        if self.before is None:
            self.graph.append(node)
        else:
            self.graph.insert_before(self.before, node)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[Dim],
        dtype: ir.DataType | None = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Appends a node with one output of global `shape`; dtype defaults to the first input's."""
        if dtype is None:
            first = next((v for v in inputs if v is not None), None)
            dtype = first.dtype if first is not None else None
        return self.ops(op_type, inputs, [(dtype, shape)], attributes, domain=domain, name=name)[0]

    def const(self, array: object, dtype: ir.DataType | None = None) -> ir.Value:
        """Returns a constant (Python numbers become int64 or float32 unless `dtype` says)."""
        data = np.asarray(array)
        if dtype is not None:
            data = data.astype(dtype.numpy())
        elif not isinstance(array, np.ndarray):
            data = data.astype(np.float32 if data.dtype.kind == "f" else np.int64)
        kind = dtype or ir.DataType.from_numpy(data.dtype)
        key = (kind, data.shape, data.tobytes())
        if key not in self._consts:
            name = self.fresh("onnxpar.const")
            tensor = ir.Tensor(data, dtype=kind, name=name)
            value = ir.Value(name=name, const_value=tensor)
            self.declare(value, kind, data.shape)
            if data.dtype.kind in "iu":
                self.contents[name] = tuple(int(x) for x in data.ravel())
            holder = self.graph if self.outermost is None else self.outermost
            holder.register_initializer(value)
            self._consts[key] = value
        return self._consts[key]

    def shape_value(self, value: ir.Value) -> ir.Value:
        """Returns the shape of a value as int64 [rank], for Reshape and Expand."""
        shape = self.shape_of(value)
        if all(isinstance(d, int) for d in shape):
            return self.const(np.array([int(d) for d in shape], np.int64))
        known = all(name in self.table for d in shape for name in symbols_of(d))
        if known and self.outermost is not None:
            # In a body, so that the value need not be kept from step to step for its shape.
            return self.sizes(shape)
        if value not in self._shape_values:
            made = self.op("Shape", value, dtype=INT64, shape=[len(shape)])
            self.contents[made.name or ""] = tuple(shape)
            self._shape_values[value] = made
        return self._shape_values[value]

    def sizes(self, dims: Sequence[Dim]) -> ir.Value:
        """Returns sizes as int64 [len(dims)], a constant or computed from the symbols."""
        if all(isinstance(d, int) for d in dims):
            return self.const(np.array([int(d) for d in dims], np.int64))
        made = self.op(SIZES, dtype=INT64, shape=[len(dims)], domain=DOMAIN)
        maker = made.producer()
        assert maker is not None
        maker.metadata_props[SIZES_KEY] = json.dumps(
            [d if isinstance(d, int) else dim_str(d) for d in dims]
        )
        self.contents[made.name or ""] = tuple(dims)
        return made

    # -- shared forms ----------------------------------------------------------------------------

    def reduce(
        self, op_type: str, x: ir.Value, axes: Sequence[int], *, keepdims: bool = False
    ) -> ir.Value:
        """Appends a reduction of `x` over `axes`."""
        before = self.shape_of(x)
        shape = [1 if a in axes else d for a, d in enumerate(before) if keepdims or a not in axes]
        return self._with_axes(op_type, x, axes, shape, keepdims=int(keepdims))

    def unsqueeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Inserts dims of size 1, so that the result has them at `axes` (ascending)."""
        shape = list(self.shape_of(x))
        for axis in axes:
            shape.insert(axis, 1)
        return self._with_axes("Unsqueeze", x, axes, shape)

    def _with_axes(
        self, op_type: str, x: ir.Value, axes: Sequence[int], shape: Sequence[Dim], **more: Any
    ) -> ir.Value:
        since = _AXES_INPUT_SINCE.get(op_type, _AXES_INPUT_DEFAULT)
        if self.opset >= since:
            every = self.const(np.array(axes, np.int64))
            return self.op(op_type, x, every, shape=shape, **more)
        return self.op(op_type, x, shape=shape, axes=list(axes), **more)

    def reshape_like(self, x: ir.Value, like: ir.Value) -> ir.Value:
        """Returns `x` with the shape of `like`."""
        shape = self.shape_of(like)
        if self.shape_of(x) == shape:
            return x
        zeros: dict[str, Any] = {"allowzero": 1} if self.opset >= 14 else {}
        return self.op("Reshape", x, self.shape_value(like), shape=shape, **zeros)

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Returns `x` in another element type; itself where it has it."""
        if x.dtype == dtype:
            return x
        return self.op("Cast", x, dtype=dtype, shape=self.shape_of(x), to=int(dtype))


def _fresh(taken: dict[str, int], hint: str) -> str:
    name = hint
    while name in taken:
        taken[hint] += 1
        name = f"{hint}.{taken[hint]}"
    taken[name] = 0
    return name
