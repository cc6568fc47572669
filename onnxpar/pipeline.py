"""The ordered list of stages from a model to rank graphs. Each takes plain data and returns plain data."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from onnxpar.analysis.plan import Plan
from onnxpar.analysis.propagate import Rules, propagate
from onnxpar.analysis.seeds import Seeds
from onnxpar.analysis.shapes import NodeView, ShapeEnv, shapes
from onnxpar.errors import ModelError
from onnxpar.ops.fallback import replicated_rule
from onnxpar.ops.registry import OpDef
from onnxpar.ops.rule import OpRule
from onnxpar.ops.table import REGISTRY
from onnxpar.passes.load import load, normalise, symbol_table
from onnxpar.passes.partition import partition
from onnxpar.passes.partitioned import PartitionedModel
from onnxpar.symbols import Symbol


@dataclass(frozen=True)
class Analysed:
    """A model and all that is known of it before anything is decided.

    Attributes:
        model: The normalised model.
        env: Shapes, and the symbols with their constraints.
        rules: The sharding rule of every node.
        ops: The operator definition of each node that has one, by node name.
    """

    model: ir.Model
    env: ShapeEnv
    rules: Rules
    ops: Mapping[str, OpDef]


def analyse(model: ir.Model, symbols: Mapping[str, Symbol]) -> Analysed:
    """Normalises a model and finds shapes and rules. The model given is used up.

    Args:
        model: As read by `onnxpar.passes.load.load`.
        symbols: Constraints on the symbols of its inputs.

    Raises:
        ModelError: The model is not valid, or a constraint is on an unknown symbol.
    """
    model = normalise(model)
    env = shapes(model, symbol_table(model, symbols))
    rules, ops = find_rules(model, env)
    return Analysed(model, env, rules, ops)


def find_rules(model: ir.Model, env: ShapeEnv) -> tuple[Rules, dict[str, OpDef]]:
    """Returns the rule of every node; one that has none is computed replicated, with the reason."""
    rules: dict[str, OpRule] = {}
    views: dict[str, NodeView] = {}
    reasons: dict[str, str] = {}
    ops: dict[str, OpDef] = {}
    default = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 1))
    for node in model.graph:
        name = node.name or ""
        view = views[name] = NodeView(node, env, default)
        version = default if node.domain in ("", "ai.onnx") else model.opset_imports[node.domain]
        definition = REGISTRY.find(node.domain, node.op_type, version)
        if definition is None:
            reasons[name] = f"no sharding rule for {node.domain or 'onnx'}::{node.op_type}"
        else:
            try:
                rules[name] = definition.rule(view)
                ops[name] = definition
                continue
            except ModelError as error:
                reasons[name] = str(error)
        rules[name] = replicated_rule(view)
    return Rules(rules, views, reasons), ops


def divide(analysed: Analysed, seeds: Seeds) -> PartitionedModel:
    """Plans and partitions a model.

    Raises:
        ShardingError: A strategy does not fit its node.
    """
    plan: Plan = propagate(analysed.model, analysed.env, analysed.rules, seeds)
    return partition(analysed.model, analysed.env, analysed.rules, analysed.ops, plan)
