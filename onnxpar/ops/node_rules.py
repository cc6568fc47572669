"""The sharding rule of every node of a model, from the table of operators."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

import onnx_ir as ir

from onnxpar.core.errors import ModelError, NodeError, RuleError
from onnxpar.core.rule import OpRule
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.metadata_keys import NOT_EXPANDED
from onnxpar.graph.node_view import BodyFacts, NodeView, default_opset
from onnxpar.graph.shapes import ShapeEnv, body_env
from onnxpar.ops.fallback import replicated_rule, settle
from onnxpar.ops.node_cost import CostFn
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.registry import Registry
from onnxpar.ops.value_patterns import pattern_of


@dataclass(frozen=True)
class Rules:
    """The rule of every node of a model, by node name.

    Attributes:
        by_node: The sharding rules.
        views: The nodes with their shapes and constants, as the rules saw them.
        reasons: Why a node is replicated, for each node without a rule of its operator.
        ops: The record of each node's operator, except for nodes in `reasons`.
    """

    by_node: Mapping[str, OpRule]
    views: Mapping[str, NodeView]
    reasons: Mapping[str, str]
    ops: Mapping[str, OpDef]

    @cached_property
    def costs(self) -> Mapping[str, CostFn]:
        """The costs of nodes whose operator's record gives them."""
        costs = ((name, op.cost) for name, op in self.ops.items())
        return {name: cost for name, cost in costs if not isinstance(cost, Missing)}


def find_rules(model: ir.Model, env: ShapeEnv, registry: Registry) -> Rules:
    """Returns the rule of every node; a node without one is replicated, with the reason.

    Args:
        model: The normalised model; it is not changed.
        env: Its shapes.
        registry: The operators.

    Raises:
        NodeError: An attribute or a constant operand is not legal, so the node cannot run.
    """
    return graph_rules(model.graph, env, model.opset_imports, registry)


def graph_rules(
    nodes: Iterable[ir.Node], env: ShapeEnv, opsets: Mapping[str, int], registry: Registry
) -> Rules:
    """Returns the rule of every node of a graph or of a body; see `find_rules`.

    Args:
        nodes: The nodes, whose names differ.
        env: Shapes of their operands and results.
        opsets: Version of each domain; 1 if it is missing.
        registry: The operators.
    """
    rules: dict[str, OpRule] = {}
    views: dict[str, NodeView] = {}
    reasons: dict[str, str] = {}
    ops: dict[str, OpDef] = {}
    same: dict[OpRule, OpRule] = {}
    default = default_opset(opsets)
    for node in nodes:
        name = node.name or ""
        view = views[name] = NodeView(node, env, default)
        definition = registry.definition(node, opsets)
        if definition is None:
            reasons[name] = node.metadata_props.get(
                NOT_EXPANDED, f"no sharding rule for {node.domain or 'onnx'}::{node.op_type}"
            )
        else:
            try:
                view = views[name] = completed(view, definition, registry)
                rule = settle(definition.rule(view), view)
                # Equal layers share one rule object, which makes comparisons fast.
                rules[name] = same.setdefault(rule, rule)
                ops[name] = definition
                continue
            except NodeError as error:
                # In a body this is no mistake of the user: the branch may never run.
                if not view.origin:
                    raise
                reasons[name] = str(error)
            except ModelError as error:
                reasons[name] = node.metadata_props.get(NOT_EXPANDED, str(error))
            except (ArithmeticError, LookupError, TypeError, ValueError) as error:
                raise RuleError(
                    f"node {name!r} ({node.op_type}): its sharding rule failed: {error}"
                ) from error
        rules[name] = replicated_rule(view)
    return Rules(rules, views, reasons, ops)


def completed(view: NodeView, definition: OpDef | None, registry: Registry) -> NodeView:
    """Returns the view of a node with what the operators say about the values around it.

    These are the patterns of values and, if the operator's rule reads them, the node's bodies.

    Args:
        view: The node.
        definition: The record of its operator, if there is one.
        registry: The operators.

    Raises:
        NodeError: As `find_rules`, for a node in a body.
    """
    found = {}
    for name, graph in (
        bodies_of(view.node).items() if definition and definition.reads_bodies else ()
    ):
        env = body_env(graph, view.env)
        rules = graph_rules(graph, env, {"": view.opset}, registry)
        found[name] = BodyFacts(graph, env, rules.by_node, rules.views, rules.reasons)
    return replace(view, bodies=found, pattern_of=partial(pattern_of, registry, view.env))
