"""The part of a node and its surroundings that a sharding rule sees: `NodeView`."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import ModelError, OnnxparError
from onnxpar.core.rule import OpRule
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.graph.metadata_keys import EXPANDED_FROM, GRADIENT_OF, RECOMPUTED_FROM
from onnxpar.graph.patterns import UNKNOWN, Pattern
from onnxpar.graph.shapes import ShapeEnv

CONST_LIMIT = 65536
"""Elements; rules do not read larger constants, which are weights."""


def default_opset(opsets: Mapping[str, int], missing: int = 1) -> int:
    """Returns the version of the default domain, which has two names; else `missing`."""
    return opsets.get("", opsets.get("ai.onnx", missing))


@dataclass(frozen=True)
class BodyFacts:
    """A body of a node of control flow, with the rules of its nodes.

    Attributes:
        graph: The body.
        env: Shapes of its values and of those around it.
        rules: The sharding rule of each of its nodes, by name.
        views: The view from which each rule was made, by name.
        reasons: For nodes that are replicated: why, by name.
    """

    graph: ir.Graph
    env: ShapeEnv
    rules: Mapping[str, OpRule]
    views: Mapping[str, "NodeView"]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class NodeView:
    """One node with its shapes and constants: all that an operator's rule may depend on.

    Attributes:
        node: The node of the global graph; rules only read it.
        env: Shapes and contents of all values.
        opset: Version of the default domain.
        bodies: Its bodies, by attribute, if the rule of its operator follows from the rules of the
            nodes in them.
        pattern_of: Returns what is known of the elements of a value, from the nodes that made it.
        sizes: A cache of `graph.plan.factor_sizes`, by rule.
    """

    node: ir.Node
    env: ShapeEnv
    opset: int
    bodies: Mapping[str, BodyFacts] = field(default_factory=dict, compare=False, repr=False)
    pattern_of: Callable[[ir.Value], Pattern] = field(
        default=lambda value: UNKNOWN, compare=False, repr=False
    )
    sizes: dict[Hashable, Mapping[str, Dim]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name or ""

    @property
    def op_type(self) -> str:
        """Operator of the node."""
        return self.node.op_type

    def fail(self, expected: str, kind: type[OnnxparError] = ModelError) -> OnnxparError:
        """Returns an error that names the node, followed by the text `expected`."""
        return kind(f"node {self.name!r} ({self.op_type}): {expected}")

    @property
    def drawing_name(self) -> str:
        """Name from which random numbers are drawn, equal for a node and its recomputed copy."""
        return self.node.metadata_props.get(RECOMPUTED_FROM, self.name)

    @property
    def is_backward(self) -> bool:
        """Whether autodiff added the node, so that the user's strategy does not apply to it."""
        return GRADIENT_OF in self.node.metadata_props

    @property
    def origin(self) -> str:
        """Name of the node of the model whose body this node is part of; "" if there is none."""
        return self.node.metadata_props.get(EXPANDED_FROM, "")

    @property
    def table(self) -> SymbolTable:
        """The symbols and their constraints."""
        return self.env.table

    @property
    def arity(self) -> int:
        """Number of inputs, including absent ones."""
        return len(self.node.inputs)

    def has(self, index: int) -> bool:
        """Whether input `index` is present."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    @property
    def has_floats(self) -> bool:
        """Whether input 0 is known to have floating-point elements."""
        value = self.node.inputs[0]
        return value is not None and value.dtype is not None and value.dtype.is_floating_point()

    def _input(self, index: int) -> ir.Value:
        value = self.node.inputs[index] if index < len(self.node.inputs) else None
        if value is None or value.name is None:
            raise self.fail(f"no input {index}")
        return value

    def shape(self, index: int) -> tuple[Dim, ...]:
        """Global shape of input `index`; ModelError if its rank is unknown."""
        return self._known_shape(f"input {index}", self._input(index))

    def known_shape(self, index: int) -> tuple[Dim, ...]:
        """Global shape of input `index`, () if its rank is unknown."""
        return self.env.shapes.get(self._input(index).name or "", ())

    def out_shape(self, index: int = 0) -> tuple[Dim, ...]:
        """Global shape of output `index`; ModelError if its rank is unknown."""
        return self._known_shape(f"output {index}", self.node.outputs[index])

    def _known_shape(self, place: str, value: ir.Value) -> tuple[Dim, ...]:
        shape = self.env.shapes.get(value.name or "")
        if shape is None:
            raise self.fail(f"the shape of {place} ({value.name!r}) is unknown")
        return shape

    def contents(self, index: int) -> tuple[Dim, ...] | None:
        """Elements of integer input `index` as expressions; None if they are unknown."""
        return self.env.contents.get(self._input(index).name or "")

    def const(self, index: int) -> NDArray[Any] | None:
        """Input `index` as an array if it is a small constant, else None."""
        tensor = self._input(index).const_value
        if tensor is None or tensor.size > CONST_LIMIT:
            return None
        return np.asarray(tensor.numpy())

    def attr(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, or `default`."""
        attribute = self.node.attributes.get(name)
        return default if attribute is None else attribute.value

    def ints(self, input_index: int) -> tuple[int, ...] | None:
        """Elements of an input of integers, such as axes; None if it is absent.

        Raises:
            ModelError: The input is present, but its elements are not known numbers.
        """
        if not self.has(input_index):
            return None
        known = self.contents(input_index)
        if known is None or not all(isinstance(k, int) for k in known):
            raise self.fail(f"input {input_index} must be constant to be sharded")
        return tuple(int(k) for k in known)
