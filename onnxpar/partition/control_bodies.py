"""Partitioning of a body: the program of all ranks for the inside of a node of control flow."""

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from onnxpar.core.errors import ShardingError
from onnxpar.core.sharding import Sharding
from onnxpar.graph.builder import GraphBuilder, ir_shape
from onnxpar.graph.cleanup import remove_unused
from onnxpar.graph.plan import NodePlan, Plan
from onnxpar.graph.shapes import ShapeEnv
from onnxpar.ops.control.body_rule import is_zero
from onnxpar.ops.node_rules import Rules
from onnxpar.ops.operator import OpDef
from onnxpar.partition.partitioner import _Partition

Known = tuple[ir.Value, Sharding, ir.Value, bool]
"""What a body captures: the global value, how it lies, the local one, whether padding is 0."""


class _BodyPartition(_Partition):
    """The partitioner of a body, where zeros may stand for zeros that wait for a sum."""

    @property
    def virtual_stage(self) -> int:
        """A body is all of one virtual stage."""
        return 0

    def _get(
        self, value: ir.Value, want: Sharding, reason: str, there: Sequence[ir.Value] = ()
    ) -> ir.Value:
        known = self._versions(value.name or "")
        if want.partial and want.reduction == "sum" and want not in known and is_zero(value):
            local = super()._get(value, want.with_partial(()), reason, there)
            self._define(value.name or "", want, local, zero=True)
            return local
        return super()._get(value, want, reason, there)


def partition_body(
    builder: GraphBuilder,
    graph: ir.Graph,
    env: ShapeEnv,
    rules: Rules,
    ops: Mapping[str, OpDef],
    plans: Mapping[str, NodePlan],
    captured: Sequence[Known],
    inputs: Sequence[Sharding],
    outputs: Sequence[Sharding],
) -> ir.Graph:
    """Returns a body written for one device.

    Args:
        builder: Builder of the graph around it; small constants and system inputs go there.
        graph: The undivided body; it is not changed.
        env: Shapes of its values and of those around it.
        rules: The rule of each of its nodes.
        ops: The operator definition of each node that has one, by node name.
        plans: The plan of each of its nodes.
        captured: What it reads from outside.
        inputs: How each of its inputs lies.
        outputs: How each of its results shall lie.

    Raises:
        ShardingError: A node cannot be written for its plan, or not without communication.
    """
    inner = builder.nested()
    model = ir.Model(graph, ir_version=10)
    work = _BodyPartition(model, env, rules, ops, Plan(builder.mesh, plans, {}, {}, {}), inner)
    for value, sharding, local, zero in captured:
        work._define(value.name or "", sharding, local, zero=zero)
    entering = []
    for value, sharding in zip(graph.inputs, inputs, strict=True):
        shape = env.shapes.get(value.name or "")
        local = ir.Value(
            name=builder.fresh(value.name or "input"),
            type=value.type,
            shape=None
            if shape is None
            else ir_shape(sharding.local_shape(builder.mesh, env.table)),
        )
        entering.append(local)
        work._define(value.name or "", sharding, local, zero=False)
    for node in graph:
        inner.scope(node.name or "")
        work._node(node)
    leaving: list[ir.Value] = []
    for value, sharding in zip(graph.outputs, outputs, strict=True):
        local = work._get(value, sharding, f"result {value.name!r}")
        made = any(local in node.outputs for node in inner.nodes)
        if not made or local in leaving:
            local = inner.op("Identity", local, dtype=local.dtype, shape=_shape(local))
        leaving.append(local)
    if len(inner.collectives) != len(builder.collectives):
        raise ShardingError(
            f"a body would communicate: {inner.collectives[-1].op} of "
            f"{inner.collectives[-1].value!r}"
        )
    remove_unused(inner, leaving)
    return ir.Graph(entering, leaving, nodes=inner.nodes, name=graph.name or "body")


def _shape(value: ir.Value) -> Sequence[int | str] | None:
    if value.shape is None:
        return None
    return [d if isinstance(d, int) else str(d.value) for d in value.shape]
