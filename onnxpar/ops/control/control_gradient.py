"""Gradients of branches and loops: their bodies are differentiated and run backwards.

The gradient of an If is an If with the same condition. Each of its branches computes those parts of
the forward branch again that its gradient reads. The gradient of a Scan is a Scan in reverse order.
Its states are the cotangents of the forward states, and sums for captured values. The forward Scan
stacks the values that the gradient of a step reads. So each step is computed once, and memory is
that of backpropagation through time (Werbos, 1990, "Backpropagation through time: what it does and
how to do it"). A Loop that no condition can end is a Scan over the numbers of its steps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxpar.core.symbols import Dim, as_dim
from onnxpar.graph.body_captures import bodies_of, close_node, own_inputs, read_by
from onnxpar.graph.builder import INT64
from onnxpar.graph.global_builder import GlobalBuilder
from onnxpar.ops.body_node import BodyNode
from onnxpar.ops.control.build_loops import (
    Along,
    copied,
    entry,
    finish,
    learn,
    scan_node,
    slice_shape,
    stacked_shape,
    zeros_like,
)
from onnxpar.ops.control.inference import runs_through
from onnxpar.ops.grad_node import GradNode


def _floats(values: Sequence[ir.Value]) -> list[ir.Value]:
    return [v for v in values if v.dtype is not None and v.dtype.is_floating_point()]


def _captured(node: GradNode) -> dict[int, ir.Value]:
    """The captured operands whose cotangent is wanted, by position."""
    inputs = node.view.node.inputs
    own = len(own_inputs(node.view.node))
    return {i: v for i in sorted(node.wanted) if i >= own and (v := inputs[i]) is not None}


# -- If --------------------------------------------------------------------------------------------


def if_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """An If with the same condition, whose branches are the gradients of both branches."""
    builder, forward = node.builder, node.view.node
    targets = _captured(node)
    branches: dict[str, tuple[GlobalBuilder, dict[ir.Value, ir.Value]]] = {}
    for name, graph in bodies_of(forward).items():
        learn(builder, graph)
        copy, _, _ = copied(builder, graph)
        inner = builder.nested(copy)
        node.inner.expand(inner, list(targets.values()), _floats(copy.outputs))
        given = {
            out: cotangent
            for out, cotangent in zip(copy.outputs, node.cotangents, strict=True)
            if cotangent is not None
        }
        branches[name] = inner, node.inner.differentiate(inner, given, list(targets.values()))
    found = {i: v for i, v in targets.items() if any(v in made for _, made in branches.values())}
    if not found:
        return []
    attributes = {}
    for name, (inner, made) in branches.items():
        finish(inner, [], [made[v] if v in made else zeros_like(inner, v) for v in found.values()])
        attributes[name] = inner.graph
    outputs = [(v.dtype, builder.shape_of(v)) for v in found.values()]
    values = builder.ops("If", [node.input(0)], outputs, attributes)
    maker = values[0].producer()
    assert maker is not None
    close_node(maker)
    results: list[ir.Value | None] = [None] * len(forward.inputs)
    for index, value in zip(found, values, strict=True):
        results[index] = value
    return results


# -- Scan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Forward:
    """The forward Scan.

    Attributes:
        node: The node.
        body: Its body.
        states: Number of states.
        slices: How each scanned operand is sliced.
        stacks: How each scanned result is stacked.
        steps: Number of steps.
    """

    node: ir.Node
    body: ir.Graph
    states: int
    slices: tuple[Along, ...]
    stacks: tuple[Along, ...]
    steps: Dim

    def is_float_state(self, index: int) -> bool:
        """Whether input `index` of the body is a state of floating-point numbers."""
        return index < self.states and bool(_floats([self.body.inputs[index]]))

    @staticmethod
    def of(node: GradNode) -> "_Forward":
        scan = node.view.node
        own = own_inputs(scan)
        scanned = node.attr("num_scan_inputs")
        states = len(own) - scanned
        slices = _along(node, "scan_input", scanned)
        stacks = _along(node, "scan_output", len(scan.outputs) - states)
        shape = node.shape(node.input(states))
        steps = shape[slices[0].axis % len(shape)]
        return _Forward(scan, bodies_of(scan)["body"], states, slices, stacks, steps)


def _along(node: GradNode, prefix: str, count: int) -> tuple[Along, ...]:
    axes = node.attr(f"{prefix}_axes") or [0] * count
    directions = node.attr(f"{prefix}_directions") or [0] * count
    return tuple(Along(a, bool(d)) for a, d in zip(axes, directions, strict=True))


def scan_gradient(node: GradNode) -> Sequence[ir.Value | None]:
    """A Scan over the steps in reverse."""
    builder, scan = node.builder, _Forward.of(node)
    targets = _captured(node)
    learn(builder, scan.body)
    variables = [*_floats(scan.body.inputs), *targets.values()]
    node.inner.expand(builder.nested(scan.body), variables, _floats(scan.body.outputs))
    close_node(scan.node)
    copy, origins, nodes = copied(builder, scan.body)
    inner = builder.nested(copy)
    forward = list(copy)
    last, state_cotangents = _state_cotangents(node, scan, copy)
    stacked, stack_cotangents = _stack_cotangents(node, scan, copy)
    wanted = [
        v
        for i, v in enumerate(copy.inputs)
        if scan.is_float_state(i) or (i >= scan.states and i in node.wanted and _floats([v]))
    ]
    given = {**state_cotangents, **stack_cotangents}
    made = node.inner.differentiate(inner, given, [*wanted, *targets.values()])
    sums = {i: v for i, v in targets.items() if v in made}
    totals = [entry(builder, v, builder.shape_of(v), "total") for v in sums.values()]
    inner.scope = f"{node.name}/grad"
    after = [
        made[v] if v in made else zeros_like(inner, v)
        for i, v in enumerate(copy.inputs)
        if scan.is_float_state(i)
    ]
    after += [
        inner.op("Add", total, made[v], shape=builder.shape_of(v))
        for total, v in zip(totals, sums.values(), strict=True)
    ]
    slices = {
        i: made[v]
        for i, v in enumerate(copy.inputs)
        if i >= scan.states and v in made and i in node.wanted
    }
    kept = _kept(copy, forward, [*after, *slices.values()])
    scanned = [(v, along.reversed()) for v, along in stacked]
    entering = [*state_cotangents.values(), *totals, *stack_cotangents.values()]
    inputs = list(copy.inputs)
    renamed: dict[ir.Value, ir.Value] = {}
    copy.outputs.clear()
    for value in kept:
        place = inputs.index(value) if value in inputs else -1
        if place >= scan.states:
            scanned.append((node.input(place), scan.slices[place - scan.states].reversed()))
            entering.append(value)
            continue
        scanned.append((_stack(builder, scan, value, origins, nodes), Along(0, True)))
        if place < 0:
            here = entry(builder, value, builder.shape_of(value), "kept")
            value.replace_all_uses_with(here)
            renamed[value] = here
            value = here
        entering.append(value)
    results = [renamed.get(v, v) for v in [*after, *slices.values()]]
    finish(inner, entering, results)
    close_node(scan.node)
    begin = [*last, *(zeros_like(builder, v) for v in sums.values())]
    stacks = [scan.slices[i - scan.states].reversed() for i in slices]
    outputs: list[tuple[ir.DataType | None, Sequence[Dim]]] = [
        (v.dtype, builder.shape_of(v)) for v in begin
    ]
    outputs += [(node.input(i).dtype, node.shape(node.input(i))) for i in slices]
    values = scan_node(builder, copy, begin, scanned, outputs, stacks)
    places = [i for i in range(scan.states) if scan.is_float_state(i)]
    results_by_place = dict(zip([*places, *sums, *slices], values, strict=True))
    return [
        results_by_place.get(i) if i in node.wanted else None for i in range(len(scan.node.inputs))
    ]


def _state_cotangents(
    node: GradNode, scan: _Forward, copy: ir.Graph
) -> tuple[list[ir.Value], dict[ir.Value, ir.Value]]:
    """The initial cotangents of the states, and the cotangent in a step of each new state."""
    begin, found = [], {}
    for index in range(scan.states):
        if not scan.is_float_state(index):
            continue
        cotangent = node.cotangents[index]
        if cotangent is None:
            cotangent = zeros_like(node.builder, node.output(index))
        begin.append(cotangent)
        shape = node.shape(node.output(index))
        found[copy.outputs[index]] = entry(node.builder, cotangent, shape, "cotangent")
    return begin, found


def _stack_cotangents(
    node: GradNode, scan: _Forward, copy: ir.Graph
) -> tuple[list[tuple[ir.Value, Along]], dict[ir.Value, ir.Value]]:
    """The cotangents of the stacked results, and the cotangent in a step of each slice of them."""
    operands, found = [], {}
    for index, along in enumerate(scan.stacks, start=scan.states):
        cotangent = node.cotangents[index]
        if cotangent is None:
            continue
        operands.append((cotangent, along))
        shape = slice_shape(node.shape(cotangent), along.axis)
        found[copy.outputs[index]] = entry(node.builder, cotangent, shape, "cotangent")
    return operands, found


def _kept(
    copy: ir.Graph, forward: Sequence[ir.Node], results: Sequence[ir.Value]
) -> list[ir.Value]:
    """The values of a forward step that its gradient reads and that differ between steps."""
    differing = set(copy.inputs)
    for inner in forward:
        if any(v in differing for v in read_by(inner)):
            differing.update(inner.outputs)
    ours = set(forward)
    read = [v for inner in copy if inner not in ours for v in read_by(inner)]
    return [v for v in dict.fromkeys([*read, *results]) if v in differing]


def _stack(
    builder: GlobalBuilder,
    scan: _Forward,
    value: ir.Value,
    origins: Mapping[ir.Value, ir.Value],
    nodes: Mapping[ir.Node, ir.Node],
) -> ir.Value:
    """Makes the forward Scan stack a value of its body, and returns the stack."""
    body = scan.body
    original = origins.get(value)
    if original is None:
        # A further output, which the gradient added to a node of the copy.
        maker = value.producer()
        assert maker is not None
        source, place = nodes[maker], list(maker.outputs).index(value)
        if len(source.outputs) <= place:
            source.resize_outputs(place + 1)
        original = source.outputs[place]
    if not original.name:
        original.name = builder.fresh(value.name or "kept")
        builder.declare(original, value.dtype, builder.shape_of(value))
    if original in body.inputs or original in body.outputs:
        inner = builder.nested(body)
        inner.scope = f"{scan.node.name}/kept"
        original = inner.op("Identity", original, shape=builder.shape_of(value))
    body.outputs.append(original)
    shape = builder.shape_of(value)
    index = len(scan.node.outputs)
    scan.node.resize_outputs(index + 1)
    stack = scan.node.outputs[index]
    stack.name = builder.fresh(f"{value.name}.stack")
    builder.declare(stack, value.dtype, stacked_shape(shape, 0, scan.steps))
    for key in ("scan_output_axes", "scan_output_directions"):
        if key in scan.node.attributes:
            old = scan.node.attributes[key].as_ints()
            scan.node.attributes[key] = ir.AttrInt64s(key, [*old, 0])
    return stack


# -- Loop ------------------------------------------------------------------------------------------


def loop_body(node: BodyNode) -> Sequence[ir.Value | None]:
    """A Scan over the step numbers.

    Raises:
        ModelError: A condition may end the loop, there is no trip count or it is 0, or a state has
            no initial value.
    """
    builder, loop = node.builder, node.view.node
    if not node.has(0) or not runs_through(loop):
        raise node.fail(
            "a gradient needs a trip count that is known at the start, got a condition "
            "that may end the loop"
        )
    body = bodies_of(loop)["body"]
    learn(builder, body)
    own = own_inputs(loop)
    states = [v for v in own[2:] if v is not None]
    if len(states) != len(own) - 2:
        raise node.fail("a gradient needs an initial value of each state")
    if _steps(node, len(states)) == 0:
        # onnxruntime's Scan needs at least one step.
        raise node.fail("a gradient needs at least one step, got a trip count of 0")
    copy, _, _ = copied(builder, body)
    inner = builder.nested(copy)
    number, condition, *entering = copy.inputs
    true = builder.const(np.array(True))
    condition.replace_all_uses_with(true)
    builder.declare(number, INT64, [])
    finish(inner, [*entering, number], list(copy.outputs)[1:])
    steps = _steps(node, len(states))
    zero, one = (builder.const(np.array(n, np.int64)) for n in (0, 1))
    count = node.input(0)
    if node.shape(count):
        count = builder.op("Squeeze", count, shape=[], dtype=INT64)
    numbers = builder.op("Range", zero, count, one, shape=[steps], dtype=INT64)
    outputs = [(v.dtype, node.shape(v)) for v in loop.outputs]
    results = [Along()] * (len(loop.outputs) - len(states))
    return scan_node(builder, copy, states, [(numbers, Along())], outputs, results)


def _steps(node: BodyNode, states: int) -> Dim:
    loop = node.view.node
    known = node.view.contents(0)
    if known is not None and len(known) == 1:
        return known[0]
    for value in loop.outputs[states:]:
        if value.name:
            return node.shape(value)[0]
    return as_dim(node.builder.fresh(f"{node.name}.steps"))
