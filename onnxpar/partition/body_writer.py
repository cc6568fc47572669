"""Partitioning of the body of a control-flow node."""

from collections.abc import Mapping, Sequence
from functools import partial

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.sharding import Sharding
from onnxpar.facts.program import Program
from onnxpar.graph.builder import ir_shape
from onnxpar.graph.cleanup import remove_unused
from onnxpar.graph.local_builder import LocalBuilder
from onnxpar.graph.node_view import BodyFacts
from onnxpar.graph.plan import NodePlan, Plan
from onnxpar.ops.local_node import Captured, PartitionBody
from onnxpar.ops.node_rules import Rules
from onnxpar.ops.registry import Registry
from onnxpar.ops.value_patterns import pattern_of
from onnxpar.partition.writer import ProgramWriter


class BodyWriter(ProgramWriter):
    """Writes a body, in which zeros may be used as partial zeros."""

    @property
    def virtual_stage(self) -> int:
        """A body is all of one virtual stage."""
        return 0

    def get(
        self, value: ir.Value, want: Sharding, reason: str, there: Sequence[ir.Value] = ()
    ) -> ir.Value:
        """As in a program, but zeros become partial without communication."""
        known = self.versions_of(value.name or "")
        if (
            want.partial
            and want.reduction == "sum"
            and want not in known
            and pattern_of(self.program.registry, self.env, value).zero
        ):
            local = super().get(value, want.with_partial(()), reason, there)
            self.define(value.name or "", want, local, zero=True)
            return local
        return super().get(value, want, reason, there)


def body_partitioner(registry: Registry) -> PartitionBody:
    """Returns a function that partitions the bodies of a program's nodes.

    Args:
        registry: The operators.
    """
    return partial(_partition_body, registry)


def _partition_body(
    registry: Registry,
    builder: LocalBuilder,
    body: BodyFacts,
    plans: Mapping[str, NodePlan],
    captured: Sequence[Captured],
    inputs: Sequence[Sharding],
    outputs: Sequence[Sharding],
) -> ir.Graph:
    """Returns the body of one rank.

    Args:
        registry: The operators.
        builder: Builder of the graph around it; small constants and system inputs go there.
        body: The undivided body; it is not changed.
        plans: The plan of each of its nodes.
        captured: The values that it reads from outside.
        inputs: The sharding of each of its inputs.
        outputs: The sharding wanted for each of its results.

    Raises:
        ShardingError: A node has no local form for its plan, or only one that communicates.
    """
    inner = builder.nested()
    graph, env = body.graph, body.env
    opsets = {"": next((view.opset for view in body.views.values()), 1)}
    ops = {
        node.name or "": definition
        for node in graph
        if node.name not in body.reasons
        and (definition := registry.definition(node, opsets)) is not None
    }
    # A body has no opset imports; the versions of its nodes are in their views.
    model = ir.Model(graph, ir_version=10)
    rules = Rules(body.rules, body.views, body.reasons, ops)
    plan = Plan(builder.mesh, plans, {}, {}, {})
    work = BodyWriter(Program(model, env, rules, registry), plan, inner, body_partitioner(registry))
    for value, sharding, local, zero in captured:
        work.define(value.name or "", sharding, local, zero=zero)
    entering = []
    for value, sharding in zip(graph.inputs, inputs, strict=True):
        known = (value.name or "") in env.shapes
        local = ir.Value(
            name=builder.fresh(value.name or "input"),
            type=value.type,
            shape=ir_shape(sharding.local_shape(builder.mesh, env.table)) if known else None,
        )
        entering.append(local)
        work.define(value.name or "", sharding, local, zero=False)
    for node in graph:
        inner.scope = node.name or ""
        work.write(node)
    leaving: list[ir.Value] = []
    for value, sharding in zip(graph.outputs, outputs, strict=True):
        local = work.get(value, sharding, f"result {value.name!r}")
        made = any(local in node.outputs for node in inner.nodes)
        if not made or local in leaving:
            local = inner.op("Identity", local, dtype=local.dtype, shape=_shape(local))
        leaving.append(local)
    if len(inner.collectives) != len(builder.collectives):
        raise ShardingError(
            f"a control-flow body must not communicate: {inner.collectives[-1].op} of "
            f"{inner.collectives[-1].value!r}"
        )
    remove_unused(inner, leaving)
    return ir.Graph(entering, leaving, nodes=inner.nodes, name=graph.name or "body")


def _shape(value: ir.Value) -> Sequence[int | str] | None:
    if value.shape is None:
        return None
    return [d if isinstance(d, int) else str(d.value) for d in value.shape]
