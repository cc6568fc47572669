"""The sharding rule of every node of a model, from the table of operators."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import onnx_ir as ir

from onnxpar.core.errors import ModelError, NodeError, RuleError
from onnxpar.core.rule import OpRule
from onnxpar.graph.keys import NOT_EXPANDED
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.fallback import replicated_rule, settle
from onnxpar.ops.node_cost import CostFn
from onnxpar.ops.operator import Missing, OpDef
from onnxpar.ops.table import REGISTRY


@dataclass(frozen=True)
class Rules:
    """The rule of every node of a model, by node name.

    Attributes:
        rules: The sharding rules.
        views: What the rules saw.
        reasons: For nodes that are computed replicated: why.
        costs: What a device computes and moves, for nodes whose operator says it.
    """

    rules: Mapping[str, OpRule]
    views: Mapping[str, NodeView]
    reasons: Mapping[str, str]
    costs: Mapping[str, CostFn] = field(default_factory=dict)


def find_rules(model: ir.Model, env: ShapeEnv) -> tuple[Rules, dict[str, OpDef]]:
    """Returns the rule of every node; one that has none is computed replicated, with the reason.

    Args:
        model: The normalised model; it is not changed.
        env: Its shapes.

    Raises:
        NodeError: An attribute or a constant operand is not legal, so there is nothing to compute.

    Returns:
        The rules, and the operator definition of each node that has one, by node name.
    """
    return graph_rules(model.graph, env, model.opset_imports)


def graph_rules(
    nodes: Iterable[ir.Node], env: ShapeEnv, opsets: Mapping[str, int]
) -> tuple[Rules, dict[str, OpDef]]:
    """Returns the rule of every node of a graph or of a body; see `find_rules`.

    Args:
        nodes: The nodes, whose names differ.
        env: Shapes of what they read and make.
        opsets: Version of each domain; 1 where it is not said.
    """
    rules: dict[str, OpRule] = {}
    views: dict[str, NodeView] = {}
    reasons: dict[str, str] = {}
    ops: dict[str, OpDef] = {}
    same: dict[OpRule, OpRule] = {}
    default = opsets.get("", opsets.get("ai.onnx", 1))
    for node in nodes:
        name = node.name or ""
        view = views[name] = NodeView(node, env, default)
        standard = node.domain in ("", "ai.onnx")
        version = default if standard else opsets.get(node.domain, 1)
        definition = REGISTRY.find(node.domain, node.op_type, version)
        if definition is None:
            reasons[name] = node.metadata_props.get(
                NOT_EXPANDED, f"no sharding rule for {node.domain or 'onnx'}::{node.op_type}"
            )
        else:
            try:
                rule = settle(definition.rule(view), view)
                # Layers that are alike have one rule, which is its own equal at a glance.
                rules[name] = same.setdefault(rule, rule)
                ops[name] = definition
                continue
            except NodeError as error:
                # Of a body it is not the user's mistake: it holds what only the run decides.
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
    costs = {name: op.cost for name, op in ops.items() if not isinstance(op.cost, Missing)}
    return Rules(rules, views, reasons, costs), ops
