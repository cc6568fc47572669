"""Builds loops and branches in the undivided program: bodies, their copies, their nodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim
from onnxpar.graph.body_captures import bodies_of, close_node, read_by
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.graph.shapes import read_shapes

StepFn = Callable[
    [GlobalBuilder, Sequence[ir.Value], Sequence[ir.Value]],
    tuple[Sequence[ir.Value], Sequence[ir.Value]],
]
"""Emits one step: takes a builder, states and slices; returns the new states and the results."""


@dataclass(frozen=True)
class Along:
    """How a tensor is sliced or stacked: along which axis, and whether from its end."""

    axis: int = 0
    reverse: bool = False

    def reversed(self) -> "Along":
        """Returns the other direction along the same axis."""
        return Along(self.axis, not self.reverse)


def entry(builder: GlobalBuilder, like: ir.Value, shape: Sequence[Dim], hint: str) -> ir.Value:
    """Returns a new input of a body, of the element type of `like`."""
    return builder.declare(ir.Value(name=builder.fresh(hint)), like.dtype, shape)


def slice_shape(shape: Sequence[Dim], axis: int) -> tuple[Dim, ...]:
    """Returns a shape without one of its dims."""
    at = axis % len(shape)
    return (*shape[:at], *shape[at + 1 :])


def stacked_shape(shape: Sequence[Dim], axis: int, count: Dim) -> tuple[Dim, ...]:
    """Returns a shape with one more dim."""
    at = axis % (len(shape) + 1)
    return (*shape[:at], count, *shape[at:])


def scan(
    builder: GlobalBuilder,
    states: Sequence[ir.Value],
    scanned: Sequence[tuple[ir.Value, Along]],
    step: StepFn,
    results: Sequence[Along],
) -> tuple[ir.Value, ...]:
    """Emits a Scan.

    Args:
        builder: Where to emit.
        states: Initial values of the states.
        scanned: The tensors that are sliced, at least one.
        step: Emits one step.
        results: How each result of a step is stacked.

    Returns:
        The last states, then the stacked results.
    """
    body = ir.Graph([], [], nodes=[], name=builder.fresh("body"))
    inner = builder.nested(body)
    entering = [entry(builder, v, builder.shape_of(v), "state") for v in states]
    slices = [
        entry(builder, v, slice_shape(builder.shape_of(v), along.axis), "slice")
        for v, along in scanned
    ]
    new, made = step(inner, entering, slices)
    first, along = scanned[0]
    count = builder.shape_of(first)[along.axis % len(builder.shape_of(first))]
    finish(inner, [*entering, *slices], [*new, *made])
    return scan_node(
        builder,
        body,
        states,
        scanned,
        [
            *((v.dtype, builder.shape_of(v)) for v in states),
            *(
                (v.dtype, stacked_shape(builder.shape_of(v), a.axis, count))
                for v, a in zip(made, results, strict=True)
            ),
        ],
        results,
    )


def scan_node(
    builder: GlobalBuilder,
    body: ir.Graph,
    states: Sequence[ir.Value],
    scanned: Sequence[tuple[ir.Value, Along]],
    outputs: Sequence[tuple[ir.DataType | None, Sequence[Dim]]],
    results: Sequence[Along],
) -> tuple[ir.Value, ...]:
    """Emits the node of a Scan, given its body."""
    attributes: dict[str, object] = {
        "body": body,
        "num_scan_inputs": len(scanned),
        "scan_input_axes": [a.axis for _, a in scanned],
        "scan_input_directions": [int(a.reverse) for _, a in scanned],
    }
    if results:
        attributes["scan_output_axes"] = [a.axis for a in results]
        attributes["scan_output_directions"] = [int(a.reverse) for a in results]
    values = builder.ops("Scan", [*states, *(v for v, _ in scanned)], outputs, attributes)
    node = values[0].producer()
    assert node is not None
    close_node(node)
    return values


def finish(builder: GlobalBuilder, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> None:
    """Gives a body its inputs and results.

    A result that no node of the body computes, or that occurs twice, goes through an Identity.
    """
    body = builder.graph
    body.inputs.clear()
    body.inputs.extend(inputs)
    made = {v for node in body for v in node.outputs}
    results: list[ir.Value] = []
    for value in outputs:
        if value not in made or value in results:
            value = builder.op("Identity", value, shape=builder.shape_of(value))
        results.append(value)
    body.outputs.clear()
    body.outputs.extend(results)
    prune(body)


def prune(graph: ir.Graph) -> None:
    """Removes the nodes of a body whose results are not read."""
    read = set(graph.outputs)
    for node in list(reversed(graph)):
        if any(out in read for out in node.outputs):
            read.update(read_by(node))
        else:
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)
            graph.remove(node)


def learn(builder: GlobalBuilder, graph: ir.Graph) -> None:
    """Adds shapes and contents of a body's values to what a builder knows."""
    values = [*graph.inputs, *(v for node in graph for v in node.outputs)]
    found = read_shapes(values, builder.table)
    for name, shape in found.shapes.items():
        builder.shapes.setdefault(name, shape)
    for name, items in found.contents.items():
        builder.contents.setdefault(name, items)


def copied(
    builder: GlobalBuilder, graph: ir.Graph
) -> tuple[ir.Graph, dict[ir.Value, ir.Value], dict[ir.Node, ir.Node]]:
    """Copies a body whose values the builder knows, with new names.

    Returns:
        The copy, and the original of each of its values and of each of its nodes.
    """
    copy = graph.clone(allow_outer_scope_values=True)
    values = dict(zip(copy.inputs, graph.inputs, strict=True))
    nodes = dict(zip(copy, graph, strict=True))
    for new, old in nodes.items():
        values.update(zip(new.outputs, old.outputs, strict=True))
    _rename(builder, copy)
    for new_value, old_value in values.items():
        for known in (builder.shapes, builder.contents):
            if old_value.name in known:
                known[new_value.name or ""] = known[old_value.name or ""]
    return copy, values, nodes


def _rename(builder: GlobalBuilder, graph: ir.Graph) -> None:
    for value in (*graph.inputs, *(v for node in graph for v in node.outputs)):
        if value.name:
            value.name = builder.fresh(value.name)
    for node in graph:
        node.name = builder.node_names.fresh(node.name or node.op_type)
        for body in bodies_of(node).values():
            _rename(builder, body)


def zeros_like(builder: GlobalBuilder, value: ir.Value) -> ir.Value:
    """Returns zeros of the shape and type of a value."""
    assert value.dtype is not None
    zero = ir.tensor(np.zeros(1, value.dtype.numpy()), dtype=value.dtype)
    return builder.op(
        "ConstantOfShape",
        builder.shape_value(value),
        shape=builder.shape_of(value),
        dtype=value.dtype,
        value=zero,
    )
