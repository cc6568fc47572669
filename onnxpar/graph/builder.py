"""The base of all builders of graphs: `Builder` emits nodes, constants, sizes and reductions.

`LocalBuilder` builds the program of all ranks, in local shapes. `GlobalBuilder` adds to the
undivided program, in global shapes. `Builder` has what both do in the same way.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy

from onnxpar.core.symbols import Dim, SymbolTable, dim_str
from onnxpar.graph.names import Names
from onnxpar.graph.new_nodes import constant

DOMAIN = "onnxpar"
GENERATED = ".out"
"""Suffix of the names of values that the model has no name for."""
INT64 = ir.DataType.INT64


@dataclass
class Builder(ABC):
    """Emits nodes into a graph.

    Attributes:
        table: The symbols and their constraints.
        opset: Version of the default domain of the graph.
        scope: Prefix of the names of new nodes.
        metadata: Metadata of new nodes.
        value_names: Names of values that are in use.
        node_names: Names of nodes that are in use.
    """

    table: SymbolTable
    opset: int
    scope: str = field(default="", kw_only=True)
    metadata: dict[str, str] = field(default_factory=dict, kw_only=True)
    value_names: Names = field(default_factory=Names, kw_only=True)
    node_names: Names = field(default_factory=Names, kw_only=True)
    _consts: dict[tuple[object, ...], ir.Value] = field(default_factory=dict, kw_only=True)

    # -- what builders do differently ------------------------------------------------------------

    @abstractmethod
    def append(self, node: ir.Node) -> None:
        """Adds a node to the graph."""

    @abstractmethod
    def hold(self, constant: ir.Value) -> None:
        """Adds a constant to the graph."""

    @abstractmethod
    def note_shape(self, value: ir.Value, shape: Sequence[Dim]) -> None:
        """Stores the shape of a value, for `shape_of`."""

    @abstractmethod
    def shape_of(self, value: ir.Value) -> tuple[Dim, ...]:
        """Returns the shape of a value, in the graph's terms: local or global.

        Raises:
            KeyError: It is unknown.
        """

    @abstractmethod
    def computed_sizes(self, dims: tuple[Dim, ...]) -> ir.Value:
        """Returns sizes that are not all static, as int64 [len(dims)]."""

    # -- nodes -----------------------------------------------------------------------------------

    def fresh(self, hint: str) -> str:
        """Returns a name that begins with `hint` and that no other value of the graph has."""
        return self.value_names.fresh(hint)

    def declare(
        self, value: ir.Value, dtype: ir.DataType | None, shape: Sequence[Dim] | None
    ) -> ir.Value:
        """Sets dtype and shape of a value that has a name, as far as they are known."""
        value.type = None if dtype is None else ir.TensorType(dtype)
        if shape is not None:
            value.shape = ir_shape(shape)
            self.note_shape(value, shape)
        return value

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        outputs: Sequence[tuple[ir.DataType | None, Sequence[Dim] | None]],
        attributes: Mapping[str, Any] | None = None,
        *,
        domain: str = "",
        name: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> tuple[ir.Value, ...]:
        """Emits a node and returns its outputs, one for each `(dtype, shape)` given.

        Args:
            op_type: The operator.
            inputs: Its operands; None for an absent one.
            outputs: Element type and shape of each result; None if unknown.
            attributes: Its attributes.
            domain: Domain of the operator.
            name: Prefix of the node's name; by default the scope and the operator.
            metadata: Metadata in addition to that of all nodes.
        """
        node_name = self.node_names.fresh(name or f"{self.scope}/{op_type}")
        values = []
        for index, (dtype, shape) in enumerate(outputs):
            suffix = "" if len(outputs) == 1 else f":{index}"
            value = ir.Value(name=self.fresh(f"{node_name}{suffix}{GENERATED}"))
            values.append(self.declare(value, dtype, shape))
        node = ir.Node(
            domain,
            op_type,
            inputs,
            ir.convenience.convert_attributes(dict(attributes or {})),
            outputs=values,
            name=node_name,
        )
        node.metadata_props.update({**self.metadata, **(metadata or {})})
        self.append(node)
        return tuple(values)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[Dim] | None = None,
        dtype: ir.DataType | None = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> ir.Value:
        """Emits a node with one output, by default of the shape and dtype of the first input."""
        first = next((v for v in inputs if v is not None), None)
        if dtype is None and first is not None:
            dtype = first.dtype
        if shape is None and first is not None:
            shape = self.shape_of(first)
        return self.ops(op_type, inputs, [(dtype, shape)], attributes, domain=domain, name=name)[0]

    # -- constants and sizes ---------------------------------------------------------------------

    def const(self, array: object, dtype: ir.DataType | None = None) -> ir.Value:
        """Returns a constant; without `dtype`, Python numbers become int64 or float32."""
        data = np.asarray(array)
        if dtype is not None:
            data = data.astype(dtype.numpy())
        elif not isinstance(array, np.ndarray) and data.dtype.kind != "b":
            data = data.astype(np.float32 if data.dtype.kind == "f" else np.int64)
        kind = dtype or ir.DataType.from_numpy(data.dtype)
        key = (kind, data.shape, data.tobytes())
        if key not in self._consts:
            value = constant(self.fresh("onnxpar.const"), data, kind)
            self.note_shape(value, data.shape)
            self.hold(value)
            self._consts[key] = value
        return self._consts[key]

    def sizes(self, dims: Sequence[Dim]) -> ir.Value:
        """Returns sizes as int64 [len(dims)]: one constant if all of them are static."""
        if all(isinstance(d, int | sympy.Integer) for d in dims):
            return self.const(np.array([int(d) for d in dims], np.int64))
        return self.computed_sizes(tuple(dims))

    # -- shared forms ----------------------------------------------------------------------------

    def cast(self, x: ir.Value, dtype: ir.DataType | None) -> ir.Value:
        """Returns `x` in another element type; `x` itself if this is None or its own type."""
        if dtype is None or x.dtype == dtype:
            return x
        return self.op("Cast", x, dtype=dtype, to=int(dtype))

    def zeros(self, shape: Sequence[Dim], dtype: ir.DataType | None) -> ir.Value:
        """Returns zeros of a shape whose sizes need not be static."""
        zero = self.const(np.array(0), dtype)
        return self.op("Expand", zero, self.sizes(shape), shape=shape)

    def reduce(
        self, op_type: str, x: ir.Value, axes: Sequence[int], *, keepdims: bool = False
    ) -> ir.Value:
        """Emits a reduction of `x` over `axes`, which are removed or (`keepdims`) have size 1."""
        before = self.shape_of(x)
        shape = [1 if a in axes else d for a, d in enumerate(before) if keepdims or a not in axes]
        every = self.const(np.array(axes, np.int64))
        return self.op(op_type, x, every, shape=shape, keepdims=int(keepdims))

    def unsqueeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        """Inserts dims of size 1, so that the result has them at `axes` (ascending)."""
        shape = list(self.shape_of(x))
        for axis in axes:
            shape.insert(axis, 1)
        return self.op("Unsqueeze", x, self.const(np.array(axes, np.int64)), shape=shape)

    def reshape_to(self, x: ir.Value, sizes: ir.Value, shape: Sequence[Dim]) -> ir.Value:
        """Returns `x` in `shape`, which the int64 value `sizes` holds."""
        # Without `allowzero`, 0 would mean the operand's size.
        return self.op("Reshape", x, sizes, shape=shape, allowzero=1)

    def reshape(self, x: ir.Value, dims: Sequence[Dim]) -> ir.Value:
        """Returns `x` with the shape `dims`; `x` itself if it has this shape."""
        if x.shape is not None and ir_shape(dims) == x.shape:
            return x
        return self.reshape_to(x, self.sizes(dims), dims)


def ir_shape(dims: Sequence[Dim]) -> ir.Shape:
    """Returns an onnx_ir shape; expressions become symbolic dims."""
    return ir.Shape([int(d) if isinstance(d, int | sympy.Integer) else _text(d) for d in dims])


@lru_cache(1 << 16)
def _text(expr: sympy.Expr) -> str:
    # sympy prints a size in 0.2 ms, and a graph of 6,000 nodes has about four sizes per value.
    return dim_str(expr)
