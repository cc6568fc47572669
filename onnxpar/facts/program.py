"""A program: a model with its shapes and rules, before there is a plan.

Every later pass takes this one record. A pass that changes the model makes a new program of it
(`Program.of`), with the same table of operators.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from onnxpar.graph.node_view import default_opset
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.kernel_memory import after_bias, kernel
from onnxpar.ops.node_rules import Rules, find_rules
from onnxpar.ops.registry import Registry
from onnxpar.ops.slots import no_workspace


class NumberedValues:
    """Numbers for values, equal for those that are alike.

    Numbers are quickly compared, and what makes values alike is computed once for each value.

    Args:
        facts: Returns what makes values alike.
    """

    def __init__(self, facts: Callable[[ir.Value], Hashable]) -> None:
        """Knows no value yet."""
        self._facts = facts
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[ir.Value | None, int] = {None: -1}

    def of(self, node: ir.Node) -> tuple[int, ...]:
        """Returns the numbers of the operands and results of a node; -1 for an absent operand."""
        known = self._known
        found = []
        for value in (*node.inputs, *node.outputs):
            number = known.get(value)
            if number is None:
                assert value is not None
                numbers = self._numbers
                number = known[value] = numbers.setdefault(self._facts(value), len(numbers))
            found.append(number)
        return tuple(found)


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

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """A number for each node, by name; nodes with one number cost the same if sharded alike.

        They have equal rules, and operands and results of equal shapes and types. If the cost or
        the memory of their operator depends on more than that, this is equal, too.
        """
        numbers: dict[object, int] = {}
        found = {}
        shapes = self.env.shapes
        seen = NumberedValues(lambda v: (v.dtype, shapes.get(v.name or "")))
        for node in self.graph:
            name = node.name or ""
            operands = seen.of(node)
            memory, count = kernel(node, self.registry), self.rules.costs.get(name)
            more: tuple[object, ...] = ()
            if memory.work is not no_workspace or count is not None:
                attributes = str(node.attributes)
                more = count, attributes, after_bias(node, self.registry)
            key = self.rules.by_node[name], operands, id(memory), more
            found[name] = numbers.setdefault(key, len(numbers))
        return found

    @property
    def opset(self) -> int:
        """Version of the default domain."""
        return default_opset(self.model.opset_imports)
