"""What a sharding rule sees of one node: `NodeView`."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxpar.core.errors import ModelError, OnnxparError
from onnxpar.core.rule import OpRule
from onnxpar.core.symbols import Dim, SymbolTable
from onnxpar.graph.metadata_keys import EXPANDED_FROM, GRADIENT_OF, RECOMPUTED_FROM
from onnxpar.graph.shapes import ShapeEnv

CONST_LIMIT = 65536
"""Elements; larger constants are weights, which no rule looks into."""


def default_opset(opsets: Mapping[str, int]) -> int:
    """Returns the version of the default domain, which has two names; 1 where it is not said."""
    return opsets.get("", opsets.get("ai.onnx", 1))


@dataclass(frozen=True)
class BodyFacts:
    """A body of a node of control flow, and what is known of the nodes in it.

    Attributes:
        graph: The body.
        env: Shapes of its values and of those around it.
        rules: The sharding rule of each of its nodes, by name.
        views: What the rules saw.
        reasons: For nodes that are replicated: why.
    """

    graph: ir.Graph
    env: ShapeEnv
    rules: Mapping[str, OpRule]
    views: Mapping[str, "NodeView"]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class NodeView:
    """One node and what is known of it: all that an operator's rule may look at.

    Attributes:
        node: The node of the global graph; rules only read it.
        env: Shapes and contents of all values.
        opset: Version of the default domain.
        bodies: What is known of its bodies, by attribute, where its operator's rule follows from
            those of the nodes in them.
        sizes: Of each rule asked for, the sizes of its factors (see `graph.plan.factor_sizes`).
    """

    node: ir.Node
    env: ShapeEnv
    opset: int
    bodies: Mapping[str, BodyFacts] = field(default_factory=dict, compare=False, repr=False)
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
        """Returns the error that names the node and says what was expected of it."""
        return kind(f"node {self.name!r} ({self.op_type}): {expected}")

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
                f"({name!r}) is unknown"
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
                f"({name!r}) is unknown"
            )
        return self.env.shapes[name]

    def contents(self, index: int) -> tuple[Dim, ...] | None:
        """Elements of integer input `index` as expressions; None where they are unknown."""
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

    def ints(self, input_index: int) -> tuple[int, ...] | None:
        """Integers that an input gives, such as axes; None if it is absent.

        Raises:
            ModelError: The input is there, but is not a constant.
        """
        if not self.has(input_index):
            return None
        known = self.contents(input_index)
        if known is None or not all(isinstance(k, int) for k in known):
            raise ModelError(
                f"node {self.name!r} ({self.node.op_type}): input {input_index} must be "
                "constant to be sharded"
            )
        return tuple(int(k) for k in known)
