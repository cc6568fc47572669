"""A program: a model with its shapes and rules, before there is a plan.

Every later pass takes this one record. A pass that changes the model makes a new program of it
(`Program.of`), with the same table of operators.
"""

from dataclasses import dataclass

import onnx_ir as ir

from onnxpar.graph.node_view import default_opset
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.node_rules import Rules, find_rules
from onnxpar.ops.registry import Registry


@dataclass(frozen=True)
class Program:
    """A model with its shapes and rules.

    Attributes:
        model: The normalised model.
        env: Shapes of its values, and the symbols with their constraints.
        rules: The sharding rule and the operator definition of each of its nodes.
        registry: The table of operators that has the rules.
    """

    model: ir.Model
    env: ShapeEnv
    rules: Rules
    registry: Registry

    @staticmethod
    def of(model: ir.Model, env: ShapeEnv, registry: Registry) -> "Program":
        """Returns the program of a model, with the rule of each of its nodes.

        Args:
            model: The normalised model; it is not changed.
            env: Its shapes.
            registry: The table of operators.

        Raises:
            NodeError: An attribute or a constant operand of a node is illegal.
        """
        return Program(model, env, find_rules(model, env, registry), registry)

    @property
    def graph(self) -> ir.Graph:
        """The graph of the model."""
        return self.model.graph

    @property
    def opset(self) -> int:
        """Version of the default domain."""
        return default_opset(self.model.opset_imports)
