"""Appends nodes to a global graph, each new value with its type, shape and a name of its own."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Sizes = Iterable[int | str | ir.SymbolicDim]

FLOAT = ir.DataType.FLOAT
DOUBLE = ir.DataType.DOUBLE
INT64 = ir.DataType.INT64

_AXES_OPERAND_SINCE = {"ReduceSum": 13}
"""Opset in which the axes of a reduction became an operand, where that was not 18."""


def opset_of(model: ir.Model) -> int:
    """Returns the version of ONNX's default domain that a model uses."""
    return model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))


def work_dtype(dtype: ir.DataType) -> ir.DataType:
    """Returns the type in which losses, norms and updates of this type are computed."""
    return DOUBLE if dtype == DOUBLE else FLOAT


def new_value(name: str, dtype: ir.DataType, shape: Sizes) -> ir.Value:
    """Returns a value that no node makes, such as a graph input."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(list(shape)))


@dataclass
class Emitter:
    """Writes nodes at the end of a graph.

    Attributes:
        graph: The graph; the emitter changes it.
        opset: Version of the default domain, which says where the axes of a reduction stand.
        scope: Prefix of the names of the nodes.
    """

    graph: ir.Graph
    opset: int
    scope: str = ""
    _taken: set[str] = field(default_factory=set)
    _constants: dict[tuple[object, ...], ir.Value] = field(default_factory=dict)
    _casts: dict[tuple[str, ir.DataType], ir.Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reads the names that the graph has already."""
        self._taken |= names_of(self.graph)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value,
        shape: Sizes | None = None,
        dtype: ir.DataType | None = None,
        name: str | None = None,
        attributes: Mapping[str, int | str | Sequence[int]] | None = None,
    ) -> ir.Value:
        """Appends a node and returns its one output.

        Args:
            op_type: Operator of the default domain.
            inputs: Its operands.
            shape: Shape of the output; the first operand's where it is not given.
            dtype: Element type of the output; the first operand's where it is not given.
            name: Name of the output, which the caller knows to be free; one is made up from the
                node's where it is not given.
            attributes: The node's attributes.
        """
        sizes = inputs[0].shape if shape is None else shape
        kind = inputs[0].dtype if dtype is None else dtype
        (out,) = self.node(op_type, inputs, [(kind, sizes)], attributes)
        if name is not None:
            out.name = name
            self._taken.add(name)
        return out

    def node(
        self,
        op_type: str,
        inputs: Sequence[ir.Value],
        outputs: Sequence[tuple[ir.DataType | None, Sizes | None]],
        attributes: Mapping[str, int | str | Sequence[int]] | None = None,
        *,
        domain: str = "",
    ) -> tuple[ir.Value, ...]:
        """Appends a node and returns its outputs, one for each type and shape given."""
        name = self._fresh(f"{self.scope}/{op_type}")
        values = []
        for dtype, sizes in outputs:
            assert dtype is not None and sizes is not None
            values.append(new_value(self._fresh(f"{name}.out"), dtype, sizes))
        node = ir.Node(
            domain,
            op_type,
            list(inputs),
            ir.convenience.convert_attributes(dict(attributes or {})),
            outputs=values,
            name=name,
        )
        self.graph.append(node)
        return tuple(values)

    def constant(self, array: object, dtype: ir.DataType) -> ir.Value:
        """Returns an initializer with this content; equal ones are the same value."""
        data: NDArray[np.generic] = np.asarray(array).astype(dtype.numpy())
        key = (dtype, data.shape, data.tobytes())
        if key not in self._constants:
            name = self._fresh("onnxpar.const")
            value = new_value(name, dtype, data.shape)
            value.const_value = ir.Tensor(data, dtype=dtype, name=name)
            self.graph.register_initializer(value)
            self._constants[key] = value
        return self._constants[key]

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Returns a value in another type; the value itself where it has that type already."""
        if x.dtype == dtype:
            return x
        key = (x.name or "", dtype)
        if key not in self._casts:
            self._casts[key] = self.op("Cast", x, dtype=dtype, attributes={"to": dtype.value})
        return self._casts[key]

    def reduce(
        self, op_type: str, x: ir.Value, axes: Sequence[int] | None = None, *, keep: bool = False
    ) -> ir.Value:
        """Appends a reduction over some axes, counted from 0, or over all of them."""
        sizes = list(x.shape or ())
        gone = range(len(sizes)) if axes is None else axes
        shape = [1 if i in gone else d for i, d in enumerate(sizes) if keep or i not in gone]
        options: dict[str, int | Sequence[int]] = {"keepdims": int(keep)}
        if axes is None:
            return self.op(op_type, x, shape=shape, attributes=options)
        operand_since = _AXES_OPERAND_SINCE.get(op_type, 18)
        if self.opset >= operand_since:
            places = self.constant(np.array(axes), INT64)
            return self.op(op_type, x, places, shape=shape, attributes=options)
        options["axes"] = list(axes)
        return self.op(op_type, x, shape=shape, attributes=options)

    def rename(self, x: ir.Value, name: str) -> ir.Value:
        """Returns the value under another name, given by an Identity."""
        return self.op("Identity", x, name=name)

    def _fresh(self, hint: str) -> str:
        name, count = hint, 0
        while name in self._taken:
            count += 1
            name = f"{hint}.{count}"
        self._taken.add(name)
        return name


def names_of(graph: ir.Graph) -> set[str]:
    """Returns the names of a graph's values and nodes, those of subgraphs included."""
    names = {v.name or "" for v in (*graph.inputs, *graph.initializers.values())}
    for node in ir.traversal.RecursiveGraphIterator(graph):
        names |= {node.name or ""} | {out.name or "" for out in node.outputs}
        names |= {v.name or "" for v in node.inputs if v is not None}
    return names
