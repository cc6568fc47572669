"""Shapes and dtypes of every value as expressions in the input symbols, and known integer contents.

The inference itself is the `onnx-shape-inference` library's; this module reads its results into
`Dim`s, and wraps a node and its facts in the `NodeView` that rules see.
"""

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
from numpy.typing import NDArray
from onnx_shape_inference import SYM_DATA_KEY

from onnxpar.core.errors import ModelError
from onnxpar.core.symbols import Dim, SymbolTable, as_dim
from onnxpar.core.symbols.expressions import fraction

CONST_LIMIT = 65536
GRADIENT_OF = "onnxpar.gradient_of"
"""Metadata key of a node that autodiff added: name of the node whose gradient it belongs to."""

VIRTUAL_STAGE = "onnxpar.virtual_stage"
"""Metadata key of a node: number of the virtual stage that it belongs to."""

RECOMPUTED_FROM = "onnxpar.recomputed_from"
"""Metadata key of a node that computes anew what another node has computed: that node's name."""

EXPANDED_FROM = "onnxpar.expanded_from"
"""Metadata key of a node of an operator's body: name of the node that the body replaces."""
EXPANDED_OPERANDS = "onnxpar.expanded_operands"
"""Metadata key beside it: JSON, names of the operands and results that the replaced node had."""
NOT_EXPANDED = "onnxpar.not_expanded"
"""Metadata key of a node whose operator has a body that it cannot be replaced by: the reason."""


@dataclass(frozen=True)
class ShapeEnv:
    """What is known of each value, by name.

    Attributes:
        shapes: Global shape of each value whose rank is known.
        contents: For small integer values whose elements are known expressions: those elements,
            flattened.
        table: What is known of the symbols.
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
    """Reads what inference found out of some values."""
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
    """A size without ends of slices that constraints show to lie inside, and quotients computed."""
    if isinstance(size, int):
        return size
    if not size.has(sympy.Min, sympy.Max) and not any(_by_size(f) for f in size.atoms(sympy.floor)):
        return size
    return as_dim(table.normal(size))


def _by_size(rounded: sympy.Expr) -> bool:
    return bool(fraction(rounded.args[0])[1].free_symbols)


_INTEGERS = (ir.DataType.INT64, ir.DataType.INT32)


@dataclass(frozen=True)
class NodeView:
    """One node and what is known of it: all that an operator's rule may look at.

    Attributes:
        node: The node of the global graph; rules only read it.
        env: Shapes and contents of all values.
        opset: Version of the default domain.
        sizes: Of each rule asked for, the sizes of its factors (see `graph.plan.factor_sizes`).
    """

    node: ir.Node
    env: ShapeEnv
    opset: int
    sizes: dict[Hashable, Mapping[str, Dim]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name or ""

    @property
    def drawing_name(self) -> str:
        """Name that random numbers are keyed by: a node that is recomputed draws the same again."""
        return self.node.metadata_props.get(RECOMPUTED_FROM, self.name)

    @property
    def is_backward(self) -> bool:
        """Whether autodiff added the node: no strategy of the user's is meant for it."""
        return GRADIENT_OF in self.node.metadata_props

    @property
    def origin(self) -> str:
        """Name of the node of the model in whose place this one stands; "" where it is its own."""
        return self.node.metadata_props.get(EXPANDED_FROM, "")

    @property
    def table(self) -> SymbolTable:
        """What is known of the symbols."""
        return self.env.table

    @property
    def arity(self) -> int:
        """Number of inputs, absent ones included."""
        return len(self.node.inputs)

    def has(self, index: int) -> bool:
        """Whether input `index` is present."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def _input(self, index: int) -> ir.Value:
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None or value.name is None:
            raise ModelError(f"node {self.name!r} ({self.node.op_type}): no input {index}")
        return value

    def shape(self, index: int) -> tuple[Dim, ...]:
        """Global shape of input `index`; ModelError where its rank is unknown."""
        name = self._input(index).name or ""
        if name not in self.env.shapes:
            raise ModelError(
                f"node {self.name!r} ({self.node.op_type}): the shape of input {index} "
                f"({name!r}) is not known"
            )
        return self.env.shapes[name]

    def known_shape(self, index: int) -> tuple[Dim, ...]:
        """Global shape of input `index`, () where its rank is unknown."""
        return self.env.shapes.get(self._input(index).name or "", ())

    def out_shape(self, index: int = 0) -> tuple[Dim, ...]:
        """Global shape of output `index`; ModelError where its rank is unknown."""
        name = self.node.outputs[index].name
        if name is None or name not in self.env.shapes:
            raise ModelError(
                f"node {self.name!r} ({self.node.op_type}): the shape of output {index} "
                f"({name!r}) is not known"
            )
        return self.env.shapes[name]

    def contents(self, index: int) -> tuple[Dim, ...] | None:
        """Elements of integer input `index` as expressions; None where they are not known."""
        return self.env.contents.get(self._input(index).name or "")

    def const(self, index: int) -> NDArray[Any] | None:
        """Input `index` as an array where it is a small constant, else None."""
        tensor = self._input(index).const_value
        if tensor is None or tensor.size > CONST_LIMIT:
            return None
        return np.asarray(tensor.numpy())

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, or `default`."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.value

    def ints(self, input_index: int, attribute: str) -> tuple[int, ...] | None:
        """Integers that older opsets give as attribute and newer ones as input; None if absent.

        Raises:
            ModelError: The input is there, but is not a constant.
        """
        if self.has(input_index):
            known = self.contents(input_index)
            if known is None or not all(isinstance(k, int) for k in known):
                raise ModelError(
                    f"node {self.name!r} ({self.node.op_type}): input {input_index} must be "
                    "constant to be divided"
                )
            return tuple(int(k) for k in known)
        value = self.attr(attribute)
        return None if value is None else tuple(int(v) for v in value)
