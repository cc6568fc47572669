"""Nodes that cannot be sharded: every device computes all of them."""

from collections.abc import Iterable
from dataclasses import replace
from types import MappingProxyType
from typing import NoReturn

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.rule import ABSENT, REPLICATED, REPLICATED_OPERAND, Operand, OpRule
from onnxpar.core.symbols import Dim, symbols_of
from onnxpar.graph.body_captures import bodies_of
from onnxpar.graph.node_view import NodeView
from onnxpar.graph.plan import factor_sizes
from onnxpar.ops.registry import Registry


def replicated_rule(view: NodeView) -> OpRule:
    """Returns the rule of a node with replicated operands and results."""
    inputs = tuple(
        Operand(mode=REPLICATED_OPERAND if view.has(i) else ABSENT) for i in range(view.arity)
    )
    outputs = tuple(Operand(mode=REPLICATED_OPERAND) for _ in view.node.outputs)
    return OpRule(inputs, outputs, MappingProxyType({}))


def draws(node: ir.Node, registry: Registry) -> bool:
    """Whether a node draws random numbers itself."""
    definition = registry.of(node)
    return definition is not None and definition.draws(node)


def refuse_random(node: ir.Node, registry: Registry, devices: int, *, copied: bool) -> None:
    """Refuses a node that draws random numbers in a body, at any depth, or is copied itself.

    Each device would draw different numbers, although they count as replicated.

    Args:
        node: The node.
        registry: The table of operators.
        devices: Number of devices that compute it.
        copied: Whether the node's local form is the same operator.

    Raises:
        ShardingError: It draws random numbers, and there is more than one device.
    """
    if devices == 1:
        return
    what = f"node {node.name!r} ({node.op_type})"
    for body in bodies_of(node).values():
        for inner in ir.traversal.RecursiveGraphIterator(body):
            if draws(inner, registry):
                name = inner.name or inner.outputs[0].name
                _refuse(f"{what}: {name!r} ({inner.op_type}) in its body", devices)
    if copied and draws(node, registry):
        _refuse(what, devices)


def _refuse(what: str, devices: int) -> NoReturn:
    raise ShardingError(
        f"{what} draws random numbers, which would differ between ranks: expected one device, "
        f"got {devices}"
    )


def readable(view: NodeView, dims: Iterable[Dim]) -> bool:
    """Whether every size follows from the sizes of the graph's inputs."""
    return all(name in view.table for dim in dims for name in symbols_of(dim))


def require_readable(view: NodeView, what: str, dims: Iterable[Dim]) -> None:
    """Refuses a node that cannot be sharded because its sizes depend on data.

    Raises:
        ModelError: A size of `what` does not follow from the sizes of the graph's inputs.
    """
    dims = tuple(dims)
    if not readable(view, dims):
        raise view.fail(
            f"{what} must be determined by the sizes of the inputs, got {', '.join(map(str, dims))}"
        )


def settle(rule: OpRule, view: NodeView) -> OpRule:
    """Returns the rule with every factor replicated whose size may be zero or depends on data.

    No device could compute the local size or the padding of a factor whose size depends on data. An
    empty tensor has no shards.
    """
    sizes = factor_sizes(rule, view)
    fixed = {
        f
        for f in rule.factors
        # A number depends on no data.
        if (size := sizes[f]) == 0
        or (
            not isinstance(size, int)
            and (view.table.may_be_empty(size) or not readable(view, (size,)))
        )
    }
    if not fixed:
        return rule
    kinds = {f: REPLICATED if f in fixed else kind for f, kind in rule.kinds.items()}
    return replace(rule, kinds=MappingProxyType(kinds))
