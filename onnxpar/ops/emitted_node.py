"""A node and the builder that emits its replacement: `EmittedNode`.

Local forms, bodies and gradients read their node and emit nodes in the same way. Only the values
differ: `LocalNode` has local operands and shapes, `BodyNode` and `GradNode` have those of the
undivided program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import onnx_ir as ir

from onnxpar.core.errors import ModelError, OnnxparError, RuleError
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.graph.builder import Builder
from onnxpar.graph.node_view import NodeView

AnyBuilder = TypeVar("AnyBuilder", bound=Builder, covariant=True)


@dataclass(frozen=True)
class EmittedNode(Generic[AnyBuilder]):
    """A node, and the builder that emits its replacement.

    Attributes:
        view: The node of the undivided graph, with its shapes and constants.
        builder: The builder.
    """

    view: NodeView
    builder: AnyBuilder

    # -- the node --------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.view.name

    @property
    def op_type(self) -> str:
        """Operator of the node."""
        return self.view.op_type

    @property
    def arity(self) -> int:
        """Number of operands, absent ones included."""
        return self.view.arity

    @property
    def table(self) -> SymbolTable:
        """The symbols and their constraints."""
        return self.view.table

    @property
    def operands(self) -> Sequence[ir.Value | None]:
        """The operands; None for absent ones."""
        return self.view.node.inputs

    def has(self, index: int) -> bool:
        """Whether operand `index` is present."""
        return self.view.has(index)

    def input(self, index: int) -> ir.Value:
        """Operand `index`, which must be present."""
        value = self.operands[index] if index < len(self.operands) else None
        if value is None:
            raise self.fail(f"input {index} is absent, but needed", RuleError)
        return value

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, or `default`."""
        return self.view.attr(name, default)

    def fail(self, expected: str, kind: type[OnnxparError] = ModelError) -> OnnxparError:
        """Returns an error that names the node and says what was expected."""
        return self.view.fail(expected, kind)

    # -- emission --------------------------------------------------------------------------------

    def shape(self, value: ir.Value) -> tuple[Dim, ...]:
        """Shape of any value that the builder knows."""
        return self.builder.shape_of(value)

    def op(
        self,
        op_type: str,
        *inputs: ir.Value | None,
        shape: Sequence[Dim] | None = None,
        dtype: ir.DataType | None = None,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """Emits an operator with one result; shape and dtype default to the first input's."""
        return self.builder.op(
            op_type, *inputs, shape=shape, dtype=dtype, domain=domain, **attributes
        )

    def number(self, value: float, like: ir.Value) -> ir.Value:
        """A scalar constant of the dtype of `like`."""
        return self.builder.const(value, like.dtype)
