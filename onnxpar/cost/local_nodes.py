"""The seconds of the nodes of a rank's graph, from their local shapes.

The prices of a plan (`onnxpar.cost.price`) are of the nodes of the undivided program. Here are
those of the nodes that a rank runs, which include what partitioning added.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.errors import OnnxparError
from onnxpar.core.sharding import Sharding
from onnxpar.core.symbols import SymbolTable
from onnxpar.cost.cost_model import CostModel, work_key
from onnxpar.graph.builder import DOMAIN
from onnxpar.graph.plan import NodePlan
from onnxpar.graph.shapes import ShapeEnv, read_shapes
from onnxpar.ops.node_rules import graph_rules
from onnxpar.ops.registry import Registry


@dataclass
class LocalNodes:
    """The prices of nodes of one graph; nodes of equal work are priced once.

    Attributes:
        env: Shapes of values of the graph.
        opsets: Its opset imports.
        registry: The table of operators.
        costs: The cost models at which each node is priced.
    """

    env: ShapeEnv
    opsets: Mapping[str, int]
    registry: Registry
    costs: tuple[CostModel, ...]
    _known: dict[tuple[object, ...], list[float]] = field(default_factory=dict)

    @staticmethod
    def of(
        nodes: Iterable[ir.Node],
        more: Iterable[ir.Value],
        table: SymbolTable,
        opsets: Mapping[str, int],
        registry: Registry,
        costs: Iterable[CostModel],
    ) -> "LocalNodes":
        """Returns the prices of the nodes of a graph.

        Args:
            nodes: Its nodes.
            more: Its inputs and initializers.
            table: The constraints on its symbols.
            opsets: Its opset imports.
            registry: The table of operators.
            costs: The cost models.
        """
        values = [*more, *(v for node in nodes for v in node.outputs)]
        env = read_shapes([v for v in values if v.name], table)
        return LocalNodes(env, opsets, registry, tuple(costs))

    def seconds(self, node: ir.Node) -> list[float] | None:
        """Returns the seconds of computing a node by each cost model; 0 for a collective.

        None if they are not known, since only a run shows a shape.
        """
        definition = self.registry.definition(node, self.opsets)
        if node.domain == DOMAIN and definition is None:
            return [0.0] * len(self.costs)
        shapes, name = self.env.shapes, node.name or ""
        made = [shapes.get(v.name or "") for v in node.outputs]
        if any(shape is None for shape in made):
            return None
        read = [None if v is None else shapes.get(v.name or "") for v in node.inputs]
        try:
            rules = graph_rules([node], self.env, self.opsets, self.registry)
            rule, view, count = rules.by_node[name], rules.views[name], rules.costs.get(name)
            plan = NodePlan(
                rule,
                {},
                tuple(None if shape is None else Sharding.replicated(shape) for shape in read),
                tuple(Sharding.replicated(shape) for shape in made if shape is not None),
            )
            key = work_key(rule, view, plan, count)
            if key not in self._known:
                known = [cost.node(rule, view, plan, count).seconds for cost in self.costs]
                self._known[key] = known
        except OnnxparError:
            return None
        return self._known[key]
