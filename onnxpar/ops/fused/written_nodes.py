"""Finds what exporters write in several operators in the graph of a rank, to replace it by one."""

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.builder import DOMAIN
from onnxpar.ops.function import Function
from onnxpar.ops.fused.activation_gradients import GATED
from onnxpar.ops.fused.backward import RMS_NORMALIZATION_GRAD
from onnxpar.ops.fused.fused_nodes import FusedNodes, NodeGraph
from onnxpar.ops.fused.rotary import MOST_DIMS, ROTARY, ROTARY_GRAD
from onnxpar.ops.fused.written import (
    Written,
    either_way,
    find_gate,
    find_normal,
    find_rotation,
)

Shapes = Mapping[ir.Value, Sequence[Dim]]


def _written(graph: NodeGraph, shapes: Shapes) -> Written:
    return Written(graph.maker, lambda value: shapes.get(value, ()))


def _has(graph: NodeGraph, *functions: Function) -> bool:
    """Whether the graph has one of our operators."""
    names = {function.name for function in functions}
    return any(node.domain == DOMAIN and node.op_type in names for node in graph.nodes)


def _nodes(
    graph: NodeGraph, last: ir.Node, inner: Sequence[ir.Value], kept: Sequence[ir.Value] = ()
) -> tuple[ir.Node, ...] | None:
    """The nodes that make some values, and the last one; None if others need these values.

    `kept` are values that these nodes make too, and that others may need.
    """
    makers = [graph.maker(value) for value in (*inner, *kept)]
    nodes = tuple(dict.fromkeys([*(node for node in makers if node is not None), last]))
    return None if graph.needs(inner, nodes) else nodes


def find_norms(graph: NodeGraph, shapes: Shapes) -> Iterator[FusedNodes]:
    """Yields each RMS norm whose inverse deviation is read by others, in a program that trains one.

    onnxruntime finds all other norms itself.
    """
    if not _has(graph, RMS_NORMALIZATION_GRAD):
        return
    written = _written(graph, shapes)
    for node in graph.nodes:
        if (node.op_type, node.domain) != ("Mul", ""):
            continue
        for scale, value in either_way([v for v in node.inputs if v is not None]):
            normal = find_normal(written, value)
            if normal is None or len(graph.readers(normal.inverse)) < 2:
                continue
            x, shape = normal.x, written.shape(normal.x)
            single = x.dtype == scale.dtype == ir.DataType.FLOAT
            nodes = _nodes(graph, node, (*normal.inner, value), (normal.inverse,))
            if nodes is None or not single or list(written.shape(scale)) != list(shape[-1:]):
                continue
            yield FusedNodes(
                "",
                "SimplifiedLayerNormalization",
                {"axis": -1, "epsilon": normal.epsilon, "stash_type": 1},
                nodes,
                (x, scale),
                (node.outputs[0], normal.inverse),
            )
            break


def find_gates(graph: NodeGraph, shapes: Shapes) -> Iterator[FusedNodes]:
    """Yields each gated unit, if the graph has the gradient of one."""
    if not _has(graph, *GATED.values()):
        return
    written = _written(graph, shapes)
    for node in graph.nodes:
        if (node.op_type, node.domain) != ("Mul", ""):
            continue
        found = find_gate(written, [v for v in node.inputs if v is not None])
        nodes = None if found is None else _nodes(graph, node, found.inner)
        if found is not None and nodes is not None:
            operands = (found.x, found.up)
            yield FusedNodes(DOMAIN, found.function.name, {}, nodes, operands, (node.outputs[0],))


def find_rotations(graph: NodeGraph, shapes: Shapes) -> Iterator[FusedNodes]:
    """Yields each rotation by positions, if the graph has the gradient of one."""
    if not _has(graph, ROTARY_GRAD):
        return
    written = _written(graph, shapes)
    for node in graph.nodes:
        if (node.op_type, node.domain) != ("Add", ""):
            continue
        found = find_rotation(written, [v for v in node.inputs if v is not None])
        if found is None or len(written.shape(found.x)) > MOST_DIMS:
            continue
        nodes = _nodes(graph, node, found.inner)
        if nodes is not None:
            operands = (found.x, found.cos, found.sin)
            yield FusedNodes(DOMAIN, ROTARY.name, {}, nodes, operands, (node.outputs[0],))
