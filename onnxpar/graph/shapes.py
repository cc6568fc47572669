"""The shape of every value as expressions in the input symbols, and known integer contents.

Shapes are inferred by `onnx-shape-inference` with the corrections of `onnxpar.ops.inference`; this
module converts the results to `Dim`s, for `onnxpar.graph.node_view` and all later rooms.
"""

import json
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir
import sympy
from onnx_shape_inference import SYM_DATA_KEY

from onnxpar.core.symbols import Dim, SymbolTable, as_dim
from onnxpar.core.symbols.expressions import fraction


@dataclass(frozen=True)
class ShapeEnv:
    """Shapes and contents of values, by name.

    Attributes:
        shapes: Global shape of each value whose rank is known.
        contents: For small integer values whose elements are known expressions: those elements,
            flattened.
        table: The symbols and their constraints.
    """

    shapes: Mapping[str, tuple[Dim, ...]]
    contents: Mapping[str, tuple[Dim, ...]]
    table: SymbolTable


def shapes(model: ir.Model, table: SymbolTable) -> ShapeEnv:
    """Reads the shapes of a model on which shape inference has run (see `onnxpar.frontend.load`).

    Args:
        model: The model; it is not changed.
        table: The symbols of the model's inputs.
    """
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [out for node in model.graph for out in node.outputs]
    return read_shapes(values, table)


def read_shapes(values: Iterable[ir.Value], table: SymbolTable) -> ShapeEnv:
    """Returns the shapes and contents that inference found for some values."""
    found: dict[str, tuple[Dim, ...]] = {}
    contents: dict[str, tuple[Dim, ...]] = {}
    for value in values:
        name = value.name
        if name is None:
            continue
        if value.shape is not None and all(
            isinstance(d, int) or d.value is not None for d in value.shape
        ):
            found[name] = tuple(
                _proved(as_dim(d if isinstance(d, int) else d.value), table) for d in value.shape
            )
        data = value.metadata_props.get(SYM_DATA_KEY)
        if data is not None:
            items = json.loads(data)
            if all(item is not None for item in items):
                contents[name] = tuple(_proved(as_dim(item), table) for item in items)
        elif (
            value.const_value is not None
            and value.dtype in _INTEGERS
            and value.const_value.size <= 1024
        ):
            contents[name] = tuple(int(x) for x in value.const_value.numpy().ravel())
    return ShapeEnv(found, contents, table)


def _proved(size: Dim, table: SymbolTable) -> Dim:
    """A size simplified by the constraints if it has min, max or a floor divided by a symbol."""
    if isinstance(size, int):
        return size
    if not size.has(sympy.Min, sympy.Max) and not any(_by_size(f) for f in size.atoms(sympy.floor)):
        return size
    return as_dim(table.normal(size))


def _by_size(rounded: sympy.Expr) -> bool:
    return bool(fraction(rounded.args[0])[1].free_symbols)


_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


def itemsize(value: ir.Value | None) -> int:
    """Returns the bytes of an element of a value; those of float32 if its type is unknown."""
    return int(value.dtype.itemsize) if value is not None and value.dtype is not None else 4


def body_env(graph: ir.Graph, outer: ShapeEnv) -> ShapeEnv:
    """Returns the shapes and contents of the values of a body and of those around it."""
    inner = read_shapes([*graph.inputs, *(v for n in graph for v in n.outputs)], outer.table)
    return ShapeEnv(
        ChainMap(dict(inner.shapes), dict(outer.shapes)),
        ChainMap(dict(inner.contents), dict(outer.contents)),
        outer.table,
    )
